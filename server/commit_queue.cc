#include "server/commit_queue.h"

#include <algorithm>
#include <vector>

#include "common/frame.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

}  // namespace

bool CommitQueue::Add(uint64_t chunk, uint64_t version, WireValue value) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_round(version);
  return Add(std::move(header), std::move(value));
}

bool CommitQueue::Add(v1::ChunkHeader header, WireValue value) {
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
  return Insert({version, true, chunk}, {std::move(header), std::move(value.bytes)});
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
  Send(/*all=*/!flush_due_);
}

void CommitQueue::Send(bool all) {
  while (waiting_bytes_ >= frame_bytes_ || (all && !waiting_.empty())) {
    if (stream_->queued_bytes() >= kCommitWindow) return;
    SendFrame();
  }
}

void CommitQueue::SendFrame() {
  v1::ChunkFrame frame;
  std::vector<BorrowedBytes> payload;
  size_t bytes = 0;
  auto next = waiting_.begin();
  for (; next != waiting_.end() && frame.header_size() < kMaxHeaders; ++next) {
    Waiting& waiting = next->second;
    const size_t size = waiting.bytes();
    if (frame.header_size() > 0 && bytes + size > frame_bytes_) break;
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
  frame_bytes_ = frame.shared_size() > 0 ? std::min(2 * frame_bytes_, kMostDescribed) : kMaxFramePayload;
}

}  // namespace sluice
