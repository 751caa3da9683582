#include "common/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace sluice {
namespace {

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
  return out;
}

// The same value in `bytes` bytes, which is more than needed.
std::string LongVarint(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i + 1 < bytes; ++i, value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value & 0x7f));
  return out;
}

std::string Field(int number, const std::string& bytes) {
  return Varint(number << 3 | 2) + Varint(bytes.size()) + bytes;
}

std::string PayloadField(const std::string& bytes) { return Field(v1::ChunkFrame::kPayloadFieldNumber, bytes); }

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string out;
  for (const grpc::Slice& s : slices) out.append(reinterpret_cast<const char*>(s.begin()), s.size());
  return out;
}

std::string Flat(const Payload& payload) {
  std::string out(payload.size(), '\0');
  payload.CopyTo(out.data());
  return out;
}

// `bytes` cut into slices of `piece` bytes (0: one slice), with an empty slice now and then.
grpc::ByteBuffer Cut(const std::string& bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  if (piece == 0) piece = std::max<size_t>(bytes.size(), 1);
  for (size_t at = 0; at < bytes.size(); at += piece) {
    if (at % (3 * piece) == 0) slices.emplace_back(bytes.data(), 0);
    slices.emplace_back(bytes.data() + at, std::min(piece, bytes.size() - at));
  }
  if (slices.empty()) slices.emplace_back();
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::ChunkFrame Control(int headers) {
  v1::ChunkFrame control;
  for (int i = 0; i < headers; ++i) {
    v1::ChunkHeader* header = control.add_header();
    header->set_chunk(1000 * i + 1);
    header->set_generation(7);
    header->set_round(1ull << 40);
    header->set_contributor(3);
    header->set_elements(i);
    header->set_count(0.5 * i);
  }
  control.mutable_ack()->set_bytes(1ull << 50);
  return control;
}

std::string Pattern(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(bytes, '\0');
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

BorrowedBytes Borrowed(const std::string& bytes) {
  auto owner = std::make_shared<std::string>(bytes);
  return {owner->data(), owner->size(), owner};
}

TEST(FrameTest, EncodedFrameIsTheProtobufMessage) {
  const v1::ChunkFrame control = Control(3);
  const std::string a = Pattern(5000, 1), b = Pattern(1, 2), c = Pattern(70000, 3);
  const std::vector<BorrowedBytes> parts = {Borrowed(a), Borrowed(""), Borrowed(b), Borrowed(c)};
  const std::string bytes = Flat(EncodeFrame(control, parts));

  v1::ChunkFrame read;
  ASSERT_TRUE(read.ParseFromString(bytes));
  v1::ChunkFrame expected = control;
  expected.set_payload(a + b + c);
  EXPECT_EQ(read.SerializeAsString(), expected.SerializeAsString());
  // Canonical: as protobuf would write it, but for the payload's place at the end.
  EXPECT_EQ(bytes, control.SerializeAsString() + PayloadField(a + b + c));
}

TEST(FrameTest, WithoutPayloadNothingFollowsTheControlPart) {
  const v1::ChunkFrame control = Control(2);
  EXPECT_EQ(Flat(EncodeFrame(control, {})), control.SerializeAsString());
  const std::vector<BorrowedBytes> none = {BorrowedBytes{}};
  EXPECT_EQ(Flat(EncodeFrame(control, none)), control.SerializeAsString());
  EXPECT_EQ(Flat(EncodeFrame(v1::ChunkFrame(), {})), "");
}

TEST(FrameTest, EncodingBorrowsAndReleases) {
  const auto owner = std::make_shared<std::string>(Pattern(1 << 20, 4));
  {
    const std::vector<BorrowedBytes> parts = {{owner->data(), owner->size(), owner}};
    grpc::ByteBuffer buffer = EncodeFrame(Control(1), parts);
    EXPECT_EQ(owner.use_count(), 3);  // the part's and the slice's
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(static_cast<const void*>(slices[1].begin()), owner->data()) << "the payload was copied";
  }
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(FrameTest, CanonicalFrameIsParsedInPlace) {
  const auto owner = std::make_shared<std::string>(Pattern(300000, 5));
  const std::vector<BorrowedBytes> parts = {{owner->data(), owner->size(), owner}};
  auto frame = ParseFrame(EncodeFrame(Control(4), parts));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->control.SerializeAsString(), Control(4).SerializeAsString());
  EXPECT_EQ(frame->payload.contiguous(), owner->data()) << "the payload was copied";
  EXPECT_GE(frame->payload.pinned_bytes(), owner->size());
  EXPECT_EQ(owner.use_count(), 3);
  frame = absl::InternalError("");
  EXPECT_EQ(owner.use_count(), 2);
}

// Every legal encoding means what protobuf's parser says it means.
void ExpectLikeProtobuf(const std::string& bytes, const std::string& what) {
  v1::ChunkFrame expected;
  ASSERT_TRUE(expected.ParseFromString(bytes)) << what;
  for (size_t piece : {0, 1, 2, 3, 7, 64, 60000}) {
    auto frame = ParseFrame(Cut(bytes, piece));
    ASSERT_TRUE(frame.ok()) << what << ", slices of " << piece << ": " << frame.status();
    EXPECT_TRUE(frame->control.payload().empty());
    v1::ChunkFrame joined = frame->control;
    joined.set_payload(Flat(frame->payload));
    EXPECT_EQ(joined.SerializeAsString(), expected.SerializeAsString()) << what << ", slices of " << piece;
    EXPECT_EQ(frame->payload.size(), expected.payload().size());
  }
}

TEST(FrameTest, EveryLegalEncodingIsAccepted) {
  const std::string payload = Pattern(1003, 6);
  const std::string other = Pattern(77, 7);
  const std::string header = Field(1, Control(2).header(1).SerializeAsString());
  const std::string ack = Field(6, Control(0).ack().SerializeAsString());
  const std::string unknown_varint = Varint(99 << 3 | 0) + Varint(1ull << 63);
  const std::string unknown_fixed64 = Varint(100 << 3 | 1) + std::string(8, 'x');
  const std::string unknown_fixed32 = Varint(101 << 3 | 5) + std::string(4, 'y');
  const std::string unknown_bytes = Field(5000, "unknown");
  const std::string unknown_group = Varint(102 << 3 | 3) + unknown_varint + Varint(102 << 3 | 4);

  ExpectLikeProtobuf("", "nothing");
  ExpectLikeProtobuf(header + PayloadField(payload), "canonical");
  ExpectLikeProtobuf(PayloadField(payload) + header, "payload first");
  ExpectLikeProtobuf(header + PayloadField(payload) + header, "headers on both sides");
  ExpectLikeProtobuf(PayloadField(other) + header + PayloadField(payload), "payload twice: the last one counts");
  ExpectLikeProtobuf(PayloadField(payload) + PayloadField(""), "the last payload is empty");
  ExpectLikeProtobuf(header + PayloadField(""), "empty payload");
  ExpectLikeProtobuf(header + ack + ack, "a message field twice: merged");
  ExpectLikeProtobuf(
      unknown_varint + unknown_fixed64 + unknown_fixed32 + unknown_bytes + header + PayloadField(payload),
      "unknown fields before");
  ExpectLikeProtobuf(header + PayloadField(payload) + unknown_varint + unknown_bytes, "unknown fields after");
  ExpectLikeProtobuf(unknown_group + header + PayloadField(payload), "unknown group");
  ExpectLikeProtobuf(LongVarint(1 << 3 | 2, 4) + LongVarint(0, 5) + PayloadField(payload),
                     "long varints in the control part");
  ExpectLikeProtobuf(header + LongVarint(2 << 3 | 2, 3) + LongVarint(payload.size(), 5) + payload,
                     "long varints at the payload");
  ExpectLikeProtobuf(header + Varint(2 << 3 | 0) + Varint(5) + PayloadField(payload),
                     "the payload's number with another wire type is an unknown field");
}

TEST(FrameTest, BytesThatAreNoFrameAreRefused) {
  const std::string header = Field(1, Control(2).header(1).SerializeAsString());
  const std::string payload = PayloadField(Pattern(500, 8));
  const std::vector<std::pair<std::string, std::string>> bad = {
      {std::string("\x00", 1), "field number 0"},
      {std::string("\x02\x00", 2), "field number 0 with a length"},
      {"\x0a", "a tag alone"},
      {"\x0a\xff", "half a length"},
      {Varint(2 << 3 | 2) + Varint(1ull << 31) + "x", "a payload of 2 GiB that is not there"},
      {Varint(2 << 3 | 2) + Varint(1ull << 34) + "x", "a length over 32 bits"},
      {Varint(1 << 3 | 2) + Varint(50 << 20) + "x", "a header of 50 MiB that is not there"},
      {header + Varint(7 << 3 | 2) + Varint(4) + "abc", "a field longer than the rest"},
      {header + payload + "\x0a", "bytes after the payload"},
      {Varint(1 << 3 | 2) + Varint(2) + Varint(5 << 3 | 2) + Varint(100), "an inner length beyond its message"},
      {LongVarint(1 << 3 | 2, 6) + Varint(0), "a tag of 6 bytes"},
      {Varint(99 << 3 | 4), "the end of a group that did not begin"},
      {Varint(99 << 3 | 3), "a group without end"},
      {Varint(99 << 3 | 6), "wire type 6"},
      {Varint(99 << 3) + std::string(10, '\xff') + "\x01", "a varint of 11 bytes"},
      {"GET / HTTP/1.1\r\n\r\n", "another protocol"},
  };
  for (const auto& [bytes, what] : bad) {
    for (size_t piece : {0, 1, 5}) {
      const auto frame = ParseFrame(Cut(bytes, piece));
      EXPECT_EQ(frame.status().code(), absl::StatusCode::kInvalidArgument) << what;
      EXPECT_FALSE(frame.status().message().empty());
    }
  }
  EXPECT_EQ(ParseFrame(grpc::ByteBuffer()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(FrameTest, EveryTruncationAgreesWithProtobuf) {
  const std::vector<BorrowedBytes> parts = {Borrowed(Pattern(200, 9))};
  const std::string whole = Flat(EncodeFrame(Control(3), parts));
  int refused = 0;
  for (size_t n = 0; n < whole.size(); ++n) {
    const std::string bytes = whole.substr(0, n);
    v1::ChunkFrame expected;
    const bool legal = expected.ParseFromString(bytes);
    EXPECT_EQ(ParseFrame(Cut(bytes, 0)).ok(), legal) << n << " bytes of " << whole.size();
    EXPECT_EQ(ParseFrame(Cut(bytes, 13)).ok(), legal) << n << " bytes of " << whole.size();
    refused += !legal;
  }
  EXPECT_GT(refused, 200);
}

TEST(FrameTest, ControlPartIsBounded) {
  const std::string huge = Field(50, std::string(kMaxFrameControl + 1, 'x'));
  for (const std::string& bytes : {huge, huge + PayloadField("abc"), PayloadField("abc") + huge}) {
    const auto frame = ParseFrame(Cut(bytes, 60000));
    EXPECT_EQ(frame.status().code(), absl::StatusCode::kInvalidArgument);
  }
  // The payload is not part of it, wherever it stands.
  const std::string large = PayloadField(std::string(3 << 20, 'p'));
  const std::string header = Field(1, Control(2).header(1).SerializeAsString());
  for (const std::string& bytes : {header + large, large + header}) {
    const auto frame = ParseFrame(Cut(bytes, 60000));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->payload.size(), 3u << 20);
  }
}

TEST(FrameTest, RandomBytesNeverDisagreeWithProtobuf) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  int legal_count = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes;
    if (i % 2 == 0) {  // a legal frame with a few bytes changed
      const std::vector<BorrowedBytes> parts = {Borrowed(Pattern(random() % 50, random()))};
      bytes = Flat(EncodeFrame(Control(static_cast<int>(random() % 3)), parts));
      for (uint32_t k = random() % 3; k > 0 && !bytes.empty(); --k)
        bytes[random() % bytes.size()] = static_cast<char>(random());
    } else {
      bytes = Pattern(random() % 12, random());
    }
    v1::ChunkFrame expected;
    const bool legal = expected.ParseFromString(bytes);
    const auto frame = ParseFrame(Cut(bytes, random() % 9));
    ASSERT_EQ(frame.ok(), legal) << testing::PrintToString(bytes) << frame.status();
    if (!legal) continue;
    ++legal_count;
    v1::ChunkFrame joined = frame->control;
    joined.set_payload(Flat(frame->payload));
    ASSERT_EQ(joined.SerializeAsString(), expected.SerializeAsString()) << testing::PrintToString(bytes);
  }
  EXPECT_GT(legal_count, 2000);
}

TEST(FrameTest, RandomFramesSurviveTheRoundTrip) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 300; ++i) {
    const v1::ChunkFrame control = Control(static_cast<int>(random() % 40));
    std::string payload;
    std::vector<BorrowedBytes> parts;
    for (uint32_t k = random() % 5; k > 0; --k) {
      const std::string part = Pattern(random() % 3000, random());
      parts.push_back(Borrowed(part));
      payload += part;
    }
    const std::string bytes = Flat(EncodeFrame(control, parts));
    auto frame = ParseFrame(Cut(bytes, 1 + random() % 997));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->control.SerializeAsString(), control.SerializeAsString());
    EXPECT_EQ(Flat(frame->payload), payload);
    // protobuf's own serialization is read alike.
    v1::ChunkFrame whole = control;
    whole.set_payload(payload);
    frame = ParseFrame(Cut(whole.SerializeAsString(), 1 + random() % 997));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->control.SerializeAsString(), control.SerializeAsString());
    EXPECT_EQ(Flat(frame->payload), payload);
  }
}

