// What the dispatch targets of common/optimizer.cc have in common: one table of kernels each.
//
// This header and optimizer_kernels.inc include nothing that defines inline functions: the kernels are compiled with
// instruction sets that the machine may lack, and the linker may pick any copy of an inline function for everybody.
#ifndef SLUICE_COMMON_OPTIMIZER_KERNELS_H_
#define SLUICE_COMMON_OPTIMIZER_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace sluice::kernels {

// Constants of one round, derived from an UpdateRule in double and rounded once.
struct UpdateConstants {
  float scale = 1;     // gradient = sum * scale
  float step = 0;      // learning rate; Adam, AdamW: divided by the first bias correction
  float momentum = 0;  // kMomentum
  float beta1 = 0, beta2 = 0;
  float rest1 = 0, rest2 = 0;  // 1 - beta1, 1 - beta2
  float epsilon = 0;
  float l2 = 0;    // Adam: added to the gradient, times the value
  float keep = 1;  // AdamW: 1 - learning rate * weight decay
  float bias2_sqrt = 1;
};

// Contracts: common/optimizer.h. value and next may be the same pointer; floats are read and written unaligned.
struct Table {
  const char* name;
  void (*sgd)(const UpdateConstants& c, const float* sum, const float* value, float* next, size_t n);
  void (*momentum)(const UpdateConstants& c, const float* sum, const float* value, float* next, float* buffer,
                   size_t n);
  void (*adam)(const UpdateConstants& c, const float* sum, const float* value, float* next, float* m, float* v,
               size_t n);
  int (*add_and_check)(const void* a, const void* b, float* out, size_t n);
  bool (*all_finite)(const void* x, size_t n);
  void (*add_squares)(const float* x, size_t n, double* lanes);
};

extern const Table kTableV2, kTableV3, kTableV4;

}  // namespace sluice::kernels

#endif  // SLUICE_COMMON_OPTIMIZER_KERNELS_H_
