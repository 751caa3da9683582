// sluice-worker: takes assignments from the scheduler and runs the train loop on one device.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "common/clock.h"
#include "common/daemon.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/version.h"
#include "worker/worker_node.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0", "HOST[:PORT] of the health service; port 0: any free one");
ABSL_FLAG(std::string, advertise, "", "HOST[:PORT] that others reach this worker by; default: as --listen");
ABSL_FLAG(std::string, port_file, "", "write the port here once the worker is ready");
ABSL_FLAG(std::string, scheduler, "127.0.0.1:7700", "HOST[:PORT] of the scheduler");
ABSL_FLAG(std::string, data_root, "", "folder under which the paths of job specs are resolved; empty: anywhere");
ABSL_FLAG(int, threads, 0, "cores to compute with; 0: all of the machine");
ABSL_FLAG(std::string, device, "cpu", "cpu, or fake_device (the cpu's kernels behind a device with memory of its own)");
ABSL_FLAG(std::string, name, "", "name that stays over restarts; default: drawn");
ABSL_FLAG(bool, insecure, false, "allow listening beyond loopback without TLS");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn or error");

namespace {

int Run() {
  using namespace sluice;
  WorkerOptions options;
  options.node = MakeNodeId("worker", absl::GetFlag(FLAGS_name));
  InitLog(options.node.name(), absl::GetFlag(FLAGS_log_level));
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
  absl::StatusOr<HostPort> scheduler = ParseHostPort(absl::GetFlag(FLAGS_scheduler), 7700);
  if (!scheduler.ok()) return fail(scheduler.status());
  absl::StatusOr<std::unique_ptr<GrpcServer>> server = GrpcServer::Start(listen, {});
  if (!server.ok()) return fail(server.status());
  GrpcTransport transport;
  RealClock clock;

  options.host_id = HostId();
  options.address = (*server)->address();
  options.scheduler = scheduler->ToString();
  options.data_root = absl::GetFlag(FLAGS_data_root);
  options.backend.kind = absl::GetFlag(FLAGS_device);
  options.backend.threads = absl::GetFlag(FLAGS_threads) != 0
                                ? absl::GetFlag(FLAGS_threads)
                                : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  options.transport = &transport;
  options.clock = &clock;
  options.on_refused = [](const absl::Status& status) { EndDaemon(status); };
  absl::StatusOr<std::unique_ptr<WorkerNode>> worker = WorkerNode::Start(options);
  if (!worker.ok()) return fail(worker.status());
  LOG_INFO("sluice-worker {} at {}, scheduler {}, {} on {} threads", kVersion, options.address, options.scheduler,
           options.backend.kind, options.backend.threads);
  if (const std::string file = absl::GetFlag(FLAGS_port_file); !file.empty()) {
    if (absl::Status status = WritePortFile(file, (*server)->port()); !status.ok()) return fail(status);
  }
  const absl::Status end = WaitForEnd();
  LOG_INFO("ends: {}", end.ok() ? "signal" : end.ToString());
  (*worker)->Leave();
  *worker = nullptr;
  (*server)->Shutdown();
  return end.ok() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  sluice::TuneMalloc();
  sluice::BlockEndSignals();
  absl::SetProgramUsageMessage("sluice-worker: trains jobs on one device; see --help=main");
  absl::ParseCommandLine(argc, argv);
  return Run();
}
