// The scheduler as an object: SchedulerCore under one lock, its timers, the publisher of checkpoints, watchers,
// history. Knows no sockets: streams come in through session_acceptor(), which any transport can call; clients' calls
// are plain methods (scheduler_service.h translates gRPC into them).
//
//   transport threads   sessions -> core
//   timer thread        core's deadlines, history to disk, watchers
//   publisher thread    PublishCheckpoint, RemoveCheckpoint
#ifndef SLUICE_SCHEDULER_SCHEDULER_NODE_H_
#define SLUICE_SCHEDULER_SCHEDULER_NODE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/protocol_rules.h"
#include "common/transport.h"
#include "scheduler/history.h"
#include "scheduler/scheduler_core.h"
#include "scheduler/state_store.h"

namespace sluice {

struct SchedulerOptions {
  StateStore* store = nullptr;  // outlives the node
  Clock* clock = nullptr;       // outlives the node
  std::string checkpoint_root;  // absolute; on a file system that the servers share
  absl::Duration lease = absl::Seconds(2);
  absl::Duration gather = absl::Milliseconds(100);
  ProtocolRules rules;
  // The store failed: nothing is decided any more and the process should end. Called once, on any thread; must not
  // destroy the node.
  std::function<void(const absl::Status&)> on_broken;
};

// Thread-safe. With a FakeClock nothing times out by itself: call Tick() after advancing it.
class SchedulerNode : private SchedulerActions {
 public:
  // Loads the state; jobs that were under way go on when their nodes have registered.
  static absl::StatusOr<std::unique_ptr<SchedulerNode>> Start(const SchedulerOptions& options);
  // Stop(). Listeners that use session_acceptor() must be gone before.
  ~SchedulerNode() override;
  SchedulerNode(const SchedulerNode&) = delete;
  SchedulerNode& operator=(const SchedulerNode&) = delete;

  // Nothing is decided or persisted from here on: what the sessions' ends would mean is none of this life's business.
  // Closes all sessions (nodes keep working and look for the next scheduler) and answers waiting clients with
  // UNAVAILABLE. Idempotent; call it before the listener ends, not from a callback.
  void Stop();

  // For Plane::kSession. Valid as long as the node.
  Acceptor session_acceptor();
  // Handles the deadlines that have come by the clock.
  void Tick();

  // Clients' calls. Job ids may be prefixes or "latest". Errors as in SchedulerCore; UNAVAILABLE once the store failed.
  absl::StatusOr<v1::SubmitJobResponse> Submit(v1::SubmitJobRequest request);  // reads the checkpoint it resumes
  absl::StatusOr<v1::JobStatus> Get(const std::string& job_id);
  v1::ListJobsResponse List();
  absl::StatusOr<v1::JobStatus> Cancel(const std::string& job_id, bool checkpoint_first);
  absl::StatusOr<v1::GetHistoryResponse> History(const std::string& job_id);
  v1::GetClusterResponse Cluster();

  // Orders a checkpoint; `done` is called once, on the timer thread or within this call: with the published checkpoint,
  // or ABORTED when the job ended before.
  using CheckpointDone = std::function<void(absl::StatusOr<v1::CheckpointRef>)>;
  void Checkpoint(const std::string& job_id, CheckpointDone done);

  // Calls `on_status` with the present status soon, then with every change, progress at most ten times a second, until
  // a status whose state is final. On the timer thread, one at a time; must not block and must not call Unwatch.
  // Returns a number for Unwatch. NOT_FOUND etc. as Get.
  using OnStatus = std::function<void(const v1::JobStatus&)>;
  absl::StatusOr<uint64_t> Watch(const std::string& job_id, OnStatus on_status);
  // Idempotent. A call under way may still end after it returns.
  void Unwatch(uint64_t watch);

  // OK, or what broke the store.
  absl::Status health() const;

 private:
  class SessionHandler;
  struct Watcher {
    std::string job_id;
    OnStatus on_status;
    absl::Time next = absl::InfinitePast();  // progress is not told before
    bool pending = true;
    v1::JobState told = v1::JOB_STATE_UNSPECIFIED;
  };
  struct CheckpointWaiter {
    std::string job_id;
    uint64_t timeline = 0, version = 0;  // done when a newer one is published
    CheckpointDone done;
  };
  struct Task {  // of the publisher
    std::string job_id, base;
    std::optional<v1::CheckpointManifest> manifest;  // publish
    std::vector<std::string> remove;                 // else
  };

  explicit SchedulerNode(const SchedulerOptions& options);

  // SchedulerActions; called by the core, so with mutex_ held.
  void Send(SessionId session, const v1::SchedulerMessage& message) override;
  void CloseSession(SessionId session, const absl::Status& status) override;
  void Persist(const v1::StoredJob& row) override;
  void Record(const std::string& job_id, const v1::RoundRecord& record) override;
  void Event(const std::string& job_id, const v1::JobEvent& event) override;
  void PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) override;
  void RemoveCheckpoints(const std::vector<std::string>& folders) override;
  void JobChanged(const std::string& job_id) override;

  std::shared_ptr<StreamHandler> Accept(std::shared_ptr<ByteStream> stream, const std::string& peer);
  void OnMessage(SessionId session, const grpc::ByteBuffer& buffer);
  void OnClosed(SessionId session);
  void TimerThread();
  void PublisherThread();
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { wake_ = true; }
  bool TimerAwake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || wake_; }
  bool PublisherAwake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !tasks_.empty(); }
  absl::Status Usable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // UNAVAILABLE: broken or ending
  void Break(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FlushHistory() ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls to clients that are due at `now`, to be made without the lock.
  std::vector<std::function<void()>> DueCalls(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextWake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<ResumeFrom>> ReadResume(v1::SubmitJobRequest* request) ABSL_LOCKS_EXCLUDED(mutex_);

  const SchedulerOptions options_;

  mutable absl::Mutex mutex_;
  SchedulerCore core_ ABSL_GUARDED_BY(mutex_);
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  SessionId last_session_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<SessionId, std::shared_ptr<ByteStream>> streams_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_watch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  std::vector<CheckpointWaiter> checkpoint_waiters_ ABSL_GUARDED_BY(mutex_);
  std::vector<HistoryEntry> history_ ABSL_GUARDED_BY(mutex_);  // not handed to the store yet
  absl::Time flush_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex history_mutex_;  // orders batches on their way to the store; taken before mutex_
  MetricHistory metrics_ ABSL_GUARDED_BY(history_mutex_);

  std::thread timer_, publisher_;
};

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_SCHEDULER_NODE_H_
