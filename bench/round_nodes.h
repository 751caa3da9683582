// The processes of a measured job, each with two pipes to the measuring one: a server, a worker, and a worker whose
// pushes and pulls are cut out.
#ifndef SLUICE_BENCH_ROUND_NODES_H_
#define SLUICE_BENCH_ROUND_NODES_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/round_job.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

// What one job's rounds were like. Seconds; warm-up rounds left out.
struct RoundResult {
  std::vector<double> seconds;  // each round
  double compute = 0, exposed = 0, others = 0,
         verdict = 0;                     // a round, mean over rounds and workers, as workers tell it
  double worker_cpu = 0, server_cpu = 0;  // a round, all workers and all servers together
};

// Runs the job with its workers and servers as processes over gRPC on loopback. `alone`: no servers, the workers' train
// loops get every round at once and their gradients go nowhere. The processes are forked and ended here: no thread and
// nothing of gRPC may exist yet. Blocks.
absl::StatusOr<RoundResult> RunRounds(const RoundJob& job, bool alone);

}  // namespace sluice

#endif  // SLUICE_BENCH_ROUND_NODES_H_
