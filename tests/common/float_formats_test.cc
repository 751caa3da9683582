#include "common/float_formats.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace sluice {
namespace {

// The value of an F16 by its definition.
double HalfByDefinition(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0x1f) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(FloatFormatsTest, EveryF16WidensToItsValueAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float wide = WidenF16(half);
    const double want = HalfByDefinition(half);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_EQ(NarrowF16(wide), half | 0x200);  // quiet
      continue;
    }
    ASSERT_EQ(wide, want) << bits;
    EXPECT_EQ(std::signbit(wide), (bits & 0x8000) != 0);
    EXPECT_EQ(NarrowF16(wide), half);
  }
}

TEST(FloatFormatsTest, EveryBf16IsTheUpperHalfOfAFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float wide = WidenBf16(half);
    EXPECT_EQ(std::bit_cast<uint32_t>(wide), bits << 16);
    EXPECT_EQ(NarrowBf16(wide), std::isnan(wide) ? half | 0x40 : half);
  }
}

// Between every two neighbours: the middle goes to the even one, what is beside it to the nearer one.
template <typename Widen, typename Narrow>
void CheckRounding(uint16_t largest, double after_largest, Widen widen, Narrow narrow) {
  const uint16_t infinity = largest + 1;
  for (uint16_t low = 0; low <= largest; ++low) {
    const uint16_t high = low + 1;
    const double above = high == infinity ? after_largest : double{widen(high)};
    const double middle = (double{widen(low)} + above) / 2;
    const float at = static_cast<float>(middle);
    ASSERT_EQ(at, middle) << low;  // a float holds it
    for (const float sign : {1.0f, -1.0f}) {
      const uint16_t bit = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(narrow(sign * at), bit | (low % 2 == 0 ? low : high)) << low;
      ASSERT_EQ(narrow(sign * std::nextafter(at, 0.0f)), bit | low) << low;
      ASSERT_EQ(narrow(sign * std::nextafter(at, INFINITY)), bit | high) << low;
    }
  }
  EXPECT_EQ(narrow(INFINITY), infinity);
  EXPECT_EQ(narrow(-INFINITY), 0x8000 | infinity);
  EXPECT_EQ(narrow(std::numeric_limits<float>::max()), infinity);
}

TEST(FloatFormatsTest, NarrowingRoundsToNearestEven) {
  CheckRounding(0x7bff, 65536, WidenF16, NarrowF16);
  CheckRounding(0x7f7f, 0x1p128, WidenBf16, NarrowBf16);
  EXPECT_EQ(NarrowF16(0x1p-30f), 0);
  EXPECT_EQ(NarrowF16(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(LargestOf(FloatFormat::kF16), WidenF16(0x7bff));
  EXPECT_EQ(LargestOf(FloatFormat::kBF16), WidenBf16(0x7f7f));
}

TEST(FloatFormatsTest, ArraysAtAnyAlignment) {
  const std::vector<float> values = {0, -0.0f, 1, -2.5f, 65504, 1e-7f, 3.14159265f};
  for (const FloatFormat format : {FloatFormat::kF32, FloatFormat::kF16, FloatFormat::kBF16}) {
    std::vector<char> bytes(values.size() * BytesOf(format) + 1);
    Narrow(format, values, bytes.data() + 1);
    std::vector<float> back(values.size());
    Widen(format, bytes.data() + 1, absl::MakeSpan(back));
    for (size_t i = 0; i < values.size(); ++i) {
      const float want = format == FloatFormat::kF32   ? values[i]
                         : format == FloatFormat::kF16 ? WidenF16(NarrowF16(values[i]))
                                                       : WidenBf16(NarrowBf16(values[i]));
      EXPECT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(want)) << DtypeOf(format) << " " << i;
    }
    EXPECT_EQ(FloatFormatOf(DtypeOf(format)), format);
  }
  for (const char* other : {"", "F64", "f32", "I32", "F8_E4M3"}) EXPECT_EQ(FloatFormatOf(other), std::nullopt);
}

}  // namespace
}  // namespace sluice
