// The verdict holder's part of ShardCore: norms and reports in, verdicts and round records out.
#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "server/shard_core.h"

namespace sluice {
namespace {

constexpr size_t kMaxRecords = 2048;  // that are said again to a scheduler that was away

}  // namespace

RoundTally* ShardCore::Tally(std::map<uint64_t, RoundTally>* tallies, uint64_t round) {
  return &tallies->try_emplace(round, layout_, round).first->second;
}

absl::Status ShardCore::OnNorm(const v1::NormReport& report, const v1::NodeId& from) {
  if (report.generation() > generation()) {
    if (parked_norms_.size() < 4096) parked_norms_.emplace_back(report, from);
    return absl::OkStatus();
  }
  if ((rules_.fencing && report.generation() < generation()) || Fenced()) return absl::OkStatus();
  if (!is_holder())
    return absl::FailedPreconditionError(absl::StrCat("job ", job_id_, ": this server is not the verdict holder"));
  if (report.shard() >= layout_->plan().shards()) {
    return absl::InvalidArgumentError(
        absl::StrCat("job ", job_id_, ": norm report of shard ", report.shard(), " of ", layout_->plan().shards()));
  }
  if (!SameNode(layout_->primary(report.shard()).node(), from)) {
    return absl::PermissionDeniedError(absl::StrCat("job ", job_id_, ": ", from.name(), " reports for shard ",
                                                    report.shard(), ", whose primary is ",
                                                    layout_->primary(report.shard()).node().name()));
  }
  // Shards are at most one version apart.
  const uint64_t newest = NewestOfShard0();
  if (report.round() > newest + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_id_, ": norm report of round ", report.round(), " while round ", newest, " is open"));
  }
  if (layout_->plan().discipline() == v1::Plan::STREAM) {
    NoteNonfinite(report);
    return absl::OkStatus();
  }
  if (auto it = decided_.find(report.round()); it != decided_.end()) {
    v1::VerdictNotice notice;
    notice.set_job_id(job_id_);
    notice.set_generation(generation());
    notice.add_shards(report.shard());
    *notice.mutable_verdict() = it->second;
    if (SameNode(from, self_)) {
      OnVerdict(notice);
    } else {
      actions_->SendVerdict(from, notice);
    }
    return absl::OkStatus();
  }
  if (report.round() < newest) return absl::OkStatus();  // decided long ago: its sender has applied it
  RETURN_IF_ERROR(Tally(&training_, report.round())->AddNorm(report));
  TryDecide(report.round());
  return absl::OkStatus();
}

absl::Status ShardCore::OnReport(StreamId id, const v1::RoundReport& report) {
  ASSIGN_OR_RETURN(Stream * stream, Admit(id, report.generation()));
  if (stream->parked) return Park(stream, report, 0);
  if (Fenced()) return absl::OkStatus();
  if (!is_holder()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_id_, ": reports go to the verdict holder, ", layout_->primary(0).node().name()));
  }
  if (async()) return absl::InvalidArgumentError("in async, reports travel in lease requests");
  if (report.contributor() != stream->hello.contributor()) {
    return absl::InvalidArgumentError(absl::StrCat("report of contributor ", report.contributor(), " on the stream of ",
                                                   stream->hello.contributor()));
  }
  const bool evaluation = report.kind() == v1::RoundReport::EVALUATION;
  if (report.round() >= layout_->rounds() + evaluation) {
    return absl::OutOfRangeError(absl::StrCat(evaluation ? "evaluation of version " : "report of round ",
                                              report.round(), "; the job has ", layout_->rounds(), " rounds"));
  }
  // Shard 0 has reached the version that a worker speaks of: the worker held it, or waited in the round (the
  // evaluation) for a rank that did. Element 0 lies on the first stage, and no rank ends a pass, an evaluation or a
  // Meet without it.
  const uint64_t newest = NewestOfShard0();
  if (report.round() > newest) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_id_, ": a report of round ", report.round(), " while round ", newest, " is open"));
  }
  if (report.round() < layout_->plan().start()) return absl::OkStatus();
  if (evaluation) {
    RoundTally* tally = Tally(&evaluation_, report.round());
    RETURN_IF_ERROR(tally->AddReport(report));
    if (tally->reports_complete()) {
      Evaluated(report.round(), *tally);
      evaluation_.erase(evaluation_.begin(), evaluation_.upper_bound(report.round()));
    }
    return absl::OkStatus();
  }
  if (decided_.contains(report.round())) return absl::OkStatus();  // recorded already
  if (layout_->plan().discipline() == v1::Plan::STREAM && report.round() < recorded_) return absl::OkStatus();
  RETURN_IF_ERROR(Tally(&training_, report.round())->AddReport(report));
  times_.Reported(report.round(), report.contributor(), now_);
  if (layout_->plan().discipline() == v1::Plan::STREAM) {
    TryRecord(report.round());
  } else {
    TryDecide(report.round());
  }
  return absl::OkStatus();
}

