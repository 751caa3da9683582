#include "worker/data/gpt2_bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "tests/common/temporary_folder.h"
#include "worker/data/pre_tokens.h"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> PreTokens(std::string_view text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = PreTokenEnd(text, at);
    EXPECT_GT(end, at);
    EXPECT_LE(end, text.size());
    words.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

TEST(PreTokenTest, FollowTheRegularExpression) {
  EXPECT_THAT(PreTokens("Hello  world"), ElementsAre("Hello", " ", " world"));
  EXPECT_THAT(PreTokens("don't I'll they've WE'RE"),
              ElementsAre("don", "'t", " I", "'ll", " they", "'ve", " WE", "'", "RE"));
  EXPECT_THAT(PreTokens("it's 'squote '' 'd"), ElementsAre("it", "'s", " '", "squote", " ''", " '", "d"));
  EXPECT_THAT(PreTokens("''s"), ElementsAre("''", "s"));
  EXPECT_THAT(PreTokens("'"), ElementsAre("'"));
  EXPECT_THAT(PreTokens("'r've"), ElementsAre("'", "r", "'ve"));
  EXPECT_THAT(PreTokens("a\n\n\nb"), ElementsAre("a", "\n\n", "\n", "b"));
  EXPECT_THAT(PreTokens("a \n b"), ElementsAre("a", " \n", " b"));
  EXPECT_THAT(PreTokens("a\t b"), ElementsAre("a", "\t", " b"));
  EXPECT_THAT(PreTokens("x  "), ElementsAre("x", "  "));
  EXPECT_THAT(PreTokens(" "), ElementsAre(" "));
  EXPECT_THAT(PreTokens("ab12!?cd"), ElementsAre("ab", "12", "!?", "cd"));
  // Letters, numbers and white space of all of Unicode; U+001C to U+001F and U+200B are no White_Space.
  EXPECT_THAT(PreTokens("né中٣½\u2167\u00a0x\u3000"), ElementsAre("né中", "٣½\u2167", "\u00a0", "x", "\u3000"));
  EXPECT_THAT(PreTokens("\x1c\x1f a\u200b b"), ElementsAre("\x1c\x1f", " a", "\u200b", " b"));
  EXPECT_THAT(PreTokens("\u1680\u2028\u0085z"), ElementsAre("\u1680\u2028", "\u0085", "z"));
  // Combining marks are no letters; a space before a wide space stays alone.
  EXPECT_THAT(PreTokens("e\u0301 \u3000x"), ElementsAre("e", "\u0301", " ", "\u3000", "x"));
  // What is no UTF-8 is one of the others.
  EXPECT_THAT(PreTokens("a\xff\xfe b\xe4\xb8"), ElementsAre("a", "\xff\xfe", " b", "\xe4\xb8"));
}

struct Files {
  nlohmann::ordered_json vocab;
  std::string merges = "#version: 0.2\n";
};

std::string SymbolOf(const std::string& bytes) {
  std::string symbol;
  for (const unsigned char byte : bytes) {
    // Lower-case ASCII stands for itself, which is all that these tests merge.
    if (byte >= 33 && byte <= 126) symbol.push_back(static_cast<char>(byte));
  }
  return symbol;
}

// The 256 bytes, then what `pairs` merge to.
Files MakeFiles(const std::vector<std::pair<std::string, std::string>>& pairs) {
  Files files;
  files.vocab = nlohmann::ordered_json::parse(Gpt2Bpe::Bytes()->VocabText());
  int next = 256;
  for (const auto& [left, right] : pairs) {
    if (!files.vocab.contains(SymbolOf(left + right))) files.vocab[SymbolOf(left + right)] = next++;
    absl::StrAppend(&files.merges, SymbolOf(left), " ", SymbolOf(right), "\n");
  }
  return files;
}

std::shared_ptr<const Gpt2Bpe> Parsed(const Files& files) {
  auto bpe = Gpt2Bpe::Parse(files.vocab.dump(), "vocab.json", files.merges, "merges.txt");
  EXPECT_TRUE(bpe.ok()) << bpe.status();
  return bpe.ok() ? *bpe : nullptr;
}

