// Server arithmetic: the same bits on every x86-64 machine.
//
// Kernels are compiled for several dispatch targets (x86-64-v2, v3, v4) with -ffp-contract=off, no explicit FMA, no
// reciprocal approximations and reductions of a fixed virtual width; tests run every target that the machine has and
// compare hashes. Pure, thread-safe, never allocate. Buffers need no alignment and must not overlap unless said.
#ifndef SLUICE_COMMON_OPTIMIZER_H_
#define SLUICE_COMMON_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sluice/v1/job.pb.h"

namespace sluice {

// Update rule with its constants for one round, in the precision of the kernels.
struct UpdateRule {
  enum Kind { kSgd, kMomentum, kAdam, kAdamW };
  Kind kind = kSgd;
  float learning_rate = 0;
  float momentum = 0;
  float beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  float rest1 = 1, rest2 = 1;       // 1 - beta1, 1 - beta2, rounded from double (1 - 0.999f is 1e-5 off)
  float bias1 = 1, bias2_sqrt = 1;  // 1 - beta1^t, sqrt(1 - beta2^t), t = round + 1
};

// Number of slots beside the value (0, 1, 2).
int SlotCount(UpdateRule::Kind kind);
// Pure; round from 0, the learning rate by the schedule (common/job_spec.h). Fields left out of the spec take the
// defaults of job.proto.
UpdateRule MakeUpdateRule(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds);
// Async: the learning rate of `round`, times `rate_scale`; `step` updates were made before this one.
UpdateRule MakeUpdateRule(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds, uint64_t step,
                          double rate_scale);

// new_value[i] = rule(value[i], gradient_sum[i] * gradient_scale, slots), slots updated in place; `decay` false: weight
// decay is left out. new_value may be value. PyTorch's update rules (torch.optim.SGD, Adam, AdamW).
void ApplyUpdate(const UpdateRule& rule, bool decay, float gradient_scale, const float* gradient_sum,
                 const float* value, float* new_value, float* slot0, float* slot1, size_t n);

// out[i] = a[i] + b[i]; out may be a or b. Returns whether a and b hold finite values only (bit 0: a, bit 1: b set when
// NOT finite).
int AddAndCheck(const void* a, const void* b, float* out, size_t n);
// Whether all n values at x (unaligned) are finite.
bool AllFinite(const void* x, size_t n);
// Sum of squares in float64: element i goes to lane i % 16, the lanes are added at the end in a fixed order. The bits
// depend on where a range begins and ends: callers pass whole norm blocks.
double SumOfSquares(const float* x, size_t n);

// The same for values that come in pieces. Not thread-safe.
class SquareSum {
 public:
  // A multiple of 16 elements, but for the last piece.
  void Add(const float* x, size_t n);
  double Total() const;

 private:
  double lanes_[16] = {};
};

// Dispatch: names of the targets that this machine can run, best last; forcing one is for tests (global, not
// thread-safe).
std::vector<std::string> DispatchTargets();
void ForceDispatchTarget(const std::string& name);  // "" = best

}  // namespace sluice

#endif  // SLUICE_COMMON_OPTIMIZER_H_
