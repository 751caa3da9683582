#include "common/frame.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpc/slice.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kPayloadTag = (v1::ChunkFrame::kPayloadFieldNumber << 3) | 2;  // length-delimited
static_assert(int{v1::ChunkFrame::kPayloadFieldNumber} == int{v1::MailFrame::kPayloadFieldNumber});

// What one refcounted slice is taken to pin: gRPC reads a socket into buffers of this size and cuts messages out of
// them.
constexpr size_t kReadBuffer = 64 << 10;

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

grpc::Slice Borrow(const BorrowedBytes& bytes) {
  return grpc::Slice(const_cast<void*>(bytes.data), bytes.size, &ReleaseOwner,
                     new std::shared_ptr<const void>(bytes.owner));
}

grpc::Slice OwnString(std::string text) {
  auto* owned = new std::string(std::move(text));
  return grpc::Slice(
      owned->data(), owned->size(), [](void* p) { delete static_cast<std::string*>(p); }, owned);
}

// Reads forward over bytes that are spread over slices.
class Cursor {
 public:
  Cursor(const std::vector<grpc::Slice>& slices, size_t size) : slices_(slices), size_(size) {}

  size_t at() const { return at_; }
  size_t left() const { return size_ - at_; }

  bool Byte(uint8_t* out) {
    if (left() == 0) return false;
    while (within_ == slices_[slice_].size()) {
      ++slice_;
      within_ = 0;
    }
    *out = slices_[slice_].begin()[within_++];
    ++at_;
    return true;
  }

