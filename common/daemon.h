// What the three daemons' main.cc share: waiting for the signal to end.
#ifndef SLUICE_COMMON_DAEMON_H_
#define SLUICE_COMMON_DAEMON_H_

#include "absl/status/status.h"

namespace sluice {

// Blocks SIGTERM and SIGINT in this thread and all that it starts; ignores SIGPIPE. Call first in main.
void BlockEndSignals();

// Waits for SIGTERM, SIGINT or EndDaemon. Returns OK for a signal, else what EndDaemon was called with.
absl::Status WaitForEnd();

// Makes WaitForEnd return. Thread-safe; the first call counts.
void EndDaemon(const absl::Status& status);

}  // namespace sluice

#endif  // SLUICE_COMMON_DAEMON_H_
