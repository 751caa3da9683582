// The shard core of an async job by hand: contributions count once, answers go to their senders, cuts are of one
// instant.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/core_rig.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

class ShardCoreAsyncTest : public ::testing::Test {
 protected:
  // Chunks 0, 2, 3 on server 0, chunk 1 on server 1; leases of 2 positions, 2 a round.
  ShardCoreAsyncTest() : rig_(2) {
    plan_.stream = plan_.async = true;
    plan_.rounds = 2;
    plan_.checkpoint_every = 1;
  }
  void Plan(const std::vector<v1::ChunkCut>& cuts = {}) { rig_.Plan(plan_.Make(), cuts); }
  static uint32_t ServerOf(uint64_t chunk) { return chunk % 3 == 1; }
  absl::Status Contribute(uint32_t contributor, uint64_t chunk, uint64_t position, uint64_t base, double value = 1,
                          double count = 1) {
    return rig_.Contribute(ServerOf(chunk), plan_.generation, contributor, chunk, position, 2, base, value, count);
  }
  const v1::ChunkHeader& LastAnswer() { return rig_.answers.back().second; }
  StreamId LastStream() { return rig_.answers.back().first; }

  ServerTestPlan plan_;
  CoreRig rig_;
};

TEST_F(ShardCoreAsyncTest, AContributionIsAppliedOnArrivalAndAnswersItsSenderOnly) {
  Plan();
  ASSERT_TRUE(Contribute(1, 0, 2, 0).ok());
  EXPECT_EQ(rig_.value(0), 1001);
  ASSERT_EQ(rig_.answers.size(), 1u);
  EXPECT_EQ(LastStream(), CoreRig::Stream(1, 1));
  EXPECT_EQ(LastAnswer().round(), 1u);
  EXPECT_EQ(LastAnswer().position(), 2u);
  EXPECT_EQ(LastAnswer().positions(), 2u);
  EXPECT_EQ(LastAnswer().staleness(), 0u);
  ASSERT_TRUE(Contribute(0, 0, 0, 0).ok());
  EXPECT_EQ(LastStream(), CoreRig::Stream(1, 0));
  EXPECT_EQ(LastAnswer().staleness(), 1u);  // computed from version 0, applied to version 1
  EXPECT_EQ(rig_.value(0), 1002);
  EXPECT_EQ(rig_.core(0).version(2), 0u);  // other chunks have versions of their own
}

TEST_F(ShardCoreAsyncTest, ASecondCopyIsAnsweredAndNotApplied) {
  Plan();
  ASSERT_TRUE(Contribute(0, 1, 0, 0).ok());
  ASSERT_TRUE(Contribute(0, 1, 0, 0).ok());
  EXPECT_EQ(rig_.value(1), 1002);  // 1001 at first
  EXPECT_TRUE(LastAnswer().repeated());
  EXPECT_EQ(LastAnswer().round(), 1u);
}

TEST_F(ShardCoreAsyncTest, ALeaseGivenOutAgainIsAppliedWhereItWasNot) {
  Plan();
  ASSERT_TRUE(Contribute(0, 0, 0, 0).ok());  // contributor 0 dies after this
  ++plan_.generation;
  Plan();
  EXPECT_EQ(rig_.closed.at({0, CoreRig::Stream(1, 0)}).code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(rig_.Contribute(0, 1, 0, 2, 0, 2, 0).ok());  // late, of the generation before
  for (uint64_t chunk = 0; chunk < 4; ++chunk)
    ASSERT_TRUE(Contribute(1, chunk, 0, rig_.core(ServerOf(chunk)).version(chunk)).ok());
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    EXPECT_EQ(rig_.value(chunk), 1001 + static_cast<double>(chunk)) << chunk;
    EXPECT_EQ(rig_.core(ServerOf(chunk)).applied(chunk).ranges(), (std::vector<Range>{{0, 2}}));
  }
}

