// Lets a transport's events through to an object until it stops, and tells when none is under way: handlers may outlive
// what they tell.
#ifndef SLUICE_WORKER_EVENT_GATE_H_
#define SLUICE_WORKER_EVENT_GATE_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

// Thread-safe.
class EventGate {
 public:
  // True: the object is there until Leave.
  bool Enter() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --inside_;
  }
  // Not from inside.
  void CloseAndAwait() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    const auto empty = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return inside_ == 0; };
    mutex_.Await(absl::Condition(&empty));
  }

 private:
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_EVENT_GATE_H_
