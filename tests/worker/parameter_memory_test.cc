#include "worker/model/parameter_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace sluice {
namespace {

constexpr uint64_t kPage = 1024;  // floats

// A server's memory of `floats`, as a worker has it mapped.
class ServerMemory {
 public:
  explicit ServerMemory(uint64_t floats) {
    auto made = SharedRegion::Make(floats * sizeof(float));
    EXPECT_TRUE(made.ok()) << made.status();
    region_ = *std::move(made);
    auto opened = MappedRegion::Open(region_->description());
    EXPECT_TRUE(opened.ok()) << opened.status();
    mapped_ = *std::move(opened);
  }

  float* at(uint64_t element) { return reinterpret_cast<float*>(region_->data()) + element; }
  const void* seen(uint64_t element) { return mapped_->At(*region_->OffsetOf(at(element), 0), 0); }
  const std::shared_ptr<const MappedRegion>& mapped() const { return mapped_; }

 private:
  std::shared_ptr<SharedRegion> region_;
  std::shared_ptr<const MappedRegion> mapped_;
};

std::shared_ptr<ParameterMemory> Memory(uint64_t floats) {
  auto made = ParameterMemory::Make(floats);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

TEST(ParameterMemoryTest, OwnMemoryIsInBothWindows) {
  const auto memory = Memory(3 * kPage + 5);
  memory->Own(0, {0, 2})[1] = 7;
  memory->Own(1, {3 * kPage, 3 * kPage + 5})[4] = 8;
  for (const uint64_t version : {0, 1}) {
    EXPECT_EQ(memory->window(version)[0], 0);
    EXPECT_EQ(memory->window(version)[1], 7);
    EXPECT_EQ(memory->window(version)[3 * kPage + 4], 8);
  }
}

TEST(ParameterMemoryTest, WhatAServerWritesIsInTheWindowOfItsVersionAtOnce) {
  const auto memory = Memory(3 * kPage);
  ServerMemory server(4 * kPage);
  memory->Own(6, {kPage, 2 * kPage})[0] = 6;
  ASSERT_TRUE(memory->Show(7, {kPage, 2 * kPage}, server.mapped(), server.seen(2 * kPage)));
  *server.at(2 * kPage) = 7;
  EXPECT_EQ(memory->window(7)[kPage], 7);
  EXPECT_EQ(memory->window(6)[kPage], 6);
  *server.at(2 * kPage) = 9;
  EXPECT_EQ(memory->window(9)[kPage], 9);
  memory->Own(7, {kPage, 2 * kPage});
  EXPECT_EQ(memory->window(7)[kPage], 6) << "what own memory last held";
  EXPECT_EQ(*server.at(2 * kPage), 9);
}

TEST(ParameterMemoryTest, OnlyWholePagesAreShownAndTheEndOfTheSpace) {
  const auto memory = Memory(3 * kPage + 5);
  ServerMemory server(6 * kPage);
  EXPECT_FALSE(memory->Show(0, {1, kPage}, server.mapped(), server.seen(0)));
  EXPECT_FALSE(memory->Show(0, {kPage, kPage + 5}, server.mapped(), server.seen(0)));
  EXPECT_FALSE(memory->Show(0, {kPage, 2 * kPage}, server.mapped(), server.seen(1)));
  memory->Own(0, {kPage, 2 * kPage})[0] = 1;  // still writable
  *server.at(4 * kPage + 4) = 5;
  EXPECT_TRUE(memory->Show(0, {3 * kPage, 3 * kPage + 5}, server.mapped(), server.seen(4 * kPage)));
  EXPECT_EQ(memory->window(0)[3 * kPage + 4], 5);
}

TEST(ParameterMemoryTest, StaysReadableWhenTheServerIsGone) {
  const auto memory = Memory(kPage);
  {
    ServerMemory server(kPage);
    *server.at(3) = 4;
    ASSERT_TRUE(memory->Show(1, {0, kPage}, server.mapped(), server.seen(0)));
  }
  EXPECT_EQ(memory->window(1)[3], 4);
}

// Any order of shown and own values of two servers against a plain array a window.
TEST(ParameterMemoryTest, RandomOrders) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kPieces = 8;
  for (int run = 0; run < 20; ++run) {
    const auto memory = Memory(kPieces * kPage - 3);
    ServerMemory servers[2] = {ServerMemory(2 * kPieces * kPage), ServerMemory(2 * kPieces * kPage)};
    // What each page shows: a server's page, or the own one.
    const float* expected[2][kPieces];
    std::vector<float> own(kPieces * kPage);
    for (auto& window : expected) {
      for (uint64_t i = 0; i < kPieces; ++i) window[i] = &own[i * kPage];
    }
    float value = 1;
    for (int step = 0; step < 200; ++step) {
      const uint64_t version = random() % 2, first = random() % kPieces, pages = 1 + random() % (kPieces - first);
      const Range range = {first * kPage, std::min((first + pages) * kPage, kPieces * kPage - 3)};
      // Whole pieces only, as chunks are: what is shown is given back before its limits change.
      for (const uint64_t v : {0, 1}) {
        if (random() % 4 != 0) continue;
        memory->Own(v, {0, kPieces * kPage - 3});
        for (uint64_t i = 0; i < kPieces; ++i) expected[v][i] = &own[i * kPage];
      }
      bool overlaps = false;  // of another size
      for (uint64_t i = first; i < first + pages; ++i) overlaps |= expected[version][i] != &own[i * kPage];
      if (random() % 2 == 0 || overlaps) {
        memory->Own(version, {0, kPieces * kPage - 3});
        for (uint64_t i = 0; i < kPieces; ++i) expected[version][i] = &own[i * kPage];
        std::fill_n(memory->Own(version, range), range.size(), value);
        std::fill_n(&own[range.begin], range.size(), value);
      } else {
        ServerMemory& server = servers[random() % 2];
        const uint64_t at = random() % kPieces * kPage;
        std::fill_n(server.at(at), range.size(), value);
        ASSERT_TRUE(memory->Show(version, range, server.mapped(), server.seen(at)));
        for (uint64_t i = 0; i < pages; ++i) expected[version][first + i] = server.at(at + i * kPage);
      }
      ++value;
      for (const uint64_t v : {0, 1}) {
        for (uint64_t i = 0; i < kPieces; ++i) {
          const uint64_t floats = std::min(kPage, kPieces * kPage - 3 - i * kPage);
          ASSERT_EQ(std::memcmp(memory->window(v) + i * kPage, expected[v][i], floats * sizeof(float)), 0)
              << "run " << run << " step " << step << " window " << v << " page " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice
