// sluice-server: holds shards of any number of jobs.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/version.h"
#include "server/server_node.h"
#include "server/services.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0", "HOST[:PORT] to listen at; port 0: any free one");
ABSL_FLAG(std::string, advertise, "", "HOST[:PORT] that others reach this server by; default: as --listen");
ABSL_FLAG(std::string, port_file, "", "write the port here once the server is ready");
ABSL_FLAG(std::string, scheduler, "127.0.0.1:7700", "HOST:PORT of the scheduler");
ABSL_FLAG(std::string, checkpoint_root, "checkpoints",
          "folder of all checkpoints: one filesystem with the scheduler's");
ABSL_FLAG(std::string, data_root, "", "folder under which init.path of specs is looked for; empty: paths as they are");
ABSL_FLAG(uint64_t, memory_limit, 0, "bytes that jobs may take on this server; 0: not limited");
ABSL_FLAG(int, lanes, 0, "threads that add and apply; 0: half the cores");
ABSL_FLAG(std::string, name, "", "name that stays over restarts; default: drawn");
ABSL_FLAG(bool, insecure, false, "allow listening beyond loopback without TLS");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn or error");

namespace {

int Run() {
  using namespace sluice;
  const v1::NodeId node = MakeNodeId("server", absl::GetFlag(FLAGS_name));
  InitLog(node.name(), absl::GetFlag(FLAGS_log_level));
  auto fail = [](const absl::Status& status) {
    LOG_ERROR("{}", status.ToString());
    return 2;
  };
  GrpcServerOptions listen;
  listen.insecure = absl::GetFlag(FLAGS_insecure);
  absl::StatusOr<HostPort> at = ParseHostPort(absl::GetFlag(FLAGS_listen), 0);
  if (!at.ok()) return fail(at.status());
  listen.listen = *at;
  if (!absl::GetFlag(FLAGS_advertise).empty()) {
    at = ParseHostPort(absl::GetFlag(FLAGS_advertise), 0);
    if (!at.ok()) return fail(at.status());
    listen.advertise = *at;
  }
  ParameterServiceImpl parameter_service;
  ShardServiceImpl shard_service;
  GrpcTransport transport;
  std::unique_ptr<ServerNode> server_node;
  absl::StatusOr<std::unique_ptr<GrpcServer>> server = GrpcServer::Start(listen, {&parameter_service, &shard_service});
  if (!server.ok()) return fail(server.status());

  ServerOptions options;
  options.node = node;
  options.host_id = HostId();
  options.address = (*server)->address();
  options.scheduler = absl::GetFlag(FLAGS_scheduler);
  options.checkpoint_root = absl::GetFlag(FLAGS_checkpoint_root);
  options.data_root = absl::GetFlag(FLAGS_data_root);
  options.memory_limit = absl::GetFlag(FLAGS_memory_limit);
  options.lanes = absl::GetFlag(FLAGS_lanes) > 0
                      ? absl::GetFlag(FLAGS_lanes)
                      : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 2);
  options.transport = &transport;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  server_node = ServerNode::Start(options);
  parameter_service.SetNode(server_node.get());
  shard_service.SetNode(server_node.get());
  LOG_INFO("sluice-server {} listens at {}, scheduler {}", kVersion, options.address, options.scheduler);
  if (const std::string file = absl::GetFlag(FLAGS_port_file); !file.empty()) {
    if (absl::Status status = WritePortFile(file, (*server)->port()); !status.ok()) return fail(status);
  }
  const absl::Status end = WaitForEnd();
  LOG_INFO("ends: {}", end.ok() ? "signal" : end.ToString());
  server_node->Leave();
  (*server)->Shutdown();
  server_node = nullptr;
  return end.ok() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  sluice::TuneMalloc();
  sluice::BlockEndSignals();
  absl::SetProgramUsageMessage("sluice-server: holds shards of jobs; see --help=main");
  absl::ParseCommandLine(argc, argv);
  return Run();
}
