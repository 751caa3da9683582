// The scheduler as a plain state machine: membership, queue, plans, generations, recovery, checkpoints, the jobs' ends.
//
// No locks, threads, clock, gRPC or files: events are method calls that carry the time, actions leave through
// SchedulerActions. SchedulerNode (scheduler_node.h) drives it in a daemon, the simulation on a simulated network.
// docs/protocol.md has the rules by number; its sections Generation and Chain are kept here.
//
//   scheduler_core.cc             sessions, leases, timers, restart
//   scheduler_core_jobs.cc        submission, queue, round records, the end
//   scheduler_core_workers.cc     which workers a job's ranks need, get and wait for
//   scheduler_core_transition.cc  from one generation to the next
//   scheduler_core_checkpoint.cc  orders, snapshots, publication, pruning
#ifndef SLUICE_SCHEDULER_SCHEDULER_CORE_H_
#define SLUICE_SCHEDULER_SCHEDULER_CORE_H_

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/protocol_rules.h"
#include "scheduler/placement.h"
#include "scheduler/resume.h"
#include "scheduler/scheduler_core_state.h"
#include "sluice/v1/checkpoint.pb.h"
#include "sluice/v1/scheduler.pb.h"
#include "sluice/v1/state.pb.h"

namespace sluice {

// What the core wants done, in this order. Calls must not enter the core again before the event that caused them has
// returned.
class SchedulerActions {
 public:
  virtual ~SchedulerActions() = default;
  virtual void Send(SessionId session, const v1::SchedulerMessage& message) = 0;
  // Nothing that comes from this session later reaches the core.
  virtual void CloseSession(SessionId session, const absl::Status& status) = 0;
  // The row is on disk when this returns. Where that fails the shell must stop executing actions, as if it had died.
  virtual void Persist(const v1::StoredJob& row) = 0;
  // Metric history and events: may reach the disk a little later.
  virtual void Record(const std::string& job_id, const v1::RoundRecord& record) = 0;
  virtual void Event(const std::string& job_id, const v1::JobEvent& event) = 0;
  // In the background: publish from the staging folder under `base`; answered by OnPublished.
  virtual void PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) = 0;
  // In the background: remove these checkpoint folders (published or staging).
  virtual void RemoveCheckpoints(const std::vector<std::string>& folders) = 0;
  // Its status is another than before.
  virtual void JobChanged(const std::string& job_id) = 0;
};

struct SchedulerCoreOptions {
  absl::Duration lease = absl::Seconds(2);
  // Membership events within so long after another one are handled together; a lone one at once. A queued job starts
  // when no node has registered for so long.
  absl::Duration gather = absl::Milliseconds(100);
  std::string checkpoint_root;
  ProtocolRules rules;
};

class SchedulerCore {
 public:
  // `actions` outlives the core.
  SchedulerCore(SchedulerCoreOptions options, SchedulerActions* actions);

  // After a restart, before any other event: every row that was persisted, in any order. Where a job was under way the
  // nodes have one lease to register again before anything is decided.
  void Restore(std::vector<v1::StoredJob> rows, absl::Time now);

  // ---- events from nodes. The first message of a session must be Register; a session that breaks the protocol is
  // closed.
  void OnMessage(SessionId session, const v1::NodeMessage& message, absl::Time now);
  // The stream broke or ended, whoever ended it.
  void OnSessionClosed(SessionId session, absl::Time now);

  // ---- events from the shell
  void OnTimer(absl::Time now);
  // When OnTimer wants to be called next; InfiniteFuture: not before another event. A call too early does no harm.
  absl::Time NextDeadline() const;
  // `result`: the published folder.
  void OnPublished(const std::string& job_id, uint64_t timeline, uint64_t version,
                   const absl::StatusOr<std::string>& result, absl::Time now);

  // ---- clients. Job ids are exact here (see Find).
  // INVALID_ARGUMENT: the spec; RESOURCE_EXHAUSTED: more memory than the servers have, or than any registered worker
  // may take for a rank, with the arithmetic; FAILED_PRECONDITION: what it would resume does not fit. `resume` where
  // spec.init.resume is set. A request id seen before returns that job.
  absl::StatusOr<v1::SubmitJobResponse> Submit(const v1::SubmitJobRequest& request,
                                               const std::optional<ResumeFrom>& resume, absl::Time now);
  // The job of an earlier submission with this request id, if any.
  const JobEntry* FindRequest(const std::string& request_id) const;
  // Ends the job, at once or (checkpoint_first) after the next possible checkpoint. An ended job stays as it is.
  absl::Status Cancel(const std::string& job_id, bool checkpoint_first, absl::Time now);
  // Orders a checkpoint of the next possible version. FAILED_PRECONDITION where the job has not started or has ended.
  absl::Status OrderCheckpoint(const std::string& job_id, absl::Time now);

