#include "common/wire_format.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/optimizer.h"
#include "common/portable_math.h"
#include "common/wire_kernels.h"

namespace sluice {
namespace {

using kernels::kInt8Block;
using kernels::WireTable;

static_assert(std::endian::native == std::endian::little);

constexpr size_t kInt8BlockBytes = kInt8Block + sizeof(float);
constexpr size_t kPiece = 1024;  // elements decoded at once, into the first cache; a multiple of kInt8Block

std::vector<const WireTable*> RunnableTables() {
  __builtin_cpu_init();
  std::vector<const WireTable*> tables = {&kernels::kWireTableV2};
  if (__builtin_cpu_supports("x86-64-v3")) tables.push_back(&kernels::kWireTableV3);
  if (__builtin_cpu_supports("x86-64-v4")) tables.push_back(&kernels::kWireTableV4);
  return tables;
}

std::atomic<const WireTable*>& Chosen() {
  static std::atomic<const WireTable*> chosen{RunnableTables().back()};
  return chosen;
}

const WireTable& Kernels() { return *Chosen().load(std::memory_order_relaxed); }

template <typename T>
T Read(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// How a block of TOP_K says where its values belong. The shorter one, so that the count alone decides.
enum class Places { kIndices, kBitmap, kAll };

Places PlacesOf(size_t count, size_t length) {
  if (count == length) return Places::kAll;
  return count * sizeof(uint16_t) < (length + 7) / 8 ? Places::kIndices : Places::kBitmap;
}

size_t PlaceBytes(size_t count, size_t length) {
  switch (PlacesOf(count, length)) {
    case Places::kIndices:
      return count * sizeof(uint16_t);
    case Places::kBitmap:
      return (length + 7) / 8;
    case Places::kAll:
      break;
  }
  return 0;
}

uint64_t TopKBlocks(uint64_t elements) { return elements / kTopKBlock + (elements % kTopKBlock != 0 ? 1 : 0); }

size_t TopKBlockLength(size_t elements, size_t block) { return std::min(kTopKBlock, elements - block * kTopKBlock); }

// Calls visit(index, bits of the value) in ascending order.
template <typename Visit>
void ForEachTopK(const char* data, size_t elements, Visit visit) {
  const size_t blocks = TopKBlocks(elements);
  const char* at = data + blocks * sizeof(uint32_t);
  for (size_t b = 0; b < blocks; ++b) {
    const size_t first = b * kTopKBlock, length = TopKBlockLength(elements, b);
    const size_t count = Read<uint32_t>(data + b * sizeof(uint32_t));
    const char* values = at + PlaceBytes(count, length);
    const auto value = [&](size_t i) { return Read<uint32_t>(values + i * sizeof(float)); };
    switch (PlacesOf(count, length)) {
      case Places::kIndices:
        for (size_t i = 0; i < count; ++i) visit(first + Read<uint16_t>(at + i * sizeof(uint16_t)), value(i));
        break;
      case Places::kBitmap: {
        size_t i = 0;
        for (size_t byte = 0; byte < (length + 7) / 8; ++byte) {
          for (uint32_t bits = static_cast<uint8_t>(at[byte]); bits != 0; bits &= bits - 1) {
            visit(first + byte * 8 + static_cast<size_t>(std::countr_zero(bits)), value(i++));
          }
        }
        break;
      }
      case Places::kAll:
        for (size_t i = 0; i < length; ++i) visit(first + i, value(i));
        break;
    }
    at = values + count * sizeof(float);
  }
}

// All bytes in one piece: in place where they are, else copied to `scratch`.
const char* Contiguous(const Payload& payload, std::string* scratch) {
  if (payload.contiguous() != nullptr) return static_cast<const char*>(payload.contiguous());
  scratch->resize(payload.size());
  payload.CopyTo(scratch->data());
  return scratch->data();
}

// Calls sink(values, first, count) with decoded pieces in order, each in a buffer that lives for the call.
template <typename Sink>
void ForEachDecoded(v1::Encoding encoding, const Payload& payload, size_t n, Sink sink) {
  const size_t unit = encoding == v1::INT8 ? kInt8BlockBytes : EncodedBytes(encoding, 1);
  const size_t unit_elements = encoding == v1::INT8 ? kInt8Block : 1;
  float values[kPiece];
  char carried[kInt8BlockBytes];
  size_t carry = 0, done = 0;
  const auto emit = [&](const void* data, size_t count) {
    DecodeValues(encoding, data, count, values);
    sink(values, done, count);
    done += count;
  };
  payload.ForEach([&](const uint8_t* data, size_t bytes, size_t) {
    if (carry > 0) {  // a unit straddles two slices
      const size_t take = std::min(unit - carry, bytes);
      std::memcpy(carried + carry, data, take);
      carry += take;
      data += take;
      bytes -= take;
      if (carry < unit) return;
      emit(carried, unit_elements);
      carry = 0;
    }
    while (bytes >= unit) {
      const size_t units = std::min(bytes / unit, kPiece / unit_elements);
      emit(data, units * unit_elements);
      data += units * unit;
      bytes -= units * unit;
    }
    std::memcpy(carried, data, bytes);
    carry = bytes;
  });
  if (carry > 0) emit(carried, n - done);  // the last block of INT8 may be short
  DCHECK(done == n);
}

// Bits of the magnitude: as numbers they are ordered as the magnitudes are, NaN last.
uint32_t Magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// The count-th largest magnitude, and how many of those equal to it belong to the `count` largest.
std::pair<uint32_t, size_t> Threshold(const float* x, size_t n, size_t count) {
  uint32_t prefix = 0, known = 0;  // bits of the threshold found so far, and which ones
  size_t wanted = count;           // of those with this prefix
  for (const auto& [shift, width] : {std::pair{20, 11}, std::pair{10, 10}, std::pair{0, 10}}) {
    std::array<uint32_t, 2048> histogram{};
    const uint32_t mask = (1u << width) - 1;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t m = Magnitude(x[i]);
      if ((m & known) == prefix) ++histogram[m >> shift & mask];
    }
    uint32_t bucket = mask;
    while (histogram[bucket] < wanted) wanted -= histogram[bucket--];
    prefix |= bucket << shift;
    known |= mask << shift;
  }
  return {prefix, wanted};
}

}  // namespace

// ---------------------------------------------------------------- spec
v1::Encoding PushEncoding(const v1::JobSpec& spec) {
  switch (spec.transfer().push().format_case()) {
    case v1::PushSpec::kBf16:
      return v1::BF16;
    case v1::PushSpec::kF16:
      return v1::F16;
    case v1::PushSpec::kInt8:
      return v1::INT8;
    case v1::PushSpec::kTopK:
      return v1::TOP_K;
    case v1::PushSpec::kF32:
    case v1::PushSpec::FORMAT_NOT_SET:
      break;
  }
  return v1::F32;
}

v1::Encoding PullEncoding(const v1::JobSpec& spec) { return spec.transfer().pull().has_bf16() ? v1::BF16 : v1::F32; }

bool ErrorFeedback(const v1::JobSpec& spec) {
  const v1::PushSpec& push = spec.transfer().push();
  return PushEncoding(spec) != v1::F32 && (!push.has_error_feedback() || push.error_feedback());
}

double TopKDensity(const v1::TopKFormat& format, uint64_t round) {
  if (round >= format.warmup_rounds()) return format.density();
  // The warmup_rounds-th root of density, by halving; then its power.
  double low = 0, high = 1;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (PortablePower(middle, format.warmup_rounds()) < format.density() ? low : high) = middle;
  }
  return std::max(format.density(), PortablePower(high, round));
}