std::string Refusal(const std::string& vocab, const std::string& merges) {
  auto bpe = Gpt2Bpe::Parse(vocab, "vocab.json", merges, "merges.txt");
  if (bpe.ok()) return "accepted";
  EXPECT_EQ(bpe.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(bpe.status().message());
}

// GPT-2's own loop: the pair with the first line, all its places from the left, again.
std::vector<std::string> ReferenceMerges(const std::string& word,
                                         const std::map<std::pair<std::string, std::string>, int>& ranks) {
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  while (true) {
    int best = std::numeric_limits<int>::max();
    std::pair<std::string, std::string> pair;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = ranks.find({parts[i], parts[i + 1]});
      if (found != ranks.end() && found->second < best) best = found->second, pair = found->first;
    }
    if (best == std::numeric_limits<int>::max()) return parts;
    std::vector<std::string> merged;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i + 1 < parts.size() && parts[i] == pair.first && parts[i + 1] == pair.second) {
        merged.push_back(parts[i] + parts[i + 1]);
        ++i;
      } else {
        merged.push_back(parts[i]);
      }
    }
    parts = merged;
  }
}

TEST(Gpt2BpeTest, MergesAsTheReferenceInAnyOrderOfLines) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    // Pieces of up to 5 letters of a small alphabet, in no sensible order: a line may need what a later one makes.
    std::vector<std::pair<std::string, std::string>> pairs;
    std::map<std::pair<std::string, std::string>, int> ranks;
    std::vector<std::string> pieces = {"a", "b", "c"};
    while (pairs.size() < 25) {
      const std::string left = pieces[random() % pieces.size()], right = pieces[random() % pieces.size()];
      if (left.size() + right.size() > 5) continue;
      if (ranks.emplace(std::pair(left, right), 0).second) pairs.emplace_back(left, right);
      pieces.push_back(left + right);
    }
    std::shuffle(pairs.begin(), pairs.end(), random);
    for (size_t i = 0; i < pairs.size(); ++i) ranks[pairs[i]] = static_cast<int>(i);
    const auto bpe = Parsed(MakeFiles(pairs));
    ASSERT_NE(bpe, nullptr);
    Gpt2Encoder encoder(bpe);
    for (const size_t length : {2, 3, 7, 20, 47, 48, 49, 130, 400}) {
      std::string word;
      for (size_t i = 0; i < length; ++i) word.push_back(static_cast<char>('a' + random() % 3));
      std::vector<std::string> expected = ReferenceMerges(word, ranks);
      for (int again = 0; again < 2; ++again) {  // the second time from memory
        std::vector<int32_t> tokens;
        encoder.Encode(word, &tokens);
        std::vector<std::string> found;
        for (const int32_t token : tokens) found.push_back(bpe->bytes(token));
        ASSERT_EQ(found, expected) << word;
      }
    }
  }
}

TEST(Gpt2BpeTest, AnyBytesComeBack) {
  const auto bpe = Parsed(MakeFiles({{"a", "b"}, {"ab", "c"}, {"'", "s"}}));
  ASSERT_NE(bpe, nullptr);
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    const size_t length = random() % 300;
    for (size_t i = 0; i < length; ++i) {
      const char* const parts[] = {"abc",  "'s",   " ",           "\n", "\xe4\xb8\xad", "\xf0\x9f\x99\x82",
                                   "\xe4", "\xff", "\xed\xa0\x80"};
      if (random() % 3 == 0) {
        text.push_back(static_cast<char>(random()));
      } else {
        text += parts[random() % 9];
      }
    }
    const std::vector<int32_t> tokens = bpe->Encode(text);
    ASSERT_EQ(bpe->Decode(tokens), text);
  }
  EXPECT_EQ(bpe->Decode({-1, 97, 1 << 20}), "a");
}

TEST(Gpt2BpeTest, OneEndlessWordTakesNoQuadraticTime) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (std::string piece = "a"; piece.size() < 64; piece += piece) pairs.emplace_back(piece, piece);
  const auto bpe = Parsed(MakeFiles(pairs));
  ASSERT_NE(bpe, nullptr);
  const std::vector<int32_t> tokens = bpe->Encode(std::string(1000001, 'a'));  // quadratic: many minutes
  EXPECT_EQ(tokens.size(), 1000001u / 64 + 1);
}

TEST(Gpt2BpeTest, TheByteVocabularyIsTheIdentity) {
  const auto bytes = Gpt2Bpe::Bytes();
  EXPECT_EQ(bytes->vocabulary(), 256u);
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const std::vector<int32_t> tokens = bytes->Encode(all);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(tokens[i], i);
  auto again = Gpt2Bpe::Parse(bytes->VocabText(), "v", bytes->MergesText(), "m");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->Encode(all), tokens);
}

