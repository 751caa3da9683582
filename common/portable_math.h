// Elementary functions with the same bits on every x86-64 machine. The C library's differ: it chooses variants with
// fused multiply-add at run time. Plain double arithmetic without contraction, errors of a few units in the last place.
// Pure, thread-safe.
#ifndef SLUICE_COMMON_PORTABLE_MATH_H_
#define SLUICE_COMMON_PORTABLE_MATH_H_

#include <cstdint>

namespace sluice {

// Natural logarithm of a positive, finite, normal x.
double PortableLog(double x);

struct SinCos {
  double sin, cos;
};
// Of the angle 2 pi turns; 0 <= turns <= 1. Multiples of a quarter turn give exactly 0, 1 or -1.
SinCos PortableSinCos(double turns);

// base^exponent by repeated squaring.
double PortablePower(double base, uint64_t exponent);

}  // namespace sluice

#endif  // SLUICE_COMMON_PORTABLE_MATH_H_
