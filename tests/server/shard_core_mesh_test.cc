// Rounds by hand of replicas of several ranks: each rank pushes for what is its own, each replica's samples count once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/server/core_rig.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ShardCoreMeshTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr uint32_t kServers = 2;

  ShardCoreMeshTest() { rig_.Plan(layout_); }

  uint32_t ServerOf(uint64_t chunk) const { return layout_->table().shard(chunk) % kServers; }
  // Replica d has 2 + d samples; the value of every contribution is 1, but for one.
  void Round(uint64_t round, uint32_t bad_rank = UINT32_MAX) {
    for (uint32_t rank = 0; rank < layout_->ranks(); ++rank) {
      const double count = 2 + layout_->mesh().place(rank).data;
      for (const uint64_t chunk : layout_->view(rank)) {
        if (!layout_->slot(chunk, rank).has_value()) continue;
        const double value = rank == bad_rank ? std::numeric_limits<double>::quiet_NaN() : 1;
        ASSERT_EQ(rig_.Push(ServerOf(chunk), 1, round, rank, chunk, value, count), absl::OkStatus());
      }
      ASSERT_EQ(
          rig_.Report(0, 1, round, rank, layout_->tells_loss(rank) ? 3 : 0, layout_->tells_loss(rank) ? count : 0),
          absl::OkStatus());
    }
    rig_.Run();
  }

  const std::shared_ptr<const Layout> layout_ = ServerTestPlan{.replicas = 2,
                                                               .servers = kServers,
                                                               .shards = 3,
                                                               .chunk_elements = 16,
                                                               .norm_block = 16,
                                                               .pipeline = 2,
                                                               .tensor = 2,
                                                               .sequence_parallel = GetParam()}
                                                    .Make();
  CoreRig rig_{kServers};
};

TEST_P(ShardCoreMeshTest, EachReplicaCountsOnceHoweverManyOfItsRanksPush) {
  ASSERT_EQ(layout_->ranks(), 8u);
  Round(0);
  std::set<uint32_t> slots;
  for (uint64_t chunk = 0; chunk < layout_->table().chunks(); ++chunk) {
    slots.insert(layout_->contributors(chunk));
    EXPECT_EQ(rig_.core(ServerOf(chunk)).version(chunk), 1u);
    EXPECT_NEAR(rig_.value(chunk), 1000.0 + static_cast<double>(chunk) - layout_->contributors(chunk) / 5.0, 1e-6);
  }
  EXPECT_TRUE(slots.contains(2)) << "one rank of each replica";
  EXPECT_TRUE(slots.contains(4)) << "two of them: the tied embedding";
  const v1::RoundRecord record = rig_.records().at(0);
  EXPECT_EQ(record.count(), 5);
  EXPECT_EQ(record.loss(), 6.0 / 5);
  EXPECT_EQ(record.times_size(), 8);
}

TEST_P(ShardCoreMeshTest, WhatARankDoesNotPushForIsRefused) {
  int refused = 0;
  for (uint32_t rank = 0; rank < layout_->ranks(); ++rank) {
    for (uint64_t chunk = 0; chunk < layout_->table().chunks(); ++chunk) {
      if (layout_->slot(chunk, rank).has_value()) continue;
      const absl::Status status = rig_.Push(ServerOf(chunk), 1, 0, rank, chunk, 1);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("does not push for it"));
      ++refused;
    }
  }
  EXPECT_GT(refused, 8);
  Round(0);
  EXPECT_EQ(rig_.records().at(0).count(), 5) << "nothing of it was counted";
}

TEST_P(ShardCoreMeshTest, ANonFiniteContributionIsSaidOfItsRank) {
  Round(0, /*bad_rank=*/5);
  const v1::RoundRecord record = rig_.records().at(0);
  EXPECT_TRUE(record.skipped());
  EXPECT_THAT(record.nonfinite_contributors(), ElementsAre(5));
}

INSTANTIATE_TEST_SUITE_P(SequenceParallel, ShardCoreMeshTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "yes" : "no"; });

}  // namespace
}  // namespace sluice
