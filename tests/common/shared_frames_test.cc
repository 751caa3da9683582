#include "common/shared_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace sluice {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<SharedRegion> Region(size_t bytes = 1 << 20) {
  auto region = SharedRegion::Make(bytes);
  EXPECT_TRUE(region.ok()) << region.status();
  return *std::move(region);
}

std::string Bytes(const Payload& payload) {
  std::string out(payload.size(), '\0');
  payload.CopyTo(out.data());
  return out;
}

TEST(SharedMemoryTest, WhatOneWritesTheOtherReads) {
  const auto region = Region();
  const auto mapped = MappedRegion::Open(region->description());
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  std::memcpy(region->data() + 100, "gradient", 8);
  const auto offset = region->OffsetOf(region->data() + 100, 8);
  ASSERT_TRUE(offset.has_value());
  EXPECT_EQ(std::string(static_cast<const char*>((*mapped)->At(*offset, 8)), 8), "gradient");
}

TEST(SharedMemoryTest, OnlyWhatLiesInTheRegionHasAnOffset) {
  const auto region = Region(1000);
  char outside = 0;
  EXPECT_FALSE(region->OffsetOf(&outside, 1).has_value());
  EXPECT_FALSE(region->OffsetOf(region->data() - 1, 1).has_value());
  EXPECT_FALSE(region->OffsetOf(region->data() + 999, 2).has_value());
  EXPECT_FALSE(region->OffsetOf(region->data(), SIZE_MAX).has_value());
  EXPECT_TRUE(region->OffsetOf(region->data() + 999, 1).has_value());
  EXPECT_TRUE(region->OffsetOf(region->data(), 1000).has_value());
  const auto mapped = MappedRegion::Open(region->description());
  ASSERT_TRUE(mapped.ok());
  const uint64_t begin = *region->OffsetOf(region->data(), 1);
  EXPECT_NE((*mapped)->At(begin, 1000), nullptr);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 16}, {begin - 1, 1}, {begin, 1001}, {begin + 1000, 1}, {begin, UINT64_MAX}, {UINT64_MAX, 1}}) {
    EXPECT_EQ((*mapped)->At(offset, bytes), nullptr) << offset << " " << bytes;
  }
}

TEST(SharedMemoryTest, StaysMappedWhenItsMakerIsGone) {
  auto region = Region();
  region->data()[5] = 'x';
  const uint64_t offset = *region->OffsetOf(region->data() + 5, 1);
  const auto mapped = MappedRegion::Open(region->description());
  ASSERT_TRUE(mapped.ok());
  const v1::SharedMemory description = region->description();
  region = nullptr;
  EXPECT_EQ(*static_cast<const char*>((*mapped)->At(offset, 1)), 'x');
  EXPECT_FALSE(MappedRegion::Open(description).ok());
}