TEST_F(ShardCoreAsyncTest, SubscribersGetTheNewestOnce) {
  Plan();
  ASSERT_TRUE(Contribute(0, 0, 0, 0).ok());
  rig_.answers.clear();
  ASSERT_TRUE(rig_.Subscribe(0, 1, 1, 0).ok());
  ASSERT_EQ(rig_.answers.size(), 3u);
  EXPECT_EQ(rig_.answers[0].second.round(), 1u);
  EXPECT_EQ(rig_.answers[0].second.positions(), 0u);
  ASSERT_TRUE(Contribute(0, 0, 2, 1).ok());
  EXPECT_EQ(rig_.answers.size(), 4u);
  EXPECT_EQ(LastStream(), CoreRig::Stream(1, 0));
}

TEST_F(ShardCoreAsyncTest, EmptyAndNonFiniteContributionsCountAndChangeNothing) {
  Plan();
  ASSERT_TRUE(Contribute(0, 0, 0, 0, 1, /*count=*/0).ok());
  EXPECT_EQ(rig_.value(0), 1000);
  EXPECT_EQ(LastAnswer().round(), 1u);
  EXPECT_FALSE(LastAnswer().nonfinite());
  ASSERT_TRUE(Contribute(1, 0, 2, 1, NAN).ok());
  EXPECT_EQ(rig_.value(0), 1000);
  EXPECT_TRUE(LastAnswer().nonfinite());
  EXPECT_EQ(rig_.core(0).applied(0).size(), 4u);
}

TEST_F(ShardCoreAsyncTest, UpdatesKnowRoundStepAndStaleness) {
  plan_.staleness_scale = v1::TrainSpec::INVERSE;
  Plan();
  ASSERT_TRUE(rig_.Contribute(0, 1, 0, 0, 0, 2, 0, 1, /*count=*/4, /*scale=*/.5f).ok());
  ASSERT_TRUE(Contribute(1, 0, 2, 0).ok());
  ASSERT_TRUE(Contribute(1, 0, 4, 0).ok());
  ASSERT_EQ(rig_.updates.size(), 3u);
  EXPECT_EQ(rig_.updates[0].gradient_scale, .125f);
  EXPECT_EQ(rig_.updates[0].rate_scale, 1);
  EXPECT_EQ(rig_.updates[1].round, 0u);  // 2 of 4 positions
  EXPECT_EQ(rig_.updates[2].round, 1u);
  EXPECT_EQ(rig_.updates[2].version, 2u);
  EXPECT_DOUBLE_EQ(rig_.updates[2].rate_scale, 1.0 / 3);
}

TEST_F(ShardCoreAsyncTest, WhatIsOutsideTheJobIsRefused) {
  Plan();
  EXPECT_EQ(Contribute(0, 0, 7, 0).code(), absl::StatusCode::kOutOfRange);  // the job has 8 positions
  EXPECT_EQ(Contribute(0, 0, UINT64_MAX - 1, 0).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(rig_.Contribute(0, 1, 0, 0, 0, 0, 0).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Contribute(0, 0, 0, 3).code(), absl::StatusCode::kFailedPrecondition);  // version 3 does not exist
  EXPECT_EQ(rig_.Contribute(0, 1, 0, 0, 0, 2, 0, 1, 1, 2).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rig_.Contribute(0, 1, 0, 0, 0, 2, 0, 1, 1, NAN).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Contribute(0, 0, 0, 0).ok());
  EXPECT_THAT(std::string(Contribute(0, 0, 1, 0).message()), HasSubstr("some were applied before"));
  EXPECT_EQ(rig_.Report(0, 1, 0, 0, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rig_.Ask(1, 1, 0, 1).code(), absl::StatusCode::kFailedPrecondition);  // not the verdict holder
  EXPECT_EQ(rig_.value(0), 1001);
}

TEST_F(ShardCoreAsyncTest, ACutIsTakenWhenTheChunkHasSeenTheRounds) {
  Plan();
  ASSERT_TRUE(Contribute(0, 0, 2, 0).ok());
  EXPECT_TRUE(rig_.snapshots.empty());
  ASSERT_TRUE(Contribute(1, 0, 4, 0).ok());  // positions [2, 6): a round's worth, whichever they are
  ASSERT_EQ(rig_.snapshots.size(), 1u);
  EXPECT_EQ(rig_.snapshots[0], (std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>{0, 0, 1, 1}));
  const v1::ChunkCut cut = rig_.cuts.at({0, 1});
  EXPECT_EQ(cut.contributions(), 2u);
  EXPECT_EQ(AppliedOf(cut).ranges(), (std::vector<Range>{{2, 6}}));
}

TEST_F(ShardCoreAsyncTest, ATimelineBeginsFromTheCuts) {
  plan_.timeline = plan_.generation = 4;
  plan_.start = 1;
  plan_.checkpoint.emplace().set_version(1);
  std::vector<v1::ChunkCut> cuts(4);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    cuts[chunk].set_chunk(chunk);
    cuts[chunk].set_contributions(2);
    cuts[chunk].add_applied()->set_begin(chunk == 2 ? 2 : 0);
    cuts[chunk].mutable_applied(0)->set_end(chunk == 2 ? 6 : 4);
  }
  Plan(cuts);
  EXPECT_EQ(rig_.core(0).version(2), 2u);
  EXPECT_EQ(rig_.core(0).applied(2).ranges(), (std::vector<Range>{{2, 6}}));
  ASSERT_NE(rig_.core(0).book(), nullptr);
  EXPECT_EQ(rig_.core(1).book(), nullptr);
  EXPECT_EQ(rig_.core(0).book()->consumed().ranges(), (std::vector<Range>{{2, 4}}));
  ASSERT_TRUE(rig_.Ask(0, 4, 0, 1).ok());
  ASSERT_EQ(rig_.leases.size(), 1u);
  EXPECT_EQ(rig_.leases[0].second.position(), 0u);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) ASSERT_TRUE(Contribute(0, chunk, 0, 2).ok());
  EXPECT_EQ(rig_.value(0), 1000);  // had it
  EXPECT_EQ(rig_.value(2), 1003);  // had it not
}

