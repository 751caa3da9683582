// A worker's end without a model: the real PsClient, a gradient that is there already, parameters that commits are put
// in place in as a worker does.
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
#include "common/layout.h"
#include "worker/model/parameter_memory.h"
#include "worker/ps_client.h"

namespace sluice {

// One owner's thread calls; commits come on the transport's.
class BenchWorker : private PsClient::Events {
 public:
  struct Times {
    double push_seconds = 0;  // to the arrival of the round's first commit
    double pull_seconds = 0;  // from there until the last commit is in place
  };

  // Opens the stream to the layout's only server. `transport` outlives this.
  // `region`: null, or where gradients lie for a server of this host; its values are read in shared memory then too.
  BenchWorker(std::shared_ptr<const Layout> layout, Transport* transport, size_t window,
              std::shared_ptr<SharedRegion> region = nullptr);
  ~BenchWorker() override;

  // Version 0 in place. Blocks, up to a minute (DEADLINE_EXCEEDED); an error if the stream broke or brought what it
  // must not.
  absl::Status AwaitInitial();
  // Pushes the contribution and waits until every chunk is at version round + 1. Rounds 0, 1, ... in order.
  absl::StatusOr<Times> Round(uint64_t round, const std::shared_ptr<const std::vector<float>>& gradient);

  // Between rounds.
  absl::Span<const float> parameters() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void OnStreamUp(uint64_t generation, size_t server) override;
  void OnStreamDown(uint64_t generation, size_t server, const absl::Status& status) override;
  absl::Status OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) override;
  void OnUnreachable(uint64_t generation, size_t server, const absl::Status& status) override;
  void OnRefused(uint64_t generation, size_t server, const absl::Status& status) override;

  absl::Status AwaitVersion(uint64_t version);

  const std::shared_ptr<const Layout> layout_;
  const std::shared_ptr<SharedRegion> region_;
  const std::shared_ptr<ParameterMemory> parameters_;
  mutable absl::Mutex mutex_;
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;   // that comes or came last
  uint64_t in_place_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks at version_
  std::optional<absl::Time> first_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  PsClient client_;  // its threads use the members above
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_WORKER_H_