void ShardCore::TryDecide(uint64_t round) {
  auto it = training_.find(round);
  if (it == training_.end() || !it->second.norms_complete() || !it->second.reports_complete()) return;
  absl::StatusOr<v1::Verdict> verdict = it->second.Decide();
  if (!verdict.ok()) {
    training_.erase(it);
    return Problem(verdict.status());
  }
  decided_[round] = *verdict;
  Record(round, it->second, &*verdict);
  training_.erase(training_.begin(), std::next(it));
  while (decided_.size() > 3) decided_.erase(decided_.begin());
  // One notice to each primary, the others' first.
  v1::VerdictNotice mine;
  mine.set_job_id(job_id_);
  mine.set_generation(generation());
  *mine.mutable_verdict() = *verdict;
  std::map<std::pair<std::string, uint64_t>, v1::VerdictNotice> others;
  for (uint32_t s = 0; s < layout_->plan().shards(); ++s) {
    if (shards_.contains(s)) {
      mine.add_shards(s);
      continue;
    }
    const v1::NodeId& node = layout_->primary(s).node();
    v1::VerdictNotice& notice = others[{node.name(), node.incarnation()}];
    if (notice.shards().empty()) {
      notice.set_job_id(job_id_);
      notice.set_generation(generation());
      *notice.mutable_verdict() = *verdict;
    }
    notice.add_shards(s);
  }
  for (const auto& [key, notice] : others) {
    actions_->SendVerdict(layout_->primary(notice.shards(0)).node(), notice);
  }
  OnVerdict(mine);
}

void ShardCore::TryRecord(uint64_t round) {
  if (!is_holder()) return;
  auto it = training_.find(round);
  if (it == training_.end() || !it->second.reports_complete()) return;
  for (uint64_t chunk : shards_.at(0).chunks) {
    if (chunks_.at(chunk).version <= round) return;
  }
  if (stream_sums_[round] < shards_.at(0).chunks.size()) return;  // whether they are finite belongs into the record
  Record(round, it->second, nullptr);
  training_.erase(training_.begin(), std::next(it));
  stream_sums_.erase(stream_sums_.begin(), stream_sums_.upper_bound(round));
  recorded_ = std::max(recorded_, round + 1);
}

void ShardCore::Record(uint64_t round, const RoundTally& tally, const v1::Verdict* verdict) {
  v1::NodeMessage message;
  v1::RoundRecord* record = message.mutable_round_record();
  record->set_job_id(job_id_);
  record->set_generation(generation());
  record->set_timeline(layout_->plan().timeline());
  record->set_round(round);
  const double count = tally.count();
  record->set_count(count);
  record->set_loss(count > 0 ? tally.loss_sum() / count : 0);
  record->set_accuracy(count > 0 ? tally.correct() / count : 0);
  record->set_learning_rate(LearningRate(layout_->plan().spec().optimizer(), round, layout_->rounds()));
  if (verdict != nullptr) {
    record->set_gradient_norm(verdict->gradient_norm());
    record->set_skipped(verdict->skip() && count > 0);
    for (uint32_t c : tally.nonfinite_contributors()) record->add_nonfinite_contributors(c);
  } else if (auto faults = stream_faults_.find(round); faults != stream_faults_.end()) {
    record->set_skipped(true);  // some chunks kept their values
    for (uint32_t c : faults->second) record->add_nonfinite_contributors(c);
  }
  if (recorded_at_ != absl::InfinitePast()) record->set_seconds(absl::ToDoubleSeconds(now_ - recorded_at_));
  recorded_at_ = now_;
  times_.Fill(round, tally.reports(), verdict != nullptr, record);
  SendRecord(std::move(message));
}

