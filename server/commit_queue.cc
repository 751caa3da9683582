#include "server/commit_queue.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/frame.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;           // of a frame: keeps its control part far below kMaxFrameControl
constexpr size_t kControlParts = 64 << 10;  // what waits in a stream beside payload

}  // namespace

CommitQueue::CommitQueue(std::shared_ptr<ByteStream> stream, std::shared_ptr<const SharedFrames> frames,
                         uint64_t generation, std::shared_ptr<StreamMemory> memory)
    : stream_(std::move(stream)),
      frames_(std::move(frames)),
      generation_(generation),
      memory_(memory != nullptr ? std::move(memory) : std::make_shared<StreamMemory>()) {
  memory_->Join();
}

CommitQueue::~CommitQueue() {
  memory_->Count(-static_cast<int64_t>(counted_));
  memory_->Leave();
}

bool CommitQueue::Add(uint64_t chunk, uint64_t version, WireValue value) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_round(version);
  return Add(std::move(header), std::move(value));
}

bool CommitQueue::Add(v1::ChunkHeader header, WireValue value, std::shared_ptr<const void> receipt) {
  const uint64_t chunk = header.chunk(), version = header.round();
  header.set_generation(generation_);
  header.set_elements(value.elements);
  header.set_encoding(value.encoding);
  absl::MutexLock lock(&mutex_);
  if (version >= 2) {
    if (const auto old = waiting_.find({version - 2, true, chunk}); old != waiting_.end()) {
      waiting_bytes_ -= old->second.bytes();
      waiting_.erase(old);
      fell_behind_ = true;
    }
  }
  return Insert({version, true, chunk}, {std::move(header), std::move(value.bytes), nullptr, std::move(receipt)});
}

bool CommitQueue::AddLater(v1::ChunkHeader header, std::function<WireValue()> make) {
  const Key key{header.round(), false, header.chunk()};
  header.set_generation(generation_);
  absl::MutexLock lock(&mutex_);
  BorrowedBytes room;
  room.size = header.elements() * sizeof(float);
  return Insert(key, {std::move(header), std::move(room), std::move(make)});
}

bool CommitQueue::Insert(const Key& key, Waiting added) {
  Waiting& waiting = waiting_[key];
  waiting_bytes_ -= waiting.bytes();
  waiting = std::move(added);
  waiting_bytes_ += waiting.bytes();
  Send(/*all=*/false);
  return !std::exchange(flush_due_, true);
}

void CommitQueue::Flush() {
  absl::MutexLock lock(&mutex_);
  flush_due_ = false;
  Send(/*all=*/true);
  frame_bytes_ = kMaxFramePayload;
}

void CommitQueue::OnWritten() {
  absl::MutexLock lock(&mutex_);
  ++written_;
  Send(/*all=*/!flush_due_);
}

void CommitQueue::Send(bool all) {
  Count();
  while (true) {
    const size_t share = memory_->share(), most = described_ ? frame_bytes_ : std::min(kMaxFramePayload, share);
    if (waiting_.empty() || (!all && waiting_bytes_ < most)) return;
    // What is described does not wait in the stream.
    const size_t queued = Count(), next = described_ ? 0 : NextFrame(most);
    if (queued > 0 && (queued + next > share + kControlParts || !memory_->Fits(next))) return;
    SendFrame(most);
    Count();
  }
}

size_t CommitQueue::Count() {
  const size_t queued = stream_->queued_bytes();
  memory_->Count(static_cast<int64_t>(queued) - static_cast<int64_t>(std::exchange(counted_, queued)));
  return queued;
}

// Payload of the frame that SendFrame would send.
size_t CommitQueue::NextFrame(size_t most) const {
  size_t bytes = 0;
  int headers = 0;
  for (auto next = waiting_.begin(); next != waiting_.end() && headers < kMaxHeaders; ++next, ++headers) {
    const size_t size = next->second.bytes();
    if (headers > 0 && bytes + size > most) break;
    bytes += size;
  }
  return bytes;
}

void CommitQueue::SendFrame(size_t most) {
  v1::ChunkFrame frame;
  std::vector<BorrowedBytes> payload;
  size_t bytes = 0;
  auto next = waiting_.begin();
  for (; next != waiting_.end() && frame.header_size() < kMaxHeaders; ++next) {
    Waiting& waiting = next->second;
    const size_t size = waiting.bytes();
    if (frame.header_size() > 0 && bytes + size > most) break;
    if (waiting.make != nullptr) {
      WireValue value = waiting.make();
      waiting.header.set_elements(value.elements);
      waiting.header.set_encoding(value.encoding);
      waiting.value = std::move(value.bytes);
    }
    *frame.add_header() = std::move(waiting.header);
    if (waiting.value.size > 0) payload.push_back(std::move(waiting.value));
    bytes += size;
  }
  stream_->Write(frames_->Encode(&frame, payload));
  waiting_.erase(waiting_.begin(), next);
  waiting_bytes_ -= bytes;
  described_ = frame.shared_size() > 0;
  frame_bytes_ = described_ ? std::min(2 * frame_bytes_, kMostDescribed) : kMaxFramePayload;
}

}  // namespace sluice