size_t TopKCount(double density, size_t elements) {
  const double count = std::ceil(density * static_cast<double>(elements));
  if (!(count > 1)) return std::min<size_t>(1, elements);
  return count >= static_cast<double>(elements) ? elements : static_cast<size_t>(count);
}

std::string EncodingName(v1::Encoding encoding) {
  return v1::Encoding_IsValid(encoding) ? v1::Encoding_Name(encoding) : absl::StrCat(static_cast<int>(encoding));
}

// ---------------------------------------------------------------- lengths
size_t EncodedBytes(v1::Encoding encoding, uint64_t elements) {
  switch (encoding) {
    case v1::F32:
      return elements * sizeof(float);
    case v1::BF16:
    case v1::F16:
      return elements * sizeof(uint16_t);
    case v1::INT8:
      return elements + (elements + kInt8Block - 1) / kInt8Block * sizeof(float);
    default:
      break;
  }
  CHECK(false, "encoding {} has no fixed length", EncodingName(encoding));
  return 0;
}

size_t MaxTopKBytes(uint64_t elements, uint64_t count) {
  const uint64_t blocks = TopKBlocks(elements);
  return blocks * sizeof(uint32_t) + count * sizeof(float) + std::min(count * sizeof(uint16_t), elements / 8 + blocks);
}

