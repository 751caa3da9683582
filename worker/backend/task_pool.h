// A few threads that share loops; they sleep when there is nothing to do. (OpenMP's spin by default, and nothing but an
// environment variable can stop them.)
#ifndef SLUICE_WORKER_BACKEND_TASK_POOL_H_
#define SLUICE_WORKER_BACKEND_TASK_POOL_H_

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

// Thread-safe: loops of several callers run one after the other.
class TaskPool {
 public:
  explicit TaskPool(int threads);  // >= 1, the caller's included
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) for parts of [0, n) that begin at multiples of `grain`, at most one part a thread; which
  // part an index falls into depends on n, grain and threads() alone. Blocks until all are done. Not from within a
  // body.
  using Body = absl::FunctionRef<void(int64_t begin, int64_t end)>;
  void For(int64_t n, int64_t grain, Body body) ABSL_LOCKS_EXCLUDED(loop_mutex_, mutex_);

 private:
  void Work(int index) ABSL_LOCKS_EXCLUDED(mutex_);
  static void Part(int index, int parts, int64_t n, int64_t grain, Body body);

  const int threads_;
  absl::Mutex loop_mutex_;  // held by the caller whose loop runs
  absl::Mutex mutex_;
  const Body* body_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t n_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t grain_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t loops_ ABSL_GUARDED_BY(mutex_) = 0;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;  // constant after construction
};

}  // namespace sluice

#endif  // SLUICE_WORKER_BACKEND_TASK_POOL_H_
