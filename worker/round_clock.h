// Where a worker's time goes between the computing of one round and of the next: waits, and how much of them passed
// between the servers having everything and the first commit. Times come from the caller; not thread-safe.
#ifndef SLUICE_WORKER_ROUND_CLOCK_H_
#define SLUICE_WORKER_ROUND_CLOCK_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/time/time.h"

namespace sluice {

class RoundClock {
 public:
  struct Times {
    absl::Duration wait, answer;  // answer: part of wait, see RoundReport.answer_seconds
    absl::Duration wait_in_work;  // part of wait
  };

  // A generation begins; waits before it do not count.
  void Restart(absl::Time now) {
    *this = RoundClock();
    begin_ = now;
  }
  // A contribution with a payload was handed to the streams.
  void Pushed() { taken_ = absl::InfiniteFuture(); }
  // The servers have taken all that was pushed.
  void Taken(absl::Time now) { taken_ = std::min(taken_, now); }
  // A commit of `version` arrived.
  void Arrived(uint64_t version, absl::Time now) {
    if (version < next_) return;
    next_ = version + 1;
    first_ = now;
  }
  // The train thread waited for parameters of `version`; `in_work`: in the work itself, not before it.
  void Waited(absl::Time from, absl::Time to, uint64_t version, bool in_work) {
    from = std::max(from, begin_);
    if (to <= from) return;
    times_.wait += to - from;
    if (in_work) times_.wait_in_work += to - from;
    const absl::Time answered = next_ > version ? std::min(first_, to) : to;
    times_.answer += std::max(absl::ZeroDuration(), answered - std::max(from, taken_));
  }
  // The computing of a round has ended: the sums since the one before.
  Times Computed() { return std::exchange(times_, Times()); }

 private:
  absl::Time begin_ = absl::InfinitePast();
  absl::Time taken_ = absl::InfinitePast();
  uint64_t next_ = 0;  // versions below it have begun to arrive, the newest of them at
  absl::Time first_ = absl::InfinitePast();
  Times times_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_ROUND_CLOCK_H_
