// The encodings that values travel in (v1::Encoding): lengths, encoding with error feedback, decoding from slices.
// docs/wire_formats.md has the layouts byte by byte.
//
// Kernels exist for several dispatch targets and give the same bits on each (ForceWireTarget is for tests). NaN and Inf
// survive: what was not finite decodes to something that is not finite. Pure but for the forcing; thread-safe. Pointers
// need no alignment; inputs and outputs do not overlap.
#ifndef SLUICE_COMMON_WIRE_FORMAT_H_
#define SLUICE_COMMON_WIRE_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/frame.h"
#include "sluice/v1/job.pb.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// ---------------------------------------------------------------- what a job's spec says
v1::Encoding PushEncoding(const v1::JobSpec& spec);
v1::Encoding PullEncoding(const v1::JobSpec& spec);
// Whether workers keep what the push encoding leaves out.
bool ErrorFeedback(const v1::JobSpec& spec);
// Share of the values that top_k sends in a round. The same bits on every machine.
double TopKDensity(const v1::TopKFormat& format, uint64_t round);
// ceil(density * elements), at least 1 and at most `elements`.
size_t TopKCount(double density, size_t elements);
// "F32", "BF16", ...; a number where it is none of them.
std::string EncodingName(v1::Encoding encoding);

// ---------------------------------------------------------------- lengths
inline constexpr size_t kTopKBlock = 65536;  // elements that 16-bit places count in

// Bytes of `elements` values; not for TOP_K, whose length depends on what is sent. `elements` at most 2^60.
size_t EncodedBytes(v1::Encoding encoding, uint64_t elements);
// At most so many bytes for TOP_K with `count` of `elements` values.
size_t MaxTopKBytes(uint64_t elements, uint64_t count);
// Length of a chunk of `elements` values that begins at `offset` of a received payload, from the sender's word alone:
// nothing is allocated by it. INVALID_ARGUMENT where it does not fit, or the encoding is unknown.
absl::StatusOr<size_t> LengthInPayload(v1::Encoding encoding, uint64_t elements, const Payload& payload, size_t offset);
// Of all chunks of a frame, in the order of their headers. INVALID_ARGUMENT where they do not add up to its payload.
absl::StatusOr<std::vector<size_t>> ChunkLengths(const ParsedFrame& frame);
// Whether a TOP_K chunk of the right length holds what it must: places ascending and within their block, bitmaps with
// as many bits as values. `data`: all bytes.
absl::Status CheckTopK(const void* data, size_t elements);

// ---------------------------------------------------------------- encoding
// Writes EncodedBytes(encoding, n) bytes. With `residual` what is encoded is x + residual, and residual becomes what
// the encoding leaves out of it (0 where that is not finite). F32: a copy, residual untouched.
void EncodeValues(v1::Encoding encoding, const float* x, float* residual, size_t n, void* out);
// The `count` values of largest magnitude (not finite: largest of all; equal ones: the first), 1 <= count <= n. Returns
// the bytes written, at most MaxTopKBytes(n, count).
size_t EncodeTopK(const float* x, float* residual, size_t n, size_t count, void* out);

// ---------------------------------------------------------------- decoding
// `payload` has exactly the length of `n` values, and TOP_K has been checked.
void DecodePayload(v1::Encoding encoding, const Payload& payload, size_t n, float* out);
// out[i] += value i; values that TOP_K does not hold add nothing. Returns whether all of the payload's were finite.
bool AddPayload(v1::Encoding encoding, const Payload& payload, size_t n, float* out);
// `in`: EncodedBytes(encoding, n) bytes; not for TOP_K.
void DecodeValues(v1::Encoding encoding, const void* in, size_t n, float* out);

// Names of the targets that this machine can run, best last; forcing one is for tests (global, not thread-safe).
std::vector<std::string> WireTargets();
void ForceWireTarget(const std::string& name);  // "" = best

}  // namespace sluice

#endif  // SLUICE_COMMON_WIRE_FORMAT_H_
