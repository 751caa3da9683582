// The floating-point formats of weight files: F32, F16 (IEEE 754 binary16) and BF16 (the upper half of an F32).
//
// Widening is exact. Narrowing rounds to nearest, ties to even; what is past the largest value becomes infinity; a NaN
// stays one (quiet, with the upper bits of its payload). Bytes are little-endian, as this machine's.
#ifndef SLUICE_COMMON_FLOAT_FORMATS_H_
#define SLUICE_COMMON_FLOAT_FORMATS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/types/span.h"

namespace sluice {

enum class FloatFormat { kF32, kF16, kBF16 };

// safetensors' names: "F32", "F16", "BF16"; nothing for other dtypes.
std::optional<FloatFormat> FloatFormatOf(std::string_view dtype);
const char* DtypeOf(FloatFormat format);
size_t BytesOf(FloatFormat format);  // of one value
// The largest finite value.
float LargestOf(FloatFormat format);

float WidenF16(uint16_t bits);
float WidenBf16(uint16_t bits);
uint16_t NarrowF16(float value);
uint16_t NarrowBf16(float value);

// `from` holds to.size() values of the format, at any alignment.
void Widen(FloatFormat format, const void* from, absl::Span<float> to);
void Narrow(FloatFormat format, absl::Span<const float> from, void* to);

}  // namespace sluice

#endif  // SLUICE_COMMON_FLOAT_FORMATS_H_
