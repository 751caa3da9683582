// SchedulerCore driven by hand: a clock that only the test moves, actions that are recorded, a store that survives
// restarts, and nodes that are nothing but what they last heard.
#ifndef SLUICE_TESTS_SCHEDULER_CORE_FIXTURE_H_
#define SLUICE_TESTS_SCHEDULER_CORE_FIXTURE_H_

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/layout.h"
#include "common/version.h"
#include "scheduler/scheduler_core.h"

namespace sluice {

// An MLP of 26 parameters, `workers` replicas, 10 rounds, a checkpoint every 4.
inline v1::JobSpec SmallSpec(uint32_t workers, const std::string& name = "small") {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.mutable_model()->mutable_mlp()->set_inputs(4);
  spec.mutable_model()->mutable_mlp()->add_hidden(3);
  spec.mutable_model()->mutable_mlp()->set_classes(2);
  spec.mutable_data()->mutable_idx()->set_images("images");
  spec.mutable_data()->mutable_idx()->set_labels("labels");
  spec.mutable_train()->set_rounds(10);
  spec.mutable_train()->set_batch(4);
  spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
  spec.mutable_parallel()->set_data(workers);
  spec.mutable_parallel()->set_chunk_elements(5);
  spec.mutable_checkpoint()->set_every_rounds(4);
  return spec;
}

class CoreFixture : public SchedulerActions {
 public:
  struct Node {
    v1::NodeRole role = v1::WORKER;
    uint64_t incarnation = 0;
    SessionId session = 0;  // 0: not connected
    std::string profile = "avx2/1";
    uint64_t memory_limit = 0;
    std::string host = "host";
    bool sums_on_host = false;
    bool serves_peers = true;
    std::vector<v1::SchedulerMessage> inbox;  // since the last Clear
    std::map<std::string, v1::Plan> plans;    // newest of each job
    absl::Status closed;                      // by the scheduler

    uint64_t generation(const std::string& job) const {
      const auto found = plans.find(job);
      return found == plans.end() ? 0 : found->second.generation();
    }
    int Count(v1::SchedulerMessage::KindCase kind) const {
      int n = 0;
      for (const auto& message : inbox) n += message.kind_case() == kind;
      return n;
    }
  };

  explicit CoreFixture(SchedulerCoreOptions options = {}) : options_(std::move(options)) {
    options_.checkpoint_root = "/checkpoints";
    core_ = std::make_unique<SchedulerCore>(options_, this);
    core_->Restore({}, now_);
  }

  // ---- nodes
  void Start(const std::string& name, v1::NodeRole role, const std::string& profile = "avx2/1",
             uint64_t memory_limit = 0, const std::string& host = "host") {
    Node& node = nodes_[name];
    node = Node();
    node.role = role;
    node.incarnation = ++lives_;
    node.profile = profile;
    node.memory_limit = memory_limit;
    node.host = host;
    Connect(name);
  }
  void Server(const std::string& name) { Start(name, v1::SERVER); }
  void Worker(const std::string& name) { Start(name, v1::WORKER); }
  // Opens a session and registers with what the node holds.
  void Connect(const std::string& name, uint32_t version = kProtocolVersion) {
    Node& node = nodes_.at(name);
    node.session = ++sessions_;
    node.closed = absl::OkStatus();
    by_session_[node.session] = name;
    v1::NodeMessage message;
    v1::Register& reg = *message.mutable_register_();
    reg.set_protocol_version(version);
    reg.set_role(node.role);
    *reg.mutable_node() = Id(name);
    reg.set_host_id(node.host);
    reg.set_sums_on_host(node.sums_on_host);
    reg.set_serves_peers(node.serves_peers);
    reg.set_address(name + ":1");
    reg.set_numeric_profile(node.profile);
    reg.set_memory_limit(node.memory_limit);
    for (const auto& [job, plan] : node.plans) {
      v1::JobGeneration* held = reg.add_jobs();
      held->set_job_id(job);
      held->set_generation(plan.generation());
    }
    core_->OnMessage(node.session, message, now_);
  }
  // The stream breaks; the node lives on.
  void Break(const std::string& name) {
    const SessionId session = nodes_.at(name).session;
    if (session == 0) return;
    nodes_.at(name).session = 0;
    by_session_.erase(session);
    core_->OnSessionClosed(session, now_);
  }
  void Kill(const std::string& name) {
    Break(name);
    nodes_.at(name).plans.clear();
    nodes_.at(name).incarnation = 0;
  }
  v1::NodeId Id(const std::string& name) const {
    v1::NodeId id;
    id.set_name(name);
    id.set_incarnation(nodes_.at(name).incarnation);
    return id;
  }
  Node& node(const std::string& name) { return nodes_.at(name); }
  std::map<std::string, Node>& nodes() { return nodes_; }
  void Say(const std::string& name, const v1::NodeMessage& message) {
    if (nodes_.at(name).session != 0) core_->OnMessage(nodes_.at(name).session, message, now_);
  }

