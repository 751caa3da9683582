// The processes between which transfers are measured: serving and working ones, each on a core of its kind, and what
// the measuring process asks of them.
#ifndef SLUICE_BENCH_TRANSFER_NODES_H_
#define SLUICE_BENCH_TRANSFER_NODES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/parameter_job.h"
#include "bench/processes.h"

namespace sluice {

enum class TransferPath { kPlace, kHot, kPlain, kServer, kShared, kAlone };

// How long one exchange of all bytes took, by the clocks of the workers.
struct TransferSeconds {
  double push = 0;   // from the first worker's start until the last one's push has ended
  double pull = 0;   // from there until everything has come
  double taken = 0;  // from the first worker's start until the last push is acknowledged; 0 where there is no server
};

// The processes of one job: `servers` + `workers` children, as long as this lives. One owner's thread; blocks.
class TransferNodes {
 public:
  // Forks; no thread and nothing of gRPC may exist yet. `job.shared_memory` is not looked at: both kinds are there.
  // `all_paths`: kPlain and kAlone too (one worker, one server).
  static absl::StatusOr<std::unique_ptr<TransferNodes>> Start(const ParameterJob& job, bool all_paths);

  bool pinned() const { return pinned_; }
  // Gradients of a pattern with this number, for all exchanges that follow.
  absl::Status SetGradient(uint64_t number);
  absl::StatusOr<TransferSeconds> Exchange(TransferPath path);
  // Everything that has come by this path since SetGradient is as it must be: DATA_LOSS says what is not.
  absl::Status Verify(TransferPath path);
  // User and system seconds so far, of all workers and of all servers.
  absl::StatusOr<double> WorkerCpu();
  absl::StatusOr<double> ServerCpu();

 private:
  struct Command;
  struct Reply;
  class Working;
  TransferNodes(const ParameterJob& job, bool all_paths) : job_(job), all_paths_(all_paths) {}
  static absl::Status Serve(const ParameterJob& job, bool all_paths, uint32_t number, const Pipes& pipes);
  static absl::Status Work(const ParameterJob& job, bool all_paths, uint32_t number, const Pipes& pipes);
  absl::Status StartAll();
  // Of all workers, which do it at the same time.
  absl::StatusOr<std::vector<Reply>> Ask(const Command& command);

  const ParameterJob job_;
  const bool all_paths_;
  bool pinned_ = false;
  Processes processes_;  // servers, then workers
};

// Pins this process to a core for its kind: the first half of the cores are the workers', the others the servers'.
// False where there is only one.
bool PinWorker(uint32_t number);
bool PinServer(uint32_t number);

}  // namespace sluice

#endif  // SLUICE_BENCH_TRANSFER_NODES_H_