void ShardCore::SendRecord(v1::NodeMessage message) {
  actions_->SendToScheduler(message);
  if (records_.size() == kMaxRecords) records_.pop_front();
  records_.push_back(std::move(message));
}

// STREAM: kept for the round's record; one that was sent already is sent again.
void ShardCore::NoteNonfinite(const v1::NormReport& report) {
  std::set<uint32_t>& faults = stream_faults_[report.round()];
  faults.insert(report.nonfinite_contributors().begin(), report.nonfinite_contributors().end());
  for (v1::NodeMessage& message : records_) {
    v1::RoundRecord& record = *message.mutable_round_record();
    if (record.evaluation() || record.round() != report.round()) continue;
    const bool known = record.skipped() && record.nonfinite_contributors_size() == static_cast<int>(faults.size());
    if (known) continue;
    record.set_skipped(true);
    record.mutable_nonfinite_contributors()->Clear();
    record.mutable_nonfinite_contributors()->Add(faults.begin(), faults.end());
    actions_->SendToScheduler(message);
  }
  while (stream_faults_.size() > 8) stream_faults_.erase(stream_faults_.begin());
}

void ShardCore::Problem(const absl::Status& status) {
  v1::NodeMessage message;
  v1::NodeProblem* problem = message.mutable_problem();
  problem->set_job_id(job_id_);
  problem->set_generation(generation());
  problem->set_code(static_cast<int>(status.code()));
  problem->set_message(absl::StrCat("server ", self_.name(), ": ", status.message()));
  actions_->SendToScheduler(message);
}

uint64_t ShardCore::NewestOfShard0() const {
  uint64_t newest = 0;
  for (uint64_t chunk : shards_.at(0).chunks) newest = std::max(newest, chunks_.at(chunk).version);
  return newest;
}

void ShardCore::Evaluated(uint64_t version, const RoundTally& tally) {
  v1::NodeMessage message;
  v1::RoundRecord* record = message.mutable_round_record();
  record->set_job_id(job_id_);
  record->set_generation(generation());
  record->set_timeline(layout_->plan().timeline());
  record->set_round(version);
  record->set_evaluation(true);
  const double count = tally.count();
  record->set_count(count);
  record->set_loss(count > 0 ? tally.loss_sum() / count : 0);
  record->set_accuracy(count > 0 ? tally.correct() / count : 0);
  SendRecord(std::move(message));
}

std::string ShardCore::Describe() const {
  std::string text = absl::StrCat("job ", job_id_, " generation ", generation());
  if (fence_ > generation()) absl::StrAppend(&text, ", fenced for ", fence_);
  if (book_ != nullptr) absl::StrAppend(&text, "; ", book_->Describe());
  for (const auto& [round, tally] : training_) absl::StrAppend(&text, "; ", tally.Missing());
  for (const auto& [index, shard] : shards_) {
    if (shard.chunks.empty()) continue;
    absl::StrAppend(&text, "; shard ", index, " at ", chunks_.at(shard.chunks[0]).version, ", ", shard.summed, "/",
                    shard.chunks.size(), " sums");
  }
  if (hold_.declined() > 0) {
    absl::StrAppend(&text, "; ", hold_.declined(), " contributions declined, ", hold_.bytes(), " bytes held");
  }
  return text;
}

}  // namespace sluice
