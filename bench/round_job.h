// Jobs whose rounds are measured: a synthetic one of any size that computes nothing, so that a round is all
// communication, and the small GPT.
#ifndef SLUICE_BENCH_ROUND_JOB_H_
#define SLUICE_BENCH_ROUND_JOB_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/network_place.h"
#include "common/layout.h"
#include "worker/backend/backend.h"
#include "worker/data/dataset.h"
#include "worker/model/model.h"

namespace sluice {

// One job as all of its processes see it.
struct RoundJob {
  bool gpt = false;  // 4 layers, 256 wide, 8 heads, context 128: 3.3 M parameters; 8 rows of 128 tokens a worker
  uint32_t mib = 4;  // synthetic: of float32, 262144 parameters each
  bool verdict = true;
  uint32_t workers = 1, servers = 1;
  bool shared_memory = false;              // payloads between workers and servers lie there; else all bytes pass TCP
  uint64_t rounds = 20;                    // measured; a few more warm up
  std::string push = "f32", pull = "f32";  // as in a spec's transfer
  std::vector<NetworkPlace> worker_places, server_places;  // empty: all here
};

v1::NodeId RoundNode(const char* role, uint32_t number);

// Generation 1, as the scheduler would plan it, on servers at these addresses. INVALID_ARGUMENT as Layout::Make.
absl::StatusOr<std::shared_ptr<const Layout>> MakeRoundLayout(const RoundJob& job,
                                                              const std::vector<std::string>& servers);
std::shared_ptr<const Dataset> MakeRoundData(const RoundJob& job);
// The synthetic one has its gradient there already: it waits for each MiB of parameters in the order of the forward,
// then says that each MiB of the gradient is ready, the last one first.
absl::StatusOr<std::unique_ptr<Model>> MakeRoundModel(const RoundJob& job, const v1::ModelSpec& spec, Backend* backend);

}  // namespace sluice

#endif  // SLUICE_BENCH_ROUND_JOB_H_