  // ---- time. Nodes that are connected send heartbeats, except those named.
  void Advance(absl::Duration by, const std::set<std::string>& silent = {}) {
    const absl::Time end = now_ + by;
    while (now_ < end) {
      now_ = std::min(end, now_ + absl::Milliseconds(50));
      for (auto& [name, node] : nodes_) {
        if (node.session == 0 || silent.count(name) > 0) continue;
        v1::NodeMessage message;
        message.mutable_heartbeat();
        core_->OnMessage(node.session, message, now_);
      }
      if (now_ >= core_->NextDeadline()) core_->OnTimer(now_);
    }
  }
  void Settle() { Advance(absl::Milliseconds(300)); }
  absl::Time now() const { return now_; }

  // ---- the scheduler dies and comes back with what was persisted; all sessions break
  void Restart() {
    for (auto& [name, node] : nodes_) node.session = 0;
    by_session_.clear();
    core_ = std::make_unique<SchedulerCore>(options_, this);
    std::vector<v1::StoredJob> rows;
    for (const auto& [id, row] : disk) rows.push_back(row);
    core_->Restore(rows, now_);
  }
  void ConnectAll() {
    for (auto& [name, node] : nodes_) {
      if (node.session == 0 && node.incarnation != 0) Connect(name);
    }
  }

  // ---- jobs
  SchedulerCore& core() { return *core_; }
  std::string Submit(const v1::JobSpec& spec, const std::string& request = "") {
    v1::SubmitJobRequest submit;
    *submit.mutable_spec() = spec;
    submit.set_request_id(request);
    auto response = core_->Submit(submit, std::nullopt, now_);
    EXPECT_TRUE(response.ok()) << response.status();
    return response.ok() ? response->job_id() : "";
  }
  v1::JobStatus status(const std::string& job) { return core_->Status(*core_->job(job), true); }
  v1::JobState state(const std::string& job) { return core_->job(job)->state(); }
  const v1::Plan& plan(const std::string& job) { return core_->job(job)->plan(); }
  std::string Tail(const std::string& job, uint32_t shard) {
    const v1::Chain& chain = plan(job).chains(static_cast<int>(shard));
    return chain.members(chain.members_size() - 1).node().name();
  }
  std::set<std::string> PlanServers(const std::string& job) {
    std::set<std::string> names;
    for (const v1::Chain& chain : plan(job).chains()) names.insert(chain.members(0).node().name());
    return names;
  }
  std::set<std::string> PlanWorkers(const std::string& job) {
    std::set<std::string> names;
    for (const v1::Rank& rank : plan(job).ranks()) names.insert(rank.node().name());
    return names;
  }

