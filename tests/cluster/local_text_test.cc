// `sluice local` on texts, with real processes: tokens are made once, exports carry the tokenizer, data alone will do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"
#include "tests/cluster/process_cluster.h"
#include "tests/common/temporary_folder.h"
#include "worker/data/gpt2_bpe.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class LocalTextTest : public testing::Test {
 protected:
  // Runs to its end; its output.
  std::string Run(std::vector<std::string> args, const std::string& end = "exit code 0") {
    if (args[0] == "local") args.push_back("--runs=" + (folder_ / "runs"));
    auto program = Program::Start("sluice", args, folder_ / absl::StrCat("log-", runs_++));
    EXPECT_TRUE(program.ok()) << program.status();
    if (!program.ok()) return "";
    EXPECT_EQ(program->AwaitEnd(), end) << program->Output();
    return program->Output();
  }
  std::vector<std::string> Names(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  TemporaryFolder folder_;
  int runs_ = 0;
};

TEST_F(LocalTextTest, TokensAreMadeOnceAndTheExportCarriesTheTokenizer) {
  std::string vocab = Gpt2Bpe::Bytes()->VocabText();
  vocab.resize(vocab.size() - 2);
  Spill(folder_ / "vocab.json", vocab + ", \"ab\": 256, \"<|endoftext|>\": 257}");
  Spill(folder_ / "merges.txt", "a b\n");
  fs::create_directory(folder_ / "texts");
  for (int i = 0; i < 3; ++i) {
    std::string text;
    for (int k = 0; k < 100; ++k) absl::StrAppend(&text, "ab", k % 7, "\n");
    Spill(absl::StrCat(folder_ / "texts/", i, ".txt"), text);
  }
  Spill(folder_ / "spec.yaml", R"(
name: abc
model: {gpt2: {layers: 1, heads: 1, width: 16, context: 8}}
data: {text: {path: texts/*.txt, tokenizer: {gpt2_bpe: {vocab: vocab.json, merges: merges.txt}}}}
train: {rounds: 6, batch: 4, eval_samples: 4}
optimizer: {adamw: {learning_rate: 1e-3}}
parallel: {data: 2}
)");
  const std::string output = Run({"local", folder_ / "spec.yaml", "--threads=1", "--sample_bytes=20"});
  EXPECT_THAT(output, HasSubstr("abc-1 succeeded: 6 rounds"));
  EXPECT_THAT(output, HasSubstr("sample of "));
  const std::string cache = folder_ / "runs/cache", export_folder = folder_ / "runs/abc-1/export";
  const std::vector<std::string> kept = Names(cache);
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_THAT(Names(export_folder),
              ElementsAre("config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"));
  EXPECT_EQ(Slurp(export_folder + "/vocab.json"), Slurp(folder_ / "vocab.json"));
  const std::string drawn = Run({"sample", export_folder, "--prompt=ab", "--bytes=20", "--top_k=3"});
  EXPECT_EQ(drawn.substr(0, 2), "ab");
  EXPECT_EQ(Run({"sample", folder_ / "runs/abc-1", "--prompt=ab", "--bytes=20", "--top_k=3"}), drawn);

  // A second run reads what the first one kept, whatever happened to it in between.
  const std::string good = Slurp(cache + "/" + kept[0]);
  Spill(cache + "/" + kept[0], good.substr(0, good.size() / 2));
  Run({"local", folder_ / "spec.yaml", "--threads=1", "--sample_bytes=0", "--no_export"});
  EXPECT_EQ(Names(cache), kept);
  EXPECT_EQ(Slurp(cache + "/" + kept[0]), good);
}

TEST_F(LocalTextTest, DataAloneBecomesASpec) {
  std::string text;
  for (int k = 0; k < 400; ++k) absl::StrAppend(&text, "line ", k, "\xe4\xb8\xad\n");
  Spill(folder_ / "my notes.txt", text);
  std::string output = Run({"local", "--text", folder_ / "my notes.txt", "--set", "train.rounds=3", "--threads=1"});
  EXPECT_THAT(output, HasSubstr(absl::StrCat("this one was made for ", text.size(), " bytes of text in 1 file")));
  EXPECT_THAT(output, HasSubstr("my-notes-1 succeeded: 3 rounds"));
  EXPECT_EQ(FirstInvalidUtf8(output), std::string::npos);
  // The printed spec and the kept one can be used.
  const size_t begin = output.find("\nname: my-notes") + 1, end = output.find("\nwith every default it is kept as ");
  ASSERT_LT(begin, end);
  Spill(folder_ / "printed.yaml", output.substr(begin, end - begin));
  Run({"validate", folder_ / "printed.yaml"});
  Run({"validate", folder_ / "runs/my-notes-1/spec.yaml"});

  std::string tokens;
  for (int i = 0; i < 900; ++i) tokens += std::string{static_cast<char>(i % 40), '\0'};
  Spill(folder_ / "train.bin", tokens);
  output = Run({"local", "--tokens", folder_ / "train.bin", "--set", "train.rounds=3", "--threads=1"});
  EXPECT_THAT(output, HasSubstr("this one was made for 900 tokens of a vocabulary of 40 in 1 file"));
  EXPECT_THAT(output, HasSubstr("vocabulary: 40"));
  EXPECT_THAT(output, HasSubstr("train-1 succeeded: 3 rounds"));

  EXPECT_THAT(Run({"local", "--text", "a", "--tokens", "b"}, "exit code 2"), HasSubstr("exclude each other"));
  Spill(folder_ / "bad.txt", "abc\xff");
  EXPECT_THAT(Run({"local", "--text", folder_ / "bad.txt"}, "exit code 2"),
              HasSubstr("bad.txt:1: not UTF-8 at byte offset 3"));
}

}  // namespace
}  // namespace sluice
