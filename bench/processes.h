// Child processes of a measurement, each with two pipes to the measuring one.
#ifndef SLUICE_BENCH_PROCESSES_H_
#define SLUICE_BENCH_PROCESSES_H_

#include <sys/types.h>

#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace sluice {

// Blocking, whole or not at all. UNAVAILABLE: the other end is gone. ReadAll waits two minutes at most
// (DEADLINE_EXCEEDED).
absl::Status WriteAll(int to, const void* data, size_t bytes);
absl::Status ReadAll(int from, void* data, size_t bytes);
// The same without a deadline; false where the other end is gone, which is how a child learns that it is to end.
bool ReadUnlessEnded(int from, void* data, size_t bytes);

// The child's ends, or the measuring process's.
struct Pipes {
  int report = -1, control = -1;  // to the measuring process; from it
};

// One owner's thread uses it.
class Processes {
 public:
  using Body = std::function<absl::Status(const Pipes&)>;

  Processes() = default;
  // Closes all control pipes, at which a child has to end; kills what is still there 10 s later.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Starts a process that runs `body` and exits, with 1 where that fails. It dies with this one. No thread and nothing
  // of gRPC may exist here yet.
  absl::Status Fork(const Body& body);

  size_t size() const { return children_.size(); }
  const Pipes& pipes(size_t i) const { return children_.at(i).second; }

 private:
  std::vector<std::pair<pid_t, Pipes>> children_;
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PROCESSES_H_
