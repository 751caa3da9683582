// A whole cluster inside one process: a scheduler, servers and workers as objects over the in-process network, with the
// operations of a test: submit, wait, kill, start again, read the parameters.
//
//   InProcessCluster cluster({.servers = 2, .workers = 2});
//   ASSERT_OK_AND_ASSIGN(std::string job, cluster.Submit(spec));
//   cluster.KillWorker(0);
//   cluster.StartWorker(0);
//   const v1::JobStatus end = cluster.AwaitEnd(job);
//   HashOf(*cluster.Parameters(end))
#ifndef SLUICE_TESTS_CLUSTER_IN_PROCESS_CLUSTER_H_
#define SLUICE_TESTS_CLUSTER_IN_PROCESS_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/clock.h"
#include "common/inprocess_transport.h"
#include "common/protocol_rules.h"
#include "scheduler/scheduler_node.h"
#include "scheduler/state_store.h"
#include "server/server_node.h"
#include "worker/worker_node.h"

namespace sluice {

struct ClusterOptions {
  int servers = 1;
  int workers = 1;
  InProcessOptions network = {};
  BackendOptions backend = {};
  int lanes = 2;                                // of each server
  uint64_t memory_limit = 0;                    // of each server
  uint64_t worker_memory_limit = 0;             // of each worker
  uint64_t hold_memory = 0, stream_memory = 0;  // as ServerOptions has them
  bool shared_memory = false;                   // between all workers and servers
  // Host of a node by its name; those not named have one of their own. With any, workers share memory with each other.
  std::map<std::string, std::string> hosts = {};
  bool peers_answer = true;  // false: streams to workers are refused
  absl::Duration lease = absl::Seconds(2);
  absl::Duration gather = absl::Milliseconds(100);
  ProtocolRules rules = {};
  WorkerHooks* hooks = nullptr;      // of every worker; outlives the cluster
  std::string checkpoint_root = {};  // empty: a temporary folder, removed with the cluster
};

// Nodes are called "scheduler", "server-0", ..., "worker-0", ...: their names are their addresses. One thread uses it.
class InProcessCluster {
 public:
  explicit InProcessCluster(const ClusterOptions& options);
  ~InProcessCluster();
  InProcessCluster(const InProcessCluster&) = delete;
  InProcessCluster& operator=(const InProcessCluster&) = delete;

  InProcessNetwork& network() { return network_; }
  SchedulerNode& scheduler() { return *scheduler_.node; }
  ServerNode& server(int i) { return *servers_.at(static_cast<size_t>(i)).node; }
  WorkerNode& worker(int i) { return *workers_.at(static_cast<size_t>(i)).node; }
  const std::string& checkpoint_root() const { return checkpoint_root_; }

  // Returns the job's id. `resume_job`: its newest checkpoint is where the new job goes on.
  absl::StatusOr<std::string> Submit(const v1::JobSpec& spec, const std::string& resume_job = "");
  // Waits until `until` holds of the job's status or the job has ended; DEADLINE_EXCEEDED with the last status.
  absl::StatusOr<v1::JobStatus> Await(const std::string& job, const std::function<bool(const v1::JobStatus&)>& until,
                                      absl::Duration patience = absl::Seconds(60));
  absl::StatusOr<v1::JobStatus> AwaitEnd(const std::string& job, absl::Duration patience = absl::Seconds(60));
  absl::StatusOr<v1::JobStatus> AwaitRounds(const std::string& job, uint64_t rounds,
                                            absl::Duration patience = absl::Seconds(60));
  // All parameters as the job's last published checkpoint holds them.
  absl::StatusOr<std::vector<float>> Parameters(const v1::JobStatus& status);

  // As kill -9: the others see broken streams. Start begins a new life under the same name; also of a further number.
  void KillScheduler();
  void StartScheduler();
  void KillServer(int i);
  void StartServer(int i);
  void KillWorker(int i);
  void StartWorker(int i);

 private:
  struct SchedulerSlot {
    std::unique_ptr<SchedulerNode> node;
    std::unique_ptr<Listener> listener;
  };
  struct ServerSlot {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<ServerNode> node;
    std::unique_ptr<Listener> listener;
  };
  struct WorkerSlot {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<WorkerNode> node;
    std::unique_ptr<Listener> listener;
  };
  std::string HostOf(const std::string& node) const;

  const ClusterOptions options_;
  std::string checkpoint_root_;
  RealClock clock_;
  MemoryStore store_;  // survives the scheduler
  InProcessNetwork network_;
  SchedulerSlot scheduler_;
  std::vector<ServerSlot> servers_;
  std::vector<WorkerSlot> workers_;
};

// Of the bits of all values (FNV-1a, 64 bits).
uint64_t HashOf(absl::Span<const float> values);

}  // namespace sluice

#endif  // SLUICE_TESTS_CLUSTER_IN_PROCESS_CLUSTER_H_
