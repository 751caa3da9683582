// What the three daemons share: flags, signals, exit codes. A daemon is a function <Name>Main(argc, argv) in
// <folder>/daemon.cc, so that one program can be all of them (deploy/all_main.cc); its main.cc calls it.
//
// Flags of all: --listen --advertise --port_file --insecure --log_level --help --version.
#ifndef SLUICE_COMMON_DAEMON_H_
#define SLUICE_COMMON_DAEMON_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/args.h"
#include "common/grpc_transport.h"

namespace sluice {

// All of a daemon's main: tunes malloc, blocks the signals that end it, parses the flags, its own and those of all, and
// calls `run`, which should set up the log first. Returns the exit code: 0 where `run` returned OK, 2 where it returned
// INVALID_ARGUMENT (a flag), else 1; the error is logged.
int RunDaemon(int argc, char** argv, const std::string& name, const std::string& summary, std::vector<Flag> flags,
              const std::function<absl::Status(const Args&)>& run);

// Sets up the log with --log_level.
void InitDaemonLog(const Args& args, const std::string& name);

// --listen, --advertise and --insecure. A --listen without a port: `default_port` (0: any free one). With `scheduler`
// what is advertised for a wildcard is the address from which that one is reached (common/local_address.h: may ask the
// resolver).
absl::StatusOr<GrpcServerOptions> ListenOptions(const Args& args, int default_port,
                                                const HostPort* scheduler = nullptr);

// Writes --port_file if it was given: others take it as "ready".
absl::Status AnnouncePort(const Args& args, const GrpcServer& server);

// Waits for SIGTERM, SIGINT or EndDaemon. Returns OK for a signal, else what EndDaemon was called with.
absl::Status WaitForEnd();

// Makes WaitForEnd return. Thread-safe; the first call counts.
void EndDaemon(const absl::Status& status);

}  // namespace sluice

#endif  // SLUICE_COMMON_DAEMON_H_
