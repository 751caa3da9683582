// sluice-worker: a daemon that takes assignments from the scheduler and runs the train loop on one device.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/synchronization/mutex.h"
#include "common/clock.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "worker/worker_node.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0", "HOST[:PORT] of the health service; port 0: any free one");
ABSL_FLAG(std::string, advertise, "", "HOST[:PORT] that others reach --listen by, where it differs");
ABSL_FLAG(std::string, port_file, "", "file to write the port into once the worker listens");
ABSL_FLAG(std::string, scheduler, "127.0.0.1:7700", "HOST[:PORT] of the scheduler");
ABSL_FLAG(std::string, data_root, "", "folder under which the paths of job specs are resolved; empty: anywhere");
ABSL_FLAG(int, threads, 0, "cores to compute with; 0: all of the machine");
ABSL_FLAG(std::string, device, "cpu", "cpu, or fake_device (the cpu's kernels behind a device with memory of its own)");
ABSL_FLAG(std::string, name, "", "name that stays the same over restarts; empty: drawn");
ABSL_FLAG(bool, insecure, false, "listen beyond loopback without TLS");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn or error");

namespace sluice {
namespace {

// Blocks the signals that end the process in every thread to come; AwaitSignal takes them.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

absl::Status Serve(const sigset_t& signals) {
  ASSIGN_OR_RETURN(const HostPort listen, ParseHostPort(absl::GetFlag(FLAGS_listen), 0));
  HostPort advertise;
  if (!absl::GetFlag(FLAGS_advertise).empty()) {
    ASSIGN_OR_RETURN(advertise, ParseHostPort(absl::GetFlag(FLAGS_advertise), 0));
  }
  ASSIGN_OR_RETURN(const HostPort scheduler, ParseHostPort(absl::GetFlag(FLAGS_scheduler), 7700));
  ASSIGN_OR_RETURN(
      const auto server,
      GrpcServer::Start({.listen = listen, .advertise = advertise, .insecure = absl::GetFlag(FLAGS_insecure)}, {}));
  GrpcTransport transport;
  RealClock clock;

  absl::Mutex mutex;
  absl::Status refused;
  WorkerOptions options;
  options.node = MakeNodeId("worker", absl::GetFlag(FLAGS_name));
  options.host_id = HostId();
  options.address = server->address();
  options.scheduler = scheduler.ToString();
  options.data_root = absl::GetFlag(FLAGS_data_root);
  options.backend.kind = absl::GetFlag(FLAGS_device);
  options.backend.threads = absl::GetFlag(FLAGS_threads);
  if (options.backend.threads == 0) {
    options.backend.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }
  options.transport = &transport;
  options.clock = &clock;
  options.on_refused = [&mutex, &refused](const absl::Status& status) {
    absl::MutexLock lock(&mutex);
    refused = status;
    kill(getpid(), SIGTERM);
  };
  InitLog(options.node.name(), absl::GetFlag(FLAGS_log_level));
  ASSIGN_OR_RETURN(std::unique_ptr<WorkerNode> node, WorkerNode::Start(options));
  if (!absl::GetFlag(FLAGS_port_file).empty()) {
    RETURN_IF_ERROR(WritePortFile(absl::GetFlag(FLAGS_port_file), server->port()));
  }
  LOG_INFO("worker at {}, scheduler at {}, device {}, {} threads", options.address, options.scheduler,
           options.backend.kind, options.backend.threads);

  int signal = 0;
  sigwait(&signals, &signal);
  {
    absl::MutexLock lock(&mutex);
    RETURN_IF_ERROR(Annotate(refused, absl::StrCat("the scheduler at ", options.scheduler, " refused this worker")));
  }
  LOG_INFO("ends on {}", signal == SIGINT ? "SIGINT" : "SIGTERM");
  node->Leave();
  node = nullptr;
  return absl::OkStatus();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  sluice::TuneMalloc();
  absl::SetProgramUsageMessage("takes jobs from a Sluice scheduler and trains them on one device");
  absl::ParseCommandLine(argc, argv);
  const sigset_t signals = sluice::BlockSignals();
  const absl::Status status = sluice::Serve(signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "sluice-worker: %s\n", std::string(status.message()).c_str());
  return 1;
}
