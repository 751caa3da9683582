#include "worker/push_queue.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

}  // namespace

void PushQueue::Add(v1::ChunkHeader header, BorrowedBytes bytes) {
  waiting_elements_ += header.elements();
  waiting_.push_back({std::move(header), std::move(bytes)});
}

void PushQueue::DropBefore(uint64_t round) {
  std::erase_if(waiting_, [&](const Entry& entry) {
    if (entry.header.round() >= round) return false;
    waiting_elements_ -= entry.header.elements();
    return true;
  });
}

absl::Status PushQueue::Acknowledge(uint64_t bytes) {
  if (bytes > sent_) {
    return absl::OutOfRangeError(absl::StrCat("acknowledgement of ", bytes, " bytes; sent were ", sent_));
  }
  acknowledged_ = std::max(acknowledged_, bytes);
  return absl::OkStatus();
}

bool PushQueue::Next(v1::ChunkFrame* control, std::vector<BorrowedBytes>* payload, bool more, bool described) {
  control->Clear();
  payload->clear();
  if (waiting_.empty()) {
    // The last frame left as one of several.
    if (more || asked_ == sent_) return false;
    asked_ = sent_;
    return true;
  }
  const size_t most = described ? std::max(frame_bytes_, kDescribedPayload) : std::min(frame_bytes_, granted_);
  const size_t worth = described || unacknowledged() > 0 ? most : most / 4;
  if (more && (described || patient_) && waiting_elements_ * sizeof(float) < worth) return false;
  size_t bytes = 0;
  absl::flat_hash_set<uint64_t> chunks;
  while (!waiting_.empty() && control->header_size() < kMaxHeaders) {
    Entry& entry = waiting_.front();
    const size_t size = entry.bytes.size;
    if (!chunks.insert(entry.header.chunk()).second) break;  // said twice around a stream's opening; or its residual
    if (size > 0 && bytes > 0 && bytes + size > most) break;
    // Without an acknowledgement to come, no more than half of the window is under way: it may be exceeded.
    if (size > 0 && !described && asked_ > acknowledged_ && unacknowledged() + size > granted_) break;
    bytes += size;
    sent_ += size;
    waiting_elements_ -= entry.header.elements();
    *control->add_header() = std::move(entry.header);
    if (size > 0) payload->push_back(std::move(entry.bytes));
    waiting_.pop_front();
  }
  if (control->header_size() == 0) return false;
  if ((waiting_.empty() && !more) || sent_ - asked_ >= granted_ / 2) {
    asked_ = sent_;
  } else {
    control->set_ack_later(true);
  }
  return true;
}

}  // namespace sluice
