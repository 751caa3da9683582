#include "client/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "client/model_files.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::HasSubstr;

// The bytes, "ab" (256) and, where asked for, "<|endoftext|>" (257).
std::string Vocab(bool ends = true) {
  std::string vocab = Gpt2Bpe::Bytes()->VocabText();
  vocab.resize(vocab.size() - 2);
  return vocab + ", \"ab\": 256" + (ends ? ", \"<|endoftext|>\": 257}" : "}");
}

class TokenizerTest : public testing::Test {
 protected:
  v1::JobSpec Spec() const {
    v1::JobSpec spec;
    auto* files = spec.mutable_data()->mutable_text()->mutable_tokenizer()->mutable_gpt2_bpe();
    files->set_vocab(folder_ / "encoder.json");
    files->set_merges(folder_ / "vocab.bpe");
    return spec;
  }
  TemporaryFolder folder_;
};

TEST_F(TokenizerTest, ACheckpointsSpecSaysWhatItsTokensAre) {
  v1::JobSpec spec;
  spec.mutable_data()->mutable_text()->set_path("x");
  EXPECT_EQ(TokenizerOfSpec(spec).bpe->vocabulary(), 256u);
  EXPECT_EQ(TokenizerOfSpec(Spec()).bpe, nullptr);
  EXPECT_THAT(TokenizerOfSpec(Spec()).why, HasSubstr("encoder.json: cannot be read"));
  Spill(folder_ / "encoder.json", Vocab());
  Spill(folder_ / "vocab.bpe", "a b\n");
  const ModelTokenizer found = TokenizerOfSpec(Spec());
  ASSERT_NE(found.bpe, nullptr) << found.why;
  EXPECT_EQ(found.vocab, Vocab());
  EXPECT_EQ(found.merges, "a b\n");
  v1::JobSpec tokens;
  tokens.mutable_data()->mutable_tokens()->set_path("x");
  tokens.mutable_model()->mutable_gpt2()->set_vocabulary(65);
  EXPECT_EQ(TokenizerOfSpec(tokens).bpe, nullptr);
  EXPECT_THAT(TokenizerOfSpec(tokens).why, HasSubstr("token numbers"));
}

TEST_F(TokenizerTest, AnExportCarriesIt) {
  Spill(folder_ / "encoder.json", Vocab());
  Spill(folder_ / "vocab.bpe", "a b\n");
  const std::string target = folder_ / "export";
  std::filesystem::create_directory(target);
  EXPECT_EQ(TokenizerOfExport(target, 258)->bpe, nullptr);
  EXPECT_THAT(TokenizerOfExport(target, 258)->why, HasSubstr("no tokenizer in it"));
  EXPECT_EQ(TokenizerOfExport(target, 256)->bpe->vocabulary(), 256u);
  ASSERT_TRUE(ExportTokenizer(TokenizerOfSpec(Spec()), 64, target).ok());
  EXPECT_EQ(Slurp(target + "/vocab.json"), Vocab());
  EXPECT_EQ(Slurp(target + "/merges.txt"), "a b\n");
  const auto config = nlohmann::json::parse(Slurp(target + "/tokenizer_config.json"));
  EXPECT_EQ(config["tokenizer_class"], "GPT2Tokenizer");
  EXPECT_EQ(config["model_max_length"], 64);
  EXPECT_EQ(config["eos_token"], "<|endoftext|>");
  EXPECT_EQ(TokenizerOfExport(target, 258)->bpe->Encode("abc"), (std::vector<int32_t>{256, 'c'}));
  Spill(target + "/merges.txt", "nonsense\n");
  EXPECT_THAT(std::string(TokenizerOfExport(target, 258).status().message()), HasSubstr("merges.txt:1: two symbols"));

  const std::string bytes = folder_ / "bytes";
  std::filesystem::create_directory(bytes);
  ASSERT_TRUE(ExportTokenizer(ByteTokenizer(), 8, bytes).ok());
  EXPECT_TRUE(nlohmann::json::parse(Slurp(bytes + "/tokenizer_config.json"))["eos_token"].is_null());
  EXPECT_EQ(TokenizerOfExport(bytes, 256)->bpe->Encode("a\xff"), (std::vector<int32_t>{'a', 0xff}));
}

TEST_F(TokenizerTest, DrawnTokensBecomeWholeCharacters) {
  TokenText text(Gpt2Bpe::Bytes(), false);
  EXPECT_EQ(text.Push(0xe4), "");
  EXPECT_EQ(text.Push(0xb8), "");
  EXPECT_EQ(text.Push(0xad), "\xe4\xb8\xad");
  EXPECT_EQ(text.Push(0xff), "\xef\xbf\xbd");
  EXPECT_EQ(text.Push(7), "\a");
  TokenText terminal(Gpt2Bpe::Bytes(), true);
  EXPECT_EQ(terminal.Push(7), "?");
  EXPECT_EQ(terminal.Push(0x1b), "?");
  EXPECT_EQ(terminal.Push('\n'), "\n");
  EXPECT_EQ(terminal.Push(0xc2), "");
  EXPECT_EQ(terminal.Push(0x9b), "?");  // U+009B begins control sequences too
  EXPECT_EQ(terminal.Push(0xc3), "");
  EXPECT_EQ(terminal.Push(0xa9), "\xc3\xa9");
}

TEST(DrawTokenTest, CutToTheLikeliest) {
  const std::vector<float> logits = {0, 3, 1, 3, 2};  // 1 and 3, then 4, 2, 0
  SampleOptions options;
  options.temperature = 1;
  const auto drawn = [&] {
    std::vector<int> counts(5);
    for (int i = 0; i < 1000; ++i) ++counts[DrawToken(logits, options, (i + 0.5) / 1000)];
    return counts;
  };
  const double shares[] = {std::exp(-3), 1, std::exp(-2), 1, std::exp(-1)};
  const auto expect = [&](const std::vector<int>& kept) {
    double total = 0;
    for (const int token : kept) total += shares[token];
    const std::vector<int> counts = drawn();
    for (int token = 0; token < 5; ++token) {
      const bool in = std::find(kept.begin(), kept.end(), token) != kept.end();
      EXPECT_NEAR(counts[token], in ? 1000 * shares[token] / total : 0, in ? 2 : 0) << token;
    }
  };
  expect({0, 1, 2, 3, 4});
  options.top_k = 3;
  expect({1, 3, 4});
  options.top_k = 1;
  expect({1});
  options.top_k = 99;
  expect({0, 1, 2, 3, 4});
  options.top_k = 0;
  options.top_p = 0.75;  // two have 0.78 of all
  expect({1, 3});
  options.top_p = 0.80;
  expect({1, 3, 4});
  options.top_p = 0;
  expect({1});
  options.top_k = 3;  // then p of what is left
  options.top_p = 0.80;
  expect({1, 3});
  options.temperature = 0;
  EXPECT_EQ(DrawToken(logits, options, 0.9), 1);
  options.temperature = 1;
  EXPECT_EQ(DrawToken({NAN, INFINITY, NAN}, options, 0.5), 0);
  EXPECT_EQ(DrawToken({NAN, 1, INFINITY}, options, 0.99), 1);
}

}  // namespace
}  // namespace sluice