TEST(Gpt2BpeTest, LinesEndAsTheyLikeAndTheVersionMayBeMissing) {
  Files files = MakeFiles({{"a", "b"}, {"ab", "c"}});
  const auto want = Parsed(files)->Encode("abcab");
  EXPECT_EQ(want.size(), 2u);
  for (const char* merges : {"a b\nab c", "#version: 0.2\r\na b\r\nab c\r\n", "a b\nab c\n\n\n"}) {
    files.merges = merges;
    EXPECT_EQ(Parsed(files)->Encode("abcab"), want);
  }
}

TEST(Gpt2BpeTest, SpecialTokensAreTextAndCanBeFound) {
  Files files = MakeFiles({});
  files.vocab["<|endoftext|>"] = 256;
  files.vocab["<|two words|>"] = 257;
  const auto bpe = Parsed(files);
  ASSERT_NE(bpe, nullptr);
  EXPECT_EQ(bpe->Find("<|endoftext|>"), 256);
  EXPECT_EQ(bpe->Find("<|two words|>"), 257);
  EXPECT_EQ(bpe->Find("<|absent|>"), -1);
  EXPECT_EQ(bpe->Encode("<|endoftext|>").size(), 13u);
  EXPECT_EQ(bpe->Decode({256, 257}), "<|endoftext|><|two words|>");
}

TEST(Gpt2BpeTest, MalformedVocabulariesNameFileAndLine) {
  const std::string good = Gpt2Bpe::Bytes()->VocabText();
  EXPECT_EQ(Refusal(good, ""), "accepted");
  const auto with = [&](const std::string& more) { return good.substr(0, good.size() - 2) + more; };
  EXPECT_THAT(Refusal("", ""), HasSubstr("vocab.json: the file is empty"));
  EXPECT_THAT(Refusal("[1]", ""), HasSubstr("vocab.json:1: an object of token: number is expected, found a list"));
  EXPECT_THAT(Refusal("7", ""), HasSubstr("found 7"));
  EXPECT_THAT(Refusal(with(",\n\"ab\": 256,\n\"ac\" 257}"), ""), HasSubstr("vocab.json:3: not the JSON"));
  EXPECT_THAT(Refusal(with(""), ""), HasSubstr("vocab.json:1: not the JSON"));
  EXPECT_THAT(Refusal(with(",\n\"ab\": -1\n}"), ""),
              HasSubstr("vocab.json:2: a token number (0 to 16777215) is expected for the token \"ab\", found -1"));
  EXPECT_THAT(Refusal(with(",\n\"ab\":\n1.5}"), ""), HasSubstr("vocab.json:3: a token number"));
  EXPECT_THAT(Refusal(with(",\n\"ab\": \"x\"}"), ""), HasSubstr("vocab.json:2: "));
  EXPECT_THAT(Refusal(with(",\n\"ab\": {}}"), ""), HasSubstr("found a group of fields"));
  EXPECT_THAT(Refusal(with(",\n\"ab\": 99999999999999999999}"), ""), HasSubstr("vocab.json:2: "));
  EXPECT_THAT(Refusal(with(",\n\n\"ab\": 300}"), ""),
              HasSubstr("vocab.json:3: the token \"ab\" has the number 300, but 257"));
  EXPECT_THAT(Refusal(with(",\n\"ab\": 97}"), ""), HasSubstr("and \"ab\" have the same number 97"));
  EXPECT_THAT(Refusal(with(",\n\"a\": 256}"), ""),
              HasSubstr("vocab.json:2: the token \"a\" is given twice, first in line 1"));
  EXPECT_THAT(Refusal(R"({"a": 0, "b": 1})", ""), HasSubstr("no token for the byte 0"));
  EXPECT_THAT(Refusal(with(",\n\"\xff\": 256}"), ""), HasSubstr("vocab.json:2: not the JSON"));
}

