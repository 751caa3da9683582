#include "server/shard_core.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace sluice {
namespace {

constexpr size_t kMaxFaultsTold = 64;

// In order of slots, whatever the order of arrival.
double Sum(const std::vector<double>& counts) { return std::accumulate(counts.begin(), counts.end(), 0.0); }

}  // namespace

ShardCore::ShardCore(std::string job_id, v1::NodeId self, const ProtocolRules& rules, ShardActions* actions,
                     std::shared_ptr<HoldBudget> hold)
    : job_id_(std::move(job_id)),
      self_(std::move(self)),
      rules_(rules),
      actions_(actions),
      hold_(std::move(hold), rules) {}

// ---------------------------------------------------------------------------------------------------- scheduler

bool ShardCore::Accepts(const Layout& layout) const {
  return layout.generation() > generation() && (!rules_.fencing || layout.generation() >= fence_);
}

void ShardCore::OnPlan(std::shared_ptr<const Layout> layout, const std::vector<v1::ChunkCut>& cuts) {
  if (!Accepts(*layout)) return;
  const uint64_t old_timeline = layout_ ? layout_->plan().timeline() : 0;
  layout_ = std::move(layout);
  hold_.Clear();
  // Streams of older generations end; workers open new ones.
  for (auto it = streams_.begin(); it != streams_.end();) {
    if (it->second.hello.generation() < generation()) {
      actions_->CloseStream(it->first, absl::AbortedError(absl::StrCat("generation ", it->second.hello.generation(),
                                                                       " ended; now ", generation())));
      it = streams_.erase(it);
    } else {
      ++it;
    }
  }
  training_.clear();
  evaluation_.clear();
  decided_.clear();
  stream_sums_.clear();
  stream_faults_.clear();
  faults_told_.clear();
  recorded_at_ = absl::InfinitePast();
  times_.Clear();
  if (layout_->plan().timeline() != old_timeline) {
    recorded_ = 0;
    records_.clear();
    ordered_.clear();
    actions_->AbandonSnapshots();
  }
  if (layout_->plan().has_verdict() && rules_.verdict_carried) {
    decided_[layout_->plan().verdict().round()] = layout_->plan().verdict();
  }
  MakeShards(old_timeline, cuts);
  MakeBook(layout_->plan().timeline() != old_timeline, cuts);
  if (is_holder() && !async() && layout_->plan().discipline() == v1::Plan::STREAM) {
    // Chunks that are past the open round give no sum for it any more.
    for (uint64_t chunk : shards_.at(0).chunks)
      stream_sums_[layout_->plan().start()] += chunks_.at(chunk).version > layout_->plan().start();
  }
  for (auto& [index, shard] : shards_) Progress(index);

  std::vector<StreamId> parked;
  for (auto& [id, stream] : streams_) {
    if (stream.parked && stream.hello.generation() == generation()) parked.push_back(id);
  }
  for (StreamId id : parked) {
    if (absl::Status status = Replay(id); !status.ok()) {
      actions_->CloseStream(id, status);
      OnStreamClosed(id);
    }
  }
  std::deque<std::pair<v1::NormReport, v1::NodeId>> norms;
  norms.swap(parked_norms_);
  for (auto& [report, from] : norms) OnNorm(report, from).IgnoreError();
}

uint64_t ShardCore::RoundOf(const Chunk& chunk) const {
  return async() ? chunk.applied.size() / layout_->batch() : chunk.version;
}

