// data.text: which files, which documents, bytes or tokens of GPT-2's BPE, and tokenized texts kept on disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/common/temporary_folder.h"
#include "worker/data/dataset.h"
#include "worker/data/file_list.h"
#include "worker/data/gpt2_bpe.h"
#include "worker/data/token_cache.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class TextTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    fs::create_directories(fs::path(folder_ / name).parent_path());
    Spill(folder_ / name, bytes);
    return folder_ / name;
  }
  // Blocks of one token in file order, nothing held out: what Tokens() takes apart.
  v1::JobSpec Spec(const std::string& path) const {
    v1::JobSpec spec;
    spec.mutable_model()->mutable_gpt2()->set_context(1);
    spec.mutable_data()->mutable_text()->set_path(path);
    spec.mutable_data()->set_shuffle(false);
    spec.mutable_data()->set_validation_fraction(0);
    return spec;
  }
  // The same with a vocabulary of the bytes, "ab" (256) and "<|endoftext|>" (257).
  v1::JobSpec BpeSpec(const std::string& path) const {
    std::string vocab = Gpt2Bpe::Bytes()->VocabText();
    vocab.resize(vocab.size() - 2);
    v1::JobSpec spec = Spec(path);
    auto* files = spec.mutable_data()->mutable_text()->mutable_tokenizer()->mutable_gpt2_bpe();
    files->set_vocab(Write("tok/vocab.json", vocab + ", \"ab\": 256, \"<|endoftext|>\": 257}\n"));
    files->set_merges(Write("tok/merges.txt", "#version: 0.2\na b\n"));
    return spec;
  }
  static std::vector<int32_t> Tokens(const v1::JobSpec& spec, const std::string& root = "",
                                     const std::string& cache = "") {
    auto data = OpenDataset(spec, root, cache);
    EXPECT_TRUE(data.ok()) << data.status();
    if (!data.ok()) return {};
    Batch batch = (*data)->Train({0, (*data)->train_samples()});
    batch.tokens.push_back(batch.targets.back());
    return batch.tokens;
  }
  static std::string Bytes(const v1::JobSpec& spec, const std::string& root = "") {
    std::string text;
    for (const int32_t token : Tokens(spec, root)) text.push_back(static_cast<char>(token));
    return text;
  }
  static std::string Refusal(const v1::JobSpec& spec, absl::StatusCode code = absl::StatusCode::kInvalidArgument,
                             const std::string& root = "") {
    auto data = OpenDataset(spec, root);
    if (data.ok()) return "accepted";
    EXPECT_EQ(data.status().code(), code) << data.status();
    return std::string(data.status().message());
  }

  TemporaryFolder folder_;
};

// ---------------------------------------------------------------- files

TEST_F(TextTest, AFolderIsAllItsFilesInOrder) {
  Write("in/b.txt", "B");
  Write("in/a/z.txt", "Z");
  Write("in/a.txt", "A");
  Write("in/a/y", "Y");
  Write("in/.hidden", "H");
  Write("in/.git/x", "X");
  Write("in/empty.txt", "");
  EXPECT_EQ(Bytes(Spec(folder_ / "in")), "AYZB");  // bytes of the paths: '.' before '/'
  EXPECT_EQ(Bytes(Spec("in"), folder_.path()), "AYZB");
  fs::create_directories(folder_ / "none/.x");
  EXPECT_THAT(Refusal(Spec(folder_ / "none"), absl::StatusCode::kNotFound), HasSubstr("has no files"));
}

TEST_F(TextTest, APatternIsTheFilesThatMatch) {
  Write("in/b1.txt", "B");
  Write("in/a1.txt", "A");
  Write("in/a2.md", "M");
  fs::create_directories(folder_ / "in/c1.txt");
  EXPECT_EQ(Bytes(Spec(folder_ / "in/*.txt")), "AB");
  EXPECT_EQ(Bytes(Spec("in/[ab]?.*"), folder_.path()), "AMB");
  EXPECT_THAT(Refusal(Spec(folder_ / "in/*.html"), absl::StatusCode::kNotFound),
              HasSubstr("data.text.path: no file matches"));
  // A file of that very name comes first.
  EXPECT_EQ(Bytes(Spec(Write("in/*.txt", "star"))), "star");
  EXPECT_TRUE(DataPathExists(folder_ / "in/*.md"));
  EXPECT_FALSE(DataPathExists(folder_ / "in/*.tex"));
}