  // An id, a unique prefix or "latest". NOT_FOUND / INVALID_ARGUMENT name the candidates.
  absl::StatusOr<std::string> Find(std::string_view id) const;
  // nullptr where there is none. Valid until the next event.
  const JobEntry* job(const std::string& job_id) const;
  // As clients see it: tokens per second and ETA filled in; the plan only with `with_plan`.
  v1::JobStatus Status(const JobEntry& job, bool with_plan) const;
  std::vector<std::string> JobIds() const;  // oldest first
  v1::GetClusterResponse Cluster() const;

 private:
  // ---- scheduler_core.cc
  void OnRegister(SessionId session, const v1::Register& message, absl::Time now);
  void Dispatch(const NodeKey& from, KnownNode& node, const v1::NodeMessage& message, absl::Time now);
  // After Welcome: what this node must know that it does not.
  void SendMissing(const NodeKey& key);
  bool Supersede(SessionId session, const v1::Register& message, absl::Time now);
  // Forgets the node; the caller calls Membership once it has said all that happened.
  void Gone(const NodeKey& key, const std::string& why, absl::Time now);
  // A membership event happened: considers all jobs now or, within `gather` of another one, a little later.
  void Membership(absl::Time now);
  void ConsiderAll(absl::Time now);
  bool GraceOver(absl::Time now) const;
  void EndGrace(absl::Time now);
  bool Here(const NodeKey& key) const { return nodes_.count(key) > 0; }
  // Sends to the node where it has a session; else it gets what it lacks when it registers.
  void Send(const NodeKey& key, const v1::SchedulerMessage& message);
  void SendPlan(const JobEntry& job, const NodeKey& key);
  void SendEndJob(const std::string& job_id, const NodeKey& key);
  void SendFence(const JobEntry& job, const NodeKey& key);

  // ---- scheduler_core_workers.cc
  std::vector<WorkerSlot> IdleWorkerSlots(const v1::JobSpec& spec) const;  // that can take a rank of it
  std::vector<const KnownNode*> IdleWorkers() const;                       // oldest registration first
  std::vector<WorkerSlot> AllWorkerSlots(const v1::JobSpec& spec) const;   // busy ones too
  // The plan's ranks with gaps filled; has_gap where idle workers do not suffice. A rank that has its worker keeps it.
  std::vector<v1::Rank> NextRanks(const JobEntry& job, bool* has_gap) const;
  Vacancy VacancyOf(const JobEntry& job, uint32_t rank) const;
  // What a job with a gap waits for.
  std::string GapText(const JobEntry& job, const std::vector<v1::Rank>& ranks) const;
  // Keeps in the row on which hosts the plan's ranks are.
  void NoteHosts(JobEntry& job) const;
  // RESOURCE_EXHAUSTED where none of the registered workers may ever hold the largest rank, with what would help.
  absl::Status CheckWorkerMemory(const v1::JobSpec& spec) const;
  // What a job that is submitted now will wait for, if anything: "" or a warning.
  std::string WorkersLacking(const v1::JobSpec& spec) const;
  std::string WaitsForWorkers(const JobEntry& job, const std::vector<WorkerSlot>& idle, size_t servers) const;
  // Makes it durable that the workers of this job's new plan are lost to the jobs that had them before.
  void ClaimWorkers(const JobEntry& job);

  // ---- scheduler_core_jobs.cc
  void TryStart(JobEntry& job, absl::Time now);
  void OnRoundRecord(const NodeKey& from, const v1::RoundRecord& record, absl::Time now);
  void CountSkips(JobEntry& job, const v1::RoundRecord& record, absl::Time now);
  void OnShardProgress(const NodeKey& from, const v1::ShardProgress& progress, absl::Time now);
  void OnProblem(const NodeKey& from, const v1::NodeProblem& problem, absl::Time now);
  void OnAccusation(const NodeKey& from, const v1::PeerAccusation& accusation, absl::Time now);
  void MaybeRunning(JobEntry& job, absl::Time now);
  void MaybeSucceeded(JobEntry& job, absl::Time now);
  void EndJob(JobEntry& job, v1::JobState state, const std::string& message, absl::Time now);
  void SetState(JobEntry& job, v1::JobState state, const std::string& message);
  void AddEvent(const JobEntry& job, absl::Time now, const std::string& text);
  JobEntry* Active(const std::string& job_id);  // started and not ended, else nullptr

