#include "server/commit_queue.h"

#include <vector>

#include "common/frame.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

}  // namespace

bool CommitQueue::Add(uint64_t chunk, uint64_t version, ChunkValue value) {
  absl::MutexLock lock(&mutex_);
  if (version >= 2) waiting_.erase({version - 2, chunk});
  waiting_[{version, chunk}] = std::move(value);
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
  for (auto& [key, value] : waiting_) {
    const size_t size = value.elements * sizeof(float);
    if (bytes + size > kMaxFramePayload || frame.header_size() == kMaxHeaders) send();
    v1::ChunkHeader* header = frame.add_header();
    header->set_chunk(key.second);
    header->set_generation(generation_);
    header->set_round(key.first);
    header->set_elements(value.elements);
    payload.push_back({value.data.get(), size, value.data});
    bytes += size;
  }
  send();
  waiting_.clear();
}

}  // namespace sluice
