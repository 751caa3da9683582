// Child processes that never outlive this one.
#ifndef SLUICE_CLIENT_PROCESS_H_
#define SLUICE_CLIENT_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// A running child. Not thread-safe; destroy it only after it has ended or with Kill.
class ChildProcess {
 public:
  // Starts program with args; stdout and stderr are appended to log_path, stdin is empty. The child gets a process
  // group of its own (a terminal's Ctrl-C does not reach it), default signals, and SIGKILL when the *thread* that
  // started it ends, in whatever way: start children from a thread that lives as long as they should.
  static absl::StatusOr<ChildProcess> Start(const std::string& program, const std::vector<std::string>& args,
                                            const std::string& log_path);
  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();  // kills and reaps it where it still runs

  bool running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }
  // Readable (poll) once the child has ended; -1 where it does not run.
  int descriptor() const { return descriptor_; }
  void Signal(int signal) const;
  // Reaps the child if it has ended: "exit code 1", "signal 9 (Killed)"; empty while it runs.
  std::string Reap();

 private:
  pid_t pid_ = -1;
  int descriptor_ = -1;
};

// The last lines of a file, for messages; empty where it cannot be read.
std::string LastLines(const std::string& path, int lines);

}  // namespace sluice

#endif  // SLUICE_CLIENT_PROCESS_H_