absl::StatusOr<size_t> LengthInPayload(v1::Encoding encoding, uint64_t elements, const Payload& payload,
                                       size_t offset) {
  const size_t left = payload.size() - offset;
  const auto too_long = [&] {
    return absl::InvalidArgumentError(absl::StrCat(elements, " elements announced in ", EncodingName(encoding), ", ",
                                                   left, " payload bytes left in the frame"));
  };
  if (!v1::Encoding_IsValid(encoding)) {
    return absl::InvalidArgumentError(
        absl::StrCat("encoding ", EncodingName(encoding), "; known are F32, BF16, F16, INT8, TOP_K"));
  }
  if (elements == 0) return size_t{0};
  if (encoding != v1::TOP_K) {
    if (elements > left) return too_long();  // no encoding has less than a byte for each
    const size_t bytes = EncodedBytes(encoding, elements);
    if (bytes > left) return too_long();
    return bytes;
  }
  const uint64_t blocks = TopKBlocks(elements);
  if (blocks > left / sizeof(uint32_t)) return too_long();
  size_t bytes = blocks * sizeof(uint32_t);
  std::array<uint32_t, 1024> counts;
  for (uint64_t b = 0; b < blocks; ++b) {
    if (b % counts.size() == 0) {
      const size_t some = std::min<uint64_t>(counts.size(), blocks - b);
      payload.Sub(offset + b * sizeof(uint32_t), some * sizeof(uint32_t)).CopyTo(counts.data());
    }
    const size_t count = counts[b % counts.size()];
    const size_t length = std::min<uint64_t>(kTopKBlock, elements - b * kTopKBlock);
    if (count > length) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", b, " of TOP_K announces ", count, " values of ", length));
    }
    bytes += PlaceBytes(count, length) + count * sizeof(float);
    if (bytes > left) return too_long();
  }
  return bytes;
}

absl::StatusOr<std::vector<size_t>> ChunkLengths(const ParsedFrame& frame) {
  std::vector<size_t> lengths;
  size_t offset = 0;
  for (const v1::ChunkHeader& header : frame.control.header()) {
    absl::StatusOr<size_t> bytes = LengthInPayload(header.encoding(), header.elements(), frame.payload, offset);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": ", bytes.status().message()));
    }
    lengths.push_back(*bytes);
    offset += *bytes;
  }
  if (offset != frame.payload.size()) {
    return absl::InvalidArgumentError(absl::StrCat(frame.payload.size(), " payload bytes, headers name ", offset));
  }
  return lengths;
}

