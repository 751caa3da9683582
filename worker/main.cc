// sluice-worker: takes assignments from the scheduler and runs the train loop on one device.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "common/clock.h"
#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "worker/worker_node.h"

ABSL_FLAG(std::string, scheduler, "127.0.0.1", "HOST[:PORT] of the scheduler; without PORT: 7700");
ABSL_FLAG(std::string, data_root, "", "folder under which the paths of job specs are resolved; empty: anywhere");
ABSL_FLAG(
    std::string, data_cache, "",
    "folder where tokenized texts are kept from one job to the next (may be emptied at any time); empty: nowhere");
ABSL_FLAG(int, threads, 0, "cores to compute with; 0: all of the machine");
ABSL_FLAG(std::string, device, "cpu", "cpu, or fake_device (the cpu's kernels behind a device with memory of its own)");
ABSL_FLAG(bool, shared_memory, true, "leave payloads to and from servers of this host and user in shared memory");
ABSL_FLAG(std::string, name, "", "name that stays over restarts; default: drawn");

namespace sluice {
namespace {

absl::Status Run() {
  WorkerOptions options;
  options.node = MakeNodeId("worker", absl::GetFlag(FLAGS_name));
  InitDaemonLog(options.node.name());
  ASSIGN_OR_RETURN(const HostPort scheduler, ParseHostPort(absl::GetFlag(FLAGS_scheduler), kSchedulerPort));
  ASSIGN_OR_RETURN(const GrpcServerOptions listen, ListenOptions(0, &scheduler));
  // For health checks only: nobody opens a stream to a worker.
  ASSIGN_OR_RETURN(const std::unique_ptr<GrpcServer> server, GrpcServer::Start(listen, {}));
  GrpcTransport transport;
  RealClock clock;

  options.host_id = HostId();
  options.address = server->address();
  options.scheduler = scheduler.ToString();
  options.data_root = absl::GetFlag(FLAGS_data_root);
  options.data_cache = absl::GetFlag(FLAGS_data_cache);
  options.backend.kind = absl::GetFlag(FLAGS_device);
  options.backend.threads = absl::GetFlag(FLAGS_threads) != 0
                                ? absl::GetFlag(FLAGS_threads)
                                : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  options.shared_memory = absl::GetFlag(FLAGS_shared_memory);
  options.transport = &transport;
  options.clock = &clock;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  ASSIGN_OR_RETURN(std::unique_ptr<WorkerNode> node, WorkerNode::Start(options));
  LOG_INFO("sluice-worker {} at {}, scheduler {}, {} on {} threads", kVersion, options.address, options.scheduler,
           options.backend.kind, options.backend.threads);
  RETURN_IF_ERROR(AnnouncePort(*server));
  const absl::Status end = WaitForEnd();
  node->Leave();
  node = nullptr;
  server->Shutdown();
  return end;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  return sluice::RunDaemon(argc, argv, "sluice-worker: trains jobs on one device", sluice::Run);
}
