// Ctrl-C as a value: main turns signals into Notify(); whatever waits or holds a call registers here. Thread-safe.
#ifndef SLUICE_CLIENT_INTERRUPT_H_
#define SLUICE_CLIENT_INTERRUPT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace sluice {

class Interrupt {
 public:
  // One Ctrl-C (SIGINT, SIGTERM, SIGHUP) or a reason of our own to stop waiting. Runs the registered callbacks.
  void Notify();
  int count() const;
  // Blocks until count() > seen or the time is over; whether count() > seen.
  bool WaitFor(absl::Duration time, int seen = 0) const;

  // `callback` runs at the next Notify that makes count() > seen, at once where it is already; never after the handle
  // is gone. It must not block and must not call this object.
  using Handle = std::unique_ptr<void, std::function<void(void*)>>;
  Handle OnNotify(int seen, std::function<void()> callback);

 private:
  struct Callback {
    int seen;
    std::function<void()> run;
  };
  mutable absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Callback> callbacks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice

#endif  // SLUICE_CLIENT_INTERRUPT_H_