TEST_F(TextTest, LinksMustNotLeadOutOfTheRootOrNowhere) {
  Write("root/a.txt", "A");
  Write("out.txt", "O");
  fs::create_symlink(folder_ / "out.txt", folder_ / "root/link.txt");
  for (const char* path : {".", "*.txt"}) {
    EXPECT_THAT(Refusal(Spec(path), absl::StatusCode::kPermissionDenied, folder_ / "root"),
                HasSubstr("outside the data root"));
  }
  EXPECT_THAT(Refusal(Spec("../*.txt"), absl::StatusCode::kPermissionDenied, folder_ / "root"), HasSubstr("outside"));
  EXPECT_EQ(Bytes(Spec(folder_ / "root")), "AO");
  fs::remove(folder_ / "out.txt");
  EXPECT_THAT(Refusal(Spec(folder_ / "root"), absl::StatusCode::kNotFound), HasSubstr("link.txt: cannot be read"));
}

TEST_F(TextTest, AValidationFileOfItsOwn) {
  v1::JobSpec spec = Spec(Write("train.txt", "train"));
  spec.mutable_data()->set_validation_fraction(0.5);
  spec.mutable_data()->mutable_text()->set_validation_path(Write("val.txt", "xyz"));
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 4u);
  EXPECT_EQ((*data)->eval_samples(), 2u);
  EXPECT_EQ((*data)->Evaluation({0, 2}).targets, (std::vector<int32_t>{'y', 'z'}));
  spec.mutable_data()->mutable_text()->set_validation_path(Write("short.txt", "x"));
  EXPECT_THAT(Refusal(spec), HasSubstr("short.txt: 1 bytes, but a block"));
}

// ---------------------------------------------------------------- documents

TEST_F(TextTest, SeparatorsStandBeforeEveryDocument) {
  Write("in/1", "ab\n\nc");
  Write("in/2", "d\n\n");
  Write("in/3", "");
  v1::JobSpec spec = Spec(folder_ / "in");
  auto* text = spec.mutable_data()->mutable_text();
  EXPECT_EQ(Bytes(spec), "ab\n\ncd\n\n");
  text->set_separator("|");
  EXPECT_EQ(Bytes(spec), "|ab\n\nc|d\n\n");
  text->set_documents(v1::TextSource::BLANK_LINE);
  EXPECT_EQ(Bytes(spec), "|ab\n\n|c|d\n\n");

  spec = BpeSpec(folder_ / "in");
  text = spec.mutable_data()->mutable_text();
  EXPECT_THAT(Tokens(spec), ElementsAre(257, 256, '\n', '\n', 'c', 257, 'd', '\n', '\n'));
  text->set_documents(v1::TextSource::BLANK_LINE);
  EXPECT_THAT(Tokens(spec), ElementsAre(257, 256, '\n', '\n', 257, 'c', 257, 'd', '\n', '\n'));
  text->set_separator("");
  EXPECT_THAT(Tokens(spec), ElementsAre(256, '\n', '\n', 'c', 'd', '\n', '\n'));
  text->set_separator("ab");
  EXPECT_EQ(Tokens(spec)[0], 256);
  text->set_separator("<|eot|>");
  EXPECT_THAT(Refusal(spec), HasSubstr("data.text.separator: \"<|eot|>\" is not one token of"));
}

TEST_F(TextTest, TokensAreThoseOfTheWholeDocument) {
  v1::JobSpec spec = BpeSpec(Write("a.txt", "abba\n\n\n\nab"));
  spec.mutable_data()->mutable_text()->set_documents(v1::TextSource::BLANK_LINE);
  EXPECT_THAT(Tokens(spec), ElementsAre(257, 256, 'b', 'a', '\n', '\n', 257, '\n', '\n', 257, 256));
  auto data = OpenDataset(spec, "");
  EXPECT_EQ((*data)->vocabulary(), 258u);
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(300);
  EXPECT_TRUE(OpenDataset(spec, "").ok());
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(257);
  EXPECT_THAT(Refusal(spec), HasSubstr("model.gpt2.vocabulary: found 257, but the tokenizer"));
}

TEST_F(TextTest, ALargeVocabularyHasWideTokens) {
  v1::JobSpec spec = BpeSpec(Write("a.txt", "ab"));
  std::string vocab = Slurp(folder_ / "tok/vocab.json");
  vocab.resize(vocab.size() - 2);
  for (int i = 258; i < 70000; ++i) absl::StrAppend(&vocab, ", \"<|", i, "|>\": ", i);
  Write("tok/vocab.json", vocab + "}");
  spec.mutable_data()->mutable_text()->set_separator("<|69999|>");
  EXPECT_THAT(Tokens(spec, "", folder_ / "cache"), ElementsAre(69999, 256));
  EXPECT_THAT(Tokens(spec, "", folder_ / "cache"), ElementsAre(69999, 256));
}

// ---------------------------------------------------------------- what is no text

