// vocab.json and merges.txt. Both write bytes as printable characters: 33-126, 161-172 and 174-255 stand for
// themselves (as code points), the other 68 bytes, in order, are the code points from 256 on.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/utf8.h"
#include "worker/data/file.h"
#include "worker/data/gpt2_bpe.h"

namespace sluice {
namespace {

constexpr uint32_t kMaxTokens = 1u << 24;  // model.gpt2.vocabulary ends there

constexpr std::array<uint16_t, 256> kPointOfByte = [] {
  std::array<uint16_t, 256> points{};
  uint16_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    points[byte] = itself ? static_cast<uint16_t>(byte) : next++;
  }
  return points;
}();

// -1: no byte is written so.
int ByteOfPoint(uint32_t point) {
  for (int byte = 0; byte < 256; ++byte) {
    if (kPointOfByte[byte] == point) return byte;
  }
  return -1;
}

std::array<int16_t, 512> MakeBytesOfPoints() {
  std::array<int16_t, 512> bytes{};
  for (uint32_t point = 0; point < bytes.size(); ++point) bytes[point] = static_cast<int16_t>(ByteOfPoint(point));
  return bytes;
}

// False where a character stands for no byte: a special token, written as it is.
bool BytesOfSymbol(std::string_view symbol, std::string* bytes) {
  static const std::array<int16_t, 512> byte_of = MakeBytesOfPoints();
  bytes->clear();
  for (size_t at = 0; at < symbol.size();) {
    const Utf8Character character = DecodeUtf8(symbol, at);
    if (!character.valid || character.point >= byte_of.size() || byte_of[character.point] < 0) return false;
    bytes->push_back(static_cast<char>(byte_of[character.point]));
    at += character.bytes;
  }
  return !symbol.empty();
}

std::string SymbolOfBytes(std::string_view bytes) {
  std::string symbol;
  for (const unsigned char byte : bytes) AppendUtf8(kPointOfByte[byte], &symbol);
  return symbol;
}

std::string Shown(std::string_view text) {
  return absl::Utf8SafeCEscape(std::string(text.substr(0, 60))) + (text.size() > 60 ? "..." : "");
}

absl::Status ErrorAt(const std::string& path, size_t line, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ":", line, ": ", what));
}

size_t LineOf(std::string_view text, size_t offset) {
  return 1 + std::count(text.begin(), text.begin() + std::min(offset, text.size()), '\n');
}

// Hands bytes to the JSON parser and knows how many it took.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** taken) : at_(at), taken_(taken) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *taken_ = ++at_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** taken_;
};

struct VocabEntry {
  std::string symbol;
  uint64_t token = 0;
  size_t offset = 0;
};

// {"symbol": number, ...} and nothing else.
class VocabReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  VocabReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  absl::StatusOr<std::vector<VocabEntry>> Read() {
    taken_ = text_.data();
    nlohmann::json::sax_parse(CountingIterator(text_.data(), &taken_),
                              CountingIterator(text_.data() + text_.size(), &taken_), this);
    RETURN_IF_ERROR(status_);
    return std::move(entries_);
  }

  bool null() override { return Wrong("null"); }
  bool boolean(bool value) override { return Wrong(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return Wrong(absl::StrCat(value)); }
  bool number_float(number_float_t, const string_t& written) override { return Wrong(written); }
  bool string(string_t& value) override { return Wrong(absl::StrCat("\"", Shown(value), "\"")); }
  bool binary(binary_t&) override { return Wrong("bytes"); }
  bool start_array(std::size_t) override { return Wrong("a list"); }
  bool end_array() override { return true; }
  bool end_object() override { return true; }
  bool start_object(std::size_t) override {
    if (inside_) return Wrong("a group of fields");
    inside_ = true;
    return true;
  }
  bool key(string_t& value) override {
    entries_.push_back({value, 0, Offset()});
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (!inside_ || value >= kMaxTokens) return Wrong(absl::StrCat(value));
    entries_.back().token = value;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string what = error.what();  // "[...] parse error at line 3, column 5: syntax error while parsing ..."
    if (const size_t column = what.find("column "); column != std::string::npos) {
      if (const size_t colon = what.find(": ", column); colon != std::string::npos) what.erase(0, colon + 2);
    }
    status_ = ErrorAt(path_, LineOf(text_, position == 0 ? 0 : position - 1),
                      absl::StrCat("not the JSON of a vocabulary: ", Shown(what.substr(0, 56))));
    return false;
  }

 private:
  // The parser has taken one character after a number.
  size_t Offset() const { return std::max<size_t>(taken_ - text_.data(), 1) - 1; }
  bool Wrong(const std::string& found) {
    const std::string where =
        entries_.empty() ? "" : absl::StrCat(" for the token \"", Shown(entries_.back().symbol), "\"");
    status_ = ErrorAt(
        path_, LineOf(text_, Offset()),
        !inside_ ? absl::StrCat("an object of token: number is expected, found ", found)
                 : absl::StrCat("a token number (0 to ", kMaxTokens - 1, ") is expected", where, ", found ", found));
    return false;
  }

  const std::string_view text_;
  const std::string& path_;
  const char* taken_ = nullptr;
  bool inside_ = false;
  std::vector<VocabEntry> entries_;
  absl::Status status_;
};

}  // namespace