TEST(SharedMemoryTest, AnotherProcessReadsAndCannotWrite) {
  const auto region = Region();
  std::memcpy(region->data(), "parent", 6);
  const uint64_t offset = *region->OffsetOf(region->data(), 6);
  const pid_t child = fork();
  if (child == 0) {
    const auto mapped = MappedRegion::Open(region->description());
    if (!mapped.ok() || std::memcmp((*mapped)->At(offset, 6), "parent", 6) != 0) _exit(1);
    signal(SIGSEGV, SIG_DFL);  // a sanitizer has a handler of its own
    // A write ends the process.
    *const_cast<char*>(static_cast<const char*>((*mapped)->At(offset, 1))) = 'c';
    _exit(2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "exit code " << WEXITSTATUS(status);
  EXPECT_EQ(std::string(region->data(), 6), "parent");
}

TEST(SharedMemoryTest, WrongDescriptionsAreRefused) {
  const auto region = Region();
  const auto with = [&](auto change) {
    v1::SharedMemory description = region->description();
    change(&description);
    const auto opened = MappedRegion::Open(description);
    return opened.ok() ? std::string("mapped") : std::string(opened.status().message());
  };
  EXPECT_EQ(with([](auto*) {}), "mapped");
  EXPECT_THAT(with([](auto* d) { d->set_host_id("elsewhere"); }), HasSubstr("of another host"));
  EXPECT_THAT(with([](auto* d) { d->set_nonce("short"); }), HasSubstr("not a description"));
  EXPECT_THAT(with([](auto* d) { d->mutable_nonce()->front() ^= 1; }), HasSubstr("another one"));
  EXPECT_THAT(with([](auto* d) { d->set_bytes(d->bytes() - 1); }), HasSubstr("not there"));
  EXPECT_THAT(with([](auto* d) { d->set_bytes(1); }), HasSubstr("not a description"));
  EXPECT_THAT(with([](auto* d) { d->set_fd(0); }), ::testing::Not(HasSubstr("mapped")));
  EXPECT_THAT(with([](auto* d) { d->set_pid(-1); }), HasSubstr("/proc/-1/fd/"));
}

class SharedFramesTest : public ::testing::Test {
 protected:
  // sender_ offers, receiver_ answers.
  bool Negotiate(bool accept = true) {
    v1::ChunkFrame offer, answer, none;
    sender_.Offer(region_, &offer);
    if (!receiver_.OnFrame(offer, accept, &answer)) return false;
    EXPECT_FALSE(sender_.OnFrame(answer, true, &none));
    return true;
  }
  BorrowedBytes At(size_t offset, const std::string& text) {
    std::memcpy(region_->data() + offset, text.data(), text.size());
    return {region_->data() + offset, text.size(), region_};
  }
  grpc::ByteBuffer Encode(const std::vector<BorrowedBytes>& payload) {
    v1::ChunkFrame control;
    control.add_header()->set_chunk(3);
    return sender_.Encode(&control, payload);
  }

  const std::shared_ptr<SharedRegion> region_ = Region();
  SharedFrames sender_, receiver_;
};

TEST_F(SharedFramesTest, PayloadsStayWhereTheyAreOnceTheOtherEndHasMappedThem) {
  const std::vector<BorrowedBytes> payload = {At(0, "abcd"), At(4, "efgh"), At(4000, std::string(9000, 'z'))};
  const std::string expected = "abcdefgh" + std::string(9000, 'z');
  grpc::ByteBuffer in_stream = Encode(payload);
  EXPECT_GT(in_stream.Length(), expected.size());
  auto frame = receiver_.Parse(std::move(in_stream));
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(Bytes(frame->payload), expected);

  ASSERT_TRUE(Negotiate());
  grpc::ByteBuffer described = Encode(payload);
  EXPECT_LT(described.Length(), 60u);
  frame = receiver_.Parse(std::move(described));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->control.header(0).chunk(), 3u);
  EXPECT_EQ(frame->control.shared_size(), 2) << "neighbours are described as one";
  EXPECT_EQ(Bytes(frame->payload), expected);
  EXPECT_EQ(Bytes(frame->payload.Sub(6, 4)), "ghzz");
}

TEST_F(SharedFramesTest, WhatLiesElsewhereGoesInTheStream) {
  ASSERT_TRUE(Negotiate());
  const auto elsewhere = std::make_shared<std::string>("elsewhere");
  const auto frame = receiver_.Parse(Encode({At(0, "abcd"), {elsewhere->data(), elsewhere->size(), elsewhere}}));
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->control.shared_size(), 0);
  EXPECT_EQ(Bytes(frame->payload), "abcdelsewhere");
}

TEST_F(SharedFramesTest, AnEndThatDoesNotAcceptGetsPayloadsInTheStream) {
  EXPECT_FALSE(Negotiate(/*accept=*/false));
  const auto frame = receiver_.Parse(Encode({At(0, "abcd")}));
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->control.shared_size(), 0);
}

TEST_F(SharedFramesTest, PayloadsOutliveTheStreamAndItsSender) {
  ASSERT_TRUE(Negotiate());
  Payload payload;
  {
    SharedFrames receiver;
    v1::ChunkFrame offer, answer;
    sender_.Offer(region_, &offer);
    ASSERT_TRUE(receiver.OnFrame(offer, true, &answer));
    v1::ChunkFrame none;
    sender_.OnFrame(answer, true, &none);
    auto frame = receiver.Parse(Encode({At(7, "still here")}));
    ASSERT_TRUE(frame.ok());
    payload = frame->payload;
  }
  EXPECT_EQ(Bytes(payload), "still here");
}

TEST_F(SharedFramesTest, WrongDescriptionsCloseTheStreamAndReadNothing) {
  v1::ChunkFrame control;
  v1::SharedBytes* const part = control.add_shared();
  part->set_offset(4096);
  part->set_bytes(4);
  EXPECT_EQ(receiver_.Parse(EncodeFrame(control, {})).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Negotiate());
  EXPECT_TRUE(receiver_.Parse(EncodeFrame(control, {})).ok());
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 4}, {4096, (1 << 20) + 1}, {4096 + (1 << 20), 1}, {UINT64_MAX, 2}, {5000, UINT64_MAX}}) {
    part->set_offset(offset);
    part->set_bytes(bytes);
    EXPECT_EQ(receiver_.Parse(EncodeFrame(control, {})).status().code(), absl::StatusCode::kOutOfRange) << offset;
  }
  part->set_offset(4096);
  part->set_bytes(4);
  const BorrowedBytes both = At(0, "abcd");
  EXPECT_EQ(receiver_.Parse(EncodeFrame(control, {&both, 1})).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
