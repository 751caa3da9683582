// A worker's end without a model: the real PsClient and the real encoder, a gradient that is there already, parameters
// that commits are put in place in as a worker does.
#ifndef SLUICE_BENCH_PARAMETER_WORKER_H_
#define SLUICE_BENCH_PARAMETER_WORKER_H_

#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "bench/parameter_job.h"
#include "common/layout.h"
#include "worker/model/parameter_memory.h"
#include "worker/ps_client.h"
#include "worker/push_encoder.h"

namespace sluice {

// One owner's thread calls; commits come on the transport's.
class BenchWorker : private PsClient::Events {
 public:
  struct Times {
    absl::Time start;  // the first call of the round
    // The last push is acknowledged. Of several servers some may leave that to the next round: then, at the latest, the
    // first commit has arrived, which under a verdict takes all pushes.
    absl::Time taken;
    absl::Time first;  // the round's first commit has arrived
    absl::Time last;   // the last one is in place
  };

  // Opens streams to the layout's servers. `transport` outlives this. With shared memory gradients lie in a region of
  // the worker's and commits are read in the servers'.
  static absl::StatusOr<std::unique_ptr<BenchWorker>> Open(const ParameterJob& job, uint32_t number,
                                                           std::shared_ptr<const Layout> layout, Transport* transport);
  ~BenchWorker() override;

  // Version 0 in place. Blocks, up to a minute (DEADLINE_EXCEEDED); an error if a stream broke or brought what it must
  // not.
  absl::Status AwaitInitial();
  // Where the gradient of the coming rounds is written, between rounds.
  float* gradient() { return gradient_; }
  // Pushes the contribution and waits until every chunk is at version round + 1. Rounds 0, 1, ... in order. With
  // `frames_apart` each chunk leaves at once, else those that wait for the window share frames.
  absl::StatusOr<Times> Round(uint64_t round, bool frames_apart = false);

  // Between rounds.
  absl::Span<const float> parameters() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  BenchWorker(const ParameterJob& job, uint32_t number, std::shared_ptr<const Layout> layout, Transport* transport,
              std::shared_ptr<SharedRegion> region, std::shared_ptr<ParameterMemory> parameters);
  void OnStreamUp(uint64_t generation, size_t server) override;
  void OnStreamDown(uint64_t generation, size_t server, const absl::Status& status) override;
  absl::Status OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) override;
  void OnPushesTaken() override;
  void OnUnreachable(uint64_t generation, size_t server, const absl::Status& status) override;
  void OnRefused(uint64_t generation, size_t server, const absl::Status& status) override;

  absl::Status AwaitVersion(uint64_t version);

  const std::shared_ptr<const Layout> layout_;
  const uint32_t number_;
  const bool backward_;
  const std::shared_ptr<SharedRegion> region_;
  std::shared_ptr<const void> owner_;  // of the gradient
  float* gradient_ = nullptr;
  std::vector<size_t> server_of_;  // by chunk
  size_t servers_ = 0;
  PushEncoder encoder_;
  const std::shared_ptr<ParameterMemory> parameters_;
  mutable absl::Mutex mutex_;
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;   // that comes or came last
  uint64_t in_place_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks at version_
  bool all_pushed_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<absl::Time> taken_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::optional<absl::Time> first_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  PsClient client_;  // its threads use the members above
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_WORKER_H_
