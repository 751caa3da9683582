// Workers' streams as the core sees them: who may say what, what waits for a plan, who wants which versions.
#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/wire_format.h"
#include "server/shard_core.h"

namespace sluice {
namespace {

// Of a stream whose plan is not here yet; a worker pushes nothing before it has received parameters.
constexpr size_t kMaxParkedMessages = 4096;
constexpr uint64_t kMaxParkedBytes = 4 << 20;

}  // namespace

absl::Status ShardCore::CheckHello(const v1::StreamHello& hello) const {
  if (hello.contributor() >= layout_->ranks()) {
    return absl::OutOfRangeError(
        absl::StrCat("contributor ", hello.contributor(), " of ", layout_->ranks(), " in job ", job_id_));
  }
  const v1::NodeId& owner = layout_->plan().ranks(static_cast<int>(hello.contributor())).node();
  if (hello.has_node() && !SameNode(hello.node(), owner)) {
    return absl::PermissionDeniedError(absl::StrCat(
        "job ", job_id_, " generation ", generation(), ": rank ", hello.contributor(), " belongs to ", owner.name(),
        " (life ", owner.incarnation(), "), not to ", hello.node().name(), " (life ", hello.node().incarnation(), ")"));
  }
  return absl::OkStatus();
}

absl::Status ShardCore::OnHello(StreamId stream, const v1::StreamHello& hello) {
  if (hello.generation() == 0) return absl::InvalidArgumentError("hello of generation 0; they count from 1");
  if (layout_ && hello.generation() == generation()) RETURN_IF_ERROR(CheckHello(hello));
  const uint64_t newest = rules_.fencing ? std::max(fence_, generation()) : generation();
  if (hello.generation() < newest && rules_.fencing) {
    return absl::AbortedError(
        absl::StrCat("job ", job_id_, ": generation ", hello.generation(), " is over; now ", newest));
  }
  Stream& added = streams_[stream];
  added.hello = hello;
  added.parked = hello.generation() > generation();
  return absl::OkStatus();
}

absl::StatusOr<ShardCore::Stream*> ShardCore::Admit(StreamId stream, uint64_t message_generation) {
  auto it = streams_.find(stream);
  if (it == streams_.end()) return absl::FailedPreconditionError("a message before the stream's hello");
  if (it->second.hello.generation() != message_generation) {
    return absl::InvalidArgumentError(absl::StrCat("a message of generation ", message_generation,
                                                   " on a stream of generation ", it->second.hello.generation()));
  }
  return &it->second;
}

absl::Status ShardCore::Replay(StreamId id) {
  Stream& stream = streams_.at(id);
  stream.parked = false;
  stream.waiting_bytes = 0;
  RETURN_IF_ERROR(CheckHello(stream.hello));
  std::deque<StreamMessage> waiting;
  waiting.swap(stream.waiting);
  for (StreamMessage& message : waiting) RETURN_IF_ERROR(Replay(id, std::move(message)));
  return absl::OkStatus();
}

absl::Status ShardCore::Replay(StreamId id, StreamMessage message) {
  if (auto* push = std::get_if<PushMessage>(&message)) {
    return OnPush(id, push->header, std::move(push->value), push->payload_bytes);
  }
  if (auto* subscribe = std::get_if<v1::Subscribe>(&message)) return OnSubscribe(id, *subscribe);
  if (auto* request = std::get_if<v1::LeaseRequest>(&message)) return OnLeaseRequest(id, *request);
  return OnReport(id, std::get<v1::RoundReport>(message));
}

absl::Status ShardCore::OnPush(StreamId id, const v1::ChunkHeader& header, ContributionRef value,
                               uint64_t payload_bytes) {
  ASSIGN_OR_RETURN(Stream * stream, Admit(id, header.generation()));
  if (stream->parked) return Park(stream, PushMessage{header, std::move(value), payload_bytes}, payload_bytes);
  if (Fenced()) return absl::OkStatus();  // nothing older than the fence is processed
  RETURN_IF_ERROR(CheckPush(*stream, header, payload_bytes));
  if (async()) return OnContribution(id, header, std::move(value));

  Chunk& chunk = chunks_.at(header.chunk());
  const uint32_t slots = layout_->contributors(header.chunk());
  uint32_t slot = *layout_->slot(header.chunk(), header.contributor()), span = std::max(1u, header.contributors());
  if (rules_.dedup) {
    if (header.round() < chunk.version || chunk.held[slot]) return absl::OkStatus();
    if (header.round() > chunk.version) {
      return absl::FailedPreconditionError(absl::StrCat("chunk ", header.chunk(), ": a contribution to round ",
                                                        header.round(), " while round ", chunk.version, " is open"));
    }
  } else {
    if (chunk.sum_posted) return absl::OkStatus();
    slot = chunk.held_count;
    span = std::min(span, slots - slot);
  }
  if (rules_.dedup && !Hold(id, header, value)) return absl::OkStatus();
  if (layout_->counts(header.chunk(), slot)) chunk.counts[slot] = header.count();
  // A host's sum stands for its first contributor; the others of its subtree are absent.
  for (uint32_t i = slot; i < slot + span; ++i, ++chunk.held_count) {
    chunk.held[i] = true;
    actions_->AddContribution(header.chunk(), i, slots,
                              i > slot || header.elements() == 0 ? nullptr : std::exchange(value, nullptr));
  }
  if (chunk.held_count == slots) ChunkComplete(header.chunk(), &chunk);
  return absl::OkStatus();
}

// Whether the contribution, which is missing, is taken.
bool ShardCore::Hold(StreamId id, const v1::ChunkHeader& header, const ContributionRef& value) {
  const HoldBook::Item item{.chunk = header.chunk(),
                            .contributor = *layout_->slot(header.chunk(), header.contributor()),
                            .contributors = layout_->contributors(header.chunk()),
                            .span = std::max(1u, header.contributors()),
                            .empty = header.elements() == 0,
                            .bytes = value == nullptr ? 0 : value->pinned_bytes,
                            .sum_bytes = layout_->table().range(header.chunk()).size() * sizeof(float),
                            .stream = id};
  std::vector<HoldBook::Ask> asks;
  const bool taken = hold_.Take(item, &asks);
  if (!taken) {
    if (hold_.declines() == 1) {
      LOG_INFO(
          "job {}: contributions that wait for others pin {} bytes, the most that --hold_memory allows; further "
          "ones are declined and asked for again",
          job_id_, hold_.bytes());
    }
    actions_->Decline(id, header.chunk(), header.round());
  }
  AskAgain(asks);
  return taken;
}

void ShardCore::AskAgain(const std::vector<HoldBook::Ask>& asks) {
  for (const HoldBook::Ask& ask : asks) actions_->AskAgain(ask.stream, ask.chunk, chunks_.at(ask.chunk).version);
}

absl::Status ShardCore::Park(Stream* stream, StreamMessage message, uint64_t payload_bytes) {
  if (stream->waiting.size() >= kMaxParkedMessages || stream->waiting_bytes + payload_bytes > kMaxParkedBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("job ", job_id_, ": more than ", kMaxParkedMessages,
                                                     " messages or ", kMaxParkedBytes, " bytes before the plan of ",
                                                     "generation ", stream->hello.generation()));
  }
  stream->waiting_bytes += payload_bytes;
  stream->waiting.push_back(std::move(message));
  return absl::OkStatus();
}

