#include "common/float_formats.h"

#include <bit>
#include <cstring>
#include <limits>

namespace sluice {

static_assert(std::endian::native == std::endian::little);

std::optional<FloatFormat> FloatFormatOf(std::string_view dtype) {
  for (const FloatFormat format : {FloatFormat::kF32, FloatFormat::kF16, FloatFormat::kBF16}) {
    if (dtype == DtypeOf(format)) return format;
  }
  return std::nullopt;
}

const char* DtypeOf(FloatFormat format) {
  switch (format) {
    case FloatFormat::kF32:
      return "F32";
    case FloatFormat::kF16:
      return "F16";
    case FloatFormat::kBF16:
      return "BF16";
  }
  return "";
}

size_t BytesOf(FloatFormat format) { return format == FloatFormat::kF32 ? 4 : 2; }

float LargestOf(FloatFormat format) {
  switch (format) {
    case FloatFormat::kF32:
      return std::numeric_limits<float>::max();
    case FloatFormat::kF16:
      return 65504;
    case FloatFormat::kBF16:
      return WidenBf16(0x7f7f);
  }
  return 0;
}

float WidenF16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {  // zero and subnormals: units of 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

float WidenBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t NarrowF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
  if (magnitude < 0x38800000) {                                              // below 2^-14
    // Between 0.5 and 1 floats are 2^-24 apart, as F16's subnormals are: the addition rounds.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f)));
  }
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

uint16_t NarrowBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void Widen(FloatFormat format, const void* from, absl::Span<float> to) {
  if (to.empty()) return;
  if (format == FloatFormat::kF32) {
    std::memcpy(to.data(), from, to.size() * sizeof(float));
    return;
  }
  const char* at = static_cast<const char*>(from);
  for (float& value : to) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    at += sizeof(bits);
    value = format == FloatFormat::kF16 ? WidenF16(bits) : WidenBf16(bits);
  }
}

void Narrow(FloatFormat format, absl::Span<const float> from, void* to) {
  if (from.empty()) return;
  if (format == FloatFormat::kF32) {
    std::memcpy(to, from.data(), from.size() * sizeof(float));
    return;
  }
  char* at = static_cast<char*>(to);
  for (const float value : from) {
    const uint16_t bits = format == FloatFormat::kF16 ? NarrowF16(value) : NarrowBf16(value);
    std::memcpy(at, &bits, sizeof(bits));
    at += sizeof(bits);
  }
}

}  // namespace sluice
