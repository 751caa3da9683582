// ServerJob's end of workers' streams: frames in, what is said on streams beside values, windows.
#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/frame.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/wire_format.h"
#include "server/server_job.h"

namespace sluice {
namespace {

// Frames that a client may push while it reads nothing of what waits for it, beside some for each chunk: a worker reads
// a whole round before the next one.
constexpr uint64_t kMaxUnreadFrames = 4096, kMaxUnreadFramesPerChunk = 8;

// Contributions that a frame says something of: keeps its control part far below kMaxFrameControl.
constexpr int kMaxLater = 4096;

// The chunks of a frame apart. What TOP_K says of places is checked here, on the stream's thread: the lanes believe it.
absl::StatusOr<std::vector<Payload>> SplitPayload(const ParsedFrame& frame) {
  ASSIGN_OR_RETURN(const std::vector<size_t> lengths, ChunkLengths(frame));
  std::vector<Payload> payloads;
  payloads.reserve(lengths.size());
  size_t offset = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Payload& payload = payloads.emplace_back(frame.payload.Sub(offset, lengths[i]));
    offset += lengths[i];
    const v1::ChunkHeader& header = frame.control.header(static_cast<int>(i));
    if (header.encoding() != v1::TOP_K || header.elements() == 0) continue;
    // Small, and then it pins no read buffers of the transport.
    grpc::Slice slice(lengths[i]);
    payload.CopyTo(const_cast<uint8_t*>(slice.begin()));
    payload = Payload({std::move(slice)});
    // Once more: shared memory may have changed since.
    const absl::StatusOr<size_t> length = LengthInPayload(v1::TOP_K, header.elements(), payload, 0);
    absl::Status status = length.status();
    if (status.ok() && *length != lengths[i]) status = absl::InvalidArgumentError("its counts have changed");
    if (status.ok()) status = CheckTopK(payload.contiguous(), header.elements());
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), ": ", status.message()));
    }
  }
  return payloads;
}

}  // namespace

// Moves the window of a stream's client as what it pushed is handed on: to a sum, or dropped; half of the stream's
// share before that, so that a client need not wait for lanes that keep up. Thread-safe.
class ServerJob::PushReceipts {
 public:
  PushReceipts(std::shared_ptr<ByteStream> stream, std::shared_ptr<const StreamMemory> memory)
      : stream_(std::move(stream)), memory_(std::move(memory)) {}

  // A frame came: to be let go of when all of its `bytes` of payload have been handed on; anywhere, also under locks.
  // Unless it says `ack_later` it asks for an acknowledgement of all that has come by now, if something has. What lies
  // in the client's own memory is handed on at once: nothing, null, is to be let go of, and no acknowledgement stands
  // in the stream when the first commit comes.
  static std::shared_ptr<const void> Make(const std::shared_ptr<PushReceipts>& receipts, const ParsedFrame& parsed) {
    const v1::ChunkFrame& frame = parsed.control;
    const uint64_t bytes = parsed.payload.size();
    absl::MutexLock lock(&receipts->mutex_);
    receipts->came_ += bytes;
    if (parsed.region != nullptr) receipts->bytes_ += bytes;
    if (!frame.ack_later() && (frame.header_size() > 0 || receipts->came_ > receipts->newest_asked_)) {
      receipts->asked_.push_back(receipts->came_);
      receipts->newest_asked_ = receipts->came_;
      receipts->Answer();
    }
    if (parsed.region != nullptr) return nullptr;
    return std::shared_ptr<const void>(receipts.get(), [receipts, bytes](const void*) { receipts->HandedOn(bytes); });
  }
  // To a client that should start with less than the most.
  void SayWindow() {
    if (window() >= kStreamWindow) return;
    absl::MutexLock lock(&mutex_);
    Say();
  }

