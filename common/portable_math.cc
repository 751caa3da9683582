#include "common/portable_math.h"

#include <bit>
#include <numbers>

namespace sluice {

double PortableLog(double x) {
  // x = m * 2^e with sqrt(1/2) <= m < sqrt(2); log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716.
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int64_t e = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (m > std::numbers::sqrt2) {
    m *= 0.5;
    ++e;
  }
  const double s = (m - 1) / (m + 1), s2 = s * s;
  double series = 0;
  for (int k = 23; k >= 3; k -= 2) series = series * s2 + 1.0 / k;
  return static_cast<double>(e) * std::numbers::ln2 + (2 * s + 2 * s * (s2 * series));
}

SinCos PortableSinCos(double turns) {
  const int quarter = static_cast<int>(turns * 4 + 0.5);
  const double x = (turns * 4 - quarter) * (std::numbers::pi / 2), x2 = x * x;  // |x| <= pi / 4
  double sine = 0, cosine = 0;
  for (int k = 18; k >= 2; k -= 2) {  // 1 - x2/(1*2) (1 - x2/(3*4) (1 - ...)), the same from 2*3 on for the sine
    cosine = (1 - cosine) * (x2 / ((k - 1) * k));
    sine = (1 - sine) * (x2 / (k * (k + 1)));
  }
  sine = x - x * sine;
  cosine = 1 - cosine;
  switch (quarter & 3) {
    case 0:
      return {sine, cosine};
    case 1:
      return {cosine, -sine};
    case 2:
      return {-sine, -cosine};
    default:
      return {-cosine, sine};
  }
}

double PortablePower(double base, uint64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if (exponent & 1) power *= base;
  }
  return power;
}

}  // namespace sluice
