// UTF-8 as RFC 3629 has it: one character at a time, faults with their cause, and text that arrives in pieces. Pure;
// functions are thread-safe.
#ifndef SLUICE_COMMON_UTF8_H_
#define SLUICE_COMMON_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

// The character that begins at text[at], at < text.size().
struct Utf8Character {
  uint32_t point = 0;  // code point; 0xfffd where it is not valid
  uint32_t bytes =
      1;  // of a character that is not valid: its longest part that a valid one could begin with, 1 or more
  bool valid = false;
  bool cut = false;  // not valid only because the text ends here
};
Utf8Character DecodeUtf8(std::string_view text, size_t at);

// Offset of the first byte of the first character that is not valid, or npos.
size_t FirstInvalidUtf8(std::string_view text);

// What is wrong with the character at text[at], which is not valid: "an overlong form (c0 af)".
std::string DescribeInvalidUtf8(std::string_view text, size_t at);

void AppendUtf8(uint32_t point, std::string* text);

// Bytes that come in pieces become valid UTF-8: an incomplete character is held back until the rest comes, what can no
// longer become one turns into U+FFFD (one for each longest part that a valid character could begin with, as Python
// and browsers do). Not thread-safe.
class Utf8Stream {
 public:
  // All characters that are complete now.
  std::string Push(std::string_view bytes);
  // Drops an incomplete character at the end; its number of bytes.
  size_t Finish();

 private:
  std::string held_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_UTF8_H_
