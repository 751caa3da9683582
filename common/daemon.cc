#include "common/daemon.h"

#include <unistd.h>

#include <csignal>

#include "absl/synchronization/mutex.h"

namespace sluice {
namespace {

sigset_t EndSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

absl::Mutex end_mutex(absl::kConstInit);
bool end_called ABSL_GUARDED_BY(end_mutex) = false;
absl::Status& EndStatus() {
  static auto* status = new absl::Status();
  return *status;
}

}  // namespace

void BlockEndSignals() {
  const sigset_t set = EndSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

absl::Status WaitForEnd() {
  const sigset_t set = EndSignals();
  int signal = 0;
  sigwait(&set, &signal);
  absl::MutexLock lock(&end_mutex);
  return end_called ? EndStatus() : absl::OkStatus();
}

void EndDaemon(const absl::Status& status) {
  absl::MutexLock lock(&end_mutex);
  if (end_called) return;
  end_called = true;
  EndStatus() = status;
  kill(getpid(), SIGTERM);
}

}  // namespace sluice