  // Server `name` answers the fence: its shards stand at `version`.
  void Report(const std::string& job, const std::string& name, uint64_t version,
              std::optional<v1::Verdict> verdict = std::nullopt) {
    v1::NodeMessage message;
    v1::FenceReport& report = *message.mutable_fence_report();
    report.set_job_id(job);
    report.set_generation(core_->job(job)->row.generation());
    report.set_plan_generation(plan(job).generation());
    for (int shard = 0; shard < plan(job).chains_size(); ++shard) {
      if (plan(job).chains(shard).members(0).node().name() != name) continue;
      v1::ShardReport* copy = report.add_shards();
      copy->set_shard(static_cast<uint32_t>(shard));
      copy->set_synced(true);
      copy->set_min_version(version);
      copy->set_max_version(version + (shard % 2));
      if (verdict.has_value()) *copy->add_verdicts() = *verdict;
    }
    Say(name, message);
  }
  void ReportAll(const std::string& job, uint64_t version) {
    const std::set<std::string> servers = PlanServers(job);
    for (const std::string& name : servers) Report(job, name, version);
  }
  // The verdict holder tells of a round, or of the evaluation of a version.
  void Record(const std::string& job, uint64_t round, bool evaluation = false, bool skipped = false,
              std::vector<uint32_t> nonfinite = {}) {
    v1::NodeMessage message;
    v1::RoundRecord& record = *message.mutable_round_record();
    record.set_job_id(job);
    record.set_generation(plan(job).generation());
    record.set_timeline(plan(job).timeline());
    record.set_round(round);
    record.set_evaluation(evaluation);
    record.set_count(100);
    record.set_loss(1);
    record.set_skipped(skipped);
    for (const uint32_t c : nonfinite) record.add_nonfinite_contributors(c);
    Say(Tail(job, 0), message);
  }
  void Rounds(const std::string& job, uint64_t begin, uint64_t end) {
    for (uint64_t round = begin; round < end; ++round) Record(job, round);
  }
  void Snapshot(const std::string& job, uint64_t version, uint32_t shard, const std::string& error = "") {
    v1::NodeMessage message;
    v1::SnapshotDone& done = *message.mutable_snapshot_done();
    done.set_job_id(job);
    done.set_timeline(plan(job).timeline());
    done.set_version(version);
    done.set_shard(shard);
    done.mutable_file()->set_name("shard-" + std::to_string(shard));
    done.set_error(error);
    Say(Tail(job, shard), message);
  }
  // All shards of the version are written; the background publishes it.
  void Checkpoint(const std::string& job, uint64_t version) {
    for (uint32_t shard = 0; shard < plan(job).shards(); ++shard) Snapshot(job, version, shard);
    FinishPublishing();
  }
  void FinishPublishing() {
    while (!publishing.empty()) {
      const auto [base, manifest] = publishing.front();
      publishing.erase(publishing.begin());
      published.push_back(manifest);
      core_->OnPublished(manifest.job_id(), manifest.timeline(), manifest.version(),
                         base + "/t" + std::to_string(manifest.timeline()) + "-v" + std::to_string(manifest.version()),
                         now_);
    }
  }
  void Final(const std::string& job, uint32_t shard) {
    v1::NodeMessage message;
    v1::ShardProgress& progress = *message.mutable_shard_progress();
    progress.set_job_id(job);
    progress.set_generation(plan(job).generation());
    progress.set_shard(shard);
    progress.set_version(status(job).rounds());
    Say(Tail(job, shard), message);
  }
  // From round `begin` of the present generation to the job's end.
  void RunToEnd(const std::string& job, uint64_t begin) {
    const uint64_t rounds = status(job).rounds();
    Rounds(job, begin, rounds);
    for (uint32_t shard = 0; shard < plan(job).shards(); ++shard) Final(job, shard);
    Record(job, rounds, /*evaluation=*/true);
    if (state(job) != v1::SUCCEEDED) Checkpoint(job, rounds);
  }
  // A fence was sent to exactly these, with the present target generation.
  std::set<std::string> Fenced(const std::string& job) {
    std::set<std::string> names;
    for (const auto& [name, node] : nodes_) {
      for (const auto& message : node.inbox) {
        if (message.has_fence() && message.fence().job_id() == job &&
            message.fence().generation() == core_->job(job)->row.generation()) {
          names.insert(name);
        }
      }
    }
    return names;
  }
  void Clear() {
    for (auto& [name, node] : nodes_) node.inbox.clear();
  }
  bool HasEvent(const std::string& text) const {
    for (const std::string& event : events) {
      if (event.find(text) != std::string::npos) return true;
    }
    return false;
  }

