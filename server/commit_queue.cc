#include "server/commit_queue.h"

#include <vector>

#include "common/frame.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

}  // namespace

bool CommitQueue::Add(uint64_t chunk, uint64_t version, ChunkValue value) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_round(version);
  header.set_elements(value.elements);
  return Add(std::move(header), std::move(value));
}

bool CommitQueue::Add(v1::ChunkHeader header, ChunkValue value) {
  const uint64_t chunk = header.chunk(), version = header.round();
  header.set_generation(generation_);
  absl::MutexLock lock(&mutex_);
  if (version >= 2) waiting_.erase({version - 2, chunk});
  waiting_[{version, chunk}] = {std::move(header), std::move(value)};
  return !std::exchange(flush_due_, true);
}

void CommitQueue::Flush() {
  absl::MutexLock lock(&mutex_);  // held while queueing, so that a chunk's versions leave in order
  flush_due_ = false;
  v1::ChunkFrame frame;
  std::vector<BorrowedBytes> payload;
  size_t bytes = 0;
  auto send = [&] {
    if (payload.empty()) return;
    stream_->Write(EncodeFrame(frame, payload));
    frame.Clear();
    payload.clear();
    bytes = 0;
  };
  for (auto& [key, entry] : waiting_) {
    const ChunkValue& value = entry.value;
    const size_t size = value.elements * sizeof(float);
    if (bytes + size > kMaxFramePayload || frame.header_size() == kMaxHeaders) send();
    *frame.add_header() = std::move(entry.header);
    payload.push_back({value.data.get(), size, value.data});
    bytes += size;
  }
  send();
  waiting_.clear();
}

}  // namespace sluice
