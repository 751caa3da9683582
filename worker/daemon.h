// sluice-worker: takes assignments from the scheduler and runs the train loop on one device. Flags, wiring, signals.
#ifndef SLUICE_WORKER_DAEMON_H_
#define SLUICE_WORKER_DAEMON_H_

namespace sluice {

// Returns the exit code (common/daemon.h).
int WorkerMain(int argc, char** argv);

}  // namespace sluice

#endif  // SLUICE_WORKER_DAEMON_H_
