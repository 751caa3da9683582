// RoundCore in an async job (docs/protocol.md, section Async): a lease of positions takes the place of the round.
//
// Of each chunk at most one answer is outstanding, to a subscribe (kPulling) or to a push (kComputing, kWaiting); a
// commit says which lease it answers, so one that comes twice is told apart.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "worker/round_core.h"

namespace sluice {

void RoundCore::Pull() {
  phase_ = Phase::kPulling;
  at_current_ = 0;
  for (Chunk& chunk : chunks_) {
    chunk.pushed = 0;
    chunk.answered = false;
  }
  for (size_t server = 0; server < servers_.size(); ++server) {
    if (up_[server]) SubscribeMissing(server);
  }
}

void RoundCore::SubscribeMissing(size_t server) {
  if (phase_ != Phase::kPulling) return;
  v1::Subscribe subscribe;
  subscribe.set_generation(generation());
  v1::Want* want = nullptr;
  for (uint64_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].tail != server) continue;
    if (chunks_[i].answered) {
      want = nullptr;  // a range must not pass over it
      continue;
    }
    if (want == nullptr) {
      want = subscribe.add_wants();
      want->set_first_chunk(i);
    }
    want->set_chunks(i + 1 - want->first_chunk());
  }
  if (subscribe.wants_size() > 0) actions_->Subscribe(server, subscribe);
}

void RoundCore::AskForLease(const v1::RoundReport* report) {
  const uint64_t number = request_.number() + 1;
  request_.Clear();
  request_.set_generation(generation());
  request_.set_contributor(rank_);
  request_.set_number(number);
  if (report != nullptr) *request_.mutable_report() = *report;
  phase_ = Phase::kAsking;
  if (up_[holder_]) actions_->Ask(holder_, request_);
}

absl::Status RoundCore::OnLease(const v1::Lease& lease) {
  if (phase_ != Phase::kAsking || lease.generation() != generation() || lease.number() != request_.number()) {
    return absl::OkStatus();
  }
  if (!async() || (lease.positions() == 0 && lease.slice() >= lease.slices())) {
    return absl::InvalidArgumentError(absl::StrCat("lease of slice ", lease.slice(), " of ", lease.slices()));
  }
  const uint64_t all = layout_->rounds() * layout_->batch();
  if (lease.positions() > all || lease.position() > all - lease.positions()) {
    return absl::OutOfRangeError(
        absl::StrCat("lease of ", lease.positions(), " positions at ", lease.position(), " of ", all));
  }
  lease_ = lease;
  answers_.Clear();
  sum_ = WorkSum();
  scale_ = 0;
  if (lease.positions() == 0) {
    round_ = lease.version();
    Pull();
    return absl::OkStatus();
  }
  round_ = lease.position() / layout_->batch();
  ++leases_;
  at_next_ = 0;
  count_ = 0;
  for (uint64_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].pushed = 0;
    chunks_[i].answered = false;
    chunks_[i].unready = layout_->table().range(i).size();
  }
  phase_ = Phase::kComputing;
  busy_ = true;
  actions_->StartCompute(generation(), round_);
  return absl::OkStatus();
}

// Every chunk is at its newest version: for the first lease, or for the evaluation that asked for it.
void RoundCore::BeginLease() {
  if (lease_.slices() == 0) return AskForLease(nullptr);
  phase_ = Phase::kEvaluating;
  busy_ = true;
  actions_->StartEvaluation(generation(), round_);
}

void RoundCore::EndLease() {
  v1::RoundReport report = answers_;
  report.set_generation(generation());
  report.set_round(round_);
  report.set_contributor(rank_);
  report.set_kind(lease_.positions() > 0 ? v1::RoundReport::TRAIN : v1::RoundReport::EVALUATION);
  report.set_loss_sum(sum_.loss);
  report.set_count(sum_.count);
  report.set_correct(sum_.correct);
  report.set_compute_seconds(sum_.seconds);
  report.set_wait_seconds(sum_.wait_seconds);
  report.set_gradient_norm(sum_.gradient_norm);
  lease_.Clear();
  for (Chunk& chunk : chunks_) chunk.pushed = 0;
  AskForLease(&report);
}

absl::Status RoundCore::OnAnswer(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value) {
  Chunk& chunk = chunks_[header.chunk()];
  if (chunk.answered) return absl::OkStatus();
  if (header.positions() == 0) {
    if (phase_ != Phase::kPulling) return absl::OkStatus();  // said again
  } else {
    const bool mine = (phase_ == Phase::kComputing || phase_ == Phase::kWaiting) && chunk.pushed > 0 &&
                      header.position() == lease_.position() && header.positions() == lease_.positions();
    if (!mine) return absl::OkStatus();
    if (static_cast<int64_t>(header.round()) < chunk.installed) {
      return absl::InvalidArgumentError(absl::StrCat("commit of chunk ", header.chunk(), " at version ", header.round(),
                                                     "; its parameters are at ", chunk.installed));
    }
    if (!header.repeated()) {
      answers_.set_staleness_sum(answers_.staleness_sum() + static_cast<double>(header.staleness()));
      answers_.set_staleness_max(std::max(answers_.staleness_max(), header.staleness()));
      answers_.set_staleness_count(answers_.staleness_count() + 1);
    }
    if (header.nonfinite()) answers_.set_nonfinite(true);
  }
  chunk.answered = true;
  HandOut(header.chunk(), header.round(), std::move(value));
  return absl::OkStatus();
}

}  // namespace sluice