  // ---- what the core did
  bool expect_persist_first = true;
  std::map<std::string, v1::StoredJob> disk;
  std::vector<std::string> events;
  std::vector<v1::RoundRecord> records;
  std::vector<std::pair<std::string, v1::CheckpointManifest>> publishing;
  std::vector<v1::CheckpointManifest> published;
  std::vector<std::string> removed;
  std::vector<v1::Plan> plans;                 // every one that was sent, in order
  std::vector<std::string> log;                // "persist g3", "fence g3", "plan g3": order of what counts
  std::map<std::string, uint64_t> generation;  // newest that left, by job

 private:
  void Send(SessionId session, const v1::SchedulerMessage& message) override {
    const auto found = by_session_.find(session);
    ASSERT_NE(found, by_session_.end()) << "sent on a session that is closed";
    Node& node = nodes_.at(found->second);
    if (message.has_fence()) {
      log.push_back("fence g" + std::to_string(message.fence().generation()));
    }
    if (message.has_plan()) {
      log.push_back("plan g" + std::to_string(message.plan().generation()));
      const auto layout = Layout::Make(message.plan());
      ASSERT_TRUE(layout.ok()) << layout.status();
      uint64_t& newest = generation[message.plan().job_id()];
      ASSERT_GE(message.plan().generation(), newest) << "generations only grow";
      newest = message.plan().generation();
      if (expect_persist_first) {
        ASSERT_GE(disk.at(message.plan().job_id()).generation(), newest) << "heard of before it was on disk";
      }
      if (message.plan().generation() > node.generation(message.plan().job_id())) {
        node.plans[message.plan().job_id()] = message.plan();
      }
      plans.push_back(message.plan());
    }
    if (message.has_end_job()) node.plans.erase(message.end_job().job_id());
    node.inbox.push_back(message);
  }
  void CloseSession(SessionId session, const absl::Status& status) override {
    const auto found = by_session_.find(session);
    ASSERT_NE(found, by_session_.end());
    if (Node& node = nodes_.at(found->second); node.session == session) {
      node.session = 0;
      node.closed = status;
    }
    by_session_.erase(found);
  }
  void Persist(const v1::StoredJob& row) override {
    v1::StoredJob& stored = disk[row.status().job_id()];
    EXPECT_GE(row.generation(), stored.generation()) << "generations only grow";
    stored = row;
    log.push_back("persist g" + std::to_string(row.generation()));
  }
  void Record(const std::string&, const v1::RoundRecord& record) override { records.push_back(record); }
  void Event(const std::string& job, const v1::JobEvent& event) override {
    events.push_back(job + ": " + event.text());
  }
  void PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) override {
    publishing.emplace_back(base, manifest);
  }
  void RemoveCheckpoints(const std::vector<std::string>& folders) override {
    removed.insert(removed.end(), folders.begin(), folders.end());
  }
  void JobChanged(const std::string&) override {}

  SchedulerCoreOptions options_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  uint64_t lives_ = 100;
  SessionId sessions_ = 0;
  std::map<std::string, Node> nodes_;
  std::map<SessionId, std::string> by_session_;
  std::unique_ptr<SchedulerCore> core_;
};

// Two servers, two workers, a job of two replicas that runs.
class RunningJob : public CoreFixture {
 public:
  explicit RunningJob(v1::JobSpec spec = SmallSpec(2)) {
    Server("s0");
    Server("s1");
    Worker("w0");
    Worker("w1");
    Settle();
    job = Submit(spec);
    Record(job, 0);
    Clear();
    log.clear();
    EXPECT_EQ(state(job), v1::RUNNING);
  }
  std::string job;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SCHEDULER_CORE_FIXTURE_H_
