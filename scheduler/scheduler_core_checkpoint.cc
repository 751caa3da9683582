// Checkpoints: which versions, when one is whole, which to keep.
#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "common/wire_format.h"
#include "scheduler/scheduler_core.h"

namespace sluice {
namespace {

auto Age(const v1::CheckpointRef& ref) { return std::make_tuple(ref.timeline(), ref.version()); }

}  // namespace

std::string SchedulerCore::CheckpointBase(const JobEntry& job) const {
  const std::string& directory = job.spec().checkpoint().directory();
  return absl::StrCat(options_.checkpoint_root, "/", directory.empty() ? job.id() : directory);
}

bool SchedulerCore::CheckpointAt(const JobEntry& job, uint64_t version) const {
  const uint64_t every = job.spec().checkpoint().every_rounds();
  return version > 0 && (version == job.row.status().rounds() || (every > 0 && version % every == 0));
}

uint32_t SchedulerCore::ResidualRanksOf(const JobEntry& job) const {
  const bool kept = ErrorFeedback(job.spec()) && job.spec().train().mode() != v1::TrainSpec::ASYNC;
  return kept ? static_cast<uint32_t>(job.plan().ranks_size()) : 0;
}

const v1::CheckpointRef* SchedulerCore::RewindPoint(const JobEntry& job) const {
  for (int i = job.row.checkpoints_size(); i-- > 0;) {
    if (job.row.checkpoints(i).timeline() == job.plan().timeline()) return &job.row.checkpoints(i);
  }
  return job.plan().has_checkpoint() ? &job.plan().checkpoint() : nullptr;
}

bool SchedulerCore::FinalCheckpointPublished(const JobEntry& job) const {
  const v1::CheckpointRef* point = RewindPoint(job);
  return point != nullptr && point->version() == job.row.status().rounds();
}

// ---------------------------------------------------------------------------------------------------------- orders
absl::Status SchedulerCore::OrderCheckpoint(const std::string& job_id, absl::Time now) {
  JobEntry* const job = Active(job_id);
  if (job == nullptr) {
    const JobEntry* const known = this->job(job_id);
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job_id, " cannot write a checkpoint: it is ",
        known == nullptr ? std::string("unknown") : absl::AsciiStrToLower(v1::JobState_Name(known->state()))));
  }
  const bool outstanding = job->row.order() && job->ordered_version > job->row.status().rounds_done();
  job->row.set_order(true);
  job->order_failure.clear();
  actions_->Persist(job->row);
  if (!outstanding && !job->transition) SendOrder(*job, now);
  return absl::OkStatus();
}

void SchedulerCore::SendOrder(JobEntry& job, absl::Time now) {
  const uint64_t done = std::max(job.row.status().rounds_done(), job.plan().start());
  job.ordered_version = std::min(job.row.status().rounds(), done + job.order_step);
  if (CheckpointAt(job, job.ordered_version)) return;  // the servers write that one anyway
  v1::SchedulerMessage message;
  message.mutable_checkpoint()->set_job_id(job.id());
  message.mutable_checkpoint()->set_generation(job.plan().generation());
  message.mutable_checkpoint()->set_version(job.ordered_version);
  for (const NodeKey& key : PlanServers(job.plan())) Send(key, message);
}

void SchedulerCore::OrderDone(JobEntry& job, const std::string& failure) {
  job.row.set_order(false);
  job.ordered_version = 0;
  job.order_step = 2;
  job.order_failure = failure;
}

