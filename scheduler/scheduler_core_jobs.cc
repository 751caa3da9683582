// A job from its submission to its end.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/job_spec.h"
#include "common/mesh_rules.h"
#include "common/status_macros.h"
#include "common/wire_format.h"
#include "scheduler/scheduler_core.h"

namespace sluice {
namespace {

constexpr size_t kPaceRounds = 256;
constexpr absl::Duration kPaceTime = absl::Seconds(10);

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

std::string Count(uint64_t n, const char* what) { return absl::StrCat(n, " ", what, n == 1 ? "" : "s"); }

// Over the ranks.
v1::RoundTime MeanTime(const v1::RoundRecord& record) {
  v1::RoundTime mean;
  const double ranks = record.times_size();
  for (const v1::RankTime& time : record.times()) {
    mean.set_compute(mean.compute() + time.compute() / ranks);
    mean.set_exposed(mean.exposed() + time.exposed() / ranks);
    mean.set_others(mean.others() + time.others() / ranks);
    mean.set_verdict(mean.verdict() + time.verdict() / ranks);
    mean.set_pipeline(mean.pipeline() + time.pipeline() / ranks);
    mean.set_tensor(mean.tensor() + time.tensor() / ranks);
  }
  mean.set_total(mean.compute() + mean.exposed() + mean.others() + mean.verdict() + mean.pipeline() + mean.tensor());
  return mean;
}

void AddRoundTime(const JobEntry& job, v1::JobStatus* status) {
  double rounds = 0;
  for (const JobEntry::Pace& pace : job.pace) rounds += pace.time.total() > 0;
  if (rounds == 0) return;
  v1::RoundTime& mean = *status->mutable_round_time();
  for (const JobEntry::Pace& pace : job.pace) {
    mean.set_total(mean.total() + pace.time.total() / rounds);
    mean.set_compute(mean.compute() + pace.time.compute() / rounds);
    mean.set_exposed(mean.exposed() + pace.time.exposed() / rounds);
    mean.set_others(mean.others() + pace.time.others() / rounds);
    mean.set_verdict(mean.verdict() + pace.time.verdict() / rounds);
    mean.set_pipeline(mean.pipeline() + pace.time.pipeline() / rounds);
    mean.set_tensor(mean.tensor() + pace.time.tensor() / rounds);
  }
}

// By contributor; nothing where none has said anything.
void AddRankTimes(const JobEntry& job, v1::JobStatus* status) {
  const int ranks = job.plan().ranks_size();
  std::vector<v1::RoundTime> sums(static_cast<size_t>(ranks));
  std::vector<double> rounds(sums.size());
  for (const JobEntry::Pace& pace : job.pace) {
    for (const v1::RankTime& time : pace.ranks) {
      if (time.contributor() >= sums.size()) continue;
      v1::RoundTime& sum = sums[time.contributor()];
      ++rounds[time.contributor()];
      sum.set_compute(sum.compute() + time.compute());
      sum.set_exposed(sum.exposed() + time.exposed());
      sum.set_others(sum.others() + time.others());
      sum.set_verdict(sum.verdict() + time.verdict());
      sum.set_pipeline(sum.pipeline() + time.pipeline());
      sum.set_tensor(sum.tensor() + time.tensor());
    }
  }
  if (std::all_of(rounds.begin(), rounds.end(), [](double n) { return n == 0; })) return;
  for (size_t i = 0; i < sums.size(); ++i) {
    const double n = std::max(rounds[i], 1.0);
    v1::RoundTime& mean = *status->add_rank_times();
    mean.set_compute(sums[i].compute() / n);
    mean.set_exposed(sums[i].exposed() / n);
    mean.set_others(sums[i].others() / n);
    mean.set_verdict(sums[i].verdict() / n);
    mean.set_pipeline(sums[i].pipeline() / n);
    mean.set_tensor(sums[i].tensor() / n);
    mean.set_total(mean.compute() + mean.exposed() + mean.others() + mean.verdict() + mean.pipeline() + mean.tensor());
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- submission
const JobEntry* SchedulerCore::FindRequest(const std::string& request_id) const {
  if (request_id.empty()) return nullptr;
  const auto found = by_request_.find(request_id);
  return found == by_request_.end() ? nullptr : &jobs_.at(found->second);
}

absl::StatusOr<v1::SubmitJobResponse> SchedulerCore::Submit(const v1::SubmitJobRequest& request,
                                                            const std::optional<ResumeFrom>& resume, absl::Time now) {
  v1::SubmitJobResponse response;
  if (const JobEntry* before = FindRequest(request.request_id()); before != nullptr) {
    response.set_job_id(before->id());
    *response.mutable_spec() = before->spec();
    *response.mutable_warnings() = before->row.status().warnings();
    return response;
  }
  v1::JobSpec spec = request.spec();
  FillDefaults(&spec);
  RETURN_IF_ERROR(ValidateJobSpec(spec));
  ASSIGN_OR_RETURN(const ParameterSpace space, MakeParameterSpace(spec.model()));
  if (resume.has_value()) RETURN_IF_ERROR(CheckResume(spec, space.size(), *resume));

  const uint64_t each = BytesPerParameter(spec);
  uint64_t need = 0;
  const bool overflow = __builtin_mul_overflow(space.size(), each, &need);
  uint64_t limit = 0;
  bool limited = true;
  const std::vector<const KnownNode*> servers = LiveServers();
  for (const KnownNode* server : servers) {
    limited &= server->info.memory_limit() > 0;
    limit += server->info.memory_limit();
  }
  if (overflow || (!servers.empty() && limited && need > limit)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(space.size(), " parameters x ", each, " bytes (", BytesPerParameterText(spec),
                     ") = ", overflow ? std::string("more than 2^64") : absl::StrCat(need), " bytes on servers; ",
                     Count(servers.size(), "server"), " with ", limit,
                     " bytes together; start more servers, raise their --memory_limit or take a smaller model"));
  }
  RETURN_IF_ERROR(CheckWorkerMemory(spec));

  const uint64_t sequence = jobs_.empty() ? 1 : jobs_.rbegin()->first + 1;
  uint64_t number = 1;
  for (const auto& [at, job] : jobs_) number += job.spec().name() == spec.name();
  JobEntry& job = jobs_[sequence];
  job.parameters = space.size();
  job.chunk_elements =
      spec.parallel().chunk_elements() > 0 ? spec.parallel().chunk_elements() : DefaultChunkElements(space.size());
  job.rank_bytes = RankBytes(spec);
  job.row.set_sequence(sequence);
  job.row.set_request_id(request.request_id());
  v1::JobStatus& status = *job.row.mutable_status();
  status.set_job_id(absl::StrCat(spec.name(), "-", number));
  status.set_state(v1::QUEUED);
  status.set_rounds(spec.train().rounds());
  status.set_created_unix_seconds(UnixSeconds(now));
  status.set_parameters(space.size());
  if (resume.has_value()) {
    v1::CheckpointRef& begins = *job.row.mutable_begins();
    begins.set_directory(resume->directory);
    begins.set_timeline(resume->manifest.timeline());
    begins.set_version(resume->manifest.version());
    status.set_rounds_done(begins.version());
    ResumeResiduals(*resume, spec, &begins, &status);
    ResumeLayout(*resume, spec, &status);
  }
  status.add_warnings(spec.checkpoint().every_rounds() > 0
                          ? absl::StrCat("copies: 1: a lost server costs the rounds since the last published checkpoint"
                                         " (one every ",
                                         Count(spec.checkpoint().every_rounds(), "round"), ")")
                          : std::string("copies: 1 and checkpoint.every_rounds: 0: a lost server costs the whole run"));
  if (const std::string idle = IdleStages(spec); !idle.empty()) status.add_warnings(idle);
  *status.mutable_spec() = std::move(spec);
  by_id_[job.id()] = sequence;
  if (!request.request_id().empty()) by_request_[request.request_id()] = sequence;
  actions_->Persist(job.row);
  AddEvent(job, now, "submitted");
  response.set_job_id(job.id());
  *response.mutable_spec() = job.spec();
  *response.mutable_warnings() = job.row.status().warnings();
  if (const std::string lacking = WorkersLacking(job.spec()); !lacking.empty()) response.add_warnings(lacking);
  Consider(job, now);
  actions_->JobChanged(response.job_id());
  return response;
}

void SchedulerCore::TryStart(JobEntry& job, absl::Time now) {
  if (now < settled_at_) {
    settling_ = true;
    return;
  }
  const uint64_t gang = GangSize(job.spec().parallel());
  const std::vector<WorkerSlot> idle = IdleWorkerSlots(job.spec());
  const std::vector<ServerSlot> servers = ServerSlots(nullptr);
  std::string waits = WaitsForWorkers(job, idle, servers.size());
  v1::Plan plan;
  if (waits.empty()) {
    plan.set_shards(ShardCount(job.parameters, job.chunk_elements, static_cast<uint32_t>(servers.size())));
    auto chains = PlaceShards(ChunkTable(job.parameters, job.chunk_elements, plan.shards()),
                              BytesPerParameter(job.spec()), servers, 1);
    if (chains.ok()) {
      for (v1::Chain& chain : *chains) *plan.add_chains() = std::move(chain);
    } else {
      waits = absl::StrCat("waiting for memory on servers: ", std::string(chains.status().message()));
    }
  }
  if (!waits.empty()) {
    if (job.row.status().message() != waits) SetState(job, v1::QUEUED, waits);
    return;
  }
  const auto ranks = PlaceRanks(job.spec().parallel(), idle, job.rank_bytes);
  if (!ranks.ok()) return SetState(job, v1::QUEUED, std::string(ranks.status().message()));
  for (const v1::Rank& rank : *ranks) {
    *plan.add_ranks() = rank;
    job.row.add_numeric_profiles(rank.numeric_profile());
  }
  plan.set_job_id(job.id());
  plan.set_generation(1);
  plan.set_timeline(1);
  if (job.row.has_begins()) {
    *plan.mutable_checkpoint() = job.row.begins();
    plan.set_start(job.row.begins().version());
  }
  plan.set_chunk_elements(job.chunk_elements);
  plan.set_norm_block(NormBlockElements(job.parameters));
  plan.set_discipline(NeedsVerdict(job.spec()) ? v1::Plan::VERDICT : v1::Plan::STREAM);
  *plan.mutable_spec() = job.spec();
  plan.set_hash(PlanHash(plan));
  v1::JobStatus& status = *job.row.mutable_status();
  status.set_generation(1);
  status.set_timeline(1);
  status.set_started_unix_seconds(UnixSeconds(now));
  *status.mutable_plan() = std::move(plan);
  job.row.set_generation(1);
  SetState(job, v1::STARTING, "");
  NoteHosts(job);
  ClaimWorkers(job);
  PersistThen(job, [&] { SendPlanToAll(job, {}); });
  AddEvent(job, now,
           absl::StrCat("started on ", Count(gang, "worker"), " and ", Count(PlanServers(job.plan()).size(), "server"),
                        job.row.has_begins() ? absl::StrCat(" from version ", job.plan().start()) : std::string()));
}

// ------------------------------------------------------------------------------------------------------- progress
JobEntry* SchedulerCore::Active(const std::string& job_id) {
  const auto found = by_id_.find(job_id);
  if (found == by_id_.end()) return nullptr;
  JobEntry& job = jobs_.at(found->second);
  return job.started() && !job.ended() ? &job : nullptr;
}

void SchedulerCore::OnRoundRecord(const NodeKey& from, const v1::RoundRecord& record, absl::Time now) {
  JobEntry* const job = Active(record.job_id());
  // A record of an older generation of this timeline is as good: the round it tells of gives the same again.
  if (job == nullptr || record.timeline() != job->plan().timeline() || record.generation() > job->plan().generation() ||
      PlanNodes(job->plan()).count(from) == 0) {
    return;
  }
  v1::JobStatus& status = *job->row.mutable_status();
  const uint64_t rounds = status.rounds();
  if (record.round() >= rounds + (record.evaluation() ? 1 : 0)) return;
  actions_->Record(job->id(), record);
  const bool current = record.generation() == job->plan().generation();
  if (record.evaluation()) {
    *status.mutable_last_evaluation() = record;
    if (record.round() == rounds) actions_->Persist(job->row);
  } else {
    if (!status.has_last_train() || record.timeline() != status.last_train().timeline() ||
        record.round() >= status.last_train().round()) {
      *status.mutable_last_train() = record;
    }
    status.set_rounds_done(std::max(status.rounds_done(), record.round() + 1));
    job->pace.push_back({now, record.count(), MeanTime(record), {record.times().begin(), record.times().end()}});
    while (job->pace.size() > kPaceRounds || now - job->pace.front().at > kPaceTime) {
      if (job->pace.size() <= 2) break;
      job->pace.pop_front();
    }
    CountSkips(*job, record, now);
    if (job->ended()) return;
  }
  if (current) MaybeRunning(*job, now);
  actions_->JobChanged(job->id());
  MaybeSucceeded(*job, now);
}

void SchedulerCore::CountSkips(JobEntry& job, const v1::RoundRecord& record, absl::Time now) {
  if (job.skipped > 0 && record.round() <= job.skipped_last) return;  // told again
  if (!record.skipped()) {
    job.skipped = 0;
    job.skip_causes.clear();
    return;
  }
  ++job.skipped;
  job.skipped_last = record.round();
  for (const uint32_t contributor : record.nonfinite_contributors()) {
    if (contributor >= static_cast<uint32_t>(job.plan().ranks_size())) continue;
    job.skip_causes.insert(
        absl::StrCat(job.plan().ranks(static_cast<int>(contributor)).node().name(), " (rank ", contributor, ")"));
  }
  const std::string cause = job.skip_causes.empty()
                                ? std::string("no finite gradient norm or no samples")
                                : absl::StrCat("non-finite gradients from ", absl::StrJoin(job.skip_causes, ", "));
  if (job.skipped == 1) AddEvent(job, now, absl::StrCat("round ", record.round(), " skipped: ", cause));
  const uint64_t most = std::max(1u, job.spec().train().max_skipped_rounds());
  if (job.skipped < most) return;
  EndJob(job, v1::FAILED,
         absl::StrCat(job.skipped, " rounds in a row were skipped, up to round ", record.round(), ": ", cause,
                      "; lower the learning rate or check the data (train.max_skipped_rounds is ", most, ")"),
         now);
}

void SchedulerCore::OnShardProgress(const NodeKey& from, const v1::ShardProgress& progress, absl::Time now) {
  JobEntry* const job = Active(progress.job_id());
  if (job == nullptr || progress.generation() != job->plan().generation() ||
      progress.shard() >= static_cast<uint32_t>(job->plan().chains_size())) {
    return;
  }
  const v1::Chain& chain = job->plan().chains(static_cast<int>(progress.shard()));
  if (chain.members_size() == 0 || KeyOf(chain.members(chain.members_size() - 1).node()) != from) return;
  MaybeRunning(*job, now);
  if (progress.version() != job->row.status().rounds()) return;
  job->final_shards.insert(progress.shard());
  MaybeSucceeded(*job, now);
}

void SchedulerCore::MaybeRunning(JobEntry& job, absl::Time now) {
  if (job.heard || job.transition) return;
  job.heard = true;
  if (job.trouble_since != absl::InfiniteFuture()) return;  // it waits for somebody
  SetState(job, v1::RUNNING, "");
  actions_->Persist(job.row);
}

void SchedulerCore::MaybeSucceeded(JobEntry& job, absl::Time now) {
  if (job.ended() || job.transition || job.final_shards.size() != job.plan().shards()) return;
  const v1::RoundRecord& evaluation = job.row.status().last_evaluation();
  if (!job.row.status().has_last_evaluation() || evaluation.round() != job.row.status().rounds() ||
      evaluation.timeline() != job.plan().timeline() || !FinalCheckpointPublished(job)) {
    return;
  }
  job.row.mutable_status()->set_rounds_done(job.row.status().rounds());
  EndJob(job, v1::SUCCEEDED, "", now);
}

void SchedulerCore::OnProblem(const NodeKey& from, const v1::NodeProblem& problem, absl::Time now) {
  JobEntry* const job = Active(problem.job_id());
  if (job == nullptr || problem.generation() < job->plan().generation() || job->lost.count(from) > 0 ||
      PlanNodes(job->plan()).count(from) == 0) {
    return;
  }
  EndJob(*job, v1::FAILED,
         absl::StrCat(from.name, ": ", absl::StatusCodeToString(static_cast<absl::StatusCode>(problem.code())), ": ",
                      problem.message()),
         now);
}

void SchedulerCore::OnAccusation(const NodeKey& from, const v1::PeerAccusation& accusation, absl::Time now) {
  JobEntry* const job = Active(accusation.job_id());
  if (job == nullptr || accusation.generation() != job->plan().generation()) return;
  const NodeKey peer = KeyOf(accusation.peer());
  const std::string text =
      absl::StrCat(from.name, " cannot reach ", peer.name,
                   Here(peer) ? " although it has a session" : ", which is gone", ": ", accusation.message());
  // The lease of a dead peer decides by itself; of a live one people must know.
  if (job->accusations.insert(absl::StrCat(from.name, "/", peer.name)).second) AddEvent(*job, now, text);
}

// ------------------------------------------------------------------------------------------------------------ end
absl::Status SchedulerCore::Cancel(const std::string& job_id, bool checkpoint_first, absl::Time now) {
  const auto found = by_id_.find(job_id);
  if (found == by_id_.end()) return absl::NotFoundError(absl::StrCat("no job ", job_id));
  JobEntry& job = jobs_.at(found->second);
  if (job.ended()) return absl::OkStatus();
  if (!checkpoint_first || !job.started()) {
    EndJob(job, v1::CANCELLED, "cancelled", now);
    return absl::OkStatus();
  }
  job.row.set_cancel_after_checkpoint(true);
  AddEvent(job, now, "will be cancelled after a checkpoint");
  return OrderCheckpoint(job_id, now);
}

void SchedulerCore::EndJob(JobEntry& job, v1::JobState state, const std::string& message, absl::Time now) {
  std::set<NodeKey> members = PlanNodes(job.plan());
  for (const auto& [key, node] : nodes_) {
    if (node.jobs.count(job.id()) > 0) members.insert(key);
  }
  job.transition = false;
  job.row.set_order(false);
  job.row.set_cancel_after_checkpoint(false);
  job.row.mutable_status()->set_ended_unix_seconds(UnixSeconds(now));
  SetState(job, state, message);
  PersistThen(job, [&] {
    for (const NodeKey& key : members) SendEndJob(job.id(), key);
  });
  DropSnapshots(job);
  const std::string text = absl::AsciiStrToLower(v1::JobState_Name(state));
  AddEvent(job, now, message.empty() || message == text ? text : absl::StrCat(text, ": ", message));
  ConsiderAll(now);
}

void SchedulerCore::SetState(JobEntry& job, v1::JobState state, const std::string& message) {
  job.row.mutable_status()->set_state(state);
  job.row.mutable_status()->set_message(message);
  actions_->JobChanged(job.id());
}

void SchedulerCore::AddEvent(const JobEntry& job, absl::Time now, const std::string& text) {
  v1::JobEvent event;
  event.set_unix_seconds(UnixSeconds(now));
  event.set_text(text);
  actions_->Event(job.id(), event);
}

// -------------------------------------------------------------------------------------------------------- reading
const JobEntry* SchedulerCore::job(const std::string& job_id) const {
  const auto found = by_id_.find(job_id);
  return found == by_id_.end() ? nullptr : &jobs_.at(found->second);
}

std::vector<std::string> SchedulerCore::JobIds() const {
  std::vector<std::string> ids;
  for (const auto& [sequence, job] : jobs_) ids.push_back(job.id());
  return ids;
}

absl::StatusOr<std::string> SchedulerCore::Find(std::string_view id) const {
  if (jobs_.empty()) return absl::NotFoundError("there are no jobs yet");
  if (id == "latest") return jobs_.rbegin()->second.id();
  if (id.empty()) return absl::InvalidArgumentError("expected a job's id, a unique prefix of one, or \"latest\"");
  std::vector<std::string> matches;
  for (const auto& [sequence, job] : jobs_) {
    if (job.id() == id) return job.id();
    if (std::string_view(job.id()).substr(0, id.size()) == id) matches.push_back(job.id());
  }
  if (matches.size() == 1) return matches[0];
  const std::string asked(id);
  if (matches.empty()) {
    return absl::NotFoundError(absl::StrCat("no job \"", asked, "\"; the newest is ", jobs_.rbegin()->second.id(),
                                            ", `sluice list` shows all"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", asked, "\" is the beginning of several jobs: ", absl::StrJoin(matches, ", ")));
}

v1::JobStatus SchedulerCore::Status(const JobEntry& job, bool with_plan) const {
  v1::JobStatus status = job.row.status();
  AddHostSums(job, &status);
  if (with_plan) {
    AddRankTimes(job, &status);
  } else {
    status.clear_plan();
  }
  AddRoundTime(job, &status);
  if (job.state() != v1::RUNNING || job.pace.size() < 2) return status;
  const double seconds = absl::ToDoubleSeconds(job.pace.back().at - job.pace.front().at);
  if (seconds <= 0) return status;
  double tokens = 0;  // of the rounds after the first: those fell into this time
  for (size_t i = 1; i < job.pace.size(); ++i) tokens += job.pace[i].count;
  status.set_tokens_per_second(tokens / seconds);
  const double each = seconds / static_cast<double>(job.pace.size() - 1);
  const uint64_t left = status.rounds() - std::min(status.rounds(), status.rounds_done());
  status.set_eta_seconds(static_cast<uint64_t>(std::ceil(each * static_cast<double>(left))));
  return status;
}

}  // namespace sluice
