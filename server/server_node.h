// One parameter server as an object: holds the session with the scheduler and shards of any number of jobs. Many may
// live in one process; only daemon.cc knows flags and signals.
//
//   session: Plan, Fence, CheckpointOrder, EndJob -> ServerJob (server_job.h)
//   parameter_acceptor(): workers' streams, hello first -> the job's ServerJob
//   shard_acceptor(): links from other servers to the verdict holder
#ifndef SLUICE_SERVER_SERVER_NODE_H_
#define SLUICE_SERVER_SERVER_NODE_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/clock.h"
#include "common/protocol_rules.h"
#include "common/session.h"
#include "common/transport.h"
#include "server/lanes.h"
#include "server/server_job.h"

namespace sluice {

struct ServerOptions {
  v1::NodeId node;
  std::string host_id;
  std::string address;          // advertised HOST:PORT
  std::string scheduler;        // HOST:PORT
  std::string checkpoint_root;  // one filesystem with the scheduler's
  std::string data_root;        // spec.init.path is resolved under it; empty: as it is
  uint64_t memory_limit = 0;    // bytes for all jobs; 0: not limited
  int lanes = 1;
  absl::Duration hello_patience = absl::Seconds(10);  // of a stream that was opened and says nothing
  // Payloads between this server and workers of the same host and user stay in shared memory.
  bool shared_memory = true;
  // What contributions of all jobs may pin while they wait for others, in bytes (hold_book.h); 0: not limited.
  uint64_t hold_memory = 0;
  // What the data streams of all jobs may buffer together, in bytes (stream_memory.h); 0: not limited.
  uint64_t stream_memory = 0;
  ProtocolRules rules;
  Transport* transport = nullptr;  // outlives the node
  Clock* clock = nullptr;          // outlives the node; null: the real one
  // The scheduler will not have this node. Called on a session thread; must not destroy the node.
  std::function<void(const absl::Status&)> on_refused;
};

class ServerNode {
 public:
  static std::unique_ptr<ServerNode> Start(const ServerOptions& options);
  // Ends at once, as a killed process would from the others' point of view. Listeners that use the acceptors go first.
  ~ServerNode();
  ServerNode(const ServerNode&) = delete;
  ServerNode& operator=(const ServerNode&) = delete;

  Acceptor parameter_acceptor();
  Acceptor shard_acceptor();

  // Tells the scheduler that the node ends in order.
  void Leave();

  // Null where no such job is here.
  std::shared_ptr<ServerJob> FindJob(const std::string& job_id) const;
  absl::StatusOr<v1::GetPlanResponse> GetPlan(const v1::GetPlanRequest& request) const;

 private:
  class HelloTimer;
  class WorkerStream;
  class PeerStream;

  explicit ServerNode(const ServerOptions& options);
  ServerOptions WithClock(ServerOptions options);
  v1::Register MakeRegister() const;
  void OnMessage(const v1::SchedulerMessage& message);
  void OnPlan(const v1::Plan& plan);
  // Null where a worker's word (not the scheduler's) asks for one more job that no plan has spoken of than are allowed.
  std::shared_ptr<ServerJob> FindOrMakeJob(const std::string& job_id, bool by_scheduler);
  void Send(const v1::NodeMessage& message);

  RealClock real_clock_;
  const ServerOptions options_;
  const std::shared_ptr<HoldBudget> hold_;      // null: not limited
  const std::shared_ptr<StreamMemory> memory_;  // null: not limited
  Lanes lanes_, background_;
  std::atomic<StreamId> next_stream_{1};

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<ServerJob>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> reserved_ ABSL_GUARDED_BY(mutex_);  // bytes by job

  absl::Mutex session_mutex_;
  Session* session_ ABSL_GUARDED_BY(session_mutex_) = nullptr;  // owned by session_owner_
  std::unique_ptr<Session> session_owner_;                      // constant after Start
};

}  // namespace sluice

#endif  // SLUICE_SERVER_SERVER_NODE_H_