TEST_F(TextTest, WhatIsNotUtf8IsNamedWithLineAndOffset) {
  const std::pair<std::string, std::string> cases[] = {
      {"ab\ncd\xe4\xb8", ":2: not UTF-8 at byte offset 5: a character cut off by the end (e4 b8)"},
      {"\xc0\xaf", ":1: not UTF-8 at byte offset 0: an overlong form (c0 af)"},
      {"a\n\n\xed\xa0\x80", ":3: not UTF-8 at byte offset 3: a surrogate, half of a UTF-16 pair (ed a0)"},
      {"\xf4\x90\x80\x80", ": a code point above U+10FFFF (f4 90)"},
      {"ab\x80", ": a continuation byte without its first byte (80)"},
      {"caf\xe9 au lait", ": a character that breaks off (e9 20)"},
      {std::string("\xff\xfe"
                   "a\0",
                   4),
       "looks like UTF-16"},
      {"\x1f\x8b\x08", "gzip file"},
      {"%PDF-1.4\xe2\xe3", "this is a PDF"},
      {"x\xffy", ": a byte that UTF-8 never has (ff 79)"},
  };
  for (const auto& [bytes, part] : cases) {
    v1::JobSpec spec = Spec(Write("in.txt", bytes));
    EXPECT_THAT(Refusal(spec), HasSubstr(absl::StrCat(folder_ / "in.txt", ":")));
    EXPECT_THAT(Refusal(spec), HasSubstr(part));
    spec.mutable_data()->mutable_text()->set_invalid_utf8(v1::TextSource::KEEP);
    EXPECT_EQ(Bytes(spec), bytes);
    v1::JobSpec bpe = BpeSpec(folder_ / "in.txt");
    EXPECT_THAT(Refusal(bpe), HasSubstr(part));
    bpe.mutable_data()->mutable_text()->set_invalid_utf8(v1::TextSource::KEEP);
    EXPECT_GE(Tokens(bpe).size(), 3u);
  }
  // In a folder the error names the file.
  Write("many/a.txt", "fine");
  Write("many/b.txt", "\xff");
  EXPECT_THAT(Refusal(Spec(folder_ / "many")), HasSubstr("many/b.txt:1: not UTF-8 at byte offset 0"));
}