absl::Status Gpt2Bpe::ReadVocab(std::string_view text, const std::string& path) {
  if (text.empty()) return absl::InvalidArgumentError(path + ": the file is empty, expected the JSON of a vocabulary");
  ASSIGN_OR_RETURN(const std::vector<VocabEntry> entries, VocabReader(text, path).Read());
  std::vector<const VocabEntry*> by_token(entries.size(), nullptr);
  for (const VocabEntry& entry : entries) {
    const auto fault = [&](const std::string& what) { return ErrorAt(path, LineOf(text, entry.offset), what); };
    if (entry.token >= entries.size()) {
      return fault(absl::StrCat("the token \"", Shown(entry.symbol), "\" has the number ", entry.token, ", but ",
                                entries.size(), " tokens are numbered 0 to ", entries.size() - 1,
                                "; a number is missing or a line is lost"));
    }
    if (const VocabEntry* other = by_token[entry.token]) {
      return fault(absl::StrCat("the tokens \"", Shown(other->symbol), "\" (line ", LineOf(text, other->offset),
                                ") and \"", Shown(entry.symbol), "\" have the same number ", entry.token));
    }
    by_token[entry.token] = &entry;
  }
  bytes_.resize(entries.size());
  absl::flat_hash_map<std::string, const VocabEntry*> symbols;
  std::vector<uint32_t> special;
  for (uint32_t token = 0; token < by_token.size(); ++token) {
    const VocabEntry& entry = *by_token[token];
    if (const auto [first, fresh] = symbols.emplace(entry.symbol, &entry); !fresh) {
      return ErrorAt(path, LineOf(text, std::max(entry.offset, first->second->offset)),
                     absl::StrCat("the token \"", Shown(entry.symbol), "\" is given twice, first in line ",
                                  LineOf(text, std::min(entry.offset, first->second->offset))));
    }
    if (BytesOfSymbol(entry.symbol, &bytes_[token])) {
      tokens_.emplace(bytes_[token], token);
    } else {
      bytes_[token] = entry.symbol;
      special.push_back(token);
    }
  }
  for (const uint32_t token : special) tokens_.emplace(bytes_[token], token);
  for (int byte = 0; byte < 256; ++byte) {
    const int32_t token = Find(std::string(1, static_cast<char>(byte)));
    if (token < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": no token for the byte ", byte, " (\"", SymbolOfBytes(std::string(1, static_cast<char>(byte))),
          "\"): this is not the vocabulary of a byte-level BPE such as GPT-2's"));
    }
    byte_tokens_[byte] = static_cast<uint32_t>(token);
  }
  return absl::OkStatus();
}

