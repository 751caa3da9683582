#include "server/lease_book.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/job_spec.h"
#include "common/status_macros.h"
#include "server/round_times.h"

namespace sluice {
namespace {

// End of the part of its round that `position` lies in.
uint64_t PartEnd(const Layout& layout, uint64_t position) {
  const uint64_t batch = layout.batch(), slot = position % batch;
  for (uint32_t d = 0; d < layout.replicas(); ++d) {
    if (const Range part = ReplicaSlots(batch, d, layout.replicas()); slot < part.end) {
      return position - slot + part.end;
    }
  }
  return position - slot + batch;
}

bool Countable(double x) { return std::isfinite(x) && x >= 0; }

}  // namespace

v1::ChunkCut CutOf(const Layout& layout, const std::vector<v1::ChunkCut>& cuts, uint64_t chunk) {
  v1::ChunkCut out;
  out.set_chunk(chunk);
  if (cuts.size() == layout.table().chunks()) return cuts[chunk];
  // Another table, or a checkpoint of sync: every chunk has seen the same positions (the scheduler has checked it).
  const uint64_t start = layout.plan().start();
  out.set_contributions(start);
  for (const v1::ChunkCut& cut : cuts) out.set_contributions(std::max(out.contributions(), cut.contributions()));
  if (start > 0) {
    v1::PositionRange* range = out.add_applied();
    range->set_begin(0);
    range->set_end(start * layout.batch());
  }
  return out;
}

PositionSet AppliedOf(const v1::ChunkCut& cut) {
  PositionSet applied;
  for (const v1::PositionRange& range : cut.applied()) applied.Add({range.begin(), range.end()});
  return applied;
}

LeaseBook::LeaseBook(std::shared_ptr<const Layout> layout, const std::vector<v1::ChunkCut>& cuts)
    : layout_(std::move(layout)) {
  const bool cut = cuts.size() == layout_->table().chunks();
  consumed_ = AppliedOf(cut ? cuts[0] : CutOf(*layout_, cuts, 0));
  for (size_t i = cut ? 1 : cuts.size(); i < cuts.size(); ++i) consumed_ = consumed_.Intersect(AppliedOf(cuts[i]));
  for (const v1::ChunkCut& one : cuts) {
    for (const v1::PositionRange& range : one.applied()) {
      borders_.insert(range.begin());
      borders_.insert(range.end());
    }
  }
  taken_ = consumed_;
  next_evaluation_ = EvaluationFrom(std::max<uint64_t>(1, layout_->plan().start()));
  recorded_ = consumed_.size() / layout_->batch();
  NoteEvaluations();
}

void LeaseBook::NewGeneration(std::shared_ptr<const Layout> layout) {
  layout_ = std::move(layout);
  taken_ = consumed_;
  askers_.clear();
  waiting_.clear();
  answers_.clear();
  for (Evaluation& evaluation : evaluations_) {
    for (size_t i = 0; i < evaluation.given.size(); ++i) evaluation.given[i] = evaluation.done[i].has_value();
  }
}

uint64_t LeaseBook::EvaluationFrom(uint64_t version) const {
  if (version > layout_->rounds()) return version;
  const uint64_t every = layout_->plan().spec().train().eval_every();
  const uint64_t next = every == 0 ? layout_->rounds() : (version + every - 1) / every * every;
  return std::min(next, layout_->rounds());
}

absl::Status LeaseBook::Check(const v1::LeaseRequest& request, const Asker& asker) const {
  if (request.number() == 0 || request.number() > asker.number + 1) {
    return absl::FailedPreconditionError(absl::StrCat("lease request ", request.number(), " of contributor ",
                                                      request.contributor(), " after ", asker.number));
  }
  if (request.number() <= asker.number || asker.number == 0) return absl::OkStatus();
  if (!asker.answer.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat("lease request ", request.number(), " of contributor ",
                                                      request.contributor(), " while the one before has no answer"));
  }
  const v1::RoundReport& report = request.report();
  if (!request.has_report() || !Countable(report.count()) || !Countable(report.correct()) ||
      !Countable(report.staleness_sum()) ||
      (report.kind() == v1::RoundReport::TRAIN) != (asker.answer->positions() > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("lease request ", request.number(), " of contributor ",
                                                   request.contributor(),
                                                   ": expected a report of the lease before, with finite counts"));
  }
  return absl::OkStatus();
}

absl::Status LeaseBook::OnRequest(const v1::LeaseRequest& request, uint64_t stream) {
  if (request.contributor() >= layout_->ranks()) {
    return absl::OutOfRangeError(
        absl::StrCat("lease request of contributor ", request.contributor(), " of ", layout_->ranks()));
  }
  Asker& asker = askers_[request.contributor()];
  RETURN_IF_ERROR(Check(request, asker));
  if (request.number() < asker.number) return absl::OkStatus();  // answered, and the answer was used
  asker.stream = std::max(asker.stream, stream);                 // a request may still come from a stream that broke
  if (request.number() == asker.number) {
    if (asker.answer.has_value()) answers_.emplace_back(stream, *asker.answer);
    return absl::OkStatus();
  }
  if (asker.answer.has_value()) Finish(request.contributor(), *asker.answer, request.report());
  asker.number = request.number();
  asker.answer.reset();
  waiting_.push_back(request.contributor());
  Grant();
  return absl::OkStatus();
}