void ShardCore::MakeShards(uint64_t old_timeline, const std::vector<v1::ChunkCut>& cuts) {
  const ChunkTable& table = layout_->table();
  const v1::Plan& plan = layout_->plan();
  const uint64_t base = plan.has_checkpoint() ? plan.checkpoint().version() : 0;
  for (uint32_t s = 0; s < table.shards(); ++s) {
    uint64_t since = 0;
    for (const v1::Member& m : plan.chains(s).members()) {
      if (SameNode(m.node(), self_)) since = m.since();
    }
    auto held = shards_.find(s);
    const bool keep =
        since != 0 && held != shards_.end() && held->second.since == since && plan.timeline() == old_timeline;
    if (!keep && held != shards_.end()) {
      for (uint64_t chunk : held->second.chunks) {
        actions_->DropChunk(chunk);
        chunks_.erase(chunk);
      }
      shards_.erase(held);
    }
    if (since == 0) continue;
    Shard& shard = shards_[s];
    if (!keep) {
      shard.since = since;
      for (const uint64_t chunk : table.chunks_of(s)) {
        shard.chunks.push_back(chunk);
        Chunk& c = chunks_[chunk];
        c.shard = s;
        c.version = base;
        if (async()) {
          const v1::ChunkCut cut = CutOf(*layout_, cuts, chunk);
          c.version = cut.contributions();
          c.applied = AppliedOf(cut);
        }
        actions_->LoadChunk(layout_, chunk, c.version);
      }
    }
    shard.summed = 0;
    shard.norm_sent = shard.progress_sent = false;
    if (plan.has_verdict() && rules_.verdict_carried) shard.verdicts[plan.verdict().round()] = plan.verdict();
    for (uint64_t chunk : shard.chunks) {
      Chunk& c = chunks_[chunk];
      ForgetRound(&c, layout_->contributors(chunk));
      c.subscribers.clear();
      if (keep) actions_->DiscardSum(chunk);
    }
  }
}

void ShardCore::ForgetRound(Chunk* chunk, uint32_t contributors) {
  chunk->held.assign(contributors, false);
  chunk->held_count = 0;
  chunk->counts.assign(contributors, 0);
  chunk->sum_posted = false;
  chunk->sum.reset();
}

void ShardCore::OnFence(uint64_t generation) {
  if (generation < fence_ || generation <= this->generation()) return;
  if (rules_.fencing) fence_ = generation;
  v1::NodeMessage message;
  *message.mutable_fence_report() = MakeFenceReport();
  message.mutable_fence_report()->set_generation(generation);
  actions_->SendToScheduler(message);
}

v1::FenceReport ShardCore::MakeFenceReport() const {
  v1::FenceReport report;
  report.set_job_id(job_id_);
  report.set_plan_generation(generation());
  for (const auto& [index, shard] : shards_) {
    if (shard.chunks.empty()) continue;  // has no version
    v1::ShardReport* r = report.add_shards();
    r->set_shard(index);
    r->set_synced(true);
    uint64_t low = UINT64_MAX, high = 0;
    for (uint64_t chunk : shard.chunks) {
      low = std::min(low, RoundOf(chunks_.at(chunk)));
      high = std::max(high, RoundOf(chunks_.at(chunk)));
    }
    r->set_min_version(low);
    r->set_max_version(high);
    // A verdict is a fact once a copy applied under it; one that is merely known may stand as well.
    for (const auto& [round, verdict] : shard.verdicts) *r->add_verdicts() = verdict;
  }
  return report;
}

void ShardCore::OnCheckpointOrder(const v1::CheckpointOrder& order) {
  if (!layout_ || order.generation() != generation() || Fenced())
    return;  // the scheduler orders again after a transition
  bool passed = false;
  for (const auto& [index, chunk] : chunks_) passed |= RoundOf(chunk) >= order.version();
  if (!passed) {
    // The chunks of a shard are at most one version apart: what all have passed will not come again.
    uint64_t low = UINT64_MAX;
    for (const auto& [index, chunk] : chunks_) low = std::min(low, RoundOf(chunk));
    ordered_.erase(ordered_.begin(), ordered_.upper_bound(low));
    ordered_.insert(order.version());
    return;
  }
  for (const auto& [index, shard] : shards_) {
    v1::NodeMessage message;
    v1::SnapshotDone* done = message.mutable_snapshot_done();
    done->set_job_id(job_id_);
    done->set_timeline(layout_->plan().timeline());
    done->set_version(order.version());
    done->set_shard(index);
    done->set_error(absl::StrCat("passed: shard ", index, " is at or past version ", order.version()));
    actions_->SendToScheduler(message);
  }
}