// ------------------------------------------------------------------------------------------------------- snapshots
void SchedulerCore::OnSnapshotDone(const NodeKey& from, const v1::SnapshotDone& done, absl::Time now) {
  JobEntry* const job = Active(done.job_id());
  if (job == nullptr || done.timeline() != job->plan().timeline() ||
      done.shard() >= static_cast<uint32_t>(job->plan().chains_size()) || done.version() > job->row.status().rounds()) {
    return;
  }
  const v1::Chain& chain = job->plan().chains(static_cast<int>(done.shard()));
  if (chain.members_size() == 0 || KeyOf(chain.members(chain.members_size() - 1).node()) != from) return;
  for (const v1::CheckpointRef& ref : job->row.checkpoints()) {
    if (ref.timeline() == done.timeline() && ref.version() >= done.version()) return;  // told again, or overtaken
  }
  if (!done.error().empty()) return SnapshotFailed(*job, done, now);
  const CheckpointKey key{done.timeline(), done.version()};
  SnapshotState& snapshot = job->snapshots[key];
  snapshot.files[done.shard()] = done.file();
  snapshot.files[done.shard()].set_shard(done.shard());
  if (snapshot.files.size() == job->plan().shards() && !snapshot.publishing && !snapshot.failed) {
    Publishable(*job, key, now);
  }
}

void SchedulerCore::SnapshotFailed(JobEntry& job, const v1::SnapshotDone& done, absl::Time now) {
  const CheckpointKey key{done.timeline(), done.version()};
  if (absl::StrContains(done.error(), "passed")) {
    // Only an order can come too late; versions of the spec are known from the start.
    const auto snapshot = job.snapshots.find(key);
    const bool had = snapshot != job.snapshots.end() && snapshot->second.files.count(done.shard()) > 0;
    if (had || done.version() != job.ordered_version || CheckpointAt(job, done.version()) || !job.row.order()) return;
    if (snapshot != job.snapshots.end()) job.snapshots.erase(snapshot);
    actions_->RemoveCheckpoints({absl::StrCat(CheckpointBase(job), "/", StagingFolderName(key.first, key.second))});
    job.order_step = std::min<uint64_t>(2 * job.order_step, uint64_t{1} << 20);
    if (!job.transition) SendOrder(job, now);
    return;
  }
  SnapshotState& snapshot = job.snapshots[key];
  if (snapshot.failed) return;
  snapshot.failed = true;
  const std::string text =
      absl::StrCat("checkpoint of version ", done.version(), " failed: shard ", done.shard(), ": ", done.error());
  if (done.version() == job.row.status().rounds()) return EndJob(job, v1::FAILED, text, now);
  AddEvent(job, now, text);
  job.row.mutable_status()->add_warnings(text);
  if (job.row.order() && done.version() >= job.ordered_version) {
    OrderDone(job, text);
    job.row.set_cancel_after_checkpoint(false);
  }
  actions_->Persist(job.row);
  actions_->RemoveCheckpoints({absl::StrCat(CheckpointBase(job), "/", StagingFolderName(key.first, key.second))});
  actions_->JobChanged(job.id());
}

void SchedulerCore::Publishable(JobEntry& job, const CheckpointKey& key, absl::Time now) {
  SnapshotState& snapshot = job.snapshots.at(key);
  snapshot.publishing = true;
  v1::CheckpointManifest manifest;
  manifest.set_job_id(job.id());
  manifest.set_timeline(key.first);
  manifest.set_version(key.second);
  *manifest.mutable_spec() = job.spec();
  manifest.set_parameters(job.parameters);
  manifest.set_chunk_elements(job.chunk_elements);
  manifest.set_shards(job.plan().shards());
  manifest.add_slots("value");
  for (const std::string& slot : OptimizerSlots(job.spec().optimizer())) manifest.add_slots(slot);
  for (uint32_t i = 0; i < ResidualRanksOf(job); ++i) manifest.add_slots(ResidualSlot(i));
  if (const v1::JobStatus& status = job.row.status(); status.has_exact_until_round()) {
    if (status.exact_until_round() <= key.second) manifest.set_exact_until_round(status.exact_until_round());
  }
  for (const auto& [shard, file] : snapshot.files) *manifest.add_files() = file;
  manifest.set_data_position(key.second * job.spec().train().batch());
  manifest.set_created_unix_seconds(absl::ToDoubleSeconds(now - absl::UnixEpoch()));
  actions_->PublishCheckpoint(CheckpointBase(job), manifest);
}

