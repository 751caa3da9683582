// A group that counts how long its rank waits for the others.
#ifndef SLUICE_WORKER_PARALLEL_TIMED_GROUP_H_
#define SLUICE_WORKER_PARALLEL_TIMED_GROUP_H_

#include <utility>

#include "absl/time/time.h"
#include "common/clock.h"
#include "worker/parallel/collectives.h"

namespace sluice {

// One thread, as the group.
class TimedGroup : public PeerGroup {
 public:
  // Both outlive this.
  TimedGroup(PeerGroup* group, Clock* clock) : group_(group), clock_(clock) {}

  uint32_t rank() const override { return group_->rank(); }
  uint32_t size() const override { return group_->size(); }
  absl::Status Send(uint32_t to, absl::Span<const float> values) override {
    const absl::Time from = clock_->Now();
    absl::Status status = group_->Send(to, values);
    waited_ += clock_->Now() - from;
    return status;
  }
  absl::Status Receive(uint32_t from, absl::Span<float> values) override {
    const absl::Time begin = clock_->Now();
    absl::Status status = group_->Receive(from, values);
    waited_ += clock_->Now() - begin;
    return status;
  }
  // In Send and Receive since the last call of this.
  absl::Duration TakeWaited() { return std::exchange(waited_, absl::ZeroDuration()); }

 private:
  PeerGroup* const group_;
  Clock* const clock_;
  absl::Duration waited_ = absl::ZeroDuration();
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PARALLEL_TIMED_GROUP_H_
