// One worker daemon as an object: holds the session with the scheduler, takes one assignment at a time and runs its
// train loop. Many may live in one process; only daemon.cc knows flags and signals.
//
//   session thread                      train thread (one for the node's life)
//   Plan for a new job  ------------->  open data set and model, then rounds until the job ends, then free all of it
//   Plan of the running job -> WorkerJob::OnPlan (new generation)
//   EndJob -> WorkerJob::End
#ifndef SLUICE_WORKER_WORKER_NODE_H_
#define SLUICE_WORKER_WORKER_NODE_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "common/clock.h"
#include "common/protocol_rules.h"
#include "common/session.h"
#include "common/transport.h"
#include "sluice/v1/plan.pb.h"
#include "sluice/v1/scheduler.pb.h"
#include "worker/backend/backend.h"
#include "worker/worker_hooks.h"

namespace sluice {

class WorkerJob;

struct WorkerOptions {
  v1::NodeId node;
  std::string host_id;
  std::string address;     // advertised
  std::string scheduler;   // HOST:PORT
  std::string data_root;   // paths of specs are resolved under it; empty: as they are
  std::string data_cache;  // folder where tokenized texts are kept; empty: nowhere
  BackendOptions backend;
  ProtocolRules rules;
  Transport* transport = nullptr;  // outlives the node
  Clock* clock = nullptr;          // outlives the node
  uint64_t memory_limit = 0;       // bytes for the parameters and gradients of its rank; 0: not limited
  // Payloads between this worker and servers of the same host and user stay in shared memory.
  bool shared_memory = true;
  // Streams to `address` come to the acceptors below: this worker may take part in host sums and replicas of many
  // ranks.
  bool serves_peers = false;
  WorkerHooks* hooks = nullptr;  // for tests; may be null
  // The scheduler will not have this node (another version, a newer life of the same name). Called on a session thread;
  // must not destroy the node.
  std::function<void(const absl::Status&)> on_refused;
};

class WorkerNode {
 public:
  // Makes the backend and starts connecting. INVALID_ARGUMENT etc. where the backend cannot be made.
  static absl::StatusOr<std::unique_ptr<WorkerNode>> Start(const WorkerOptions& options);
  // Ends at once, as a killed process would from the others' point of view: nothing is announced. Waits for its threads
  // (the computing under way is cancelled between two layers).
  ~WorkerNode();
  WorkerNode(const WorkerNode&) = delete;
  WorkerNode& operator=(const WorkerNode&) = delete;

  // Tells the scheduler that the node ends in order, so that it is replaced at once. The destructor should follow.
  void Leave();

  // For Plane::kPeer and Plane::kMail. Valid as long as the node.
  Acceptor peer_acceptor();
  Acceptor mail_acceptor();

  // Of the job it works for; empty: idle. For tests and messages.
  std::string job() const;

 private:
  WorkerNode(const WorkerOptions& options, std::unique_ptr<Backend> backend);

  v1::Register MakeRegister() const;
  void OnMessage(const v1::SchedulerMessage& message);
  void OnPlan(const v1::Plan& plan);
  void OnEndJob(const std::string& job_id);
  // The job that this node works for or is about to, unless it has ended.
  std::shared_ptr<WorkerJob> Newest() const;
  void TrainThread();

  const WorkerOptions options_;
  const std::unique_ptr<Backend> backend_;

  mutable absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<WorkerJob> job_ ABSL_GUARDED_BY(mutex_);       // running
  std::shared_ptr<WorkerJob> assigned_ ABSL_GUARDED_BY(mutex_);  // to be run next

  absl::Notification started_;        // session_ is set
  std::unique_ptr<Session> session_;  // constant after that
  std::thread train_thread_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_WORKER_NODE_H_
