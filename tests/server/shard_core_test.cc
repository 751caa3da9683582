// Rounds by hand. Plan: 8 parameters in 4 chunks of 2, shards 0 (chunks 0, 3) and 2 (chunk 2) on server-0, shard 1
// (chunk 1) on server-1; two contributors; server-0 holds the verdict.
#include "server/shard_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/server/core_rig.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const uint32_t kServerOf[] = {0, 1, 0, 0};  // by chunk

class ShardCoreTest : public ::testing::Test {
 protected:
  CoreRig rig_{2};

  // Contributor c pushes c + 1 for every chunk and reports a loss of 3.
  void Contribute(uint64_t generation, uint64_t round, uint32_t contributor) {
    for (uint64_t chunk = 0; chunk < 4; ++chunk) {
      ASSERT_EQ(rig_.Push(kServerOf[chunk], generation, round, contributor, chunk, contributor + 1.0),
                absl::OkStatus());
    }
    ASSERT_EQ(rig_.Report(0, generation, round, contributor, 3), absl::OkStatus());
  }
  void ExpectVersion(uint64_t version) {
    for (uint64_t chunk = 0; chunk < 4; ++chunk) {
      EXPECT_EQ(rig_.core(kServerOf[chunk]).version(chunk), version) << "chunk " << chunk;
    }
  }
};

