// sluice-scheduler: flags, wiring, signals.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "scheduler/scheduler_node.h"
#include "scheduler/scheduler_service.h"
#include "scheduler/state_store.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:7700", "HOST[:PORT] to listen at; port 0: any free one");
ABSL_FLAG(std::string, advertise, "", "HOST[:PORT] that others reach it by; default: that of --listen");
ABSL_FLAG(std::string, port_file, "", "file that gets the port once the scheduler listens");
ABSL_FLAG(std::string, state_dir, "", "folder of the durable state; default: the user's state folder (root: /var/lib)");
ABSL_FLAG(std::string, checkpoint_root, "",
          "folder of all checkpoints, shared with the servers; default: "
          "<state_dir>/checkpoints");
ABSL_FLAG(std::string, name, "scheduler", "name in the log");
ABSL_FLAG(int64_t, lease_ms, 2000, "a node from which nothing comes for so long is lost; 100..600000");
ABSL_FLAG(bool, insecure, false, "listen beyond loopback without TLS");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn or error");

namespace sluice {
namespace {

constexpr int kDefaultPort = 7700;

std::string DefaultStateDir() {
  if (geteuid() == 0) return "/var/lib/sluice/scheduler";
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && state[0] == '/') {
    return absl::StrCat(state, "/sluice/scheduler");
  }
  const char* const home = std::getenv("HOME");
  return absl::StrCat(home != nullptr ? home : ".", "/.local/state/sluice/scheduler");
}

absl::StatusOr<std::string> AbsoluteFolder(const std::string& path) {
  RETURN_IF_ERROR(MakeDirectories(path));
  char* const real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return ErrnoStatus(errno, "cannot resolve", path);
  std::string result = real;
  std::free(real);
  return result;
}

absl::Status Run(const sigset_t& ends) {
  const int64_t lease_ms = absl::GetFlag(FLAGS_lease_ms);
  if (lease_ms < 100 || lease_ms > 600000) {
    return absl::InvalidArgumentError(absl::StrCat("--lease_ms=", lease_ms, ": expected 100 to 600000"));
  }
  GrpcServerOptions listen;
  ASSIGN_OR_RETURN(listen.listen, ParseHostPort(absl::GetFlag(FLAGS_listen), kDefaultPort));
  if (!absl::GetFlag(FLAGS_advertise).empty()) {
    ASSIGN_OR_RETURN(listen.advertise, ParseHostPort(absl::GetFlag(FLAGS_advertise), 0));
  }
  listen.insecure = absl::GetFlag(FLAGS_insecure);
  std::string state_dir = absl::GetFlag(FLAGS_state_dir);
  if (state_dir.empty()) state_dir = DefaultStateDir();
  ASSIGN_OR_RETURN(state_dir, AbsoluteFolder(state_dir));
  std::string checkpoint_root = absl::GetFlag(FLAGS_checkpoint_root);
  if (checkpoint_root.empty()) checkpoint_root = absl::StrCat(state_dir, "/checkpoints");
  ASSIGN_OR_RETURN(checkpoint_root, AbsoluteFolder(checkpoint_root));

  ASSIGN_OR_RETURN(std::unique_ptr<StateStore> store, OpenSqliteStore(state_dir));
  RealClock clock;
  SchedulerOptions options;
  options.store = store.get();
  options.clock = &clock;
  options.checkpoint_root = checkpoint_root;
  options.lease = absl::Milliseconds(lease_ms);
  options.on_broken = [](const absl::Status&) { kill(getpid(), SIGTERM); };
  ASSIGN_OR_RETURN(std::unique_ptr<SchedulerNode> node, SchedulerNode::Start(options));
  const std::unique_ptr<grpc::Service> service = MakeSchedulerService(node.get());
  auto server = GrpcServer::Start(listen, {service.get()});
  if (!server.ok()) {
    node->Stop();
    return server.status();
  }
  LOG_INFO("listening at {}, state in {}, checkpoints in {}", (*server)->address(), state_dir, checkpoint_root);
  if (const std::string file = absl::GetFlag(FLAGS_port_file); !file.empty()) {
    RETURN_IF_ERROR(WritePortFile(file, (*server)->port()));
  }
  int signal = 0;
  sigwait(&ends, &signal);
  LOG_INFO("ending on {}", signal == SIGINT ? "SIGINT" : "SIGTERM");
  node->Stop();
  (*server)->Shutdown(absl::Milliseconds(200));
  return node->health();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  sluice::TuneMalloc();
  // Blocked before any thread exists, so that only the main thread takes them.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  signal(SIGPIPE, SIG_IGN);
  absl::SetProgramUsageMessage("sluice-scheduler: jobs, membership, plans, recovery.");
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  sluice::InitLog(absl::GetFlag(FLAGS_name), absl::GetFlag(FLAGS_log_level));
  if (rest.size() > 1) {
    LOG_ERROR("unexpected argument \"{}\"; only flags are taken, --help lists them", rest[1]);
    return 2;
  }
  if (const absl::Status status = sluice::Run(ends); !status.ok()) {
    LOG_ERROR("{}", status.ToString());
    return 1;
  }
  return 0;
}
