#include "common/utf8.h"

#include <gtest/gtest.h>

#include <random>

namespace sluice {
namespace {

TEST(Utf8Test, EveryCodePointAndNoOther) {
  for (uint32_t point = 0; point < 0x110000; ++point) {
    std::string text = "x";
    AppendUtf8(point, &text);
    const Utf8Character character = DecodeUtf8(text, 1);
    const bool surrogate = point >= 0xd800 && point < 0xe000;
    ASSERT_EQ(character.valid, !surrogate) << point;
    if (!surrogate) {
      ASSERT_EQ(character.point, point);
      ASSERT_EQ(character.bytes, text.size() - 1);
    }
    ASSERT_EQ(FirstInvalidUtf8(text), surrogate ? 1 : std::string::npos);
    // Every beginning of it is cut.
    for (size_t part = 2; part < text.size() && !surrogate; ++part) {
      const Utf8Character cut = DecodeUtf8(std::string_view(text).substr(0, part), 1);
      ASSERT_TRUE(cut.cut && !cut.valid) << point;
      ASSERT_EQ(cut.bytes, part - 1);
    }
  }
}

TEST(Utf8Test, FaultsHaveTheirNames) {
  const std::pair<std::string, std::string> cases[] = {
      {"\xc0\xaf", "an overlong form (c0 af)"},
      {"\xe0\x9f\xbf", "an overlong form (e0 9f)"},
      {"\xf0\x8f\xbf\xbf", "an overlong form (f0 8f)"},
      {"\xed\xbf\xbf", "a surrogate, half of a UTF-16 pair (ed bf)"},
      {"\xf5\x80\x80\x80", "a code point above U+10FFFF (f5 80)"},
      {"\xfe", "a byte that UTF-8 never has (fe)"},
      {"\xbf", "a continuation byte without its first byte (bf)"},
      {"\xe4\xb8", "a character cut off by the end (e4 b8)"},
      {"\xe4\xb8x", "a character that breaks off (e4 b8)"},
  };
  for (const auto& [bytes, name] : cases) EXPECT_EQ(DescribeInvalidUtf8(bytes, 0), name);
}

TEST(Utf8StreamTest, PiecesGiveTheSameTextAndOnlyWholeCharacters) {
  std::mt19937 random(11);
  const std::string parts[] = {"a",    "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x99\x82",
                               "\xff", "\xe4\xb8", "\xf0\x9f",     "\n"};
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) text += parts[random() % 8];
    Utf8Stream whole, pieces;
    const std::string expected = whole.Push(text);
    std::string found;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random() % 3;
      const std::string piece = pieces.Push(std::string_view(text).substr(at, size));
      ASSERT_EQ(FirstInvalidUtf8(piece), std::string::npos);
      found += piece;
      at += size;
    }
    ASSERT_EQ(found, expected);
    ASSERT_EQ(whole.Finish(), pieces.Finish());
  }
}

TEST(Utf8StreamTest, HoldsBackWhatMayStillBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("a\xf0\x9f"), "a");
  EXPECT_EQ(stream.Push("\x99"), "");
  EXPECT_EQ(stream.Push("\x82z"), "\xf0\x9f\x99\x82z");
  EXPECT_EQ(stream.Push("\xe4\xb8"), "");
  EXPECT_EQ(stream.Push("x"), "\xef\xbf\xbdx");  // one mark for the part of a character
  EXPECT_EQ(stream.Push("\xff\xfe"), "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(stream.Push("\xe4"), "");
  EXPECT_EQ(stream.Finish(), 1u);
  EXPECT_EQ(stream.Push("b"), "b");
}

}  // namespace
}  // namespace sluice
