// sluice-scheduler: flags, wiring, signals.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/daemon.h"
#include "common/file.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "scheduler/scheduler_node.h"
#include "scheduler/scheduler_service.h"
#include "scheduler/state_store.h"

ABSL_FLAG(std::string, state_dir, "", "folder of the durable state; default: the user's state folder (root: /var/lib)");
ABSL_FLAG(std::string, checkpoint_root, "",
          "folder of all checkpoints, shared with the servers; default: "
          "<state_dir>/checkpoints");
ABSL_FLAG(std::string, name, "scheduler", "name in the log");
ABSL_FLAG(int64_t, lease_ms, 2000, "a node from which nothing comes for so long is lost; 100..600000");

namespace sluice {
namespace {

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

absl::Status Run() {
  InitDaemonLog(absl::GetFlag(FLAGS_name));
  const int64_t lease_ms = absl::GetFlag(FLAGS_lease_ms);
  if (lease_ms < 100 || lease_ms > 600000) {
    return absl::InvalidArgumentError(absl::StrCat("--lease_ms=", lease_ms, ": expected 100 to 600000"));
  }
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(kSchedulerPort));
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
  options.on_broken = [](const absl::Status& status) { EndDaemon(status); };
  ASSIGN_OR_RETURN(std::unique_ptr<SchedulerNode> node, SchedulerNode::Start(options));
  const std::unique_ptr<grpc::Service> service = MakeSchedulerService(node.get());
  auto server = GrpcServer::Start(listen, {service.get()});
  if (!server.ok()) {
    node->Stop();
    return server.status();
  }
  LOG_INFO("listening at {}, state in {}, checkpoints in {}", (*server)->address(), state_dir, checkpoint_root);
  if (const absl::Status status = AnnouncePort(**server); !status.ok()) {
    node->Stop();
    return status;
  }
  const absl::Status end = WaitForEnd();
  node->Stop();
  (*server)->Shutdown(absl::Milliseconds(200));
  return end.ok() ? node->health() : end;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  return sluice::RunDaemon(argc, argv, "sluice-scheduler: jobs, membership, plans, recovery", sluice::Run);
}