TEST_F(ShardCoreAsyncTest, TheJobsEndIsToldWhenAllPositionsAreIn) {
  plan_.rounds = 1;
  Plan();
  const auto progress = [&] {
    int shards = 0;
    for (const v1::NodeMessage& m : rig_.to_scheduler)
      shards += m.has_shard_progress() && m.shard_progress().version() == 1;
    return shards;
  };
  for (uint64_t chunk = 0; chunk < 4; ++chunk) ASSERT_TRUE(Contribute(0, chunk, 2, 0).ok());
  EXPECT_EQ(progress(), 0);
  for (uint64_t chunk = 0; chunk < 3; ++chunk) ASSERT_TRUE(Contribute(1, chunk, 0, 0).ok());
  EXPECT_EQ(progress(), 2);  // chunk 3 of shard 0 is missing
  ASSERT_TRUE(Contribute(1, 3, 0, 0).ok());
  EXPECT_EQ(progress(), 3);
}

TEST_F(ShardCoreAsyncTest, FenceReportsSpeakOfRounds) {
  Plan();
  for (uint64_t position : {0, 2}) ASSERT_TRUE(Contribute(0, 0, position, 0).ok());
  rig_.core(0).OnFence(2);
  const v1::ShardReport shard = rig_.fence_reports().at(0).shards(0);
  EXPECT_EQ(shard.min_version(), 0u);
  EXPECT_EQ(shard.max_version(), 1u);
  ASSERT_TRUE(Contribute(0, 2, 0, 0).ok());
  EXPECT_EQ(rig_.value(2), 1002);  // fenced: nothing is processed
}

TEST_F(ShardCoreAsyncTest, RecordsCarryTheJob) {
  Plan();
  ASSERT_TRUE(rig_.Ask(0, 1, 0, 1).ok());
  ASSERT_TRUE(rig_.Ask(0, 1, 1, 1).ok());
  v1::RoundReport report;
  report.set_loss_sum(3);
  report.set_count(2);
  ASSERT_TRUE(rig_.Ask(0, 1, 0, 2, report).ok());
  ASSERT_TRUE(rig_.Ask(0, 1, 1, 2, report).ok());
  const auto records = rig_.records();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records.at(0).job_id(), "job-1");
  EXPECT_EQ(records.at(0).timeline(), 1u);
  EXPECT_EQ(records.at(0).loss(), 1.5);
  EXPECT_EQ(records.at(0).learning_rate(), .5);
}

}  // namespace
}  // namespace sluice