TEST(Gpt2BpeTest, MalformedMergesNameFileAndLine) {
  Files files = MakeFiles({{"a", "b"}});
  const std::string vocab = files.vocab.dump();
  EXPECT_EQ(Refusal(vocab, files.merges), "accepted");
  EXPECT_THAT(Refusal(vocab, "#version: 0.2\na b\nab\n"),
              HasSubstr("merges.txt:3: two symbols with one space between are expected, found \"ab\""));
  EXPECT_THAT(Refusal(vocab, "a b c\n"), HasSubstr("merges.txt:1: two symbols"));
  EXPECT_THAT(Refusal(vocab, "a  b\n"), HasSubstr("merges.txt:1: two symbols"));
  EXPECT_THAT(Refusal(vocab, "a b\n\na b\n"), HasSubstr("merges.txt:2: an empty line"));
  EXPECT_THAT(Refusal(vocab, "a b\na b\n"), HasSubstr("merges.txt:2: the merge \"a b\" is given twice"));
  EXPECT_THAT(Refusal(vocab, "a b\nab zz\n"), HasSubstr("merges.txt:2: the symbol \"zz\" is not in the vocabulary"));
  EXPECT_THAT(Refusal(vocab, "a c\n"), HasSubstr("merges.txt:1: the merged symbol \"ac\" is not in the vocabulary"));
  EXPECT_THAT(Refusal(vocab, "\xff \xfe\n"), HasSubstr("merges.txt:1: the symbol"));
}

TEST(Gpt2BpeTest, DamagedFilesAreRefusedOrWork) {
  const Files files = MakeFiles({{"a", "b"}, {"ab", "c"}, {"abc", "abc"}});
  const std::string vocab = files.vocab.dump(1);
  std::mt19937 random(13);
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string texts[] = {vocab, files.merges};
    std::string& text = texts[round % 2];
    for (unsigned changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), 1 + random() % 20));
          break;
        default:
          text.resize(at + 1);
      }
      if (text.empty()) break;
    }
    auto bpe = Gpt2Bpe::Parse(texts[0], "vocab.json", texts[1], "merges.txt");
    if (!bpe.ok()) {
      ++refused;
      EXPECT_EQ(bpe.status().code(), absl::StatusCode::kInvalidArgument);
      // A symbol that is missing in the vocabulary shows in the merges.
      const std::string message(bpe.status().message());
      EXPECT_TRUE(message.rfind("merges.txt:", 0) == 0 || (round % 2 == 0 && message.rfind("vocab.json:", 0) == 0))
          << message;
      continue;
    }
    EXPECT_EQ((*bpe)->Decode((*bpe)->Encode("abcabcab x\xff")), "abcabcab x\xff");
  }
  EXPECT_GT(refused, 1000);
}

class SharedTokenizer : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = SharedFolder();
    if (folder_.empty()) GTEST_SKIP() << "SKIPPED: the shared data folder is absent";
    auto bpe = Gpt2Bpe::Load(folder_ + "/data/tok/encoder.json", folder_ + "/data/tok/vocab.bpe");
    ASSERT_TRUE(bpe.ok()) << bpe.status();
    bpe_ = *bpe;
  }
  std::string folder_;
  std::shared_ptr<const Gpt2Bpe> bpe_;
};

TEST_F(SharedTokenizer, GoldenTexts) {
  EXPECT_EQ(bpe_->vocabulary(), 50257u);
  EXPECT_EQ(bpe_->Find("<|endoftext|>"), 50256);
  std::istringstream lines(Slurp(folder_ + "/data/tok/gpt2_bpe_golden.jsonl"));
  int cases = 0;
  for (std::string line; std::getline(lines, line); ++cases) {
    const auto golden = nlohmann::json::parse(line);
    const std::string text = golden["text"];
    EXPECT_EQ(bpe_->Encode(text), golden["ids"].get<std::vector<int32_t>>()) << text;
    EXPECT_EQ(bpe_->Decode(golden["ids"].get<std::vector<int32_t>>()), text);
  }
  EXPECT_EQ(cases, 23);
}

TEST_F(SharedTokenizer, WrittenFilesAreTheSameTokenizer) {
  auto again = Gpt2Bpe::Parse(bpe_->VocabText(), "v", bpe_->MergesText(), "m");
  ASSERT_TRUE(again.ok()) << again.status();
  const std::string text = Slurp(folder_ + "/data/lm/tang_1mb_zh.txt").substr(0, 20000);
  EXPECT_EQ((*again)->Encode(text), bpe_->Encode(text));
  EXPECT_EQ((*again)->Find("<|endoftext|>"), 50256);
}

}  // namespace
}  // namespace sluice
