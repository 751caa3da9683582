// A small pool of threads, each with a queue: work posted to one lane runs in order, on one thread.
#ifndef SLUICE_SERVER_LANES_H_
#define SLUICE_SERVER_LANES_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace sluice {

// Thread-safe. The destructor runs what was posted, then joins.
class Lanes {
 public:
  // 0: one lane without a thread, whose work runs in Drain (for fuzzing, where nothing may depend on threads).
  explicit Lanes(int count);
  ~Lanes();

  int count() const { return static_cast<int>(lanes_.size()); }
  // Never blocks.
  void Post(uint64_t lane, std::function<void()> work);  // lane modulo count()
  // Returns when everything posted before has run. Never from a lane.
  void Drain();

 private:
  struct Lane {
    absl::Mutex mutex;
    std::deque<std::function<void()>> queue ABSL_GUARDED_BY(mutex);
    bool ending ABSL_GUARDED_BY(mutex) = false;
    std::thread thread;
  };
  // Until the lane ends, or with `once` until nothing is left.
  static void Run(Lane* lane, bool once);

  const bool threads_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_LANES_H_