void ShardCore::OnSchedulerConnected() {
  for (const v1::NodeMessage& record : records_) actions_->SendToScheduler(record);
  for (auto& [index, shard] : shards_) {
    shard.progress_sent = false;
    Progress(index);
  }
}

void ShardCore::Progress(uint32_t index) {
  Shard& shard = shards_.at(index);
  if (shard.progress_sent) return;
  for (uint64_t chunk : shard.chunks) {
    if (RoundOf(chunks_.at(chunk)) < layout_->rounds()) return;
  }
  shard.progress_sent = true;
  v1::NodeMessage message;
  v1::ShardProgress* progress = message.mutable_shard_progress();
  progress->set_job_id(job_id_);
  progress->set_generation(generation());
  progress->set_shard(index);
  progress->set_version(layout_->rounds());
  actions_->SendToScheduler(message);
}

// --------------------------------------------------------------------------------------------------------- rounds

void ShardCore::ChunkComplete(uint64_t index, Chunk* chunk) {
  const uint64_t round = chunk->version;
  chunk->sum_posted = true;
  if (layout_->plan().discipline() == v1::Plan::STREAM) {
    actions_->FinishSum(index, generation(), round);
    v1::Verdict verdict;
    verdict.set_round(round);
    const double count = Sum(chunk->counts);
    verdict.set_count(count);
    verdict.set_skip(count == 0);
    verdict.set_gradient_scale(count == 0 ? 0 : static_cast<float>(1 / count));
    ApplyChunk(index, chunk, verdict, /*skip_nonfinite=*/true);
    Progress(chunk->shard);
    TryRecord(round);
    return;
  }
  actions_->FinishSum(index, generation(), round);
}

void ShardCore::OnSum(uint64_t index, uint64_t generation, uint64_t round, SumResult result) {
  if (generation != this->generation() || Fenced()) return;
  for (uint32_t& contributor : result.nonfinite_contributors) contributor = layout_->rank_of_slot(index, contributor);
  auto it = chunks_.find(index);
  if (it == chunks_.end()) return;
  Chunk& chunk = it->second;
  if (layout_->plan().discipline() == v1::Plan::STREAM) {
    if (!result.finite) {
      LOG_WARN("job {} round {} chunk {}: the sum is not finite, the chunk keeps its value; contributors: {}", job_id_,
               round, index, fmt::join(result.nonfinite_contributors, ", "));
    }
    OnStreamSum(chunk.shard, round, result);
    return;
  }
  if (round != chunk.version || chunk.sum) return;
  chunk.sum = std::move(result);
  Shard& shard = shards_.at(chunk.shard);
  ++shard.summed;
  TryNorm(chunk.shard);
}

void ShardCore::OnStreamSum(uint32_t shard, uint64_t round, const SumResult& result) {
  if (!result.finite) {
    v1::NormReport report;
    report.set_job_id(job_id_);
    report.set_generation(generation());
    report.set_round(round);
    report.set_shard(shard);
    report.set_finite(false);
    report.mutable_nonfinite_contributors()->Add(result.nonfinite_contributors.begin(),
                                                 result.nonfinite_contributors.end());
    if (is_holder()) {
      NoteNonfinite(report);
    } else {
      if (faults_told_.size() == kMaxFaultsTold) faults_told_.pop_front();
      faults_told_.push_back(report);
      actions_->SendNorm(layout_->primary(0), report);
    }
  }
  if (shard == 0 && is_holder()) {
    ++stream_sums_[round];
    TryRecord(round);
  }
}

void ShardCore::TryNorm(uint32_t index) {
  Shard& shard = shards_.at(index);
  if (shard.chunks.empty() || shard.summed != shard.chunks.size()) return;
  const uint64_t round = chunks_.at(shard.chunks[0]).version;
  if (auto it = shard.verdicts.find(round); it != shard.verdicts.end()) {
    ApplyShards({index}, it->second);  // carried: a fact, never derived anew
    return;
  }
  if (shard.norm_sent) return;
  shard.norm_sent = true;
  SendNormOf(index);
}