absl::Status Gpt2Bpe::ReadMerges(std::string_view text, const std::string& path) {
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (number == 1 && line.substr(0, 8) == "#version") continue;
    const auto fault = [&](const std::string& what) { return ErrorAt(path, number, what); };
    if (line.empty()) {
      const bool rest = text.substr(std::min(at, text.size())).find_first_not_of("\r\n") != std::string_view::npos;
      if (!rest) break;
      return fault("an empty line among the merges");
    }
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos) {
      return fault(absl::StrCat("two symbols with one space between are expected, found \"", Shown(line), "\""));
    }
    const std::string_view parts[2] = {line.substr(0, space), line.substr(space + 1)};
    std::string bytes[2];
    int32_t tokens[2];
    for (int i = 0; i < 2; ++i) {
      tokens[i] = BytesOfSymbol(parts[i], &bytes[i]) ? Find(bytes[i]) : -1;
      if (tokens[i] < 0) {
        return fault(absl::StrCat("the symbol \"", Shown(parts[i]),
                                  "\" is not in the vocabulary; do the two files belong together?"));
      }
    }
    const int32_t merged = Find(bytes[0] + bytes[1]);
    if (merged < 0) {
      return fault(absl::StrCat("the merged symbol \"", Shown(std::string(parts[0]) + std::string(parts[1])),
                                "\" is not in the vocabulary; do the two files belong together?"));
    }
    const uint32_t rank = static_cast<uint32_t>(merge_lines_.size());
    const auto [first, fresh] = merges_.emplace(Pair(tokens[0], tokens[1]), Merge{rank, static_cast<uint32_t>(merged)});
    if (!fresh) return fault(absl::StrCat("the merge \"", Shown(line), "\" is given twice"));
    merge_lines_.emplace_back(tokens[0], tokens[1]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Gpt2Bpe>> Gpt2Bpe::Parse(std::string_view vocab, const std::string& vocab_path,
                                                              std::string_view merges, const std::string& merges_path) {
  auto bpe = std::make_shared<Gpt2Bpe>();
  RETURN_IF_ERROR(bpe->ReadVocab(vocab, vocab_path));
  RETURN_IF_ERROR(bpe->ReadMerges(merges, merges_path));
  return bpe;
}

absl::StatusOr<std::shared_ptr<const Gpt2Bpe>> Gpt2Bpe::Load(const std::string& vocab_path,
                                                             const std::string& merges_path) {
  ASSIGN_OR_RETURN(const std::string vocab, ReadDataFile(vocab_path));
  ASSIGN_OR_RETURN(const std::string merges, ReadDataFile(merges_path));
  return Parse(vocab, vocab_path, merges, merges_path);
}

std::shared_ptr<const Gpt2Bpe> Gpt2Bpe::Bytes() {
  auto bpe = std::make_shared<Gpt2Bpe>();
  for (uint32_t byte = 0; byte < 256; ++byte) {
    bpe->bytes_.emplace_back(1, static_cast<char>(byte));
    bpe->tokens_.emplace(bpe->bytes_.back(), byte);
    bpe->byte_tokens_[byte] = byte;
  }
  return bpe;
}

std::string Gpt2Bpe::VocabText() const {
  std::string text = "{";
  for (uint32_t token = 0; token < vocabulary(); ++token) {
    // Of two tokens with the same bytes one is a special token, which is written as it is.
    const bool special = Find(bytes_[token]) != static_cast<int32_t>(token);
    const std::string symbol = special ? bytes_[token] : SymbolOfBytes(bytes_[token]);
    absl::StrAppend(&text, token == 0 ? "" : ", ", nlohmann::json(symbol).dump(), ": ", token);
  }
  return text + "}\n";
}

std::string Gpt2Bpe::MergesText() const {
  std::string text = "#version: 0.2\n";
  for (const auto& [left, right] : merge_lines_) {
    absl::StrAppend(&text, SymbolOfBytes(bytes_[left]), " ", SymbolOfBytes(bytes_[right]), "\n");
  }
  return text;
}

}  // namespace sluice