  // At most five bytes, as protobuf's parser accepts for tags and lengths.
  bool Varint32(uint64_t* out) {
    *out = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      uint8_t byte;
      if (!Byte(&byte)) return false;
      *out |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool SkipVarint64() {
    for (int i = 0; i < 10; ++i) {
      uint8_t byte;
      if (!Byte(&byte)) return false;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool Skip(size_t n) {
    if (n > left()) return false;
    at_ += n;
    while (n > 0) {
      const size_t here = std::min(n, slices_[slice_].size() - within_);
      within_ += here;
      n -= here;
      if (n > 0) {
        ++slice_;
        within_ = 0;
      }
    }
    return true;
  }

 private:
  const std::vector<grpc::Slice>& slices_;
  const size_t size_;
  size_t at_ = 0;
  size_t slice_ = 0;
  size_t within_ = 0;
};

// How the payload lies in a message.
struct Scan {
  bool canonical = false;    // at most one payload field, and it is last
  size_t control_bytes = 0;  // canonical: bytes before the payload's tag
  size_t payload_offset = 0;
  size_t payload_bytes = 0;
};

// Walks the top-level fields. Whatever is odd (groups, long varints, bad tags) is left to protobuf's parser; only
// lengths beyond the message are refused here, before anything is allocated for them.
absl::StatusOr<Scan> ScanFields(const std::vector<grpc::Slice>& slices, size_t size) {
  const Scan odd;
  Cursor cursor(slices, size);
  Scan scan;
  while (cursor.left() > 0) {
    const size_t field_start = cursor.at();
    uint64_t tag, length;
    if (!cursor.Varint32(&tag) || tag > std::numeric_limits<uint32_t>::max()) return odd;
    switch (tag & 7) {
      case 0:
        if (!cursor.SkipVarint64()) return odd;
        break;
      case 1:
        if (!cursor.Skip(8)) return odd;
        break;
      case 5:
        if (!cursor.Skip(4)) return odd;
        break;
      case 2:
        if (!cursor.Varint32(&length)) return odd;
        if (length > cursor.left()) {
          return absl::InvalidArgumentError(absl::StrCat("frame: field ", tag >> 3, " at byte ", field_start,
                                                         " claims ", length, " bytes, the message has ", cursor.left(),
                                                         " more; it is truncated or not a frame"));
        }
        if (tag == kPayloadTag) {
          if (length != cursor.left()) return odd;
          scan.canonical = true;
          scan.control_bytes = field_start;
          scan.payload_offset = cursor.at();
          scan.payload_bytes = length;
          return scan;
        }
        cursor.Skip(length);
        break;
      default:
        return odd;
    }
  }
  scan.canonical = true;
  scan.control_bytes = size;
  scan.payload_offset = size;
  return scan;
}

absl::Status NotAFrame(const google::protobuf::MessageLite& control) {
  return absl::InvalidArgumentError(
      absl::StrCat("frame: the bytes are not a ", control.GetTypeName(), " message (protobuf's parser refuses them)"));
}

absl::Status ControlTooLarge(size_t bytes) {
  return absl::InvalidArgumentError(
      absl::StrCat("frame: ", bytes, " bytes beside the payload, at most ", kMaxFrameControl, " are accepted"));
}

template <typename Parsed>
absl::StatusOr<Parsed> ParseInPlace(const Scan& scan, std::vector<grpc::Slice> slices) {
  if (scan.control_bytes > kMaxFrameControl) return ControlTooLarge(scan.control_bytes);
  const Payload whole(std::move(slices));
  const Payload control = whole.Sub(0, scan.control_bytes);
  Parsed frame;
  bool ok;
  if (const void* bytes = control.contiguous()) {
    ok = frame.control.ParseFromArray(bytes, static_cast<int>(control.size()));
  } else {
    std::string gathered(control.size(), '\0');
    control.CopyTo(gathered.data());
    ok = frame.control.ParseFromString(gathered);
  }
  if (!ok) return NotAFrame(frame.control);
  frame.payload = whole.Sub(scan.payload_offset, scan.payload_bytes);
  return frame;
}

template <typename Parsed>
absl::StatusOr<Parsed> ParseByProtobuf(const grpc::ByteBuffer& message) {
  Parsed frame;
  if (!DecodeMessage(message, &frame.control)) return NotAFrame(frame.control);
  const std::unique_ptr<std::string> payload(frame.control.release_payload());
  const size_t payload_bytes = payload == nullptr ? 0 : payload->size();
  const size_t control_bytes = message.Length() - payload_bytes;
  if (control_bytes > kMaxFrameControl) return ControlTooLarge(control_bytes);
  if (payload_bytes > 0) frame.payload = Payload({OwnString(std::move(*payload))});
  return frame;
}

template <typename Message>
grpc::ByteBuffer Encode(const Message& control, absl::Span<const BorrowedBytes> payload) {
  CHECK(control.payload().empty(), "the payload is given as borrowed bytes");
  size_t payload_bytes = 0;
  for (const BorrowedBytes& part : payload) payload_bytes += part.size;
  CHECK(payload_bytes < std::numeric_limits<int32_t>::max(), "a frame's payload of {} bytes", payload_bytes);

  const size_t control_bytes = control.ByteSizeLong();
  const size_t head_bytes =
      control_bytes +
      (payload_bytes == 0 ? 0 : 1 + CodedOutputStream::VarintSize32(static_cast<uint32_t>(payload_bytes)));
  grpc::Slice head(head_bytes);
  auto* out = const_cast<uint8_t*>(head.begin());
  out = control.SerializeWithCachedSizesToArray(out);
  if (payload_bytes > 0) {
    out = CodedOutputStream::WriteTagToArray(kPayloadTag, out);
    out = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(payload_bytes), out);
  }
  DCHECK(out == head.end());

  std::vector<grpc::Slice> slices;
  slices.reserve(1 + payload.size());
  slices.push_back(std::move(head));
  for (const BorrowedBytes& part : payload) {
    if (part.size > 0) slices.push_back(Borrow(part));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

template <typename Parsed>
absl::StatusOr<Parsed> Parse(grpc::ByteBuffer message) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return absl::InvalidArgumentError("frame: no message, or one that is compressed");
  size_t size = 0;
  for (const grpc::Slice& s : slices) size += s.size();
  ASSIGN_OR_RETURN(const Scan scan, ScanFields(slices, size));
  if (scan.canonical) return ParseInPlace<Parsed>(scan, std::move(slices));
  return ParseByProtobuf<Parsed>(message);
}

}  // namespace

Payload::Payload(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {
  slices_.erase(std::remove_if(slices_.begin(), slices_.end(), [](const grpc::Slice& s) { return s.size() == 0; }),
                slices_.end());
  for (const grpc::Slice& s : slices_) size_ += s.size();
}

Payload Payload::Sub(size_t offset, size_t length) const {
  CHECK(offset <= size_ && length <= size_ - offset, "Payload::Sub({}, {}) of {} bytes", offset, length, size_);
  Payload part;
  part.size_ = length;
  for (const grpc::Slice& s : slices_) {
    if (length == 0) break;
    if (offset >= s.size()) {
      offset -= s.size();
      continue;
    }
    const size_t here = std::min(length, s.size() - offset);
    part.slices_.push_back(here == s.size() ? s : s.sub(offset, offset + here));
    offset = 0;
    length -= here;
  }
  return part;
}

size_t Payload::pinned_bytes() const {
  size_t pinned = 0;
  const void* last = nullptr;
  size_t last_bytes = 0;
  const auto round_up = [](size_t n) { return (n + kReadBuffer - 1) / kReadBuffer * kReadBuffer; };
  for (const grpc::Slice& s : slices_) {
    const grpc_slice raw = s.c_slice();
    const void* owner = raw.refcount;
    grpc_slice_unref(raw);
    if (owner == nullptr) {  // small: the bytes are in the slice itself
      pinned += sizeof(grpc_slice);
    } else if (owner == last) {
      last_bytes += s.size();
    } else {
      pinned += round_up(last_bytes);
      last = owner;
      last_bytes = s.size();
    }
  }
  return pinned + round_up(last_bytes);
}

void Payload::CopyTo(void* out) const {
  ForEach([out](const uint8_t* bytes, size_t n, size_t offset) {
    std::memcpy(static_cast<uint8_t*>(out) + offset, bytes, n);
  });
}

const void* PayloadReader::Next(size_t most, size_t unit, void* scratch, size_t* bytes) {
  *bytes = std::min(most, unit);
  if (*bytes == 0) return scratch;
  for (; within_ == slices_[slice_].size(); within_ = 0) ++slice_;
  const grpc::Slice& first = slices_[slice_];
  if (const size_t here = std::min(most, first.size() - within_); here >= *bytes) {
    *bytes = here == most ? here : here / unit * unit;
    return first.begin() + std::exchange(within_, within_ + *bytes);
  }
  auto* out = static_cast<uint8_t*>(scratch);
  for (size_t left = *bytes;;) {
    const grpc::Slice& slice = slices_[slice_];
    const size_t here = std::min(left, slice.size() - within_);
    std::memcpy(out, slice.begin() + within_, here);
    out += here;
    within_ += here;
    left -= here;
    if (left == 0) return scratch;
    ++slice_;
    within_ = 0;
  }
}

grpc::ByteBuffer EncodeFrame(const v1::ChunkFrame& control, absl::Span<const BorrowedBytes> payload) {
  return Encode(control, payload);
}

absl::StatusOr<ParsedFrame> ParseFrame(grpc::ByteBuffer message) { return Parse<ParsedFrame>(std::move(message)); }

grpc::ByteBuffer EncodeMail(const v1::MailFrame& control, absl::Span<const BorrowedBytes> payload) {
  return Encode(control, payload);
}

absl::StatusOr<ParsedMail> ParseMail(grpc::ByteBuffer message) { return Parse<ParsedMail>(std::move(message)); }

grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

// Not through grpc::ProtoBufferReader: malformed bytes make protobuf back up further than that allows, and it aborts.
bool DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message) {
  grpc::Slice whole;
  if (!buffer.Valid() || buffer.Length() > static_cast<size_t>(std::numeric_limits<int>::max())) return false;
  if (!buffer.TrySingleSlice(&whole).ok() && !buffer.DumpToSingleSlice(&whole).ok()) return false;
  return message->ParseFromArray(whole.begin(), static_cast<int>(whole.size()));
}

}  // namespace sluice
