// The job that push and pull are measured with: plain SGD, no model behind it: gradients are patterns, and what the
// parameters must be after each round is computed here too, by the rules of docs/wire_formats.md and without the
// product's kernels.
#ifndef SLUICE_BENCH_PARAMETER_JOB_H_
#define SLUICE_BENCH_PARAMETER_JOB_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/network_place.h"
#include "common/layout.h"

namespace sluice {

inline constexpr double kBenchCount = 32;      // targets of a worker in a round
inline constexpr double kBenchDensity = 0.01;  // of top_k

// One job as all of its processes see it.
struct ParameterJob {
  uint64_t elements = 16 << 20;  // a multiple of 256
  uint64_t chunk_elements = 256 << 10;
  uint32_t workers = 1, servers = 1;       // at most 2 workers: the order of two summands does not matter
  std::string push = "f32", pull = "f32";  // as in a spec's transfer
  bool verdict = true;                     // one decision a round, else streamed
  bool shared_memory = false;              // payloads of f32 lie there
  size_t window = 4 << 20;                 // bytes under way unacknowledged, a stream
  bool backward = false;                   // chunks leave one by one, the last one first, as a backward pass makes them
  std::vector<NetworkPlace> worker_places, server_places;  // empty: all here
  size_t bytes() const { return elements * sizeof(float); }
};

// INVALID_ARGUMENT for a format that there is not. top_k's density is kBenchDensity.
absl::Status SetBenchFormats(const std::string& push, const std::string& pull, v1::TransferSpec* transfer);

// "worker-3".
v1::NodeId BenchNode(const char* role, uint32_t number);

// The plan of generation 1 as the scheduler would make it; the same in every process that is told the same addresses.
// INVALID_ARGUMENT as Layout::Make, or for a format that there is not.
absl::StatusOr<std::shared_ptr<const Layout>> MakeBenchLayout(const ParameterJob& job,
                                                              const std::vector<std::string>& servers);

// A worker's gradient sum of a round: powers of two from 1/4 to 2 with both signs, so that squares (of sums of two,
// too) add up exactly in double and the norm does not depend on the order.
void FillBenchGradient(uint64_t round, uint32_t worker, std::vector<float>* gradient);

// The parameters as they must be.
class ExpectedParameters {
 public:
  ExpectedParameters(const ParameterJob& job, const Layout& layout);  // version 0
  // Moves on by so many rounds, in each of which every worker has pushed the same gradient in the job's format with
  // error feedback.
  void Apply(const std::vector<std::vector<float>>& gradients, uint64_t rounds);
  // What a worker holds. DATA_LOSS names the first element that has other bits.
  absl::Status Compare(absl::Span<const float> values) const;

 private:
  void ApplySum(const std::vector<float>& sum, uint64_t rounds);
  // What the servers make of a worker's contribution; what is left out of it stays in the residual.
  const std::vector<float>& Contribution(uint32_t worker, const std::vector<float>& gradient);

  const ParameterJob job_;
  std::vector<float> values_, sum_, sent_;
  std::vector<std::vector<float>> residuals_;  // by worker; not with f32
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_JOB_H_
