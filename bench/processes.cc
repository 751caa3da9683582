#include "bench/processes.h"

#include <grpc/grpc.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>

#include "common/log.h"

namespace sluice {
namespace {

constexpr int kPatienceMs = 120000;

}  // namespace

absl::Status WriteAll(int to, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t n = write(to, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return absl::UnavailableError("a process of the measurement is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

bool ReadUnlessEnded(int from, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t n = read(from, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

absl::Status ReadAll(int from, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    pollfd ready = {from, POLLIN, 0};
    const int some = poll(&ready, 1, kPatienceMs);
    if (some < 0 && errno == EINTR) continue;
    if (some == 0) return absl::DeadlineExceededError("a process of the measurement said nothing for two minutes");
    const ssize_t n = read(from, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return absl::UnavailableError("a process of the measurement is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

Processes::~Processes() {
  for (const auto& [pid, pipes] : children_) close(pipes.control);
  for (const auto& [pid, pipes] : children_) {
    // In order, unless it does not come to an end.
    int state = 0;
    for (int i = 0; i < 1000 && waitpid(pid, &state, WNOHANG) == 0; ++i) usleep(10000);
    kill(pid, SIGKILL);
    waitpid(pid, &state, 0);
    close(pipes.report);
  }
}

absl::Status Processes::Fork(const Body& body) {
  std::fflush(stdout);  // else it would be printed by both
  int report[2], control[2];
  if (pipe(report) != 0 || pipe(control) != 0) return absl::ErrnoToStatus(errno, "pipe");
  const pid_t parent = getpid(), pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    close(report[0]);
    close(control[1]);
    for (const auto& [other, pipes] : children_) {
      close(pipes.control);
      close(pipes.report);
    }
    dup2(STDERR_FILENO, STDOUT_FILENO);  // the log; results are the parent's
    grpc_init();  // never undone: gRPC's own end can wait 10 s for a timer, and this process just goes
    const absl::Status status = body({.report = report[1], .control = control[0]});
    if (!status.ok()) LOG_ERROR("{}", status.ToString());
    _exit(status.ok() ? 0 : 1);
  }
  close(report[1]);
  close(control[0]);
  children_.push_back({pid, {.report = report[0], .control = control[1]}});
  return absl::OkStatus();
}

}  // namespace sluice