  // ---- scheduler_core_host_sums.cc
  void OnHostSumFailure(const NodeKey& from, const v1::HostSumFailure& failure, absl::Time now);
  void AddHostSums(const JobEntry& job, v1::JobStatus* status) const;

  // ---- scheduler_core_transition.cc
  void Consider(JobEntry& job, absl::Time now);
  void Begin(JobEntry& job, absl::Time now);
  void OnFenceReport(const NodeKey& from, const v1::FenceReport& report, absl::Time now);
  void Publish(JobEntry& job, absl::Time now);
  // Start and verdict of the next plan where every shard survived; else false and nothing is changed.
  bool FillFromReports(const JobEntry& job, v1::Plan& plan) const;
  // Timeline, checkpoint, start and chains of a plan that rewinds; an error: servers do not suffice.
  absl::Status FillRewind(const JobEntry& job, v1::Plan& plan) const;
  // What the plan that was just made means for the job: counters, volatile state, event.
  void Adopt(JobEntry& job, v1::Plan plan, bool rewind, absl::Time now);
  void Wait(JobEntry& job, const std::string& message, absl::Time now);
  // All lost servers came back with what they held: the plan goes on.
  void Returned(JobEntry& job, absl::Time now);
  std::vector<const KnownNode*> LiveServers() const;
  std::vector<ServerSlot> ServerSlots(const JobEntry* except) const;  // live ones, memory_used without `except`
  std::set<NodeKey> PlanServers(const v1::Plan& plan) const;
  std::set<NodeKey> PlanNodes(const v1::Plan& plan) const;
  uint64_t MemoryUsed(const NodeKey& server, const JobEntry* except) const;  // bytes of all jobs' shards
  void SendPlanToAll(JobEntry& job, const std::set<NodeKey>& before);
  // Persists, then `say`; the other way round where the rule persist_first is off.
  void PersistThen(const JobEntry& job, const std::function<void()>& say);

  // ---- scheduler_core_checkpoint.cc
  void OnSnapshotDone(const NodeKey& from, const v1::SnapshotDone& done, absl::Time now);
  void SnapshotFailed(JobEntry& job, const v1::SnapshotDone& done, absl::Time now);
  void SendOrder(JobEntry& job, absl::Time now);
  void OrderDone(JobEntry& job, const std::string& failure);
  void Publishable(JobEntry& job, const CheckpointKey& key, absl::Time now);
  bool CheckpointAt(const JobEntry& job, uint64_t version) const;
  void DropSnapshots(JobEntry& job);
  // Takes what is too many out of the row; returns the folders, to be removed once the row is on disk.
  std::vector<std::string> Prune(JobEntry& job);
  std::string CheckpointBase(const JobEntry& job) const;
  // Newest published checkpoint of the present timeline, or what it began from; nullptr: initial values.
  const v1::CheckpointRef* RewindPoint(const JobEntry& job) const;
  bool FinalCheckpointPublished(const JobEntry& job) const;
  // Whose residuals the job's checkpoints hold; 0: its workers keep none.
  uint32_t ResidualRanksOf(const JobEntry& job) const;

  const SchedulerCoreOptions options_;
  SchedulerActions* const actions_;

  std::map<NodeKey, KnownNode> nodes_;
  std::map<SessionId, NodeKey> sessions_;  // registered ones
  std::set<SessionId> left_;               // of nodes that said Leaving; their stream may last a little longer
  std::map<uint64_t, JobEntry> jobs_;      // by sequence
  std::map<std::string, uint64_t> by_id_;
  std::map<std::string, uint64_t> by_request_;
  uint64_t registrations_ = 0;

  absl::Time grace_until_ = absl::InfinitePast();
  absl::Time last_membership_ = absl::InfinitePast();
  absl::Time consider_at_ = absl::InfiniteFuture();
  absl::Time settled_at_ = absl::InfinitePast();  // queued jobs start from here on
  absl::Time unsettled_since_ = absl::InfinitePast();
  bool settling_ = false;  // a timer at settled_at_ is wanted
  absl::Time last_event_ = absl::InfinitePast();
  std::map<std::string, uint64_t> newest_life_;  // by node name
};

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_SCHEDULER_CORE_H_
