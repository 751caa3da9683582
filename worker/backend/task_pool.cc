#include "worker/backend/task_pool.h"

#include <algorithm>

namespace sluice {

TaskPool::TaskPool(int threads) : threads_(threads) {
  for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { Work(i); });
}

TaskPool::~TaskPool() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void TaskPool::Part(int index, int parts, int64_t n, int64_t grain, Body body) {
  const int64_t grains = (n + grain - 1) / grain;
  const int64_t begin = grains * index / parts * grain;
  const int64_t end = std::min(n, grains * (index + 1) / parts * grain);
  if (begin < end) body(begin, end);
}

void TaskPool::For(int64_t n, int64_t grain, Body body) {
  if (n <= 0) return;
  if (threads_ == 1 || n <= grain) {
    body(0, n);
    return;
  }
  absl::MutexLock loop(&loop_mutex_);
  {
    absl::MutexLock lock(&mutex_);
    body_ = &body;
    n_ = n;
    grain_ = grain;
    running_ = threads_ - 1;
    ++loops_;
  }
  Part(0, threads_, n, grain, body);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* running) { return *running == 0; }, &running_));
  body_ = nullptr;
}

void TaskPool::Work(int index) {
  uint64_t seen = 0;
  while (true) {
    const Body* body = nullptr;
    int64_t n = 0, grain = 1;
    {
      absl::MutexLock lock(&mutex_);
      const auto wake = [this, &seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || loops_ != seen; };
      mutex_.Await(absl::Condition(&wake));
      if (stop_) return;
      seen = loops_;
      body = body_;
      n = n_;
      grain = grain_;
    }
    Part(index, threads_, n, grain, *body);
    absl::MutexLock lock(&mutex_);
    --running_;
  }
}

}  // namespace sluice
