#include "server/commit_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "common/frame.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

class RecordingStream : public ByteStream {
 public:
  void Write(grpc::ByteBuffer message) override {
    absl::StatusOr<ParsedFrame> frame = ParseFrame(std::move(message));
    ASSERT_TRUE(frame.ok()) << frame.status();
    frames.push_back(*std::move(frame));
    if (stuck) queued += frames.back().payload.size();
  }
  size_t queued_bytes() const override { return queued; }
  void Close(const absl::Status&) override {}

  std::vector<ParsedFrame> frames;
  bool stuck = false;  // what is written stays queued
  size_t queued = 0;
};

WireValue Value(size_t elements, float x) {
  std::shared_ptr<float[]> data(new float[elements]);
  std::fill_n(data.get(), elements, x);
  return {v1::F32, elements, {data.get(), elements * sizeof(float), data}};
}

class CommitQueueTest : public ::testing::Test {
 protected:
  // (chunk, version) in the order of sending; checks payloads: the first element is chunk * 10 + version.
  std::vector<std::pair<uint64_t, uint64_t>> Sent() {
    std::vector<std::pair<uint64_t, uint64_t>> out;
    for (const ParsedFrame& frame : stream_->frames) {
      size_t offset = 0;
      for (const v1::ChunkHeader& h : frame.control.header()) {
        EXPECT_EQ(h.generation(), 7u);
        float first;
        frame.payload.Sub(offset, sizeof(float)).CopyTo(&first);
        EXPECT_EQ(first, h.chunk() * 10 + h.round());
        offset += h.elements() * sizeof(float);
        out.emplace_back(h.chunk(), h.round());
      }
      EXPECT_EQ(offset, frame.payload.size());
    }
    return out;
  }
  bool Add(uint64_t chunk, uint64_t version, size_t elements = 4) {
    return queue_.Add(chunk, version, Value(elements, static_cast<float>(chunk * 10 + version)));
  }

  std::shared_ptr<RecordingStream> stream_ = std::make_shared<RecordingStream>();
  std::shared_ptr<SharedFrames> frames_ = std::make_shared<SharedFrames>();
  CommitQueue queue_{stream_, frames_, 7};
};

TEST_F(CommitQueueTest, NeighboursTravelTogetherInChunkOrder) {
  EXPECT_TRUE(Add(2, 1));
  EXPECT_FALSE(Add(0, 1));  // a flush is due already
  EXPECT_FALSE(Add(1, 1));
  queue_.Flush();
  EXPECT_THAT(Sent(), ElementsAre(Pair(0, 1), Pair(1, 1), Pair(2, 1)));
  EXPECT_EQ(stream_->frames.size(), 1u);
  EXPECT_TRUE(Add(0, 2));
  queue_.Flush();
  queue_.Flush();  // nothing waits
  EXPECT_EQ(stream_->frames.size(), 2u);
}

TEST_F(CommitQueueTest, OnlyTheNewestTwoVersionsWait) {
  for (uint64_t version = 0; version < 6; ++version) Add(3, version);
  queue_.Flush();
  EXPECT_THAT(Sent(), ElementsAre(Pair(3, 4), Pair(3, 5)));
}

TEST_F(CommitQueueTest, FramesEndAtAMebibyte) {
  const size_t elements = (300 << 10) / sizeof(float);
  for (uint64_t chunk = 0; chunk < 7; ++chunk) Add(chunk, 1, elements);
  queue_.Flush();
  EXPECT_EQ(Sent().size(), 7u);
  ASSERT_EQ(stream_->frames.size(), 3u);
  for (const ParsedFrame& frame : stream_->frames) EXPECT_LE(frame.payload.size(), kMaxFramePayload);
}

TEST_F(CommitQueueTest, FullFramesDoNotWaitForTheFlush) {
  const size_t elements = (512 << 10) / sizeof(float);
  EXPECT_TRUE(Add(0, 1, elements));
  EXPECT_TRUE(stream_->frames.empty());
  EXPECT_FALSE(Add(1, 1, elements));
  EXPECT_THAT(Sent(), ElementsAre(Pair(0, 1), Pair(1, 1)));
  EXPECT_FALSE(Add(2, 1, elements));
  EXPECT_EQ(stream_->frames.size(), 1u);
  queue_.Flush();
  EXPECT_EQ(stream_->frames.size(), 2u);
}

TEST_F(CommitQueueTest, ASlowReaderGetsNoMoreThanAWindowAtATime) {
  stream_->stuck = true;
  const size_t elements = (1 << 20) / sizeof(float);
  for (uint64_t version = 1; version <= 5; ++version) {
    for (uint64_t chunk = 0; chunk < 6; ++chunk) Add(chunk, version, elements);
  }
  queue_.Flush();
  EXPECT_THAT(Sent(), ElementsAre(Pair(0, 1), Pair(1, 1), Pair(2, 1), Pair(3, 1)));
  stream_->queued -= 1 << 20;
  queue_.OnWritten();  // of what waits the newest two versions are left
  EXPECT_EQ(Sent().back(), std::make_pair(uint64_t{0}, uint64_t{4}));
  EXPECT_EQ(Sent().size(), 5u);
  stream_->stuck = false;
  stream_->queued = 0;
  queue_.OnWritten();
  EXPECT_EQ(Sent().size(), 4u + 12u);
  EXPECT_EQ(Sent().back(), std::make_pair(uint64_t{5}, uint64_t{5}));
}