absl::Status ShardCore::CheckPlace(const Stream& stream, const v1::ChunkHeader& header) const {
  const ChunkTable& table = layout_->table();
  if (header.space() != 0) return absl::InvalidArgumentError(absl::StrCat("space ", header.space(), " does not exist"));
  if (header.chunk() >= table.chunks()) {
    return absl::OutOfRangeError(absl::StrCat("chunk ", header.chunk(), " of ", table.chunks(), " in job ", job_id_));
  }
  if (!chunks_.contains(header.chunk())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), " belongs to another server: shard ",
                                                   table.shard(header.chunk()), " is held by ",
                                                   layout_->primary(table.shard(header.chunk())).node().name()));
  }
  if (header.contributor() >= layout_->ranks()) {
    return absl::OutOfRangeError(
        absl::StrCat("contributor ", header.contributor(), " of ", layout_->ranks(), " in job ", job_id_));
  }
  if (!layout_->slot(header.chunk(), header.contributor()).has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": by the plan, rank ",
                                                   header.contributor(), " of job ", job_id_, " does not push for it"));
  }
  if (header.contributor() != stream.hello.contributor()) {
    return absl::InvalidArgumentError(absl::StrCat("contributor ", header.contributor(),
                                                   " on the stream of contributor ", stream.hello.contributor()));
  }
  return absl::OkStatus();
}

absl::Status ShardCore::CheckPush(const Stream& stream, const v1::ChunkHeader& header, uint64_t payload_bytes) const {
  RETURN_IF_ERROR(CheckPlace(stream, header));
  const ChunkTable& table = layout_->table();
  RETURN_IF_ERROR(CheckSpan(header));
  RETURN_IF_ERROR(CheckRound(header));
  const v1::Encoding encoding = PushEncoding(layout_->plan().spec());
  if (header.elements() != 0 && header.encoding() != encoding) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": pushed in ",
                                                   EncodingName(header.encoding()), "; this job pushes ",
                                                   EncodingName(encoding), " (spec.transfer.push)"));
  }
  const uint64_t length = table.range(header.chunk()).size();
  if (header.elements() != 0 && header.elements() != length) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", header.chunk(), ": ", header.elements(), " elements; it has ", length));
  }
  // TOP_K: as many as its counts say, which were checked where the frame was taken apart.
  const bool fits = header.elements() == 0 || encoding != v1::TOP_K
                        ? payload_bytes == (header.elements() == 0 ? 0 : EncodedBytes(encoding, length))
                        : payload_bytes > 0;
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": ", payload_bytes, " payload bytes for ",
                                                   header.elements(), " elements"));
  }
  if (!std::isfinite(header.count()) || header.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", header.chunk(), ": count ", header.count(), "; expected a finite one, 0 or more"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ShardCore::OnResidual(StreamId id, const v1::ChunkHeader& header, uint64_t payload_bytes) const {
  const auto it = streams_.find(id);
  if (it == streams_.end()) return absl::FailedPreconditionError("a residual before the stream's hello");
  const Stream& stream = it->second;
  if (stream.hello.generation() != header.generation()) {
    return absl::InvalidArgumentError(absl::StrCat("a residual of generation ", header.generation(),
                                                   " on a stream of generation ", stream.hello.generation()));
  }
  if (stream.parked) return absl::FailedPreconditionError("a residual before its plan; first come parameters");
  if (Fenced()) return false;
  RETURN_IF_ERROR(CheckPlace(stream, header));
  if (async() || !ErrorFeedback(layout_->plan().spec())) {
    return absl::InvalidArgumentError(absl::StrCat("a residual; job ", job_id_, " keeps none (spec.transfer.push)"));
  }
  const uint64_t length = layout_->table().range(header.chunk()).size();
  if ((header.elements() != 0 && header.elements() != length) || header.encoding() != v1::F32 ||
      payload_bytes != header.elements() * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": a residual of ", header.elements(),
                                                   " elements in ", EncodingName(header.encoding()), ", ",
                                                   payload_bytes, " bytes; expected ", length, " in F32, or none"));
  }
  return true;
}

