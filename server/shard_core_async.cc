// ShardCore in an async job (docs/protocol.md, section Async): every contribution is applied on arrival and answered to
// its sender only; the verdict holder leases positions.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "server/shard_core.h"

namespace sluice {

void ShardCore::MakeBook(bool new_timeline, const std::vector<v1::ChunkCut>& cuts) {
  if (!async() || !is_holder()) {
    book_ = nullptr;
  } else if (new_timeline || book_ == nullptr) {
    book_ = std::make_unique<LeaseBook>(layout_, cuts);
  } else {
    book_->NewGeneration(layout_);
  }
}

v1::ChunkHeader ShardCore::AnswerOf(uint64_t chunk) const {
  v1::ChunkHeader answer;
  answer.set_chunk(chunk);
  answer.set_generation(generation());
  answer.set_round(chunks_.at(chunk).version);
  answer.set_elements(layout_->table().range(chunk).size());
  return answer;
}

absl::Status ShardCore::CheckLease(const v1::ChunkHeader& header) const {
  const uint64_t all = layout_->rounds() * layout_->batch();
  if (header.positions() == 0 || header.positions() > all || header.position() > all - header.positions()) {
    return absl::OutOfRangeError(absl::StrCat("chunk ", header.chunk(), ": a contribution of ", header.positions(),
                                              " positions at ", header.position(), "; job ", job_id_, " has ", all));
  }
  if (!(header.scale() >= 0 && header.scale() <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", header.chunk(), ": scale ", header.scale(), "; expected 0 to 1"));
  }
  return absl::OkStatus();
}

absl::Status ShardCore::OnContribution(StreamId id, const v1::ChunkHeader& header, ContributionRef value) {
  Chunk& chunk = chunks_.at(header.chunk());
  const Range lease{header.position(), header.position() + header.positions()};
  v1::ChunkHeader answer = AnswerOf(header.chunk());
  answer.set_position(header.position());
  answer.set_positions(header.positions());
  if (rules_.dedup && chunk.applied.Overlaps(lease)) {
    if (!chunk.applied.Contains(lease)) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": of positions [", lease.begin, ", ",
                                                     lease.end, ") some were applied before, some not; leases are ",
                                                     "never cut anew"));
    }
    answer.set_repeated(true);
    actions_->Answer(id, answer);
    return absl::OkStatus();
  }
  if (header.round() > chunk.version) {
    return absl::FailedPreconditionError(absl::StrCat("chunk ", header.chunk(),
                                                      ": a contribution computed from version ", header.round(),
                                                      "; it is at ", chunk.version));
  }
  const v1::TrainSpec& train = layout_->plan().spec().train();
  const uint64_t before = RoundOf(chunk), staleness = chunk.version - header.round();
  ContributionUpdate update;
  update.version = chunk.version;
  update.round = before;
  if (train.staleness_scale() == v1::TrainSpec::INVERSE) update.rate_scale = 1 / (1 + static_cast<double>(staleness));
  const double clip = header.scale() > 0 ? header.scale() : 1;
  const bool empty = header.elements() == 0 || header.count() == 0;
  if (!empty) update.gradient_scale = static_cast<float>(clip / header.count());
  answer.set_round(++chunk.version);
  answer.set_staleness(staleness);
  chunk.applied.Add(lease);
  actions_->ApplyContribution(id, answer, update, empty ? nullptr : std::move(value));
  // A lease is at most a round: none is passed over.
  if (const uint64_t round = RoundOf(chunk);
      round > before && (layout_->CheckpointAt(round) || ordered_.contains(round))) {
    v1::ChunkCut cut;
    cut.set_chunk(header.chunk());
    cut.set_contributions(chunk.version);
    for (const Range& range : chunk.applied.ranges()) {
      v1::PositionRange* applied = cut.add_applied();
      applied->set_begin(range.begin);
      applied->set_end(range.end);
    }
    actions_->Snapshot(chunk.shard, header.chunk(), layout_->plan().timeline(), round, cut);
  }
  if (RoundOf(chunk) == layout_->rounds()) Progress(chunk.shard);
  return absl::OkStatus();
}

absl::Status ShardCore::OnLeaseRequest(StreamId id, const v1::LeaseRequest& request) {
  ASSIGN_OR_RETURN(Stream * stream, Admit(id, request.generation()));
  if (stream->parked) return Park(stream, request, 0);
  if (Fenced()) return absl::OkStatus();
  if (book_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job_id_, ": leases come from the verdict holder of an ",
                                                      "async job; this server is not it"));
  }
  if (request.contributor() != stream->hello.contributor()) {
    return absl::InvalidArgumentError(absl::StrCat("lease request of contributor ", request.contributor(),
                                                   " on the stream of ", stream->hello.contributor()));
  }
  RETURN_IF_ERROR(book_->OnRequest(request, id));
  SayBook();
  return absl::OkStatus();
}

void ShardCore::SayBook() {
  for (const auto& [stream, lease] : book_->TakeAnswers()) actions_->SendLease(stream, lease);
  for (v1::RoundRecord& record : book_->TakeRecords()) {
    record.set_job_id(job_id_);
    record.set_generation(generation());
    record.set_timeline(layout_->plan().timeline());
    if (!record.evaluation()) {
      if (recorded_at_ != absl::InfinitePast()) record.set_seconds(absl::ToDoubleSeconds(now_ - recorded_at_));
      recorded_at_ = now_;
    }
    v1::NodeMessage message;
    *message.mutable_round_record() = std::move(record);
    SendRecord(std::move(message));
  }
}

}  // namespace sluice
