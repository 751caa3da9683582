// data.tokens: nanoGPT's and llm.c's files; and the shared collection of odd texts and token files, each with the
// verdict that its manifest states.
#include "worker/data/token_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/common/temporary_folder.h"
#include "worker/data/dataset.h"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

template <typename Unit>
std::string Raw(const std::vector<Unit>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Unit));
}

// llm.c's header: 256 int32.
std::string Header(uint32_t magic, uint32_t version, uint32_t count) {
  std::vector<uint32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return Raw(header);
}

class TokenFilesTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    Spill(folder_ / name, bytes);
    return folder_ / name;
  }
  template <typename Unit = uint16_t>
  std::vector<Unit> Read(const std::string& bytes, uint32_t vocabulary = 65536) const {
    std::vector<Unit> tokens;
    const absl::Status status = ReadTokenFile<Unit>(Write("t.bin", bytes), vocabulary, &tokens);
    EXPECT_TRUE(status.ok()) << status;
    return tokens;
  }
  std::string Refusal(const std::string& bytes, uint32_t vocabulary = 65536) const {
    std::vector<uint32_t> tokens;
    const absl::Status status = ReadTokenFile<uint32_t>(Write("t.bin", bytes), vocabulary, &tokens);
    if (status.ok()) return "accepted";
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(folder_ / "t.bin", ": ")));
    return std::string(status.message());
  }

  TemporaryFolder folder_;
};

TEST_F(TokenFilesTest, TheMagicNumberDecides) {
  const std::vector<uint16_t> narrow = {1, 300, 65535};
  EXPECT_EQ(Read(Raw(narrow)), narrow);
  EXPECT_EQ(Read(Header(20240520, 1, 3) + Raw(narrow)), narrow);
  EXPECT_EQ(Read(Header(20240520, 1, 0)), std::vector<uint16_t>{});
  const std::vector<uint32_t> wide = {1, 300, 128000};
  EXPECT_EQ(Read<uint32_t>(Header(20240801, 7, 3) + Raw(wide), 128256), wide);
  EXPECT_EQ(Read(Header(20240801, 7, 2) + Raw(std::vector<uint32_t>{5, 6})), (std::vector<uint16_t>{5, 6}));
}

TEST_F(TokenFilesTest, MalformedFilesAreRefusedWithTheCause) {
  const std::string tokens = Raw(std::vector<uint16_t>{1, 2, 3});
  EXPECT_THAT(Refusal("abc"), HasSubstr("odd size of 3 bytes"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 4) + tokens),
              HasSubstr("says 4 tokens of 2 bytes at byte offset 8, which makes a file of 1032 bytes, but it has 1030: "
                        "the file is cut off"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 2) + tokens), HasSubstr("something follows the tokens"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 3) + tokens + "x"), HasSubstr("something follows"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 0xffffffff) + tokens), HasSubstr("says 4294967295 tokens"));
  EXPECT_THAT(Refusal(Header(20240520, 2, 3) + tokens), HasSubstr("of version 2 at byte offset 4; known is version 1"));
  EXPECT_THAT(Refusal(Header(20240801, 1, 3) + tokens), HasSubstr("known is version 7"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 3).substr(0, 1000)),
              HasSubstr("has 1000 bytes, less than its header's 1024"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 3).substr(0, 4)), HasSubstr("has 4 bytes, less than its header's 1024"));
  EXPECT_THAT(Refusal(Header(20240326, 3, 3)), HasSubstr("this is a model of llm.c (magic 20240326 at byte offset 0)"));
  EXPECT_THAT(Refusal(Header(20240522, 1, 3)), HasSubstr("this is an evaluation set of llm.c"));
  EXPECT_THAT(Refusal(tokens, 3),
              HasSubstr("token 3 at byte offset 4 (token number 2) is outside model.gpt2.vocabulary 3"));
  EXPECT_THAT(Refusal(Header(20240520, 1, 3) + tokens, 3), HasSubstr("token 3 at byte offset 1028 (token number 2)"));
  EXPECT_THAT(Refusal(Header(20240801, 7, 2) + Raw(std::vector<uint32_t>{1, 70000})),
              HasSubstr("token 70000 at byte offset 1028 (token number 1)"));
  EXPECT_THAT(Refusal("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(Refusal("<!DOCTYPE html><html>"), HasSubstr("web page"));
}

TEST_F(TokenFilesTest, EveryDamageToAHeaderIsRefusedOrHarmless) {
  const std::string tokens = Raw(std::vector<uint16_t>{1, 2, 3}), good = Header(20240520, 1, 3) + tokens;
  for (size_t at = 0; at < 1024; ++at) {
    for (const char flip : {'\x01', '\x80', '\xff'}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ flip);
      std::vector<uint16_t> found;
      const absl::Status status = ReadTokenFile<uint16_t>(Write("t.bin", bad), 50257, &found);
      if (at >= 12) {
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_EQ(Raw(found), tokens);
      } else if (at >= 4) {
        EXPECT_FALSE(status.ok()) << at;
      } else if (status.ok()) {
        EXPECT_EQ(Raw(found), bad);  // without its magic number a file is nanoGPT's
      }
    }
  }
  for (size_t size = 1; size < good.size(); ++size) {
    std::vector<uint16_t> found;
    EXPECT_FALSE(ReadTokenFile<uint16_t>(Write("t.bin", good.substr(0, size)), 50257, &found).ok()) << size;
  }
}

