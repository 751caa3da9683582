#include "common/daemon.h"

#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/local_address.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"

ABSL_FLAG(std::string, listen, "127.0.0.1",
          "HOST[:PORT] to listen at; without PORT: 7700 (scheduler) or any free one (others); PORT 0: any free one");
ABSL_FLAG(
    std::string, advertise, "",
    "HOST[:PORT] that others reach this daemon by; default: as --listen, and for 0.0.0.0 or [::] the address of the "
    "interface that routes to the scheduler");
ABSL_FLAG(std::string, port_file, "", "write the port here once the daemon is ready");
ABSL_FLAG(bool, insecure, false, "allow listening beyond loopback without TLS");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn or error");

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

int RunDaemon(int argc, char** argv, const char* usage, const std::function<absl::Status()>& run) {
  TuneMalloc();
  // Blocked before any other thread exists: only WaitForEnd takes them.
  const sigset_t set = EndSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // --help: the daemon's own flags and those of this file, not every flag of every library.
  absl::FlagsUsageConfig config;
  config.contains_help_flags = config.contains_helpshort_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "/main.cc") || absl::EndsWith(file, "common/daemon.cc");
  };
  config.version_string = [] { return absl::StrCat("sluice ", kVersion, " (protocol ", kProtocolVersion, ")\n"); };
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage(usage);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    LOG_ERROR("unexpected argument \"{}\"; only flags are taken, --help lists them", rest[1]);
    return 2;
  }
  const absl::Status status = run();
  if (status.ok()) return 0;
  LOG_ERROR("{}", status.ToString());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

void InitDaemonLog(const std::string& name) { InitLog(name, absl::GetFlag(FLAGS_log_level)); }

absl::StatusOr<GrpcServerOptions> ListenOptions(int default_port, const HostPort* scheduler) {
  GrpcServerOptions options;
  ASSIGN_OR_RETURN(options.listen, ParseHostPort(absl::GetFlag(FLAGS_listen), default_port));
  if (const std::string advertise = absl::GetFlag(FLAGS_advertise); !advertise.empty()) {
    ASSIGN_OR_RETURN(options.advertise, ParseHostPort(advertise, 0));
  }
  options.insecure = absl::GetFlag(FLAGS_insecure);
  if (scheduler != nullptr) {
    ASSIGN_OR_RETURN(options.advertise, ChooseAdvertised(options.listen, options.advertise, *scheduler));
  }
  return options;
}

absl::Status AnnouncePort(const GrpcServer& server) {
  const std::string file = absl::GetFlag(FLAGS_port_file);
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