void ShardCore::SendNormOf(uint32_t index) {
  const Shard& shard = shards_.at(index);
  v1::NormReport report;
  report.set_job_id(job_id_);
  report.set_generation(generation());
  report.set_round(chunks_.at(shard.chunks[0]).version);
  report.set_shard(index);
  report.set_finite(true);
  std::set<uint32_t> nonfinite;
  for (uint64_t chunk : shard.chunks) {
    const Chunk& c = chunks_.at(chunk);
    report.set_finite(report.finite() && c.sum->finite);
    nonfinite.insert(c.sum->nonfinite_contributors.begin(), c.sum->nonfinite_contributors.end());
    // Of the largest, so that a disagreement between chunks of one shard is seen by the holder too.
    report.set_count(std::max(report.count(), Sum(c.counts)));
    for (const auto& [block, sum] : c.sum->blocks) {
      report.add_block(block);
      report.add_sum(sum);
    }
    for (const v1::NormFragment& f : c.sum->fragments) *report.add_fragments() = f;
  }
  report.mutable_nonfinite_contributors()->Add(nonfinite.begin(), nonfinite.end());
  if (is_holder()) {
    OnNorm(report, self_).IgnoreError();
  } else {
    actions_->SendNorm(layout_->primary(0), report);
  }
}

void ShardCore::OnHolderConnected() {
  if (!layout_ || is_holder()) return;
  for (const v1::NormReport& report : faults_told_) actions_->SendNorm(layout_->primary(0), report);
  if (layout_->plan().discipline() != v1::Plan::VERDICT) return;
  for (const auto& [index, shard] : shards_) {
    if (shard.norm_sent) SendNormOf(index);
  }
}

void ShardCore::OnVerdict(const v1::VerdictNotice& notice) {
  if (!layout_ || notice.generation() != generation() || Fenced()) return;
  std::vector<uint32_t> due;
  for (const uint32_t index : notice.shards()) {
    auto it = shards_.find(index);
    if (it == shards_.end()) continue;
    Shard& shard = it->second;
    if (!shard.verdicts.emplace(notice.verdict().round(), notice.verdict()).second || shard.chunks.empty()) continue;
    if (notice.verdict().round() == chunks_.at(shard.chunks[0]).version && shard.summed == shard.chunks.size()) {
      due.push_back(index);
    }
  }
  ApplyShards(due, notice.verdict());
}

// In the order of chunks over all of the shards: the order in which the next forward reads them.
void ShardCore::ApplyShards(const std::vector<uint32_t>& indices, const v1::Verdict& verdict) {
  std::vector<uint64_t> chunks;
  for (const uint32_t index : indices) {
    Shard& shard = shards_.at(index);
    shard.summed = 0;
    shard.norm_sent = false;
    chunks.insert(chunks.end(), shard.chunks.begin(), shard.chunks.end());
  }
  std::sort(chunks.begin(), chunks.end());
  for (const uint64_t chunk : chunks) {
    Chunk& c = chunks_.at(chunk);
    ApplyChunk(chunk, &c, verdict, /*skip_nonfinite=*/!c.sum->finite);
  }
  for (const uint32_t index : indices) {
    Shard& shard = shards_.at(index);
    while (!shard.verdicts.empty() && shard.verdicts.begin()->first + 1 < verdict.round()) {
      shard.verdicts.erase(shard.verdicts.begin());
    }
    Progress(index);
  }
}

void ShardCore::ApplyChunk(uint64_t index, Chunk* chunk, const v1::Verdict& verdict, bool skip_nonfinite) {
  actions_->Apply(index, verdict, skip_nonfinite);
  ++chunk->version;
  chunk->has_previous = rules_.kept_version;
  if (!rules_.kept_version) actions_->DropPrevious(index);
  ForgetRound(chunk, layout_->contributors(index));
  for (Subscriber& s : chunk->subscribers) {
    if (s.want > chunk->version) continue;
    actions_->Serve(s.stream, index, chunk->version);
    s.want = chunk->version + 1;
  }
  if (layout_->CheckpointAt(chunk->version) || ordered_.contains(chunk->version)) {
    actions_->Snapshot(chunk->shard, index, layout_->plan().timeline(), chunk->version, v1::ChunkCut());
  }
}

}  // namespace sluice
