// libFuzzer: ParseFrame against protobuf's own parser, and the round trip Parse -> Encode -> Parse.
//
// The first byte says how the message is cut into slices; the rest is the message.
#include <cstdint>
#include <string>
#include <vector>

#include "common/frame.h"
#include "common/log.h"

namespace sluice {
namespace {

grpc::ByteBuffer Cut(const std::string& bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
  if (slices.empty()) slices.emplace_back(std::string());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string BytesOf(const Payload& payload) {
  std::string copied(payload.size(), '\0');
  payload.CopyTo(copied.data());
  size_t next = 0;
  payload.ForEach([&](const uint8_t* bytes, size_t n, size_t offset) {
    CHECK(offset == next && n > 0 && copied.compare(offset, n, reinterpret_cast<const char*>(bytes), n) == 0);
    next += n;
  });
  CHECK(next == copied.size());
  return copied;
}

void Run(size_t piece, const std::string& bytes) {
  v1::ChunkFrame reference;
  const bool legal = reference.ParseFromString(bytes);
  const absl::StatusOr<ParsedFrame> frame = ParseFrame(Cut(bytes, piece));
  if (!frame.ok()) {
    CHECK(!legal || bytes.size() > kMaxFrameControl, "refused what protobuf takes: {}", frame.status().ToString());
    return;
  }
  CHECK(legal, "took what protobuf refuses");
  const std::string payload = BytesOf(frame->payload);
  CHECK(payload == reference.payload());
  reference.clear_payload();
  CHECK(frame->control.payload().empty());
  CHECK(frame->control.SerializeAsString() == reference.SerializeAsString());

  // Parts, cut where the message says.
  const size_t size = payload.size(), from = size == 0 ? 0 : bytes.size() * 7 % size, length = (size - from) / 2;
  const Payload part = frame->payload.Sub(from, length);
  CHECK(BytesOf(part) == payload.substr(from, length));
  CHECK(part.contiguous() == nullptr ||
        payload.compare(from, length, static_cast<const char*>(part.contiguous()), length) == 0);
  CHECK(frame->payload.Sub(size, 0).size() == 0);
  CHECK(size == 0 || frame->payload.pinned_bytes() > 0);

  const auto owner = std::make_shared<const std::string>(payload);
  const std::vector<BorrowedBytes> borrowed = {{owner->data(), from, owner},
                                               {owner->data() + from, size - from, owner}};
  const absl::StatusOr<ParsedFrame> again = ParseFrame(EncodeFrame(frame->control, borrowed));
  CHECK(again.ok(), "{}", again.status().ToString());
  CHECK(again->control.SerializeAsString() == reference.SerializeAsString());
  CHECK(BytesOf(again->payload) == payload);
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  sluice::Run(data[0] == 0 ? bytes.size() + 1 : data[0], bytes);
  return 0;
}
