// The job that push and pull are measured with: plain SGD with clipping to norm 1, one shard on one server, one worker,
// no model behind it: the gradient is a pattern, and what the parameters must be after each round is computed here too.
#ifndef SLUICE_BENCH_PARAMETER_JOB_H_
#define SLUICE_BENCH_PARAMETER_JOB_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/layout.h"

namespace sluice {

inline constexpr double kBenchCount = 32;  // targets of a round

v1::NodeId BenchServerId();
v1::NodeId BenchWorkerId();

// The plan of generation 1 as the scheduler would make it; the same in every process that is told the same address.
// INVALID_ARGUMENT as Layout::Make.
absl::StatusOr<std::shared_ptr<const Layout>> MakeBenchLayout(uint64_t mib, uint64_t chunk_elements,
                                                              const std::string& server_address);

// The gradient sum of a round: powers of two from 1/4 to 2 with both signs, so that squares add up exactly in double
// and the norm does not depend on the order.
void FillBenchGradient(uint64_t round, std::vector<float>* gradient);

// The parameters as they must be, computed from the rule and not with the server's kernels.
class ExpectedParameters {
 public:
  explicit ExpectedParameters(const Layout& layout);  // version 0
  // Moves on by one round.
  void Apply(const std::vector<float>& gradient);
  // DATA_LOSS names the first element that has other bits.
  absl::Status Compare(absl::Span<const float> values) const;

 private:
  std::vector<float> values_;
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_JOB_H_