TEST(FrameTest, PayloadSubAndForEachCoverEveryRange) {
  const std::string bytes = Pattern(101, 10);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(Cut(bytes, 7).Dump(&slices).ok());
  const Payload payload(slices);
  ASSERT_EQ(payload.size(), bytes.size());
  EXPECT_EQ(payload.contiguous(), nullptr);
  for (size_t offset = 0; offset <= bytes.size(); ++offset) {
    for (size_t length = 0; offset + length <= bytes.size(); ++length) {
      const Payload sub = payload.Sub(offset, length);
      ASSERT_EQ(sub.size(), length);
      ASSERT_EQ(Flat(sub), bytes.substr(offset, length)) << offset << "+" << length;
      size_t next = 0;
      sub.ForEach([&](const uint8_t* piece, size_t n, size_t at) {
        ASSERT_EQ(at, next);
        ASSERT_GT(n, 0u);
        ASSERT_EQ(std::memcmp(piece, bytes.data() + offset + at, n), 0);
        next += n;
      });
      ASSERT_EQ(next, length);
    }
  }
}

TEST(FrameTest, FloatsThatStraddleSlicesComeOutWhole) {
  std::vector<float> values(1000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * static_cast<float>(i) - 3;
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  for (size_t piece : {1, 2, 3, 5, 6, 999}) {
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(Cut(bytes, piece).Dump(&slices).ok());
    std::vector<float> out(values.size());
    Payload(slices).CopyTo(out.data());
    EXPECT_EQ(out, values) << piece;
  }
}

TEST(FrameTest, PinnedBytesCountReadBuffersOnce) {
  const grpc::Slice buffer(std::string(64 << 10, 'x'));
  std::vector<grpc::Slice> pieces;
  for (size_t at = 0; at < 1000; at += 100) pieces.push_back(buffer.sub(at, at + 100));
  EXPECT_EQ(Payload(pieces).pinned_bytes(), 64u << 10);
  EXPECT_EQ(Payload().pinned_bytes(), 0u);
}

TEST(FrameTest, SmallMessagesRoundTrip) {
  v1::PullRequest request;
  request.set_job_id("kjv-small-3");
  request.set_version(12);
  v1::PullRequest read;
  ASSERT_TRUE(DecodeMessage(EncodeMessage(request), &read));
  EXPECT_EQ(read.SerializeAsString(), request.SerializeAsString());
  ASSERT_TRUE(DecodeMessage(EncodeMessage(v1::PullRequest()), &read));
  EXPECT_EQ(read.SerializeAsString(), "");
  EXPECT_TRUE(DecodeMessage(Cut(request.SerializeAsString(), 2), &read));
  EXPECT_FALSE(DecodeMessage(Cut("\x0a\x7fx", 0), &read));
  EXPECT_FALSE(DecodeMessage(grpc::ByteBuffer(), &read));
}

}  // namespace
}  // namespace sluice