void LeaseBook::Finish(uint32_t contributor, const v1::Lease& lease, const v1::RoundReport& report) {
  if (lease.positions() == 0) return FinishEvaluation(lease, report);
  consumed_.Add({lease.position(), lease.position() + lease.positions()});
  tally_.loss += report.loss_sum();
  tally_.count += report.count();
  tally_.correct += report.correct();
  tally_.norm += report.gradient_norm();
  ++tally_.leases;
  tally_.staleness += report.staleness_sum();
  tally_.staleness_count += report.staleness_count();
  tally_.staleness_max = std::max(tally_.staleness_max, report.staleness_max());
  if (report.nonfinite()) tally_.nonfinite.insert(contributor);
  v1::RankTime& time = tally_.times[contributor];
  time.set_compute(static_cast<float>(time.compute() + SaneSeconds(report.compute_seconds())));
  time.set_exposed(static_cast<float>(time.exposed() + SaneSeconds(report.wait_seconds())));
  // A lease is at most a round.
  if (consumed_.size() >= (recorded_ + 1) * layout_->batch()) RecordRound();
  NoteEvaluations();
}

void LeaseBook::NoteEvaluations() {
  while (next_evaluation_ <= layout_->rounds() && consumed_.size() >= next_evaluation_ * layout_->batch()) {
    Evaluation& evaluation = evaluations_.emplace_back();
    evaluation.version = next_evaluation_;
    evaluation.given.resize(layout_->replicas());
    evaluation.done.resize(layout_->replicas());
    next_evaluation_ = EvaluationFrom(next_evaluation_ + 1);
  }
}

void LeaseBook::RecordRound() {
  v1::RoundRecord& record = records_.emplace_back();
  record.set_round(recorded_);
  record.set_count(tally_.count);
  record.set_loss(tally_.count > 0 ? tally_.loss / tally_.count : 0);
  record.set_accuracy(tally_.count > 0 ? tally_.correct / tally_.count : 0);
  record.set_gradient_norm(tally_.leases > 0 ? tally_.norm / static_cast<double>(tally_.leases) : 0);
  record.set_learning_rate(LearningRate(layout_->plan().spec().optimizer(), recorded_, layout_->rounds()));
  record.set_staleness_mean(tally_.staleness_count > 0 ? tally_.staleness / static_cast<double>(tally_.staleness_count)
                                                       : 0);
  record.set_staleness_max(tally_.staleness_max);
  record.set_skipped(!tally_.nonfinite.empty());  // some chunks kept their values
  for (uint32_t contributor : tally_.nonfinite) record.add_nonfinite_contributors(contributor);
  for (auto& [contributor, time] : tally_.times) {
    time.set_contributor(contributor);
    *record.add_times() = time;
  }
  tally_ = Tally();
  ++recorded_;
}

void LeaseBook::FinishEvaluation(const v1::Lease& lease, const v1::RoundReport& report) {
  for (auto at = evaluations_.begin(); at != evaluations_.end(); ++at) {
    if (at->version != lease.version()) continue;
    at->done[lease.slice()] = report;
    if (std::any_of(at->done.begin(), at->done.end(), [](const auto& d) { return !d.has_value(); })) return;
    v1::RoundRecord& record = records_.emplace_back();
    double loss = 0, count = 0, correct = 0;
    for (const auto& slice : at->done) {
      loss += slice->loss_sum();
      count += slice->count();
      correct += slice->correct();
    }
    record.set_round(at->version);
    record.set_evaluation(true);
    record.set_count(count);
    record.set_loss(count > 0 ? loss / count : 0);
    record.set_accuracy(count > 0 ? correct / count : 0);
    evaluations_.erase(at);
    return;
  }
}

void LeaseBook::Grant() {
  while (!waiting_.empty() && GrantTo(&askers_.at(waiting_.front()))) waiting_.pop_front();
}

bool LeaseBook::GrantTo(Asker* asker) {
  v1::Lease lease;
  lease.set_generation(layout_->generation());
  lease.set_number(asker->number);
  // The oldest evaluation that is due comes first; the next one when nobody needs to ask for this one any more.
  const auto open = [](Evaluation& e) { return std::find(e.given.begin(), e.given.end(), false); };
  if (!evaluations_.empty() && open(evaluations_.front()) != evaluations_.front().given.end()) {
    Evaluation& evaluation = evaluations_.front();
    const auto slice = open(evaluation);
    *slice = true;
    lease.set_version(evaluation.version);
    lease.set_slice(static_cast<uint32_t>(slice - evaluation.given.begin()));
    lease.set_slices(static_cast<uint32_t>(evaluation.given.size()));
  } else {
    const Range gap = taken_.FirstGap(0, layout_->rounds() * layout_->batch());
    if (gap.size() == 0) return false;
    Range cell{gap.begin, std::min(gap.end, PartEnd(*layout_, gap.begin))};
    if (auto border = borders_.upper_bound(cell.begin); border != borders_.end()) {
      cell.end = std::min(cell.end, *border);
    }
    taken_.Add(cell);
    lease.set_position(cell.begin);
    lease.set_positions(cell.size());
  }
  asker->answer = lease;
  answers_.emplace_back(asker->stream, lease);
  return true;
}

std::string LeaseBook::Describe() const {
  std::vector<uint32_t> holders;
  for (const auto& [contributor, asker] : askers_) {
    if (asker.answer.has_value()) holders.push_back(contributor);
  }
  return absl::StrCat(consumed_.size(), " of ", layout_->rounds() * layout_->batch(), " positions consumed, ", leased(),
                      " leased; contributors at work: ", absl::StrJoin(holders, ", "), "; ", waiting_.size(),
                      " wait for work");
}

}  // namespace sluice
