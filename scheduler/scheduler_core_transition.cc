// From one generation to the next: docs/protocol.md, rules 1 to 4 and 14.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/wire_format.h"
#include "scheduler/scheduler_core.h"

namespace sluice {

std::set<NodeKey> SchedulerCore::PlanServers(const v1::Plan& plan) const {
  std::set<NodeKey> servers;
  for (const v1::Chain& chain : plan.chains()) {
    for (const v1::Member& member : chain.members()) servers.insert(KeyOf(member.node()));
  }
  return servers;
}

std::set<NodeKey> SchedulerCore::PlanNodes(const v1::Plan& plan) const {
  std::set<NodeKey> nodes = PlanServers(plan);
  for (const v1::Rank& rank : plan.ranks()) nodes.insert(KeyOf(rank.node()));
  return nodes;
}

std::vector<const KnownNode*> SchedulerCore::LiveServers() const {
  std::vector<const KnownNode*> servers;
  for (const auto& [key, node] : nodes_) {
    if (node.info.role() == v1::SERVER && node.session != 0) servers.push_back(&node);
  }
  return servers;
}

std::vector<ServerSlot> SchedulerCore::ServerSlots(const JobEntry* except) const {
  std::vector<ServerSlot> slots;
  for (const KnownNode* node : LiveServers()) {
    const NodeKey key = KeyOf(node->info.node());
    slots.push_back({node->info.node(), node->info.address(), node->info.memory_limit(), MemoryUsed(key, except),
                     node->info.host_id()});
  }
  return slots;
}

uint64_t SchedulerCore::MemoryUsed(const NodeKey& server, const JobEntry* except) const {
  uint64_t bytes = 0;
  for (const auto& [sequence, job] : jobs_) {
    if (!job.started() || job.ended() || &job == except) continue;
    const ChunkTable table(job.parameters, job.chunk_elements, job.plan().shards());
    const uint64_t each = BytesPerParameter(job.spec());
    for (int shard = 0; shard < job.plan().chains_size(); ++shard) {
      for (const v1::Member& member : job.plan().chains(shard).members()) {
        if (KeyOf(member.node()) == server) bytes += ShardElements(table, static_cast<uint32_t>(shard)) * each;
      }
    }
  }
  return bytes;
}

void SchedulerCore::PersistThen(const JobEntry& job, const std::function<void()>& say) {
  if (options_.rules.persist_first) {
    actions_->Persist(job.row);
    say();
  } else {
    say();
    actions_->Persist(job.row);
  }
}

void SchedulerCore::Wait(JobEntry& job, const std::string& message, absl::Time now) {
  if (job.state() == v1::RECOVERING && job.row.status().message() == message) return;
  job.trouble_since = std::min(job.trouble_since, now);
  SetState(job, v1::RECOVERING, message);
  AddEvent(job, now, message);
  actions_->Persist(job.row);
}

void SchedulerCore::Returned(JobEntry& job, absl::Time now) {
  if (job.trouble_since == absl::InfiniteFuture()) return;
  AddEvent(job, now, absl::StrCat(absl::StrJoin(job.trouble, ", "), " came back; nothing was lost"));
  job.trouble.clear();
  job.trouble_since = absl::InfiniteFuture();
  SetState(job, job.heard ? v1::RUNNING : v1::STARTING, "");
  actions_->Persist(job.row);
}

void SchedulerCore::Consider(JobEntry& job, absl::Time now) {
  if (!GraceOver(now) || job.ended() || job.transition) return;
  if (!job.started()) return TryStart(job, now);
  const std::set<NodeKey> servers = PlanServers(job.plan());
  const bool server_lost =
      std::any_of(servers.begin(), servers.end(), [&](const NodeKey& key) { return job.lost.count(key) > 0; });
  const bool owed = job.row.generation() > job.plan().generation();
  if (job.lost.empty() && !owed) return Returned(job, now);
  bool gap = false;
  const std::vector<v1::Rank> ranks = NextRanks(job, &gap);
  if (gap) return Wait(job, GapText(job, ranks), now);
  if (server_lost && LiveServers().empty()) return Wait(job, "waiting for a server: none is there", now);
  Begin(job, now);
}

void SchedulerCore::Begin(JobEntry& job, absl::Time now) {
  job.row.set_generation(std::max(job.row.generation(), job.plan().generation()) + 1);
  job.transition = true;
  job.trouble_since = std::min(job.trouble_since, now);
  job.reports.clear();
  job.fenced.clear();
  for (const NodeKey& key : PlanServers(job.plan())) {
    if (job.lost.count(key) == 0 && Here(key)) job.fenced.insert(key);
  }
  job.waiting = job.fenced;
  SetState(job, v1::RECOVERING,
           job.trouble.empty() ? absl::StrCat("making generation ", job.row.generation())
                               : absl::StrCat("making generation ", job.row.generation(), " without ",
                                              absl::StrJoin(job.trouble, ", ")));
  PersistThen(job, [&] {
    for (const NodeKey& key : job.fenced) SendFence(job, key);
  });
  if (job.waiting.empty()) Publish(job, now);
}

void SchedulerCore::OnFenceReport(const NodeKey& from, const v1::FenceReport& report, absl::Time now) {
  JobEntry* const job = Active(report.job_id());
  if (job == nullptr || !job->transition || report.generation() != job->row.generation() ||
      report.plan_generation() != job->plan().generation() || job->waiting.erase(from) == 0) {
    return;
  }
  job->reports[from] = report;
  if (job->waiting.empty()) Publish(*job, now);
}

bool SchedulerCore::FillFromReports(const JobEntry& job, v1::Plan& plan) const {
  uint64_t start = UINT64_MAX;
  for (int shard = 0; shard < job.plan().chains_size(); ++shard) {
    bool survives = false;
    for (const v1::Member& member : job.plan().chains(shard).members()) {
      const auto report = job.reports.find(KeyOf(member.node()));
      if (report == job.reports.end() || job.lost.count(report->first) > 0) continue;
      for (const v1::ShardReport& copy : report->second.shards()) {
        if (copy.shard() != static_cast<uint32_t>(shard) || !copy.synced()) continue;
        survives = true;
        start = std::min(start, copy.min_version());
      }
    }
    if (!survives) return false;
  }
  plan.set_start(start);
  plan.clear_verdict();
  if (!options_.rules.verdict_carried) return true;
  for (const auto& [key, report] : job.reports) {
    for (const v1::ShardReport& copy : report.shards()) {
      for (const v1::Verdict& verdict : copy.verdicts()) {
        if (verdict.round() == start) *plan.mutable_verdict() = verdict;
      }
    }
  }
  return true;
}

absl::Status SchedulerCore::FillRewind(const JobEntry& job, v1::Plan& plan) const {
  const ChunkTable table(job.parameters, job.chunk_elements, plan.shards());
  auto chains = PlaceShards(table, BytesPerParameter(job.spec()), ServerSlots(&job), plan.generation());
  if (!chains.ok()) return chains.status();
  plan.clear_chains();
  for (v1::Chain& chain : *chains) *plan.add_chains() = std::move(chain);
  plan.clear_verdict();
  plan.set_timeline(plan.generation());
  if (const v1::CheckpointRef* point = RewindPoint(job); point != nullptr) {
    const v1::CheckpointRef ref = *point;  // may lie within the plan
    *plan.mutable_checkpoint() = ref;
    plan.set_start(ref.version());
  } else {
    plan.clear_checkpoint();
    plan.set_start(0);
  }
  return absl::OkStatus();
}

void SchedulerCore::Publish(JobEntry& job, absl::Time now) {
  v1::Plan plan = job.plan();
  plan.set_generation(job.row.generation());
  bool gap = false;
  const std::vector<v1::Rank> ranks = NextRanks(job, &gap);
  const bool rewind = !FillFromReports(job, plan);
  absl::Status placed = rewind ? FillRewind(job, plan) : absl::OkStatus();
  if (gap || !placed.ok()) {  // the transition stays owed: the persisted generation is newer than the plan
    job.transition = false;
    if (placed.ok()) return Consider(job, now);  // says which workers are missing
    return Wait(job, absl::StrCat("waiting for a server: ", std::string(placed.message())), now);
  }
  plan.clear_ranks();
  for (const v1::Rank& rank : ranks) *plan.add_ranks() = rank;
  plan.set_hash(PlanHash(plan));
  const std::set<NodeKey> before = PlanNodes(job.plan());
  Adopt(job, std::move(plan), rewind, now);
  NoteHosts(job);
  ClaimWorkers(job);
  PersistThen(job, [&] { SendPlanToAll(job, before); });
  if (job.row.order()) SendOrder(job, now);
  actions_->JobChanged(job.id());
}

void SchedulerCore::Adopt(JobEntry& job, v1::Plan plan, bool rewind, absl::Time now) {
  v1::JobStatus& status = *job.row.mutable_status();
  const auto inexact = [&] {
    const uint64_t exact = status.has_exact_until_round() ? status.exact_until_round() : UINT64_MAX;
    status.set_exact_until_round(std::min(exact, plan.start()));
  };
  std::string profile;
  for (int i = 0; i < plan.ranks_size() && i < job.row.numeric_profiles_size(); ++i) {
    if (plan.ranks(i).numeric_profile() == job.row.numeric_profiles(i)) continue;
    inexact();
    profile = plan.ranks(i).numeric_profile();
  }
  // What a lossy push encoding left out lies in the workers' memory (worker/push_encoder.h), and of the version that
  // the timeline began with in its checkpoint; in the beginning it is nothing.
  const v1::CheckpointRef& base = plan.checkpoint();
  const bool at_hand = plan.start() == base.version() && (!plan.has_checkpoint() || base.residuals() > 0 ||
                                                          base.directory() == job.row.begins().directory());
  int dropped = 0;
  for (int i = 0; ErrorFeedback(plan.spec()) && !at_hand && i < plan.ranks_size(); ++i) {
    const bool kept =
        !rewind && i < job.plan().ranks_size() && SameNode(plan.ranks(i).node(), job.plan().ranks(i).node());
    if (!kept) ++dropped;
  }
  if (dropped > 0 && plan.spec().train().mode() != v1::TrainSpec::ASYNC) inexact();  // async never is exact
  std::string text = absl::StrCat("generation ", plan.generation());
  if (!job.trouble.empty()) absl::StrAppend(&text, " without ", absl::StrJoin(job.trouble, ", "));
  if (job.trouble_since != absl::InfiniteFuture()) {
    absl::StrAppend(&text, " after ",
                    absl::FormatDuration(absl::Trunc(now - job.trouble_since, absl::Milliseconds(1))));
  }
  if (rewind) {
    absl::StrAppend(&text, ": a server's shards were lost; the job rewinds from round ", status.rounds_done(),
                    " to version ", plan.start(),
                    plan.has_checkpoint() ? absl::StrCat(" of ", plan.checkpoint().directory())
                                          : std::string(", its initial values"));
    status.set_rewinds(status.rewinds() + 1);
    status.set_rounds_done(plan.start());
    DropSnapshots(job);
    job.skipped = 0;
    job.skip_causes.clear();
  } else {
    absl::StrAppend(&text, ": goes on at round ", plan.start());
  }
  if (!profile.empty()) absl::StrAppend(&text, "; with a worker of another numeric profile, ", profile);
  if (dropped > 0) {
    absl::StrAppend(&text, "; what ", EncodingName(PushEncoding(plan.spec())), " had left out of the gradients of ",
                    dropped, " of ", plan.ranks_size(), " ranks is dropped");
  }
  status.set_recoveries(status.recoveries() + 1);
  status.set_generation(plan.generation());
  status.set_timeline(plan.timeline());
  *status.mutable_plan() = std::move(plan);
  job.transition = false;
  job.waiting.clear();
  job.fenced.clear();
  job.reports.clear();
  job.lost.clear();
  job.row.clear_lost();
  job.trouble.clear();
  job.trouble_since = absl::InfiniteFuture();
  job.final_shards.clear();
  job.heard = false;
  job.accusations.clear();
  job.pace.clear();
  SetState(job, v1::RECOVERING, text);
  AddEvent(job, now, text);
}

void SchedulerCore::SendPlanToAll(JobEntry& job, const std::set<NodeKey>& before) {
  const std::set<NodeKey> members = PlanNodes(job.plan());
  for (const NodeKey& key : before) {
    if (members.count(key) == 0) SendEndJob(job.id(), key);
  }
  for (const NodeKey& key : members) SendPlan(job, key);
}

}  // namespace sluice