 private:
  size_t window() const { return memory_ == nullptr ? kStreamWindow : memory_->share(); }
  void HandedOn(uint64_t bytes) {
    absl::MutexLock lock(&mutex_);
    bytes_ += bytes;
    Answer();
  }
  void Answer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const uint64_t taken = Taken();
    if (asked_.empty() || asked_.front() > taken) return;
    while (!asked_.empty() && asked_.front() <= taken) asked_.pop_front();
    Say();
  }
  uint64_t Taken() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return std::min(came_, bytes_ + window() / 2); }
  void Say() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::ChunkFrame frame;
    frame.mutable_ack()->set_bytes(Taken());
    frame.mutable_ack()->set_window(window());
    stream_->WriteLatest(EncodeFrame(frame, {}));
  }

  const std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<const StreamMemory> memory_;
  absl::Mutex mutex_;  // held while writing: what is said only grows
  uint64_t came_ ABSL_GUARDED_BY(mutex_) = 0, bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of payload; handed on
  uint64_t newest_asked_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<uint64_t> asked_ ABSL_GUARDED_BY(mutex_);  // acknowledged when so many bytes have been handed on
};

absl::StatusOr<std::shared_ptr<CommitQueue>> ServerJob::AddStream(StreamId id, std::shared_ptr<ByteStream> stream,
                                                                  std::shared_ptr<SharedFrames> frames,
                                                                  const v1::StreamHello& hello) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return absl::NotFoundError(absl::StrCat("job ", options_.job_id, " has ended"));
  WorkerStream& s = streams_[id];
  auto queue = std::make_shared<CommitQueue>(stream, frames, hello.generation(), options_.memory);
  s.receipts = std::make_shared<PushReceipts>(stream, options_.memory);
  s.queue = queue;
  s.frames = std::move(frames);
  s.stream = std::move(stream);
  s.who = absl::StrCat(hello.node().name(), " contributor ", hello.contributor());
  s.hello = hello;
  absl::Status status = core_.OnHello(id, hello);
  if (status.ok()) {
    for (const uint64_t version : core_.ordered()) AnnounceCheckpoint(s, version);
    if (!hello.residuals() && core_.generation() == hello.generation()) ResidualsAbsent(hello.contributor());
    // Where the generation is not here yet, its plan brings the offer.
    if (core_.generation() == hello.generation()) OfferMemory(&s);
    s.receipts->SayWindow();
    return queue;
  }
  streams_.erase(id);
  return status;
}

absl::Status ServerJob::OnFrame(StreamId id, ParsedFrame frame) {
  // Nothing of a frame whose lengths do not add up is counted: its bytes may stand at other places than they should.
  ASSIGN_OR_RETURN(std::vector<Payload> payloads, SplitPayload(frame));
  std::shared_ptr<const void> receipt;
  absl::MutexLock lock(&mutex_);
  const auto it = streams_.find(id);
  if (it == streams_.end()) return absl::CancelledError("the stream has been closed");
  receipt = PushReceipts::Make(it->second.receipts, frame);
  core_.SetTime(options_.clock->Now());
  const absl::Status status = HandleFrame(id, frame.control, std::move(payloads), receipt);
  AfterEvent();
  return status;
}

absl::Status ServerJob::HandleFrame(StreamId id, const v1::ChunkFrame& control, std::vector<Payload> payloads,
                                    const std::shared_ptr<const void>& receipt) {
  if (control.has_report()) RETURN_IF_ERROR(core_.OnReport(id, control.report()));
  if (control.has_lease_request()) RETURN_IF_ERROR(core_.OnLeaseRequest(id, control.lease_request()));
  if (control.has_subscribe()) RETURN_IF_ERROR(core_.OnSubscribe(id, control.subscribe()));
  for (size_t i = 0; i < payloads.size(); ++i) {
    const v1::ChunkHeader& header = control.header(static_cast<int>(i));
    Payload& payload = payloads[i];
    if (header.residual()) {
      RETURN_IF_ERROR(OnResidual(id, header, std::move(payload), receipt));
      continue;
    }
    const uint64_t bytes = payload.size();
    std::shared_ptr<PayloadContribution> value;
    if (bytes > 0) {
      // What lies in shared memory pins nothing of this server's; TOP_K has been copied out of it.
      const bool elsewhere = control.shared_size() > 0 && header.encoding() != v1::TOP_K;
      const uint64_t pinned = elsewhere ? 0 : payload.pinned_bytes();
      value = std::make_shared<PayloadContribution>(std::move(payload), pinned, receipt);
      if (header.contributors() > 1) {  // who it names is checked by the core
        value->of = {header.contributors(),
                     {header.nonfinite_contributors().begin(), header.nonfinite_contributors().end()}};
      }
    }
    RETURN_IF_ERROR(core_.OnPush(id, header, std::move(value), bytes));
  }
  const auto it = streams_.find(id);
  return it == streams_.end() ? absl::OkStatus() : CheckUnread(&it->second);
}