TEST_F(TokenFilesTest, VocabulariesThatFit) {
  EXPECT_EQ(SummarizeTokenFile(Write("a", Raw(std::vector<uint16_t>{3, 64, 7})))->vocabulary, 65u);
  EXPECT_EQ(SummarizeTokenFile(Write("a", Raw(std::vector<uint16_t>{0})))->vocabulary, 2u);
  EXPECT_EQ(SummarizeTokenFile(Write("a", Header(20240520, 1, 1) + Raw(std::vector<uint16_t>{9})))->vocabulary, 50257u);
  EXPECT_EQ(SummarizeTokenFile(Write("a", Header(20240801, 7, 1) + Raw(std::vector<uint32_t>{128000})))->vocabulary,
            128001u);
  EXPECT_FALSE(SummarizeTokenFile(Write("a", Header(20240801, 7, 1) + Raw(std::vector<uint32_t>{0xffffffff}))).ok());
}

TEST_F(TokenFilesTest, FilesOfAFolderFollowOneAnother) {
  Write("x_2.bin", Raw(std::vector<uint16_t>{4, 5}));
  Write("x_1.bin", Header(20240520, 1, 3) + Raw(std::vector<uint16_t>{1, 2, 3}));
  v1::JobSpec spec;
  spec.mutable_model()->mutable_gpt2()->set_context(4);
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(10);
  spec.mutable_data()->set_shuffle(false);
  spec.mutable_data()->set_validation_fraction(0);
  for (const std::string& path : {folder_.path(), folder_ / "x_*.bin"}) {
    spec.mutable_data()->mutable_tokens()->set_path(path);
    auto data = OpenDataset(spec, "");
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_THAT((*data)->Train({0, 1}).tokens, ElementsAre(1, 2, 3, 4));
    EXPECT_THAT((*data)->Train({0, 1}).targets, ElementsAre(2, 3, 4, 5));
  }
}

TEST(NastyTextAndTokens, GetTheManifestsVerdict) {
  if (SharedFolder().empty()) GTEST_SKIP() << "SKIPPED: the shared data folder is absent";
  const std::string nasty = SharedFolder() + "/data/nasty/";
  // What an error says beside the file, or "" for a file to be accepted.
  const std::map<std::string, std::string> verdicts = {
      {"tokens/llmc_ok.bin", ""},
      {"tokens/llmc_bad_magic.bin", "this is a model of llm.c"},
      {"tokens/llmc_count_mismatch.bin",
       "says 101 tokens of 2 bytes at byte offset 8, which makes a file of 1226 bytes, but it has 1224"},
      {"tokens/llmc_llama3_u32.bin", ""},
      {"tokens/llmc_shorter_than_block.bin", "10 tokens, but a block of model.gpt2.context 16 needs 17"},
      {"tokens/nanogpt_odd_bytes.bin", "odd size of 3 bytes"},
      {"tokens/nanogpt_token_out_of_vocab.bin",
       "token 65 at byte offset 0 (token number 0) is outside model.gpt2.vocabulary 65; so are 299 more tokens, the "
       "largest is 60000"},
      {"text/bom.txt", ""},
      {"text/crlf.txt", ""},
      {"text/cut_multibyte_eof.txt", ":1: not UTF-8 at byte offset 3: a character cut off by the end"},
      {"text/overlong_surrogate.txt", ":1: not UTF-8 at byte offset 0: an overlong form (c0 af)"},
      {"text/no_final_newline.txt", ""},
      {"text/empty.txt", "the file is empty, nothing to train on"},
      {"text/astral.txt", ""},
  };
  int checked = 0;
  for (const auto& entry : nlohmann::json::parse(Slurp(nasty + "MANIFEST.json"))) {
    const std::string file = entry["file"];
    const bool text = file.rfind("text/", 0) == 0;
    if (!text && file.rfind("tokens/", 0) != 0) continue;
    ++checked;
    const auto verdict = verdicts.find(file);
    ASSERT_NE(verdict, verdicts.end()) << file << ": " << entry["expect"];
    v1::JobSpec spec;
    v1::Gpt2Spec* model = spec.mutable_model()->mutable_gpt2();
    model->set_context(text ? 1 : file == "tokens/llmc_llama3_u32.bin" ? 4 : 16);
    if (!text)
      model->set_vocabulary(file.find("llama3") != std::string::npos ? 128256
                            : file.find("llmc") != std::string::npos ? 50257
                                                                     : 65);
    text ? spec.mutable_data()->mutable_text()->set_path(nasty + file)
         : spec.mutable_data()->mutable_tokens()->set_path(nasty + file);
    spec.mutable_data()->set_shuffle(false);
    spec.mutable_data()->set_validation_fraction(0);
    auto data = OpenDataset(spec, "");
    EXPECT_EQ(data.ok(), verdict->second.empty()) << file << ": " << entry["expect"] << "; " << data.status();
    if (!data.ok()) {
      EXPECT_THAT(std::string(data.status().message()), HasSubstr(file));
      EXPECT_THAT(std::string(data.status().message()), HasSubstr(verdict->second));
    } else if (text) {
      // All bytes are kept: marks, carriage returns, the lack of a final line feed.
      Batch batch = (*data)->Train({0, (*data)->train_samples()});
      batch.tokens.push_back(batch.targets.back());
      EXPECT_EQ(std::string(batch.tokens.begin(), batch.tokens.end()), Slurp(nasty + file)) << file;
    } else if (file == "tokens/llmc_ok.bin") {
      EXPECT_EQ((*data)->train_samples(), 99u / 16);
      EXPECT_THAT((*data)->Train({0, 1}).tokens[15], 15);
    } else {
      EXPECT_EQ((*data)->train_samples(), 9u / 4);  // ten tokens, not twenty halves
    }
  }
  EXPECT_EQ(checked, 14);
}

}  // namespace
}  // namespace sluice
