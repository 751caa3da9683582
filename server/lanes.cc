#include "server/lanes.h"

#include <algorithm>

#include "absl/synchronization/blocking_counter.h"

namespace sluice {

Lanes::Lanes(int count) : threads_(count > 0) {
  for (int i = 0; i < std::max(1, count); ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    if (threads_) lanes_.back()->thread = std::thread(Run, lanes_.back().get(), /*once=*/false);
  }
}

Lanes::~Lanes() {
  if (!threads_) {
    Drain();
    return;
  }
  for (auto& lane : lanes_) {
    absl::MutexLock lock(&lane->mutex);
    lane->ending = true;
  }
  for (auto& lane : lanes_) lane->thread.join();
}

void Lanes::Post(uint64_t lane, std::function<void()> work) {
  Lane& l = *lanes_[lane % lanes_.size()];
  absl::MutexLock lock(&l.mutex);
  l.queue.push_back(std::move(work));
}

void Lanes::Drain() {
  if (!threads_) return Run(lanes_[0].get(), /*once=*/true);
  absl::BlockingCounter left(count());
  for (int i = 0; i < count(); ++i) Post(i, [&left] { left.DecrementCount(); });
  left.Wait();
}

void Lanes::Run(Lane* lane, bool once) {
  while (true) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&lane->mutex);
      auto ready = [lane]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !lane->queue.empty() || lane->ending; };
      if (once && lane->queue.empty()) return;
      lane->mutex.Await(absl::Condition(&ready));
      if (lane->queue.empty()) return;
      work = std::move(lane->queue.front());
      lane->queue.pop_front();
    }
    work();
  }
}

}  // namespace sluice
