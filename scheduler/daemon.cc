#include "scheduler/daemon.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>

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

absl::Status Run(const Args& args) {
  InitDaemonLog(args, args.String("name", "scheduler"));
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(args, kSchedulerPort));
  std::string state_dir = args.String("state_dir");
  if (state_dir.empty()) state_dir = DefaultStateDir();
  ASSIGN_OR_RETURN(state_dir, AbsoluteFolder(state_dir));
  std::string checkpoint_root = args.String("checkpoint_root");
  if (checkpoint_root.empty()) checkpoint_root = absl::StrCat(state_dir, "/checkpoints");
  ASSIGN_OR_RETURN(checkpoint_root, AbsoluteFolder(checkpoint_root));

  ASSIGN_OR_RETURN(std::unique_ptr<StateStore> store, OpenSqliteStore(state_dir));
  RealClock clock;
  SchedulerOptions options;
  options.store = store.get();
  options.clock = &clock;
  options.checkpoint_root = checkpoint_root;
  options.lease = absl::Milliseconds(args.Integer("lease_ms", 2000));
  options.on_broken = [](const absl::Status& status) { EndDaemon(status); };
  ASSIGN_OR_RETURN(std::unique_ptr<SchedulerNode> node, SchedulerNode::Start(options));
  const std::unique_ptr<grpc::Service> service = MakeSchedulerService(node.get());
  auto server = GrpcServer::Start(listen, {service.get()});
  if (!server.ok()) {
    node->Stop();
    return server.status();
  }
  LOG_INFO("listening at {}, state in {}, checkpoints in {}", (*server)->address(), state_dir, checkpoint_root);
  if (const absl::Status status = AnnouncePort(args, **server); !status.ok()) {
    node->Stop();
    return status;
  }
  const absl::Status end = WaitForEnd();
  node->Stop();
  (*server)->Shutdown(absl::Milliseconds(200));
  return end.ok() ? node->health() : end;
}

}  // namespace

int SchedulerMain(int argc, char** argv) {
  return RunDaemon(
      argc, argv, "sluice-scheduler", "Jobs, membership, plans, recovery.",
      {{"state_dir", FlagKind::kString, "DIR",
        "folder of the durable state; default: the user's state folder (root: /var/lib/sluice/scheduler)"},
       {"checkpoint_root", FlagKind::kString, "DIR",
        "folder of all checkpoints, shared with the servers; default: <state_dir>/checkpoints"},
       {"name", FlagKind::kString, "NAME", "name in the log; default: scheduler"},
       {"lease_ms", FlagKind::kInteger, "N",
        "a node from which nothing comes for so long is lost; 100 to 600000, default 2000", 0, false, 100, 600000}},
      Run);
}

}  // namespace sluice
