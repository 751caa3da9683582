#include "client/interrupt.h"

#include <utility>

namespace sluice {

void Interrupt::Notify() {
  absl::MutexLock lock(&mutex_);
  ++count_;
  for (auto& [id, callback] : callbacks_) {
    if (count_ > callback.seen) callback.run();
  }
}

int Interrupt::count() const {
  absl::MutexLock lock(&mutex_);
  return count_;
}

bool Interrupt::WaitFor(absl::Duration time, int seen) const {
  absl::MutexLock lock(&mutex_);
  const auto more = [this, seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return count_ > seen; };
  return mutex_.AwaitWithTimeout(absl::Condition(&more), time);
}

Interrupt::Handle Interrupt::OnNotify(int seen, std::function<void()> callback) {
  absl::MutexLock lock(&mutex_);
  const uint64_t id = next_++;
  if (count_ > seen) callback();
  callbacks_[id] = {seen, std::move(callback)};
  // The pointer only has to be there: the deleter does the work.
  return Handle(this, [this, id](void*) {
    absl::MutexLock lock(&mutex_);
    callbacks_.erase(id);
  });
}

}  // namespace sluice
