#include "worker/data/pre_tokens.h"

#include <utf8proc.h>

#include <array>
#include <cstdint>

#include "common/utf8.h"

namespace sluice {
namespace {

enum Kind : uint8_t { kOther, kLetter, kNumber, kSpace };

// The White_Space property; utf8proc has categories only.
bool IsWhiteSpace(uint32_t point) {
  return (point >= 9 && point <= 13) || point == 0x20 || point == 0x85 || point == 0xa0 || point == 0x1680 ||
         (point >= 0x2000 && point <= 0x200a) || point == 0x2028 || point == 0x2029 || point == 0x202f ||
         point == 0x205f || point == 0x3000;
}

Kind KindOf(uint32_t point) {
  if (IsWhiteSpace(point)) return kSpace;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(point))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return kLetter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return kNumber;
    default:
      return kOther;
  }
}

constexpr std::array<Kind, 128> kAscii = [] {
  std::array<Kind, 128> kinds{};
  for (int c = 0; c < 128; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool space = c == ' ' || (c >= 9 && c <= 13);
    kinds[c] = letter ? kLetter : c >= '0' && c <= '9' ? kNumber : space ? kSpace : kOther;
  }
  return kinds;
}();

struct Character {
  Kind kind = kOther;
  uint32_t bytes = 1;
};

Character CharacterAt(std::string_view text, size_t at) {
  const unsigned char byte = text[at];
  if (byte < 0x80) return {kAscii[byte], 1};
  const Utf8Character character = DecodeUtf8(text, at);
  return {character.valid ? KindOf(character.point) : kOther, character.bytes};
}

// The end of the characters of one kind from `at` on; `last`: where the last of them begins.
size_t RunEnd(std::string_view text, size_t at, Kind kind, size_t* last) {
  while (at < text.size()) {
    const Character character = CharacterAt(text, at);
    if (character.kind != kind) break;
    *last = at;
    at += character.bytes;
  }
  return at;
}

// Bytes of 's, 't, 're, 've, 'm, 'll or 'd at text[at]; 0: none of them.
size_t Contraction(std::string_view text, size_t at) {
  if (text[at] != '\'' || at + 1 >= text.size()) return 0;
  const char a = text[at + 1], b = at + 2 < text.size() ? text[at + 2] : '\0';
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

}  // namespace

size_t PreTokenEnd(std::string_view text, size_t at) {
  if (const size_t contraction = Contraction(text, at); contraction > 0) return at + contraction;
  size_t last = at;
  size_t first = at;
  Character character = CharacterAt(text, at);
  if (text[at] == ' ' && at + 1 < text.size()) {  // " ?" before a run
    const Character next = CharacterAt(text, at + 1);
    if (next.kind != kSpace) {
      first = at + 1;
      character = next;
    }
  }
  const size_t end = RunEnd(text, first, character.kind, &last);
  if (character.kind != kSpace) return end;
  // White space before a word leaves its last character to it, unless that is all of it.
  return end == text.size() || last == at ? end : last;
}

}  // namespace sluice
