// Thinning: never more than the limit and a little, evenly spread, the newest round always there.
#include "scheduler/history.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace sluice {
namespace {

HistoryEntry Round(uint64_t round, bool evaluation = false) {
  HistoryEntry entry;
  entry.job_id = "a";
  entry.has_record = true;
  entry.record.set_round(round);
  entry.record.set_evaluation(evaluation);
  return entry;
}

TEST(HistoryStride, SmallestPowerOfTwo) {
  EXPECT_EQ(HistoryStride(0, 4), 1u);
  EXPECT_EQ(HistoryStride(3, 4), 1u);
  EXPECT_EQ(HistoryStride(4, 4), 2u);
  EXPECT_EQ(HistoryStride(8, 4), 4u);
  EXPECT_EQ(HistoryStride(uint64_t{1} << 40, 4000), uint64_t{1} << 29);
}

TEST(MetricHistory, KeepsAllWhileFew) {
  MemoryStore store;
  MetricHistory history(&store, 8);
  for (uint64_t r = 0; r < 8; ++r) ASSERT_TRUE(history.Add({Round(r)}).ok());
  EXPECT_EQ(store.TrainRounds("a")->size(), 8u);
}

TEST(MetricHistory, ThinsEvenlyAndKeepsTheNewest) {
  MemoryStore store;
  MetricHistory history(&store, 8);
  for (uint64_t r = 0; r < 1000; ++r) {
    ASSERT_TRUE(history.Add({Round(r)}).ok());
    const std::vector<uint64_t> kept = *store.TrainRounds("a");
    ASSERT_LE(kept.size(), 9u);
    ASSERT_EQ(kept.back(), r);
    const uint64_t stride = HistoryStride(r, 8);
    for (size_t i = 0; i + 1 < kept.size(); ++i) ASSERT_EQ(kept[i], i * stride);
  }
}

TEST(MetricHistory, BatchesGiveTheSameAsSingleRounds) {
  std::mt19937_64 rng(5);
  MemoryStore one, many;
  MetricHistory single(&one, 16), batched(&many, 16);
  uint64_t round = 0;
  while (round < 700) {
    std::vector<HistoryEntry> batch;
    for (uint64_t n = 1 + rng() % 40; n > 0; --n, ++round) {
      batch.push_back(Round(round));
      ASSERT_TRUE(single.Add({Round(round)}).ok());
    }
    ASSERT_TRUE(batched.Add(batch).ok());
    ASSERT_EQ(*one.TrainRounds("a"), *many.TrainRounds("a")) << "after round " << round;
  }
}

TEST(MetricHistory, EvaluationsStay) {
  MemoryStore store;
  MetricHistory history(&store, 4);
  for (uint64_t r = 0; r < 100; ++r) ASSERT_TRUE(history.Add({Round(r), Round(r, true)}).ok());
  EXPECT_EQ(store.LoadHistory("a")->records_size(), static_cast<int>(100 + store.TrainRounds("a")->size()));
}

TEST(MetricHistory, ANewLifeGoesOnThinning) {
  MemoryStore store;
  {
    MetricHistory history(&store, 8);
    for (uint64_t r = 0; r < 100; ++r) ASSERT_TRUE(history.Add({Round(r)}).ok());
  }
  MetricHistory history(&store, 8);
  for (uint64_t r = 100; r < 120; ++r) ASSERT_TRUE(history.Add({Round(r)}).ok());
  const std::vector<uint64_t> kept = *store.TrainRounds("a");
  EXPECT_EQ(kept, (std::vector<uint64_t>{0, 16, 32, 48, 64, 80, 96, 112, 119}));
}

TEST(MetricHistory, PassesTheStoresErrorOn) {
  MemoryStore store;
  MetricHistory history(&store);
  store.FailWrites(absl::ResourceExhaustedError("disk is full"));
  EXPECT_EQ(history.Add({Round(0)}).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace sluice
