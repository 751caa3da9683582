// What the dispatch targets of common/wire_format.cc have in common: one table of kernels each. The rule of
// common/optimizer_kernels.h holds here too: nothing is included that defines inline functions.
#ifndef SLUICE_COMMON_WIRE_KERNELS_H_
#define SLUICE_COMMON_WIRE_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace sluice::kernels {

inline constexpr size_t kInt8Block = 256;  // elements that share a scale

// Contracts: common/wire_format.h. `residual` may be null: nothing is added and nothing is kept. Pointers need no
// alignment; input and output do not overlap.
struct WireTable {
  const char* name;
  void (*encode_bf16)(const float* x, float* residual, void* out, size_t n);
  void (*encode_f16)(const float* x, float* residual, void* out, size_t n);
  void (*encode_int8)(const float* x, float* residual, void* out, size_t n);
  void (*decode_bf16)(const void* in, float* out, size_t n);
  void (*decode_f16)(const void* in, float* out, size_t n);
  // `in` begins with a block.
  void (*decode_int8)(const void* in, float* out, size_t n);
  // residual[i] += x[i]
  void (*accumulate)(const float* x, float* residual, size_t n);
};

extern const WireTable kWireTableV2, kWireTableV3, kWireTableV4;

}  // namespace sluice::kernels

#endif  // SLUICE_COMMON_WIRE_KERNELS_H_
