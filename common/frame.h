// The frame codec of the data plane and of workers' mail: v1::ChunkFrame and v1::MailFrame as grpc::ByteBuffer without
// copying payloads.
//
// Written by hand, yet a valid protobuf message: slice 0 holds the encoded control part, the payload's tag and length;
// the payload follows as borrowed slices. Parsed in place: everything but the payload into the message, the payload as
// slices. Any legal encoding is accepted: the canonical one (payload once, last) in place, every other through the
// protobuf parser.
#ifndef SLUICE_COMMON_FRAME_H_
#define SLUICE_COMMON_FRAME_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/peer.pb.h"

namespace sluice {

class MappedRegion;

inline constexpr size_t kMaxFramePayload = 1 << 20;  // bytes a sender puts into one frame, unless one chunk is larger
inline constexpr size_t kMaxFrameControl = 1 << 20;  // bytes of the control part accepted

// Bytes owned by somebody else: `owner` keeps them alive and unchanged for as long as it is held.
struct BorrowedBytes {
  const void* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
};

// control.payload must be empty.
grpc::ByteBuffer EncodeFrame(const v1::ChunkFrame& control, absl::Span<const BorrowedBytes> payload);

// Bytes spread over reference-counted slices. Copying is cheap. Thread-safe for reading.
class Payload {
 public:
  Payload() = default;
  explicit Payload(std::vector<grpc::Slice> slices);

  size_t size() const { return size_; }
  // The part [offset, offset + length); must lie within.
  Payload Sub(size_t offset, size_t length) const;
  // Memory that holding this pins: the capacity of the slices behind it.
  size_t pinned_bytes() const;
  void CopyTo(void* out) const;
  // Calls visit(pointer, bytes, offset) for consecutive pieces; pointers are unaligned, an element may straddle two.
  template <typename Visit>
  void ForEach(Visit visit) const {
    size_t at = 0;
    for (const grpc::Slice& s : slices_) {
      visit(s.begin(), s.size(), at);
      at += s.size();
    }
  }
  // A pointer to all bytes where they are in one slice, else nullptr.
  const void* contiguous() const { return slices_.size() == 1 ? slices_[0].begin() : nullptr; }

 private:
  friend class PayloadReader;
  std::vector<grpc::Slice> slices_;
  size_t size_ = 0;
};

// Goes through a payload, which outlives it, from front to back. Not thread-safe.
class PayloadReader {
 public:
  explicit PayloadReader(const Payload& payload) : slices_(payload.slices_) {}

  // The next bytes, unaligned: in place, as many as lie in one slice and no more than `most`, cut to a multiple of
  // `unit` unless they are `most`; where not even a unit lies together, one (or `most`) is copied to `scratch`. `most`
  // must still be there. Sets `bytes`. Valid as long as the payload and, until the next call with the same one,
  // scratch.
  const void* Next(size_t most, size_t unit, void* scratch, size_t* bytes);

 private:
  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0, within_ = 0;
};

struct ParsedFrame {
  v1::ChunkFrame control;  // without payload
  Payload payload;
  std::shared_ptr<const MappedRegion> region;  // where all of the payload lies; null: it came in the stream
};

// INVALID_ARGUMENT says what is wrong; nothing is allocated by lengths that the message itself claims beyond its size.
absl::StatusOr<ParsedFrame> ParseFrame(grpc::ByteBuffer message);

// The same for mail.
struct ParsedMail {
  v1::MailFrame control;  // without payload
  Payload payload;
};
grpc::ByteBuffer EncodeMail(const v1::MailFrame& control, absl::Span<const BorrowedBytes> payload);
absl::StatusOr<ParsedMail> ParseMail(grpc::ByteBuffer message);

// A small protobuf message as ByteBuffer and back.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);
bool DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace sluice

#endif  // SLUICE_COMMON_FRAME_H_