TEST_F(TextTest, WhatStandsInPlaceOfATextIsNamed) {
  const std::string page = "\n<!DOCTYPE html>\n<html><body>404 not found</body></html>\n";
  EXPECT_THAT(Refusal(Spec(Write("a.txt", page))), HasSubstr("a.txt: this is a web page, not the data"));
  EXPECT_EQ(Bytes(Spec(Write("a.html", page))), page);  // whoever says so gets it
  EXPECT_THAT(Refusal(Spec(Write("b.html", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"))),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(Refusal(Spec(Write("e.txt", ""))), HasSubstr("e.txt: the file is empty, nothing to train on"));
  Write("none/a", "");
  Write("none/b", "");
  EXPECT_THAT(Refusal(Spec(folder_ / "none")), HasSubstr("all are empty, nothing to train on"));
  v1::JobSpec spec = BpeSpec(folder_ / "a.html");
  Write("tok/vocab.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
  EXPECT_THAT(Refusal(spec), HasSubstr("vocab.json: this is a Git LFS pointer"));
  Write("tok/vocab.json", page);
  EXPECT_THAT(Refusal(spec), HasSubstr("vocab.json:2: not the JSON of a vocabulary"));
}

// ---------------------------------------------------------------- kept tokens

class TokenCacheTest : public TextTest {
 protected:
  std::vector<std::string> Kept() const {
    std::vector<std::string> files;
    if (!fs::exists(folder_ / "cache")) return files;
    for (const auto& entry : fs::directory_iterator(folder_ / "cache")) files.push_back(entry.path().string());
    return files;
  }
};

TEST_F(TokenCacheTest, KeptTokensAreUsedAsLongAsNothingChanges) {
  v1::JobSpec spec = BpeSpec(Write("a.txt", "abc"));
  const std::string cache = folder_ / "cache";
  EXPECT_THAT(Tokens(spec, "", cache), ElementsAre(257, 256, 'c'));
  ASSERT_EQ(Kept().size(), 1u);
  // It is really read: other tokens under the same name are what the job gets.
  const std::string name = fs::path(Kept()[0]).stem().string();
  std::string hash;
  for (size_t i = 0; i < name.size(); i += 2)
    hash.push_back(static_cast<char>(std::stoi(name.substr(i, 2), nullptr, 16)));
  ASSERT_TRUE(TokenCache(cache).Store(hash, std::vector<uint16_t>{1, 2, 3}).ok());
  EXPECT_THAT(Tokens(spec, "", cache), ElementsAre(1, 2, 3));
  ASSERT_EQ(Kept().size(), 1u);
  // Another text, tokenizer, separator or way of cutting has tokens of its own.
  Write("a.txt", "abd");
  EXPECT_THAT(Tokens(spec, "", cache), ElementsAre(257, 256, 'd'));
  Write("a.txt", "abc");
  v1::JobSpec other = spec;
  other.mutable_data()->mutable_text()->set_separator("");
  EXPECT_THAT(Tokens(other, "", cache), ElementsAre(256, 'c'));
  other = spec;
  other.mutable_data()->mutable_text()->set_documents(v1::TextSource::BLANK_LINE);
  EXPECT_THAT(Tokens(other, "", cache), ElementsAre(257, 256, 'c'));
  Write("tok/merges.txt", "");
  EXPECT_THAT(Tokens(spec, "", cache), ElementsAre(257, 'a', 'b', 'c'));
  EXPECT_EQ(Kept().size(), 5u);
  // The name of the text's file does not matter.
  Write("tok/merges.txt", "#version: 0.2\na b\n");
  fs::rename(folder_ / "a.txt", folder_ / "b.txt");
  EXPECT_THAT(Tokens(BpeSpec(folder_ / "b.txt"), "", cache), ElementsAre(1, 2, 3));
}

TEST_F(TokenCacheTest, EveryDamageIsNoticedAndMended) {
  v1::JobSpec spec = BpeSpec(Write("a.txt", "abcde"));
  const std::string cache = folder_ / "cache";
  const std::vector<int32_t> want = Tokens(spec, "", cache);
  ASSERT_EQ(Kept().size(), 1u);
  const std::string file = Kept()[0], good = Slurp(file);
  ASSERT_EQ(good.size(), 64 + 2 * want.size());
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    Spill(file, bad);
    EXPECT_EQ(Tokens(spec, "", cache), want) << at;
    EXPECT_EQ(Slurp(file), good) << at;
  }
  for (size_t size = 0; size < good.size(); ++size) {
    Spill(file, good.substr(0, size));
    EXPECT_EQ(Tokens(spec, "", cache), want) << size;
    EXPECT_EQ(Slurp(file), good) << size;
  }
  Spill(file, good + "x");
  EXPECT_EQ(Tokens(spec, "", cache), want);
  EXPECT_EQ(Slurp(file), good);
  EXPECT_EQ(Kept().size(), 1u);  // nothing temporary is left
}

TEST_F(TokenCacheTest, WhereNothingCanBeKeptTrainingGoesOn) {
  v1::JobSpec spec = BpeSpec(Write("a.txt", "abc"));
  const std::string cache = Write("cache", "a file, no folder");
  EXPECT_THAT(Tokens(spec, "", cache), ElementsAre(257, 256, 'c'));
}

TEST_F(TokenCacheTest, PartsOfAHashAreNotTheirJoin) {
  const auto hash = [](std::vector<std::string> parts) {
    ContentHash hash;
    for (const auto& part : parts) hash.Add(part);
    return hash.Finish();
  };
  EXPECT_EQ(hash({"ab", "c"}).size(), 32u);
  std::set<std::string> all = {hash({}),          hash({""}),        hash({"abc"}),
                               hash({"ab", "c"}), hash({"a", "bc"}), hash({"abc", ""})};
  EXPECT_EQ(all.size(), 6u);
}

// ---------------------------------------------------------------- the shared files

class SharedText : public TextTest {
 protected:
  void SetUp() override {
    shared_ = SharedFolder();
    if (shared_.empty()) GTEST_SKIP() << "SKIPPED: the shared data folder is absent";
    shared_ += "/data";
  }
  std::string shared_;
};

TEST_F(SharedText, TinyShakespeareHasLlmcsTokens) {
  v1::JobSpec spec = Spec(shared_ + "/lm/tinyshakespeare.txt");
  auto* text = spec.mutable_data()->mutable_text();
  text->set_documents(v1::TextSource::BLANK_LINE);
  text->mutable_tokenizer()->mutable_gpt2_bpe()->set_vocab(shared_ + "/tok/encoder.json");
  text->mutable_tokenizer()->mutable_gpt2_bpe()->set_merges(shared_ + "/tok/vocab.bpe");
  v1::JobSpec llmc = Spec("");
  llmc.mutable_model()->mutable_gpt2()->set_vocabulary(50257);
  llmc.mutable_data()->mutable_tokens()->set_path(shared_ + "/tok/llmc_tiny_shakespeare_val.bin");
  std::vector<int32_t> want = Tokens(llmc);
  EXPECT_EQ(want.size(), 32768u);
  llmc.mutable_data()->mutable_tokens()->set_path(shared_ + "/tok/llmc_tiny_shakespeare_train.bin");
  const std::vector<int32_t> train = Tokens(llmc);
  EXPECT_EQ(train.size(), 305260u);
  want.insert(want.end(), train.begin(), train.end());
  EXPECT_TRUE(Tokens(spec, "", folder_ / "cache") == want);
  EXPECT_TRUE(Tokens(spec, "", folder_ / "cache") == want);  // kept ones
}

}  // namespace
}  // namespace sluice
