#include "worker/daemon.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "common/clock.h"
#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "worker/peer_service.h"
#include "worker/worker_node.h"

namespace sluice {
namespace {

absl::Status Run(const Args& args) {
  WorkerOptions options;
  options.node = MakeNodeId("worker", args.String("name"));
  InitDaemonLog(args, options.node.name());
  ASSIGN_OR_RETURN(const HostPort scheduler, ParseHostPort(args.String("scheduler", "127.0.0.1"), kSchedulerPort));
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(args, 0, &scheduler));
  if (const std::string host = args.String("host_id"); !host.empty()) SetHostId(host);
  PeerServiceImpl peer_service;
  GrpcTransport transport;
  RealClock clock;
  std::unique_ptr<WorkerNode> node;
  ASSIGN_OR_RETURN(const std::unique_ptr<GrpcServer> server, GrpcServer::Start(listen, {&peer_service}));

  options.host_id = HostId();
  options.address = server->address();
  options.scheduler = scheduler.ToString();
  options.data_root = args.String("data_root");
  options.data_cache = args.String("data_cache");
  options.backend.kind = args.String("device", "cpu");
  options.backend.threads = static_cast<int>(args.Integer("threads", 0)) != 0
                                ? static_cast<int>(args.Integer("threads", 0))
                                : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  options.memory_limit = static_cast<uint64_t>(args.Integer("memory_limit", 0));
  options.shared_memory = args.Bool("shared_memory", true);
  options.serves_peers = true;
  options.transport = &transport;
  options.clock = &clock;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  ASSIGN_OR_RETURN(node, WorkerNode::Start(options));
  peer_service.SetNode(node.get());
  LOG_INFO("sluice-worker {} at {}, scheduler {}, {} on {} threads", kVersion, options.address, options.scheduler,
           options.backend.kind, options.backend.threads);
  RETURN_IF_ERROR(AnnouncePort(args, *server));
  const absl::Status end = WaitForEnd();
  node->Leave();
  server->Shutdown();
  node = nullptr;
  return end;
}

}  // namespace

int WorkerMain(int argc, char** argv) {
  return RunDaemon(argc, argv, "sluice-worker", "Trains jobs on one device.",
                   {{"scheduler", FlagKind::kString, "HOST[:PORT]", "the scheduler (127.0.0.1); without PORT: 7700"},
                    {"data_root", FlagKind::kString, "DIR",
                     "folder under which the paths of job specs are resolved; default: anywhere"},
                    {"data_cache", FlagKind::kString, "DIR",
                     "folder where tokenized texts are kept from one job to the next (may be emptied at any time); "
                     "default: nowhere"},
                    {"threads", FlagKind::kInteger, "N", "cores to compute with; 0 (default): all of the machine", 0,
                     false, 0, 4096},
                    {"device", FlagKind::kString, "KIND",
                     "cpu (default), or fake_device (the cpu's kernels behind a device with memory of its own)"},
                    {"memory_limit", FlagKind::kInteger, "BYTES",
                     "what the parameters and gradients of its part of a model may take (8 bytes a parameter; "
                     "activations are not counted); larger parts go to other workers; 0 (default): not limited"},
                    {"shared_memory", FlagKind::kBool, "",
                     "leave payloads to and from servers and workers of this host and user in shared memory; default: "
                     "true"},
                    {"host_id", FlagKind::kString, "NAME",
                     "this host's name, equal for processes that can share memory; default: its machine id"},
                    {"name", FlagKind::kString, "NAME", "name that stays over restarts; default: drawn"}},
                   Run);
}

}  // namespace sluice
