#include "common/utf8.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

uint32_t ByteAt(std::string_view text, size_t at) { return static_cast<unsigned char>(text[at]); }

// Bytes of a character with this first byte; 0: none begins so.
uint32_t LengthFrom(uint32_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0;
  if (lead < 0xe0) return 2;
  if (lead < 0xf0) return 3;
  return lead < 0xf5 ? 4 : 0;
}

}  // namespace

Utf8Character DecodeUtf8(std::string_view text, size_t at) {
  const uint32_t lead = ByteAt(text, at);
  const uint32_t length = LengthFrom(lead);
  if (length == 1) return {lead, 1, true, false};
  if (length == 0) return {0xfffd, 1, false, false};
  // The second byte's range rules out overlong forms, surrogates and points above U+10FFFF (Unicode, table 3-7).
  uint32_t low = 0x80, high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  uint32_t point = lead & (0x7fu >> length);
  for (uint32_t k = 1; k < length; ++k) {
    if (at + k >= text.size()) return {0xfffd, k, false, true};
    const uint32_t byte = ByteAt(text, at + k);
    if (byte < low || byte > high) return {0xfffd, k, false, false};
    point = point << 6 | (byte & 0x3f);
    low = 0x80, high = 0xbf;
  }
  return {point, length, true, false};
}

size_t FirstInvalidUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (ByteAt(text, at) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Character character = DecodeUtf8(text, at);
    if (!character.valid) return at;
    at += character.bytes;
  }
  return std::string_view::npos;
}

std::string DescribeInvalidUtf8(std::string_view text, size_t at) {
  const uint32_t lead = ByteAt(text, at);
  const uint32_t second = at + 1 < text.size() ? ByteAt(text, at + 1) : 0;
  const bool continued = (second & 0xc0) == 0x80;
  const char* what = "a character that breaks off";
  if ((lead & 0xc0) == 0x80) {
    what = "a continuation byte without its first byte";
  } else if (lead == 0xc0 || lead == 0xc1 || (lead == 0xe0 && continued && second < 0xa0) ||
             (lead == 0xf0 && continued && second < 0x90)) {
    what = "an overlong form";
  } else if (lead == 0xed && continued && second > 0x9f) {
    what = "a surrogate, half of a UTF-16 pair";
  } else if (lead > 0xf4 || (lead == 0xf4 && continued && second > 0x8f)) {
    what = lead > 0xf7 ? "a byte that UTF-8 never has" : "a code point above U+10FFFF";
  } else if (DecodeUtf8(text, at).cut) {
    what = "a character cut off by the end";
  }
  std::string bytes;
  for (size_t k = at; k < std::min(text.size(), at + 2); ++k) {
    absl::StrAppend(&bytes, k == at ? "" : " ", absl::Hex(ByteAt(text, k), absl::kZeroPad2));
  }
  return absl::StrCat(what, " (", bytes, ")");
}

void AppendUtf8(uint32_t point, std::string* text) {
  const auto tail = [text](uint32_t bits) { text->push_back(static_cast<char>(0x80 | (bits & 0x3f))); };
  if (point < 0x80) {
    text->push_back(static_cast<char>(point));
  } else if (point < 0x800) {
    text->push_back(static_cast<char>(0xc0 | point >> 6));
    tail(point);
  } else if (point < 0x10000) {
    text->push_back(static_cast<char>(0xe0 | point >> 12));
    tail(point >> 6);
    tail(point);
  } else {
    text->push_back(static_cast<char>(0xf0 | point >> 18));
    tail(point >> 12);
    tail(point >> 6);
    tail(point);
  }
}

std::string Utf8Stream::Push(std::string_view bytes) {
  held_.append(bytes);
  std::string out;
  size_t at = 0;
  while (at < held_.size()) {
    const Utf8Character character = DecodeUtf8(held_, at);
    if (character.cut) break;
    if (character.valid) {
      out.append(held_, at, character.bytes);
    } else {
      AppendUtf8(0xfffd, &out);
    }
    at += character.bytes;
  }
  held_.erase(0, at);
  return out;
}

size_t Utf8Stream::Finish() {
  const size_t dropped = held_.size();
  held_.clear();
  return dropped;
}

}  // namespace sluice