void ServerJob::OfferMemory(WorkerStream* stream) {
  if (stream->offered || !stream->frames->offered() || store_ == nullptr || store_->region() == nullptr) return;
  stream->offered = true;
  v1::ChunkFrame offer;
  stream->frames->Offer(store_->region(), &offer);
  stream->stream->Write(EncodeFrame(offer, {}));
}

absl::Status ServerJob::CheckUnread(WorkerStream* stream) {
  const uint64_t chunks = core_.layout() == nullptr ? 0 : core_.layout()->table().chunks();
  const size_t waiting = stream->stream->queued_bytes();
  const uint64_t written = stream->queue->written();
  stream->unread_frames =
      waiting == 0 || written != std::exchange(stream->written, written) ? 0 : stream->unread_frames + 1;
  if (stream->unread_frames > kMaxUnreadFrames + kMaxUnreadFramesPerChunk * chunks) {
    return absl::ResourceExhaustedError(absl::StrCat("job ", options_.job_id, ": ", stream->unread_frames,
                                                     " frames came while ", waiting,
                                                     " bytes wait that the client does not read"));
  }
  return absl::OkStatus();
}

void ServerJob::CloseUnread(StreamId id) {
  absl::MutexLock lock(&mutex_);
  const auto it = streams_.find(id);
  if (it == streams_.end()) return;
  const absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat("job ", options_.job_id, ": the client subscribed and does not read: it is two versions behind"));
  LOG_WARN("stream of {}, job {}: {}", it->second.who, options_.job_id, status.ToString());
  // At once: it would only hold on to old values.
  it->second.stream->Cut(status);
  streams_.erase(it);
  core_.OnStreamClosed(id);
  AfterEvent();
}

void ServerJob::RemoveStream(StreamId id) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(id);
  if (ended_) return;
  core_.OnStreamClosed(id);
  AfterEvent();
}

void ServerJob::AfterEvent() {
  FlushServed();
  SayLater();
  std::erase_if(fetches_, [this](const auto& fetch) {
    mutex_.AssertHeld();
    return TryFetch(fetch.second);
  });
}

v1::Later* ServerJob::LaterOf(StreamId stream) {
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return nullptr;
  v1::Later* const later = &it->second.later;
  if (later->declined_size() + later->again_size() >= kMaxLater) SayLater();
  later_.insert(stream);
  return later;
}

void ServerJob::Decline(StreamId stream, uint64_t chunk, uint64_t round) {
  mutex_.AssertHeld();
  v1::Later* const later = LaterOf(stream);
  if (later == nullptr) return;
  v1::ContributionName* const name = later->add_declined();
  name->set_chunk(chunk);
  name->set_round(round);
}

void ServerJob::AskAgain(StreamId stream, uint64_t chunk, uint64_t round) {
  mutex_.AssertHeld();
  v1::Later* const later = LaterOf(stream);
  if (later == nullptr) return;
  v1::ContributionName* const name = later->add_again();
  name->set_chunk(chunk);
  name->set_round(round);
}

// What the core said during an event, in one frame for each stream.
void ServerJob::SayLater() {
  for (const StreamId id : std::exchange(later_, {})) {
    const auto it = streams_.find(id);
    if (it == streams_.end()) continue;
    v1::ChunkFrame frame;
    frame.mutable_later()->Swap(&it->second.later);
    it->second.stream->Write(EncodeFrame(frame, {}));
  }
}

void ServerJob::CloseStream(StreamId stream, const absl::Status& status) {
  mutex_.AssertHeld();
  auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  if (!absl::IsAborted(status)) {  // a new generation is nobody's fault
    LOG_WARN("stream of {}, job {}: {}", it->second.who, options_.job_id, status.ToString());
  }
  v1::ChunkFrame refusal;
  refusal.mutable_refusal()->set_code(static_cast<int>(status.code()));
  refusal.mutable_refusal()->set_message(std::string(status.message()));
  refusal.mutable_refusal()->set_generation(core_.generation());
  it->second.stream->Write(EncodeFrame(refusal, {}));
  it->second.stream->Close(status);
  streams_.erase(it);
}

}  // namespace sluice
