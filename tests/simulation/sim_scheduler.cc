#include "tests/simulation/sim_scheduler.h"

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"

namespace sluice {
namespace {

SchedulerCoreOptions Options(const ProtocolRules& rules) {
  SchedulerCoreOptions o;
  o.lease = absl::Milliseconds(120);
  o.gather = absl::Milliseconds(5);
  o.checkpoint_root = "/checkpoints";
  o.rules = rules;
  return o;
}

}  // namespace

SimScheduler::SimScheduler(Cluster* cluster, LifeRef life)
    : cluster_(cluster), life_(std::move(life)), core_(Options(cluster->rules), this) {}

void SimScheduler::Restore() {
  std::vector<v1::StoredJob> rows;
  for (const auto& [sequence, row] : cluster_->disk) rows.push_back(row);
  core_.Restore(std::move(rows), cluster_->world.now());
  ArmTimer();
}

void SimScheduler::Submit(const v1::JobSpec& spec) {
  v1::SubmitJobRequest request;
  *request.mutable_spec() = spec;
  absl::StatusOr<v1::SubmitJobResponse> response = core_.Submit(request, std::nullopt, cluster_->world.now());
  if (!response.ok()) cluster_->Fail(response.status().ToString());
  ArmTimer();
}

SessionId SimScheduler::AddSession(std::shared_ptr<Link> link,
                                   std::function<void(const v1::SchedulerMessage&)> to_node) {
  const SessionId id = next_session_++;
  sessions_[id] = {std::move(link), std::move(to_node)};
  return id;
}

void SimScheduler::OnMessage(SessionId session, const v1::NodeMessage& message) {
  if (!sessions_.contains(session)) return;
  core_.OnMessage(session, message, cluster_->world.now());
  ArmTimer();
}

void SimScheduler::OnClosed(SessionId session) {
  if (sessions_.erase(session) == 0) return;
  core_.OnSessionClosed(session, cluster_->world.now());
  ArmTimer();
}

void SimScheduler::ArmTimer() {
  const absl::Time next = core_.NextDeadline();
  if (next >= armed_ || next == absl::InfiniteFuture()) return;
  armed_ = next;
  cluster_->world.After(std::max(absl::ZeroDuration(), next - cluster_->world.now()), life_,
                        [self = shared_from_this(), next] {
                          if (self->armed_ != next) return;
                          self->armed_ = absl::InfiniteFuture();
                          self->core_.OnTimer(self->cluster_->world.now());
                          self->ArmTimer();
                        });
}

void SimScheduler::Send(SessionId session, const v1::SchedulerMessage& message) {
  auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  if (message.has_plan()) cluster_->SawPlan(message.plan());
  it->second.link->ToB([to = it->second.to_node, message] { to(message); });
}

void SimScheduler::CloseSession(SessionId session, const absl::Status&) {
  auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  it->second.link->Break(/*graceful=*/true);
  sessions_.erase(it);
}

void SimScheduler::Persist(const v1::StoredJob& row) {
  if (cluster_->rules.persist_first) {
    cluster_->disk[row.sequence()] = row;
    return;
  }
  // Without the rule the disk lags behind what was said.
  cluster_->world.After(absl::Milliseconds(30), life_,
                        [self = shared_from_this(), row] { self->cluster_->disk[row.sequence()] = row; });
}

void SimScheduler::Event(const std::string& job_id, const v1::JobEvent& event) {
  cluster_->world.Log(absl::StrCat("event ", job_id, ": ", event.text()));
}

void SimScheduler::PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) {
  cluster_->world.After(cluster_->world.Delay() * 3, life_, [self = shared_from_this(), base, manifest] {
    SimCheckpoint& c = self->cluster_->storage[{manifest.timeline(), manifest.version()}];
    c.published = true;
    self->cluster_->CheckCheckpoint(manifest, c);
    self->core_.OnPublished(manifest.job_id(), manifest.timeline(), manifest.version(),
                            absl::StrCat(base, "/", CheckpointFolderName(manifest.timeline(), manifest.version())),
                            self->cluster_->world.now());
    self->ArmTimer();
  });
}

v1::JobState SimScheduler::state() const {
  const JobEntry* job = core_.job("sim-1");
  return job == nullptr ? v1::JOB_STATE_UNSPECIFIED : job->state();
}

std::string SimScheduler::message() const {
  const JobEntry* job = core_.job("sim-1");
  return job == nullptr ? "no job" : job->row.status().message();
}

void SimScheduler::JobChanged(const std::string&) {
  if (state() == v1::SUCCEEDED || state() == v1::FAILED || state() == v1::CANCELLED) cluster_->finished = true;
}

}  // namespace sluice