void SchedulerCore::OnPublished(const std::string& job_id, uint64_t timeline, uint64_t version,
                                const absl::StatusOr<std::string>& result, absl::Time now) {
  const auto found = by_id_.find(job_id);
  if (found == by_id_.end()) return;
  JobEntry& job = jobs_.at(found->second);
  job.snapshots.erase({timeline, version});
  v1::JobStatus& status = *job.row.mutable_status();
  const bool satisfies =
      job.row.order() && job.ordered_version > 0 && version >= job.ordered_version && timeline == job.plan().timeline();
  if (!result.ok()) {
    const std::string text =
        absl::StrCat("checkpoint of version ", version, " could not be published: ", result.status().ToString());
    if (!job.ended() && timeline == job.plan().timeline() && version == status.rounds()) {
      return EndJob(job, v1::FAILED, text, now);
    }
    AddEvent(job, now, text);
    status.add_warnings(text);
    if (satisfies) {
      OrderDone(job, text);
      job.row.set_cancel_after_checkpoint(false);
    }
    actions_->Persist(job.row);
    return actions_->JobChanged(job.id());
  }
  v1::CheckpointRef ref;
  ref.set_directory(*result);
  ref.set_timeline(timeline);
  ref.set_version(version);
  ref.set_residuals(ResidualRanksOf(job));
  auto* const all = job.row.mutable_checkpoints();
  const bool known = std::any_of(all->begin(), all->end(), [&](const auto& c) { return Age(c) == Age(ref); });
  if (!known) *all->Add() = ref;
  std::sort(all->begin(), all->end(), [](const auto& a, const auto& b) { return Age(a) < Age(b); });
  *status.mutable_last_checkpoint() = *all->rbegin();
  if (satisfies) OrderDone(job, "");
  const std::vector<std::string> pruned = Prune(job);
  actions_->Persist(job.row);
  if (!pruned.empty()) actions_->RemoveCheckpoints(pruned);
  AddEvent(job, now, absl::StrCat("checkpoint of version ", version, " published: ", *result));
  actions_->JobChanged(job.id());
  if (job.ended()) return;
  // With the last version nothing is left to cancel: the job succeeds.
  if (satisfies && job.row.cancel_after_checkpoint() && version < status.rounds()) {
    return EndJob(job, v1::CANCELLED, absl::StrCat("cancelled after the checkpoint of version ", version), now);
  }
  MaybeSucceeded(job, now);
}

std::vector<std::string> SchedulerCore::Prune(JobEntry& job) {
  std::vector<std::string> folders;
  auto* const all = job.row.mutable_checkpoints();
  const int keep = static_cast<int>(std::max(1u, job.spec().checkpoint().keep()));
  for (int i = 0; i + 1 < all->size() && all->size() > keep;) {  // the newest stays in any case
    const v1::CheckpointRef& ref = all->Get(i);
    if (job.plan().has_checkpoint() && job.plan().checkpoint().directory() == ref.directory()) {
      ++i;  // servers may still load it
      continue;
    }
    folders.push_back(ref.directory());
    all->erase(all->begin() + i);
  }
  return folders;
}

void SchedulerCore::DropSnapshots(JobEntry& job) {
  std::vector<std::string> folders;
  for (auto at = job.snapshots.begin(); at != job.snapshots.end();) {
    if (at->second.publishing) {  // may still become a checkpoint
      ++at;
      continue;
    }
    folders.push_back(absl::StrCat(CheckpointBase(job), "/", StagingFolderName(at->first.first, at->first.second)));
    at = job.snapshots.erase(at);
  }
  job.ordered_version = 0;
  if (!folders.empty()) actions_->RemoveCheckpoints(folders);
}

}  // namespace sluice
