// sluice-server: holds shards of any number of jobs.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "server/server_node.h"
#include "server/services.h"

ABSL_FLAG(std::string, scheduler, "127.0.0.1", "HOST[:PORT] of the scheduler; without PORT: 7700");
ABSL_FLAG(std::string, checkpoint_root, "checkpoints",
          "folder of all checkpoints: one filesystem with the scheduler's");
ABSL_FLAG(std::string, data_root, "", "folder under which init.path of specs is looked for; empty: paths as they are");
ABSL_FLAG(uint64_t, memory_limit, 0, "bytes that jobs may take on this server; 0: not limited");
ABSL_FLAG(int, lanes, 0, "threads that add and apply; 0: half the cores");
ABSL_FLAG(bool, shared_memory, true, "leave payloads to and from workers of this host and user in shared memory");
ABSL_FLAG(std::string, name, "", "name that stays over restarts; default: drawn");

namespace sluice {
namespace {

absl::Status Run() {
  ServerOptions options;
  options.node = MakeNodeId("server", absl::GetFlag(FLAGS_name));
  InitDaemonLog(options.node.name());
  ASSIGN_OR_RETURN(const HostPort scheduler, ParseHostPort(absl::GetFlag(FLAGS_scheduler), kSchedulerPort));
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(0, &scheduler));
  ParameterServiceImpl parameter_service;
  ShardServiceImpl shard_service;
  GrpcTransport transport;
  std::unique_ptr<ServerNode> node;
  ASSIGN_OR_RETURN(const std::unique_ptr<GrpcServer> server,
                   GrpcServer::Start(listen, {&parameter_service, &shard_service}));

  options.host_id = HostId();
  options.address = server->address();
  options.scheduler = scheduler.ToString();
  options.checkpoint_root = absl::GetFlag(FLAGS_checkpoint_root);
  options.data_root = absl::GetFlag(FLAGS_data_root);
  options.memory_limit = absl::GetFlag(FLAGS_memory_limit);
  options.lanes = absl::GetFlag(FLAGS_lanes) > 0
                      ? absl::GetFlag(FLAGS_lanes)
                      : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 2);
  options.shared_memory = absl::GetFlag(FLAGS_shared_memory);
  options.transport = &transport;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  node = ServerNode::Start(options);
  parameter_service.SetNode(node.get());
  shard_service.SetNode(node.get());
  LOG_INFO("sluice-server {} listens at {}, scheduler {}", kVersion, options.address, options.scheduler);
  RETURN_IF_ERROR(AnnouncePort(*server));
  const absl::Status end = WaitForEnd();
  node->Leave();
  server->Shutdown();
  node = nullptr;
  return end;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  return sluice::RunDaemon(argc, argv, "sluice-server: holds shards of jobs", sluice::Run);
}