TEST_F(CommitQueueTest, FramesThatOnlyDescribeGrow) {
  constexpr size_t kElements = (1 << 20) / sizeof(float), kChunks = 40;
  auto region = SharedRegion::Make(kChunks << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  v1::ChunkFrame offer, mapped, none;
  frames_->Offer(*region, &offer);
  mapped.set_mapped(true);
  frames_->OnFrame(mapped, false, &none);
  const auto add = [&](uint64_t version) {
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
      queue_.Add(chunk, version, {v1::F32, kElements, {(*region)->data() + (chunk << 20), 1 << 20, *region}});
    }
    queue_.Flush();
    std::vector<int> sizes;
    for (const ParsedFrame& frame : stream_->frames) {
      EXPECT_EQ(frame.payload.size(), 0u);
      EXPECT_EQ(frame.control.shared_size(), 1) << "neighbours are one piece";
      sizes.push_back(frame.control.header_size());
    }
    stream_->frames.clear();
    return sizes;
  };
  EXPECT_THAT(add(1), ElementsAre(1, 2, 4, 8, 16, 9));
  EXPECT_THAT(add(2), ElementsAre(1, 2, 4, 8, 16, 9)) << "the next version's first chunk is waited for";
}

TEST_F(CommitQueueTest, TheWindowAndTheFramesShrinkWithTheShare) {
  const auto memory = std::make_shared<StreamMemory>(8 << 20);  // 4 MiB for values that wait
  const auto make = [&] {
    auto stream = std::make_shared<RecordingStream>();
    stream->stuck = true;
    return std::make_pair(stream, std::make_unique<CommitQueue>(stream, std::make_shared<SharedFrames>(), 7, memory));
  };
  const auto fill = [](CommitQueue& queue) {
    for (uint64_t chunk = 0; chunk < 100; ++chunk) queue.Add(chunk, 1, Value((64 << 10) / sizeof(float), 1));
    queue.Flush();
  };
  auto first = make();
  EXPECT_EQ(memory->share(), kStreamWindow);
  fill(*first.second);
  EXPECT_EQ(first.first->queued, 4u << 20);
  EXPECT_EQ(memory->waiting(), 4 << 20);
  auto second = make();
  EXPECT_EQ(memory->share(), 2u << 20);
  fill(*second.second);
  EXPECT_EQ(second.first->queued, 1u << 20) << "the first takes all the room: one frame";
  first.first->queued = 0;
  first.second->OnWritten();
  EXPECT_EQ(first.first->queued, 2u << 20) << "its share";
  second.second->OnWritten();
  EXPECT_EQ(second.first->queued, 2u << 20);
  std::vector<decltype(make())> more;
  for (int i = 0; i < 30; ++i) more.push_back(make());
  EXPECT_EQ(memory->share(), 128u << 10);
  fill(*more.back().second);
  ASSERT_EQ(more.back().first->frames.size(), 1u);
  EXPECT_EQ(more.back().first->queued, 128u << 10);
  more.clear();
  second.second = nullptr;
  first.second = nullptr;
  EXPECT_EQ(memory->waiting(), 0);
  EXPECT_EQ(memory->streams(), 0);
}

// However many do not read: each has one frame at most, and those who read go on.
TEST_F(CommitQueueTest, TwoHundredStreamsStayWithinTheLimit) {
  const auto memory = std::make_shared<StreamMemory>(64 << 20);
  std::vector<std::pair<std::shared_ptr<RecordingStream>, std::unique_ptr<CommitQueue>>> streams;
  const WireValue value = Value((16 << 10) / sizeof(float), 1);
  for (int i = 0; i < 200; ++i) {
    auto stream = std::make_shared<RecordingStream>();
    stream->stuck = i % 2 == 0;
    streams.emplace_back(stream, std::make_unique<CommitQueue>(stream, std::make_shared<SharedFrames>(), 7, memory));
  }
  for (uint64_t version = 1; version <= 3; ++version) {
    for (const auto& [stream, queue] : streams) {
      for (uint64_t chunk = 0; chunk < 60; ++chunk) queue->Add(chunk, version, value);
      queue->Flush();
      EXPECT_LE(memory->waiting(), 32 << 20);
    }
  }
  for (size_t i = 1; i < streams.size(); i += 2) {
    size_t sent = 0;
    for (const ParsedFrame& frame : streams[i].first->frames) sent += static_cast<size_t>(frame.control.header_size());
    EXPECT_EQ(sent, 180u);
  }
}

TEST_F(CommitQueueTest, ALargeChunkTravelsAlone) {
  Add(0, 1);
  Add(1, 1, (3 << 20) / sizeof(float));
  Add(2, 1);
  queue_.Flush();
  EXPECT_THAT(Sent(), ElementsAre(Pair(0, 1), Pair(1, 1), Pair(2, 1)));
  EXPECT_EQ(stream_->frames.size(), 3u);
}

TEST_F(CommitQueueTest, ManyTinyChunksDoNotOverflowTheControlPart) {
  for (uint64_t chunk = 0; chunk < 100000; ++chunk) Add(chunk, 1, 1);
  queue_.Flush();
  size_t headers = 0;
  for (const ParsedFrame& frame : stream_->frames) {
    EXPECT_LE(frame.control.ByteSizeLong(), kMaxFrameControl / 8);
    headers += frame.control.header_size();
  }
  EXPECT_EQ(headers, 100000u);
}

}  // namespace
}  // namespace sluice