absl::Status ShardCore::CheckSpan(const v1::ChunkHeader& header) const {
  const uint32_t first = header.contributor(), count = std::max(1u, header.contributors());
  const ContributorSpan span = layout_->contribution(first, layout_->table().shard(header.chunk()));
  if (span != ContributorSpan{first, count}) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": a contribution of ", count,
                                                   " ranks from ", first, " on; by the plan (docs/host_sums.md) it is ",
                                                   "part of that of ", span.count, " ranks from ", span.first, " on"));
  }
  for (const uint32_t contributor : header.nonfinite_contributors()) {
    if (contributor >= first && contributor - first < count) continue;
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": contributor ", contributor,
                                                   " is no part of the sum of ", count, " from ", first, " on"));
  }
  return absl::OkStatus();
}

absl::Status ShardCore::CheckRound(const v1::ChunkHeader& header) const {
  if (async()) return CheckLease(header);
  if (header.round() < layout_->rounds()) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("chunk ", header.chunk(), ": a contribution to round ", header.round(),
                                            "; job ", job_id_, " has ", layout_->rounds(), " rounds"));
}

absl::Status ShardCore::OnSubscribe(StreamId id, const v1::Subscribe& subscribe) {
  ASSIGN_OR_RETURN(Stream * stream, Admit(id, subscribe.generation()));
  if (stream->parked) return Park(stream, subscribe, subscribe.ByteSizeLong());
  if (Fenced()) return absl::OkStatus();
  const uint64_t chunks = layout_->table().chunks();
  uint64_t next_chunk = 0;
  for (const v1::Want& want : subscribe.wants()) {
    if (want.first_chunk() >= chunks || want.chunks() > chunks - want.first_chunk()) {
      return absl::OutOfRangeError(absl::StrCat("chunks ", want.first_chunk(), " + ", want.chunks(), " of ", chunks));
    }
    // So that what a frame asks for is bounded by what there is.
    if (want.first_chunk() < next_chunk) {
      return absl::InvalidArgumentError(absl::StrCat("a subscription to chunks from ", want.first_chunk(),
                                                     " on after one up to ", next_chunk,
                                                     "; each chunk once, in ascending order"));
    }
    next_chunk = want.first_chunk() + want.chunks();
    for (auto it = chunks_.lower_bound(want.first_chunk());
         it != chunks_.end() && it->first < want.first_chunk() + want.chunks(); ++it) {
      Chunk& chunk = it->second;
      if (subscribe.residuals()) actions_->ServeResidual(id, it->first, stream->hello.contributor());
      if (async()) {
        actions_->Answer(id, AnswerOf(it->first));
        continue;
      }
      uint64_t next = want.version();
      if (next < chunk.version) {
        if (next + 1 < chunk.version || !chunk.has_previous) {
          return absl::OutOfRangeError(
              absl::StrCat("chunk ", it->first, " version ", next, " is gone; now ", chunk.version));
        }
        actions_->Serve(id, it->first, next++);
      }
      if (next == chunk.version) actions_->Serve(id, it->first, next++);
      auto mine = std::find_if(chunk.subscribers.begin(), chunk.subscribers.end(),
                               [&](const Subscriber& s) { return s.stream == id; });
      if (mine == chunk.subscribers.end()) {
        chunk.subscribers.push_back({id, next});
      } else {
        mine->want = next;
      }
    }
  }
  return absl::OkStatus();
}

void ShardCore::OnStreamClosed(StreamId stream) {
  if (streams_.erase(stream) == 0) return;
  for (auto& [index, chunk] : chunks_) {
    std::erase_if(chunk.subscribers, [&](const Subscriber& s) { return s.stream == stream; });
  }
  std::vector<HoldBook::Ask> asks;
  hold_.OnStreamClosed(stream, &asks);
  AskAgain(asks);
}

}  // namespace sluice