absl::Status CheckTopK(const void* data, size_t elements) {
  const char* const start = static_cast<const char*>(data);
  const size_t blocks = TopKBlocks(elements);
  const char* at = start + blocks * sizeof(uint32_t);
  for (size_t b = 0; b < blocks; ++b) {
    const size_t length = TopKBlockLength(elements, b), count = Read<uint32_t>(start + b * sizeof(uint32_t));
    const Places places = PlacesOf(count, length);
    if (places == Places::kIndices) {
      int64_t before = -1;
      for (size_t i = 0; i < count; ++i) {
        const int64_t index = Read<uint16_t>(at + i * sizeof(uint16_t));
        if (index <= before || index >= static_cast<int64_t>(length)) {
          return absl::InvalidArgumentError(absl::StrCat("block ", b, " of TOP_K: place ", i, " is ", index,
                                                         "; expected ascending ones below ", length));
        }
        before = index;
      }
    } else if (places == Places::kBitmap) {
      size_t bits = 0;
      for (size_t byte = 0; byte < (length + 7) / 8; ++byte) {
        bits += static_cast<size_t>(std::popcount(static_cast<uint8_t>(at[byte])));
      }
      const size_t spare = length % 8;
      const bool past = spare != 0 && static_cast<uint8_t>(at[length / 8]) >> spare != 0;
      if (bits != count || past) {
        return absl::InvalidArgumentError(absl::StrCat("block ", b, " of TOP_K: a bitmap of ", bits, " bits",
                                                       past ? ", some past the end," : "", " for ", count,
                                                       " values of ", length));
      }
    }
    at += PlaceBytes(count, length) + count * sizeof(float);
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- encoding
void EncodeValues(v1::Encoding encoding, const float* x, float* residual, size_t n, void* out) {
  if (n == 0) return;
  switch (encoding) {
    case v1::F32:
      std::memcpy(out, x, n * sizeof(float));
      return;
    case v1::BF16:
      return Kernels().encode_bf16(x, residual, out, n);
    case v1::F16:
      return Kernels().encode_f16(x, residual, out, n);
    case v1::INT8:
      return Kernels().encode_int8(x, residual, out, n);
    default:
      break;
  }
  CHECK(false, "encoding {} is not one of values alone", EncodingName(encoding));
}

size_t EncodeTopK(const float* x, float* residual, size_t n, size_t count, void* out) {
  CHECK(count >= 1 && count <= n, "{} of {} values", count, n);
  const float* wanted = x;
  if (residual != nullptr) {
    Kernels().accumulate(x, residual, n);
    wanted = residual;
  }
  const auto [threshold, equal] = Threshold(wanted, n, count);
  const size_t blocks = TopKBlocks(n);
  char* const start = static_cast<char*>(out);
  char* at = start + blocks * sizeof(uint32_t);
  size_t ties = equal;  // still to be taken
  for (size_t b = 0; b < blocks; ++b) {
    const size_t length = TopKBlockLength(n, b);
    const float* block = wanted + b * kTopKBlock;
    size_t above = 0, level = 0;
    for (size_t i = 0; i < length; ++i) {
      above += Magnitude(block[i]) > threshold;
      level += Magnitude(block[i]) == threshold;
    }
    const size_t chosen = above + std::min(level, ties);
    const uint32_t chosen_bits = static_cast<uint32_t>(chosen);
    std::memcpy(start + b * sizeof(uint32_t), &chosen_bits, sizeof(chosen_bits));
    const Places places = PlacesOf(chosen, length);
    const size_t place_bytes = PlaceBytes(chosen, length);
    if (places == Places::kBitmap) std::memset(at, 0, place_bytes);
    char* value = at + place_bytes;
    char* index = at;
    for (size_t i = 0; i < length && chosen > 0; ++i) {
      const uint32_t magnitude = Magnitude(block[i]);
      if (magnitude < threshold || (magnitude == threshold && ties == 0)) continue;
      if (magnitude == threshold) --ties;
      std::memcpy(value, &block[i], sizeof(float));
      value += sizeof(float);
      if (places == Places::kIndices) {
        const uint16_t place = static_cast<uint16_t>(i);
        std::memcpy(index, &place, sizeof(place));
        index += sizeof(place);
      } else if (places == Places::kBitmap) {
        at[i / 8] = static_cast<char>(static_cast<uint8_t>(at[i / 8]) | 1u << i % 8);
      }
      if (residual != nullptr) residual[b * kTopKBlock + i] = 0;
    }
    at = value;
  }
  if (threshold >= 0x7f800000u && residual != nullptr) {  // more of them than places: none stays behind
    for (size_t i = 0; i < n; ++i) {
      if (Magnitude(residual[i]) >= 0x7f800000u) residual[i] = 0;
    }
  }
  return static_cast<size_t>(at - start);
}

// ---------------------------------------------------------------- decoding
void DecodeValues(v1::Encoding encoding, const void* in, size_t n, float* out) {
  if (n == 0) return;
  switch (encoding) {
    case v1::F32:
      std::memcpy(out, in, n * sizeof(float));
      return;
    case v1::BF16:
      return Kernels().decode_bf16(in, out, n);
    case v1::F16:
      return Kernels().decode_f16(in, out, n);
    case v1::INT8:
      return Kernels().decode_int8(in, out, n);
    default:
      break;
  }
  CHECK(false, "encoding {} is not one of values alone", EncodingName(encoding));
}

void DecodePayload(v1::Encoding encoding, const Payload& payload, size_t n, float* out) {
  if (encoding == v1::F32) return payload.CopyTo(out);
  if (encoding == v1::TOP_K) {
    std::memset(out, 0, n * sizeof(float));
    std::string scratch;
    ForEachTopK(Contiguous(payload, &scratch), n,
                [out](size_t i, uint32_t bits) { std::memcpy(out + i, &bits, sizeof(bits)); });
    return;
  }
  if (payload.contiguous() != nullptr) return DecodeValues(encoding, payload.contiguous(), n, out);
  ForEachDecoded(encoding, payload, n, [out](const float* values, size_t first, size_t count) {
    std::memcpy(out + first, values, count * sizeof(float));
  });
}

bool AddPayload(v1::Encoding encoding, const Payload& payload, size_t n, float* out) {
  bool finite = true;
  if (encoding == v1::TOP_K) {
    std::string scratch;
    ForEachTopK(Contiguous(payload, &scratch), n, [&](size_t i, uint32_t bits) {
      finite &= (bits & 0x7f800000u) != 0x7f800000u;
      out[i] += std::bit_cast<float>(bits);
    });
    return finite;
  }
  ForEachDecoded(encoding, payload, n, [&](const float* values, size_t first, size_t count) {
    finite &= (AddAndCheck(out + first, values, out + first, count) & 2) == 0;
  });
  return finite;
}

// ---------------------------------------------------------------- targets
std::vector<std::string> WireTargets() {
  std::vector<std::string> names;
  for (const WireTable* table : RunnableTables()) names.emplace_back(table->name);
  return names;
}

void ForceWireTarget(const std::string& name) {
  const std::vector<const WireTable*> tables = RunnableTables();
  const WireTable* chosen = tables.back();
  for (const WireTable* table : tables) {
    if (table->name == name) chosen = table;
  }
  Chosen().store(chosen, std::memory_order_relaxed);
}

}  // namespace sluice
