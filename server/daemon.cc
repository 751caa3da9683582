#include "server/daemon.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/machine_memory.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "server/server_node.h"
#include "server/services.h"

namespace sluice {
namespace {

// A flag in bytes; 0: an eighth of the memory that this process may have.
uint64_t BytesOrShare(const Args& args, const std::string& flag) {
  const uint64_t given = static_cast<uint64_t>(args.Integer(flag, 0));
  return given > 0 ? given : std::max<uint64_t>(MemoryOfMachine() / 8, 64 << 20);
}

absl::Status Run(const Args& args) {
  ServerOptions options;
  options.node = MakeNodeId("server", args.String("name"));
  InitDaemonLog(args, options.node.name());
  ASSIGN_OR_RETURN(const HostPort scheduler, ParseHostPort(args.String("scheduler", "127.0.0.1"), kSchedulerPort));
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(args, 0, &scheduler));
  if (const std::string host = args.String("host_id"); !host.empty()) SetHostId(host);
  ParameterServiceImpl parameter_service;
  ShardServiceImpl shard_service;
  GrpcTransport transport;
  std::unique_ptr<ServerNode> node;
  ASSIGN_OR_RETURN(const std::unique_ptr<GrpcServer> server,
                   GrpcServer::Start(listen, {&parameter_service, &shard_service}));

  options.host_id = HostId();
  options.address = server->address();
  options.scheduler = scheduler.ToString();
  options.checkpoint_root = args.String("checkpoint_root", "checkpoints");
  options.data_root = args.String("data_root");
  options.memory_limit = static_cast<uint64_t>(args.Integer("memory_limit", 0));
  options.hold_memory = BytesOrShare(args, "hold_memory");
  options.stream_memory = BytesOrShare(args, "stream_memory");
  options.lanes = static_cast<int>(args.Integer("lanes", 0)) > 0
                      ? static_cast<int>(args.Integer("lanes", 0))
                      : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 2);
  options.shared_memory = args.Bool("shared_memory", true);
  options.transport = &transport;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  node = ServerNode::Start(options);
  parameter_service.SetNode(node.get());
  shard_service.SetNode(node.get());
  LOG_INFO("sluice-server {} listens at {}, scheduler {}", kVersion, options.address, options.scheduler);
  RETURN_IF_ERROR(AnnouncePort(args, *server));
  const absl::Status end = WaitForEnd();
  node->Leave();
  server->Shutdown();
  node = nullptr;
  return end;
}

}  // namespace

int ServerMain(int argc, char** argv) {
  return RunDaemon(
      argc, argv, "sluice-server", "Holds shards of any number of jobs.",
      {{"scheduler", FlagKind::kString, "HOST[:PORT]", "the scheduler (127.0.0.1); without PORT: 7700"},
       {"checkpoint_root", FlagKind::kString, "DIR",
        "folder of all checkpoints, one filesystem with the scheduler's; default: checkpoints"},
       {"data_root", FlagKind::kString, "DIR",
        "folder under which init.path of specs is looked for; default: paths as they are"},
       {"memory_limit", FlagKind::kInteger, "BYTES", "what jobs may take on this server; 0 (default): not limited"},
       {"hold_memory", FlagKind::kInteger, "BYTES",
        "what gradients may take that wait for other workers' to be added to; those that find no room stay with their "
        "workers and are asked for later; 0 (default): an eighth of the machine's memory"},
       {"stream_memory", FlagKind::kInteger, "BYTES",
        "what all data streams may buffer together: parameters that slow workers have not read yet and gradients that "
        "were received and not yet handed on; 0 (default): an eighth of the machine's memory"},
       {"lanes", FlagKind::kInteger, "N", "threads that add and apply; 0 (default): half the cores", 0, false, 0, 4096},
       {"shared_memory", FlagKind::kBool, "",
        "leave payloads to and from workers of this host and user in shared memory; default: true"},
       {"host_id", FlagKind::kString, "NAME",
        "this host's name, equal for processes that can share memory; default: its machine id"},
       {"name", FlagKind::kString, "NAME", "name that stays over restarts; default: drawn"}},
      Run);
}

}  // namespace sluice
