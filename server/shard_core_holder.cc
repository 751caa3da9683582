// The verdict holder's part of ShardCore: norms and reports in, verdicts and round records out.
#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "server/shard_core.h"

namespace sluice {
namespace {

constexpr size_t kKeptRecords = 512;  // what a scheduler that was down gets told when it is back

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
  if (auto it = decided_.find(report.round()); it != decided_.end()) {
    v1::VerdictNotice notice;
    notice.set_job_id(job_id_);
    notice.set_generation(generation());
    notice.set_shard(report.shard());
    *notice.mutable_verdict() = it->second;
    if (SameNode(from, self_)) {
      OnVerdict(notice);
    } else {
      actions_->SendVerdict(from, notice);
    }
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Tally(&training_, report.round())->AddNorm(report));
  TryDecide(report.round());
  return absl::OkStatus();
}

absl::Status ShardCore::OnReport(StreamId id, const v1::RoundReport& report) {
  ASSIGN_OR_RETURN(Stream * stream, Admit(id, report.generation()));
  if (stream->parked) {
    stream->waiting.push_back(report);
    return absl::OkStatus();
  }
  if (Fenced()) return absl::OkStatus();
  if (!is_holder()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_id_, ": reports go to the verdict holder, ", layout_->primary(0).node().name()));
  }
  if (report.contributor() != stream->hello.contributor()) {
    return absl::InvalidArgumentError(absl::StrCat("report of contributor ", report.contributor(), " on the stream of ",
                                                   stream->hello.contributor()));
  }
  if (report.round() > layout_->rounds()) {
    return absl::OutOfRangeError(absl::StrCat("report of round ", report.round(), " of ", layout_->rounds()));
  }
  if (report.kind() == v1::RoundReport::EVALUATION) {
    RoundTally* tally = Tally(&evaluation_, report.round());
    RETURN_IF_ERROR(tally->AddReport(report));
    if (tally->reports_complete()) {
      Evaluated(report.round(), *tally);
      evaluation_.erase(report.round());
    }
    return absl::OkStatus();
  }
  if (decided_.contains(report.round())) return absl::OkStatus();  // recorded already
  if (layout_->plan().discipline() == v1::Plan::STREAM && report.round() < recorded_) return absl::OkStatus();
  RETURN_IF_ERROR(Tally(&training_, report.round())->AddReport(report));
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
  CHECK(verdict.ok(), "job {}: {}", job_id_, verdict.status().ToString());
  decided_[round] = *verdict;
  Record(round, it->second, &*verdict);
  training_.erase(training_.begin(), std::next(it));
  while (decided_.size() > 3) decided_.erase(decided_.begin());
  for (uint32_t s = 0; s < layout_->plan().shards(); ++s) {
    v1::VerdictNotice notice;
    notice.set_job_id(job_id_);
    notice.set_generation(generation());
    notice.set_shard(s);
    *notice.mutable_verdict() = *verdict;
    if (shards_.contains(s)) {
      OnVerdict(notice);
    } else {
      actions_->SendVerdict(layout_->primary(s).node(), notice);
    }
  }
}

void ShardCore::TryRecord(uint64_t round) {
  if (!is_holder()) return;
  auto it = training_.find(round);
  if (it == training_.end() || !it->second.reports_complete()) return;
  for (uint64_t chunk : shards_.at(0).chunks) {
    if (chunks_.at(chunk).version <= round) return;
  }
  Record(round, it->second, nullptr);
  training_.erase(training_.begin(), std::next(it));
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
  }
  Tell(message);
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
  Tell(message);
}

void ShardCore::Tell(const v1::NodeMessage& record) {
  records_.push_back(record);
  if (records_.size() > kKeptRecords) records_.pop_front();
  actions_->SendToScheduler(record);
}

std::string ShardCore::Describe() const {
  std::string text = absl::StrCat("job ", job_id_, " generation ", generation());
  if (fence_ > generation()) absl::StrAppend(&text, ", fenced for ", fence_);
  for (const auto& [round, tally] : training_) absl::StrAppend(&text, "; ", tally.Missing());
  for (const auto& [index, shard] : shards_) {
    if (shard.chunks.empty()) continue;
    absl::StrAppend(&text, "; shard ", index, " at ", chunks_.at(shard.chunks[0]).version, ", ", shard.summed, "/",
                    shard.chunks.size(), " sums");
  }
  return text;
}

}  // namespace sluice
