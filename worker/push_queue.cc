#include "worker/push_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

}  // namespace

void PushQueue::Add(v1::ChunkHeader header, BorrowedBytes bytes) {
  waiting_.push_back({std::move(header), std::move(bytes)});
}

void PushQueue::DropBefore(uint64_t round) {
  std::erase_if(waiting_, [round](const Entry& entry) { return entry.header.round() < round; });
}

absl::Status PushQueue::Acknowledge(uint64_t bytes) {
  if (bytes > sent_) {
    return absl::OutOfRangeError(absl::StrCat("acknowledgement of ", bytes, " bytes; sent were ", sent_));
  }
  acknowledged_ = std::max(acknowledged_, bytes);
  return absl::OkStatus();
}

bool PushQueue::Next(v1::ChunkFrame* control, std::vector<BorrowedBytes>* payload) {
  control->Clear();
  payload->clear();
  size_t bytes = 0;
  while (!waiting_.empty() && control->header_size() < kMaxHeaders) {
    Entry& entry = waiting_.front();
    const size_t more = entry.bytes.size;
    if (more > 0 && bytes > 0 && bytes + more > frame_bytes_) break;
    if (more > 0 && unacknowledged() > 0 && unacknowledged() + more > window_) break;
    bytes += more;
    sent_ += more;
    *control->add_header() = std::move(entry.header);
    if (more > 0) payload->push_back(std::move(entry.bytes));
    waiting_.pop_front();
  }
  return control->header_size() > 0;
}

}  // namespace sluice