TEST_F(ShardCoreTest, AVerdictRound) {
  rig_.Plan(ServerTestPlan{}.Make());
  ASSERT_EQ(rig_.Subscribe(0, 1, 0, 0), absl::OkStatus());
  ASSERT_EQ(rig_.Subscribe(1, 1, 0, 0), absl::OkStatus());
  EXPECT_EQ(rig_.served.size(), 4u);  // version 0 of all chunks
  Contribute(1, 0, 0);
  rig_.Run();
  ExpectVersion(0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  // Every chunk: sum 3, count 4. The rig's fragments carry the sum in a chunk's first element: norm sqrt(4 * 9) / 4.
  for (uint64_t chunk = 0; chunk < 4; ++chunk) EXPECT_DOUBLE_EQ(rig_.value(chunk), 1000.0 + chunk - 0.75);
  const v1::RoundRecord record = rig_.records().at(0);
  EXPECT_EQ(record.loss(), 1.5);
  EXPECT_EQ(record.count(), 4);
  EXPECT_DOUBLE_EQ(record.gradient_norm(), 1.5);
  EXPECT_EQ(record.learning_rate(), 0.5);
  EXPECT_FALSE(record.skipped());
  ASSERT_EQ(rig_.served.size(), 8u);
  EXPECT_EQ(rig_.served[7].version, 1u);
}

TEST_F(ShardCoreTest, ClippingScalesTheSum) {
  ServerTestPlan plan;
  plan.clip_norm = 0.15;  // a tenth of the norm
  rig_.Plan(plan.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  EXPECT_NEAR(rig_.value(1), 1001 - 0.075, 1e-6);
}

TEST_F(ShardCoreTest, DuplicatesAndOldPushesAreDropped) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  EXPECT_EQ(rig_.Push(0, 1, 0, 0, 0, 77), absl::OkStatus());  // again, with another value
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  EXPECT_EQ(rig_.Push(0, 1, 0, 1, 0, 77), absl::OkStatus());  // of a round that is committed
  EXPECT_EQ(rig_.Report(0, 1, 0, 1, 99), absl::OkStatus());
  Contribute(1, 1, 0);
  Contribute(1, 1, 1);
  rig_.Run();
  ExpectVersion(2);
  EXPECT_DOUBLE_EQ(rig_.value(0), 1000 - 1.5);
  EXPECT_EQ(rig_.records().at(0).loss(), 1.5);
}

TEST_F(ShardCoreTest, ARoundThatIsNotOpenIsRefused) {
  rig_.Plan(ServerTestPlan{}.Make());
  EXPECT_EQ(rig_.Push(0, 1, 1, 0, 0, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rig_.Report(0, 1, 1, 0, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rig_.Report(0, 1, 6, 0, 1).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(rig_.Report(1, 1, 0, 0, 1).code(), absl::StatusCode::kFailedPrecondition);  // not the verdict holder
}

TEST_F(ShardCoreTest, EmptyContributionsCount) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    ASSERT_EQ(rig_.Empty(kServerOf[chunk], 1, 0, 1, chunk), absl::OkStatus());
  }
  rig_.Run();
  ExpectVersion(0);  // the report is missing
  ASSERT_EQ(rig_.Report(0, 1, 0, 1, 0, 0), absl::OkStatus());
  rig_.Run();
  ExpectVersion(1);
  EXPECT_DOUBLE_EQ(rig_.value(2), 1002 - 0.5);  // 1 of 2 targets
}

TEST_F(ShardCoreTest, NonFiniteSkipsTheRoundAndNamesTheContributor) {
  rig_.Plan(ServerTestPlan{}.Make());
  ASSERT_EQ(rig_.Push(1, 1, 0, 1, 1, kNaN), absl::OkStatus());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(rig_.value(chunk), 1000.0 + chunk);
  EXPECT_TRUE(rig_.records().at(0).skipped());
  EXPECT_THAT(rig_.records().at(0).nonfinite_contributors(), ElementsAre(1));
}

TEST_F(ShardCoreTest, NormsAreSaidAgainWhenTheLinkReopens) {
  rig_.Plan(ServerTestPlan{}.Make());
  rig_.set_links_open(false);
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(0);
  rig_.set_links_open(true);
  rig_.core(1).OnHolderConnected();
  rig_.core(1).OnHolderConnected();  // twice: a repeated norm changes nothing
  rig_.Run();
  ExpectVersion(1);
  EXPECT_EQ(rig_.verdicts.size(), 4u);
}

TEST_F(ShardCoreTest, ALateAskerGetsTheVerdictAgain) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  while (rig_.core(0).version(0) == 0) ASSERT_TRUE(rig_.RunOne(0));
  rig_.DropMessages();  // the verdict was under way to server-1
  rig_.Run();
  ASSERT_EQ(rig_.core(1).version(1), 0u);
  rig_.core(1).OnHolderConnected();
  rig_.Run();
  ExpectVersion(1);
}

TEST_F(ShardCoreTest, CountsThatDisagreeFailTheJobNotTheServer) {
  rig_.Plan(ServerTestPlan{}.Make());
  ASSERT_EQ(rig_.Push(1, 1, 0, 0, 1, 1, /*count=*/7), absl::OkStatus());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(0);
  ASSERT_TRUE(rig_.to_scheduler.back().has_problem());
  EXPECT_THAT(rig_.to_scheduler.back().problem().message(), HasSubstr("targets"));
}

TEST_F(ShardCoreTest, PushesOutsideThePlan) {
  rig_.Plan(ServerTestPlan{}.Make());
  ASSERT_EQ(rig_.Hello(0, 1, 0), absl::OkStatus());
  v1::ChunkHeader good;
  good.set_generation(1);
  good.set_elements(2);
  good.set_count(1);
  struct Case {
    const char* what;
    std::function<void(v1::ChunkHeader*)> spoil;
    absl::StatusCode code;
    uint64_t bytes = 8;
  };
  const Case cases[] = {
      {"chunk", [](v1::ChunkHeader* h) { h->set_chunk(4); }, absl::StatusCode::kOutOfRange},
      {"huge chunk", [](v1::ChunkHeader* h) { h->set_chunk(UINT64_MAX); }, absl::StatusCode::kOutOfRange},
      {"another server's", [](v1::ChunkHeader* h) { h->set_chunk(1); }, absl::StatusCode::kInvalidArgument},
      {"length", [](v1::ChunkHeader* h) { h->set_elements(1); }, absl::StatusCode::kInvalidArgument, 4},
      {"payload", [](v1::ChunkHeader*) {}, absl::StatusCode::kInvalidArgument, 4},
      {"encoding", [](v1::ChunkHeader* h) { h->set_encoding(static_cast<v1::Encoding>(9)); },
       absl::StatusCode::kInvalidArgument},
      {"generation", [](v1::ChunkHeader* h) { h->set_generation(2); }, absl::StatusCode::kInvalidArgument},
      {"contributor", [](v1::ChunkHeader* h) { h->set_contributor(2); }, absl::StatusCode::kOutOfRange},
      {"other's contribution", [](v1::ChunkHeader* h) { h->set_contributor(1); }, absl::StatusCode::kInvalidArgument},
      {"space", [](v1::ChunkHeader* h) { h->set_space(1); }, absl::StatusCode::kInvalidArgument},
      {"count", [](v1::ChunkHeader* h) { h->set_count(-1); }, absl::StatusCode::kInvalidArgument},
      {"NaN count", [](v1::ChunkHeader* h) { h->set_count(kNaN); }, absl::StatusCode::kInvalidArgument},
      {"endless count", [](v1::ChunkHeader* h) { h->set_count(HUGE_VAL); }, absl::StatusCode::kInvalidArgument},
      {"round", [](v1::ChunkHeader* h) { h->set_round(1); }, absl::StatusCode::kFailedPrecondition},
  };
  for (const Case& c : cases) {
    v1::ChunkHeader header = good;
    c.spoil(&header);
    const absl::Status status =
        rig_.core(0).OnPush(CoreRig::Stream(1, 0), header, std::make_shared<NumberContribution>(1), c.bytes);
    EXPECT_EQ(status.code(), c.code) << c.what << ": " << status;
  }
  // Nothing of that was counted.
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
}

TEST_F(ShardCoreTest, HelloOutsideThePlan) {
  v1::StreamHello hello;
  EXPECT_EQ(rig_.core(0).OnHello(5, hello).code(),
            absl::StatusCode::kInvalidArgument);  // generation 0, before any plan
  rig_.Plan(ServerTestPlan{.generation = 2}.Make());
  EXPECT_EQ(rig_.Hello(0, 1, 0).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(rig_.Hello(0, 2, 2).code(), absl::StatusCode::kOutOfRange);
  hello.set_generation(2);
  *hello.mutable_node() = ServerTestNode("worker", 1);  // rank 0 is worker-0's
  EXPECT_EQ(rig_.core(0).OnHello(5, hello).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(rig_.core(0).OnPush(5, {}, nullptr, 0).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rig_.core(0).OnReport(5, {}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rig_.core(0).OnSubscribe(5, {}).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ShardCoreTest, NormReportsOutsideThePlan) {
  rig_.Plan(ServerTestPlan{}.Make());
  v1::NormReport norm;
  norm.set_generation(1);
  norm.set_shard(1);
  EXPECT_EQ(rig_.core(0).OnNorm(norm, ServerTestNode("server", 2)).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(rig_.core(1).OnNorm(norm, ServerTestNode("server", 1)).code(), absl::StatusCode::kFailedPrecondition);
  norm.set_shard(9);
  EXPECT_EQ(rig_.core(0).OnNorm(norm, ServerTestNode("server", 1)).code(), absl::StatusCode::kInvalidArgument);
  norm.set_shard(1);
  norm.set_round(UINT64_MAX);
  EXPECT_EQ(rig_.core(0).OnNorm(norm, ServerTestNode("server", 1)).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ShardCoreTest, MessagesBeforeThePlanWait) {
  Contribute(1, 0, 0);
  ASSERT_EQ(rig_.Subscribe(0, 1, 0, 0), absl::OkStatus());
  EXPECT_THAT(rig_.served, IsEmpty());
  rig_.Plan(ServerTestPlan{}.Make());
  EXPECT_THAT(rig_.served, ElementsAre(ServedValue{100, 0, 0, 1000}));
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
}

TEST_F(ShardCoreTest, ParkingIsBounded) {
  absl::Status status;
  int messages = 0;
  for (; status.ok() && messages < 100000; ++messages) status = rig_.Report(0, 1, 0, 0, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  v1::ChunkHeader header;
  header.set_generation(1);
  header.set_contributor(1);
  ASSERT_EQ(rig_.Hello(0, 1, 1), absl::OkStatus());
  status = absl::OkStatus();
  for (messages = 0; status.ok() && messages < 100; ++messages) {
    status = rig_.core(0).OnPush(CoreRig::Stream(1, 1), header, nullptr, 1 << 20);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LE(messages, 17);
}

TEST_F(ShardCoreTest, AParkedStreamOfABadHelloEndsWithThePlan) {
  ASSERT_EQ(rig_.Hello(0, 1, 7), absl::OkStatus());
  ASSERT_EQ(rig_.Hello(0, 1, 0), absl::OkStatus());
  rig_.Plan(ServerTestPlan{}.Make());
  EXPECT_EQ(rig_.closed.at({0, CoreRig::Stream(1, 7)}).code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(rig_.closed.contains({0, CoreRig::Stream(1, 0)}));
}

TEST_F(ShardCoreTest, AFenceStopsTheOldGenerationAndItsReportRepeats) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.core(0).OnFence(2);
  rig_.core(1).OnFence(2);
  ASSERT_EQ(rig_.fence_reports().size(), 2u);
  rig_.Run();  // sums that come out late
  EXPECT_EQ(rig_.Push(0, 1, 0, 0, 0, 1), absl::OkStatus());
  ExpectVersion(0);
  EXPECT_EQ(rig_.Hello(0, 1, 1).code(), absl::StatusCode::kAborted);
  rig_.core(0).OnFence(2);
  rig_.core(0).OnFence(1);  // older than the fence: no answer
  const std::vector<v1::FenceReport> reports = rig_.fence_reports();
  ASSERT_EQ(reports.size(), 3u);
  EXPECT_EQ(reports[0].SerializeAsString(), reports[2].SerializeAsString());
  EXPECT_EQ(reports[0].generation(), 2u);
  EXPECT_EQ(reports[0].plan_generation(), 1u);
  ASSERT_EQ(reports[0].shards_size(), 2);
  EXPECT_EQ(reports[0].shards(0).shard(), 0u);
  EXPECT_TRUE(reports[0].shards(0).synced());
  EXPECT_EQ(reports[0].shards(0).min_version(), 0u);
  // A plan older than the fence is ignored; the one it stands for goes on from round 0 with nothing held.
  rig_.Plan(ServerTestPlan{.generation = 2}.Make());
  EXPECT_TRUE(rig_.closed.contains({0, CoreRig::Stream(1, 0)}));
  Contribute(2, 0, 0);
  rig_.Run();
  ExpectVersion(0);
  Contribute(2, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  EXPECT_DOUBLE_EQ(rig_.value(0), 1000 - 0.75);
}

TEST_F(ShardCoreTest, AFenceWithoutAPlanIsAnsweredAndHolds) {
  rig_.core(0).OnFence(5);
  ASSERT_EQ(rig_.fence_reports().size(), 1u);
  EXPECT_EQ(rig_.fence_reports()[0].plan_generation(), 0u);
  rig_.core(0).OnPlan(ServerTestPlan{.generation = 4}.Make());
  EXPECT_EQ(rig_.core(0).generation(), 0u);
  rig_.core(0).OnPlan(ServerTestPlan{.generation = 5}.Make());
  EXPECT_EQ(rig_.core(0).generation(), 5u);
}

TEST_F(ShardCoreTest, TheCarriedVerdictFinishesTheRoundOfTheShardsThatLackIt) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  while (rig_.core(0).version(0) == 0) ASSERT_TRUE(rig_.RunOne(0));
  rig_.core(0).OnFence(2);
  rig_.core(1).OnFence(2);
  rig_.Run();
  ASSERT_EQ(rig_.core(1).version(1), 0u);  // shard 1 is behind
  const v1::FenceReport report = rig_.fence_reports()[0];
  ASSERT_EQ(report.shards(0).verdicts_size(), 1);
  EXPECT_EQ(report.shards(0).min_version(), 1u);
  ServerTestPlan plan{.generation = 2};
  plan.verdict = report.shards(0).verdicts(0);
  rig_.Plan(plan.Make());
  // The workers restart at version 0: shard 0 still has it, and version 1.
  ASSERT_EQ(rig_.Subscribe(0, 2, 0, 0), absl::OkStatus());
  EXPECT_THAT(rig_.served, ElementsAre(ServedValue{200, 0, 0, 1000}, ServedValue{200, 0, 1, 1000 - .75},
                                       ServedValue{200, 2, 0, 1002}, ServedValue{200, 2, 1, 1002 - .75},
                                       ServedValue{200, 3, 0, 1003}, ServedValue{200, 3, 1, 1003 - .75}));
  Contribute(2, 0, 0);
  Contribute(2, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  EXPECT_DOUBLE_EQ(rig_.value(1), 1001 - 0.75);
  Contribute(2, 1, 0);
  Contribute(2, 1, 1);
  rig_.Run();
  ExpectVersion(2);
}

TEST_F(ShardCoreTest, UnderACarriedVerdictANonFiniteChunkKeepsItsValue) {
  ServerTestPlan plan;
  v1::Verdict verdict;
  verdict.set_gradient_scale(0.25);
  plan.verdict = verdict;
  rig_.Plan(plan.Make());
  ASSERT_EQ(rig_.Push(1, 1, 0, 0, 1, kNaN), absl::OkStatus());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  EXPECT_EQ(rig_.value(1), 1001);
  EXPECT_DOUBLE_EQ(rig_.value(0), 1000 - 0.75);
}

TEST_F(ShardCoreTest, VersionsThatAreGoneAreRefused) {
  rig_.Plan(ServerTestPlan{}.Make());
  for (uint64_t round = 0; round < 2; ++round) {
    Contribute(1, round, 0);
    Contribute(1, round, 1);
    rig_.Run();
  }
  EXPECT_EQ(rig_.Subscribe(0, 1, 0, 0).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(rig_.Subscribe(0, 1, 1, 1), absl::OkStatus());
  v1::Subscribe wide;
  wide.set_generation(1);
  wide.add_wants()->set_first_chunk(1);
  wide.mutable_wants(0)->set_chunks(UINT64_MAX);
  EXPECT_EQ(rig_.core(0).OnSubscribe(CoreRig::Stream(1, 1), wide).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(ShardCoreTest, ARewindLoadsEverythingAnew) {
  rig_.Plan(ServerTestPlan{}.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ServerTestPlan plan{.generation = 2, .timeline = 2, .start = 0};
  rig_.Plan(plan.Make());
  ExpectVersion(0);
  EXPECT_EQ(rig_.value(0), 1000);
  EXPECT_EQ(rig_.abandoned, 4);  // by each of both servers, at each new timeline
  rig_.to_scheduler.clear();
  rig_.core(0).OnSchedulerConnected();
  EXPECT_THAT(rig_.records(), IsEmpty());  // of a timeline that ended
  plan.generation = plan.timeline = 3;
  plan.start = 2;
  plan.checkpoint.emplace().set_version(2);
  rig_.Plan(plan.Make());
  ExpectVersion(2);
}

TEST_F(ShardCoreTest, SnapshotPoints) {
  ServerTestPlan plan;
  plan.checkpoint_every = 2;
  rig_.Plan(plan.Make());
  v1::CheckpointOrder order;
  order.set_job_id("job-1");
  order.set_generation(1);
  order.set_version(3);
  for (uint64_t round = 0; round < 5; ++round) {
    if (round == 1) {
      rig_.core(0).OnCheckpointOrder(order);
      rig_.core(1).OnCheckpointOrder(order);
    }
    Contribute(1, round, 0);
    Contribute(1, round, 1);
    rig_.Run();
  }
  std::map<uint64_t, int> chunks;
  for (const auto& [shard, chunk, timeline, version] : rig_.snapshots) {
    EXPECT_EQ(shard, chunk % 3);
    EXPECT_EQ(timeline, 1u);
    ++chunks[version];
  }
  EXPECT_EQ(chunks, (std::map<uint64_t, int>{{2, 4}, {3, 4}, {4, 4}, {5, 4}}));
  rig_.to_scheduler.clear();
  rig_.core(0).OnCheckpointOrder(order);  // passed
  ASSERT_EQ(rig_.to_scheduler.size(), 2u);
  EXPECT_THAT(rig_.to_scheduler[0].snapshot_done().error(), HasSubstr("passed"));
}

TEST_F(ShardCoreTest, ANewSchedulerIsToldAgain) {
  rig_.Plan(ServerTestPlan{.rounds = 1}.Make());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  for (uint32_t c : {0, 1}) ASSERT_EQ(rig_.Report(0, 1, 1, c, 4, 2, v1::RoundReport::EVALUATION), absl::OkStatus());
  rig_.to_scheduler.clear();
  rig_.core(0).OnSchedulerConnected();
  int training = 0, evaluations = 0, progress = 0;
  for (const v1::NodeMessage& m : rig_.to_scheduler) {
    training += m.has_round_record() && !m.round_record().evaluation();
    evaluations += m.has_round_record() && m.round_record().evaluation() && m.round_record().round() == 1 &&
                   m.round_record().loss() == 2 && m.round_record().accuracy() == 0.5;
    progress += m.has_shard_progress() && m.shard_progress().version() == 1;
  }
  EXPECT_EQ(training, 1);
  EXPECT_EQ(evaluations, 1);
  EXPECT_EQ(progress, 2);  // shards 0 and 2
}

TEST_F(ShardCoreTest, SecondsBetweenRounds) {
  rig_.Plan(ServerTestPlan{}.Make());
  for (uint64_t round = 0; round < 2; ++round) {
    rig_.core(0).SetTime(absl::UnixEpoch() + absl::Seconds(3) * (round + 1));
    Contribute(1, round, 0);
    Contribute(1, round, 1);
    rig_.Run();
  }
  EXPECT_EQ(rig_.records().at(1).seconds(), 3);
}

TEST_F(ShardCoreTest, AStreamRoundCommitsChunkByChunk) {
  rig_.Plan(ServerTestPlan{.stream = true}.Make());
  ASSERT_EQ(rig_.Push(0, 1, 0, 0, 0, 1), absl::OkStatus());
  ASSERT_EQ(rig_.Push(0, 1, 0, 1, 0, 2), absl::OkStatus());
  EXPECT_EQ(rig_.core(0).version(0), 1u);
  EXPECT_EQ(rig_.core(0).version(3), 0u);
  EXPECT_DOUBLE_EQ(rig_.value(0), 1000 - 0.75);
  EXPECT_THAT(rig_.records(), IsEmpty());
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  ASSERT_TRUE(rig_.records().contains(0));
  EXPECT_EQ(rig_.records().at(0).loss(), 1.5);
  EXPECT_FALSE(rig_.records().at(0).skipped());
}

TEST_F(ShardCoreTest, AStreamChunkThatIsNotFiniteIsAttributed) {
  rig_.Plan(ServerTestPlan{.stream = true}.Make());
  ASSERT_EQ(rig_.Push(0, 1, 0, 1, 3, kNaN), absl::OkStatus());  // the holder's own
  Contribute(1, 0, 0);
  Contribute(1, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  EXPECT_EQ(rig_.value(3), 1003);
  EXPECT_DOUBLE_EQ(rig_.value(0), 1000 - 0.75);
  EXPECT_TRUE(rig_.records().at(0).skipped());
  EXPECT_THAT(rig_.records().at(0).nonfinite_contributors(), ElementsAre(1));
  // Another server's, told over a link that was down.
  rig_.set_links_open(false);
  ASSERT_EQ(rig_.Push(1, 1, 1, 0, 1, kNaN), absl::OkStatus());
  Contribute(1, 1, 0);
  Contribute(1, 1, 1);
  rig_.Run();
  EXPECT_FALSE(rig_.records().at(1).skipped());
  rig_.set_links_open(true);
  rig_.core(1).OnHolderConnected();
  rig_.Run();
  EXPECT_TRUE(rig_.records().at(1).skipped());
  EXPECT_THAT(rig_.records().at(1).nonfinite_contributors(), ElementsAre(0));
}

TEST_F(ShardCoreTest, AStreamRoundGoesOnInANewGeneration) {
  rig_.Plan(ServerTestPlan{.stream = true}.Make());
  ASSERT_EQ(rig_.Push(0, 1, 0, 0, 0, 1), absl::OkStatus());
  ASSERT_EQ(rig_.Push(0, 1, 0, 1, 0, 2), absl::OkStatus());  // committed; its sum's result comes too late
  rig_.core(0).OnFence(2);
  rig_.core(1).OnFence(2);
  rig_.Run();
  EXPECT_EQ(rig_.fence_reports()[0].shards(0).min_version(), 0u);
  EXPECT_EQ(rig_.fence_reports()[0].shards(0).max_version(), 1u);
  rig_.Plan(ServerTestPlan{.generation = 2, .stream = true}.Make());
  Contribute(2, 0, 0);
  Contribute(2, 0, 1);
  rig_.Run();
  ExpectVersion(1);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) EXPECT_DOUBLE_EQ(rig_.value(chunk), 1000.0 + chunk - 0.75);
  EXPECT_TRUE(rig_.records().contains(0));
}

TEST_F(ShardCoreTest, ShardsWithoutChunksAreLegal) {
  rig_.Plan(ServerTestPlan{.chunk_elements = 8}.Make());  // one chunk, three shards
  for (uint32_t c : {0, 1}) {
    ASSERT_EQ(rig_.Push(0, 1, 0, c, 0, c + 1.0), absl::OkStatus());
    ASSERT_EQ(rig_.Report(0, 1, 0, c, 3), absl::OkStatus());
  }
  rig_.Run();
  EXPECT_EQ(rig_.core(0).version(0), 1u);
  rig_.core(1).OnFence(2);
  EXPECT_EQ(rig_.fence_reports().back().shards_size(), 0);  // nothing that could hold the start back
}

}  // namespace
}  // namespace sluice
