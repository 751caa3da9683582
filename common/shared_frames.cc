#include "common/shared_frames.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {

absl::StatusOr<grpc::Slice> MappedSlice(const std::shared_ptr<const MappedRegion>& region,
                                        const v1::SharedBytes& part) {
  const void* const at = region->At(part.offset(), part.bytes());
  if (at == nullptr) {
    return absl::OutOfRangeError(
        absl::StrCat("shared bytes [", part.offset(), ", +", part.bytes(), ") do not lie in the sender's region"));
  }
  return grpc::Slice(
      const_cast<void*>(at), part.bytes(),
      [](void* held) { delete static_cast<std::shared_ptr<const MappedRegion>*>(held); },
      new std::shared_ptr<const MappedRegion>(region));
}

void SharedFrames::Offer(std::shared_ptr<const SharedRegion> own, v1::ChunkFrame* frame) {
  *frame->mutable_memory() = own->description();
  absl::MutexLock lock(&mutex_);
  own_ = std::move(own);
  own_mapped_ = false;
}

bool SharedFrames::offered() const {
  absl::MutexLock lock(&mutex_);
  return offered_;
}

bool SharedFrames::describes() const {
  absl::MutexLock lock(&mutex_);
  return own_mapped_;
}

bool SharedFrames::OnFrame(const v1::ChunkFrame& frame, bool accept, v1::ChunkFrame* answer) {
  {
    absl::MutexLock lock(&mutex_);
    if (frame.mapped()) own_mapped_ = own_ != nullptr;
    if (frame.has_memory()) offered_ = true;
  }
  if (!frame.has_memory() || !accept) return false;
  const absl::Status mapped = Map(frame.memory(), answer);
  if (!mapped.ok()) LOG_DEBUG("payloads stay in the stream: {}", mapped.ToString());
  return mapped.ok();
}

absl::Status SharedFrames::Map(const v1::SharedMemory& memory, v1::ChunkFrame* answer) {
  ASSIGN_OR_RETURN(std::shared_ptr<const MappedRegion> region, MappedRegion::Open(memory));
  absl::MutexLock lock(&mutex_);
  peers_ = std::move(region);
  answer->set_mapped(true);
  return absl::OkStatus();
}

grpc::ByteBuffer SharedFrames::Encode(v1::ChunkFrame* control, absl::Span<const BorrowedBytes> payload) const {
  std::shared_ptr<const SharedRegion> region;
  if (!payload.empty()) {
    absl::MutexLock lock(&mutex_);
    if (own_mapped_) region = own_;
  }
  if (region == nullptr) return EncodeFrame(*control, payload);
  for (const BorrowedBytes& part : payload) {
    if (part.size == 0) continue;
    const std::optional<uint64_t> offset = region->OffsetOf(part.data, part.size);
    if (!offset.has_value()) {
      control->clear_shared();
      return EncodeFrame(*control, payload);
    }
    v1::SharedBytes* const last =
        control->shared_size() > 0 ? control->mutable_shared(control->shared_size() - 1) : nullptr;
    if (last != nullptr && last->offset() + last->bytes() == *offset) {
      last->set_bytes(last->bytes() + part.size);
    } else {
      v1::SharedBytes* const added = control->add_shared();
      added->set_offset(*offset);
      added->set_bytes(part.size);
    }
  }
  return EncodeFrame(*control, {});
}

absl::StatusOr<ParsedFrame> SharedFrames::Parse(grpc::ByteBuffer message) const {
  ASSIGN_OR_RETURN(ParsedFrame frame, ParseFrame(std::move(message)));
  if (frame.control.shared_size() == 0) return frame;
  std::shared_ptr<const MappedRegion> region;
  {
    absl::MutexLock lock(&mutex_);
    region = peers_;
  }
  if (region == nullptr) {
    return absl::FailedPreconditionError("a frame describes shared memory, but none of the sender's is mapped here");
  }
  if (frame.payload.size() > 0) return absl::InvalidArgumentError("a frame has both `payload` and `shared`");
  std::vector<grpc::Slice> slices;
  for (const v1::SharedBytes& part : frame.control.shared()) {
    ASSIGN_OR_RETURN(grpc::Slice slice, MappedSlice(region, part));
    slices.push_back(std::move(slice));
  }
  frame.payload = Payload(std::move(slices));
  frame.region = std::move(region);
  return frame;
}

}  // namespace sluice
