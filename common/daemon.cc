#include "common/daemon.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/local_address.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"

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

int RunDaemon(int argc, char** argv, const std::string& name, const std::string& summary, std::vector<Flag> flags,
              const std::function<absl::Status(const Args&)>& run) {
  TuneMalloc();
  // Blocked before any other thread exists: only WaitForEnd takes them.
  const sigset_t set = EndSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  flags.insert(
      flags.end(),
      {{"listen", FlagKind::kString, "HOST[:PORT]",
        "where to listen (127.0.0.1); without PORT: 7700 (scheduler) or any free one (others); PORT 0: any free one"},
       {"advertise", FlagKind::kString, "HOST[:PORT]",
        "where others reach it; default: as --listen, and for 0.0.0.0 or [::] the address of the interface that "
        "routes to the scheduler"},
       {"port_file", FlagKind::kString, "FILE", "write the port there once the daemon is ready"},
       {"insecure", FlagKind::kBool, "", "allow listening beyond loopback without TLS"},
       {"log_level", FlagKind::kString, "LEVEL", "debug, info (default), warn or error"},
       {"help", FlagKind::kBool, "", "print this and end"},
       {"version", FlagKind::kBool, "", "print the version and end"}});
  const Command command{
      .name = name, .arguments = "", .summary = summary, .details = "", .flags = std::move(flags), .program = true};
  const auto args = ParseArgs(command, std::vector<std::string>(argv + std::min(argc, 1), argv + argc));
  if (!args.ok()) {
    LOG_ERROR("{}", std::string(args.status().message()));
    return 2;
  }
  if (args->Bool("help") || args->Bool("version")) {
    const std::string text = args->Bool("help")
                                 ? CommandHelp(command)
                                 : absl::StrCat("sluice ", kVersion, " (protocol ", kProtocolVersion, ")\n");
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  const absl::Status status = run(*args);
  if (status.ok()) return 0;
  LOG_ERROR("{}", status.ToString());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

void InitDaemonLog(const Args& args, const std::string& name) { InitLog(name, args.String("log_level", "info")); }

absl::StatusOr<GrpcServerOptions> ListenOptions(const Args& args, int default_port, const HostPort* scheduler) {
  GrpcServerOptions options;
  ASSIGN_OR_RETURN(options.listen, ParseHostPort(args.String("listen", "127.0.0.1"), default_port));
  if (const std::string advertise = args.String("advertise"); !advertise.empty()) {
    ASSIGN_OR_RETURN(options.advertise, ParseHostPort(advertise, 0));
  }
  options.insecure = args.Bool("insecure");
  if (scheduler != nullptr) {
    ASSIGN_OR_RETURN(options.advertise, ChooseAdvertised(options.listen, options.advertise, *scheduler));
  }
  return options;
}

absl::Status AnnouncePort(const Args& args, const GrpcServer& server) {
  const std::string file = args.String("port_file");
  return file.empty() ? absl::OkStatus() : WritePortFile(file, server.port());
}

absl::Status WaitForEnd() {
  const sigset_t set = EndSignals();
  int signal = 0;
  sigwait(&set, &signal);
  absl::MutexLock lock(&end_mutex);
  LOG_INFO("ending on {}", end_called ? EndStatus().ToString() : signal == SIGINT ? "SIGINT" : "SIGTERM");
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
