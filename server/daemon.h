// sluice-server: holds shards of any number of jobs. Flags, wiring, signals.
#ifndef SLUICE_SERVER_DAEMON_H_
#define SLUICE_SERVER_DAEMON_H_

namespace sluice {

// Returns the exit code (common/daemon.h).
int ServerMain(int argc, char** argv);

}  // namespace sluice

#endif  // SLUICE_SERVER_DAEMON_H_
