// sluice-scheduler: jobs, membership, plans, recovery. Flags, wiring, signals.
#ifndef SLUICE_SCHEDULER_DAEMON_H_
#define SLUICE_SCHEDULER_DAEMON_H_

namespace sluice {

// Returns the exit code (common/daemon.h).
int SchedulerMain(int argc, char** argv);

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_DAEMON_H_
