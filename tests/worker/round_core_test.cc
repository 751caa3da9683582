// The round core by hand: every action in the order in which it must come.
#include "worker/round_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/worker/test_plan.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Nothing : public CommitValue {};

// Writes every action down as a word.
class Recorder : public RoundActions {
 public:
  void OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) override {
    Say("open g", layout->generation(), " ", servers.size());
  }
  void CloseStreams() override { Say("close"); }
  void Subscribe(size_t server, const v1::Subscribe& subscribe) override {
    std::vector<std::string> wants;
    for (const v1::Want& want : subscribe.wants()) {
      wants.push_back(absl::StrCat(want.first_chunk(), "+", want.chunks(), "@", want.version()));
    }
    Say("subscribe s", server, " ", absl::StrJoin(wants, ","));
  }
  void Push(size_t server, const v1::ChunkHeader& header) override {
    Say("push s", server, " c", header.chunk(), " r", header.round(), " g", header.generation(), " n",
        header.elements(), " count ", header.count());
  }
  void Report(size_t server, const v1::RoundReport& report) override {
    Say(report.kind() == v1::RoundReport::TRAIN ? "train" : "evaluation", " report s", server, " r", report.round(),
        " g", report.generation(), " loss ", report.loss_sum());
  }
  void Ask(size_t server, const v1::LeaseRequest& request) override { Say("ask s", server, " ", request.number()); }
  void Install(uint64_t generation, uint64_t chunk, uint64_t version,
               std::shared_ptr<const CommitValue> value) override {
    Say("install g", generation, " c", chunk, " v", version);
  }
  void AllInPlace(uint64_t version) override { in_place = version; }
  void StartCompute(uint64_t generation, uint64_t round) override { Say("compute g", generation, " r", round); }
  void StartEvaluation(uint64_t generation, uint64_t version) override { Say("evaluate g", generation, " v", version); }
  void CancelWork() override { Say("cancel"); }

  std::vector<std::string> Take() { return std::exchange(said_, {}); }
  uint64_t in_place = UINT64_MAX;  // version, as it was said last

 private:
  template <typename... Args>
  void Say(const Args&... args) {
    said_.push_back(absl::StrCat(args...));
  }
  std::vector<std::string> said_;
};

// Three chunks: 0 and 2 on server-0 (the holder), 1 on server-1; 3, 3 and 2 elements.
class RoundCoreTest : public ::testing::Test {
 protected:
  void Plan(uint64_t generation, uint64_t start, uint64_t rounds = 3, uint64_t eval_every = 100,
            uint64_t timeline = 1) {
    core_.OnPlan(
        TestPlan{
            .rounds = rounds, .eval_every = eval_every, .generation = generation, .timeline = timeline, .start = start}
            .Make(),
        0);
  }
  absl::Status Commit(uint64_t generation, uint64_t chunk, uint64_t version) {
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(generation);
    header.set_round(version);
    header.set_elements(chunk == 2 ? 2 : 3);
    return core_.OnCommit(header, std::make_shared<Nothing>());
  }
  void CommitAndInstall(uint64_t generation, uint64_t chunk, uint64_t version) {
    ASSERT_TRUE(Commit(generation, chunk, version).ok());
    core_.OnInstalled(generation, chunk, version);
  }
  // Up to the first compute of a generation.
  void Pulled(uint64_t generation, uint64_t start) {
    core_.OnStreamUp(generation, 0);
    core_.OnStreamUp(generation, 1);
    for (uint64_t chunk : {0, 1, 2}) CommitAndInstall(generation, chunk, start);
    said_.Take();
  }
  void Computed(uint64_t generation, uint64_t round) {
    core_.OnBatch(generation, round, 5);
    core_.OnGradientReady(generation, round, {0, 8});
    core_.OnComputed(generation, round, {.loss = 1, .count = 5});
  }
  void WholeRound(uint64_t generation, uint64_t round) {
    Computed(generation, round);
    for (uint64_t chunk : {0, 1, 2}) CommitAndInstall(generation, chunk, round + 1);
  }

  Recorder said_;
  RoundCore core_{ProtocolRules(), &said_};
};

TEST_F(RoundCoreTest, PullsThenComputes) {
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kIdle);
  Plan(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("open g1 2"));
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s1 1+1@0"));
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@0"));
  EXPECT_TRUE(Commit(1, 2, 0).ok());
  EXPECT_TRUE(Commit(1, 1, 0).ok());
  EXPECT_TRUE(Commit(1, 0, 0).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("install g1 c2 v0", "install g1 c1 v0", "install g1 c0 v0"));
  core_.OnInstalled(1, 0, 0);
  core_.OnInstalled(1, 1, 0);
  EXPECT_THAT(said_.Take(), IsEmpty());
  EXPECT_EQ(core_.installed(2), -1);
  core_.OnInstalled(1, 2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("compute g1 r0"));
}

TEST_F(RoundCoreTest, ChunksLeaveWhenTheirLastElementIsReady) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {5, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("push s0 c2 r0 g1 n2 count 5"));
  core_.OnGradientReady(1, 0, {1, 4});
  core_.OnGradientReady(1, 0, {4, 4});
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnGradientReady(1, 0, {4, 5});
  EXPECT_THAT(said_.Take(), ElementsAre("push s1 c1 r0 g1 n3 count 5"));
  core_.OnGradientReady(1, 0, {0, 1});
  EXPECT_THAT(said_.Take(), ElementsAre("push s0 c0 r0 g1 n3 count 5"));
  core_.OnComputed(1, 0, {.loss = 7, .count = 5});
  EXPECT_THAT(said_.Take(), ElementsAre("train report s0 r0 g1 loss 7", "compute g1 r1"));
}

TEST_F(RoundCoreTest, AdvancesOnlyWhenItHasComputed) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  for (uint64_t chunk : {0, 1, 2}) CommitAndInstall(1, chunk, 1);
  EXPECT_EQ(core_.round(), 0u) << "its own computing has not ended";
  said_.Take();
  core_.OnComputed(1, 0, {.loss = 7, .count = 5});
  EXPECT_EQ(core_.round(), 1u);
  EXPECT_THAT(said_.Take(), ElementsAre("train report s0 r0 g1 loss 7", "compute g1 r1"));
}

TEST_F(RoundCoreTest, CommitBeforeOwnPushIsKeptAndInstalledLater) {
  Plan(2, 4, 10);
  Pulled(2, 4);
  ASSERT_TRUE(Commit(2, 1, 5).ok());  // committed in the generation before
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnBatch(2, 4, 5);
  core_.OnGradientReady(2, 4, {3, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("install g2 c1 v5", "push s0 c2 r4 g2 n2 count 5"))
      << "a contribution that is committed already is not pushed";
  core_.OnInstalled(2, 1, 5);
  EXPECT_EQ(core_.installed(1), 5);
  core_.OnGradientReady(2, 4, {0, 3});
  core_.OnComputed(2, 4, {.loss = 1, .count = 5});
  EXPECT_EQ(core_.round(), 5u);
  EXPECT_TRUE(core_.InPlace({3, 6}));
  EXPECT_FALSE(core_.InPlace({0, 8}));
  CommitAndInstall(2, 0, 5);
  CommitAndInstall(2, 2, 5);
  EXPECT_TRUE(core_.InPlace({0, 8}));
}

TEST_F(RoundCoreTest, EmptyReplicaSendsEmptyContributionsForAll) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 0);
  EXPECT_THAT(said_.Take(),
              ElementsAre("push s0 c0 r0 g1 n0 count 0", "push s1 c1 r0 g1 n0 count 0", "push s0 c2 r0 g1 n0 count 0"));
  core_.OnComputed(1, 0, {});
  EXPECT_THAT(said_.Take(), ElementsAre("train report s0 r0 g1 loss 0", "compute g1 r1"));
  for (uint64_t chunk : {0, 1, 2}) CommitAndInstall(1, chunk, 1);
  EXPECT_EQ(core_.round(), 1u);
}

TEST_F(RoundCoreTest, EvaluatesWhereDueAndStaysAtTheEnd) {
  Plan(1, 0, 3, 2);
  Pulled(1, 0);
  WholeRound(1, 0);
  said_.Take();
  Computed(1, 1);
  for (uint64_t chunk : {0, 1}) CommitAndInstall(1, chunk, 2);
  said_.Take();
  CommitAndInstall(1, 2, 2);
  EXPECT_THAT(said_.Take(), ElementsAre("install g1 c2 v2", "evaluate g1 v2"));
  core_.OnEvaluated(1, 2, {.loss = 3});
  EXPECT_THAT(said_.Take(), ElementsAre("evaluation report s0 r2 g1 loss 3", "compute g1 r2"));
  WholeRound(1, 2);
  said_.Take();
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEvaluating);  // the last version always
  core_.OnEvaluated(1, 3, {.loss = 2});
  EXPECT_THAT(said_.Take(), ElementsAre("evaluation report s0 r3 g1 loss 2"));
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kFinished);
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@4", "evaluation report s0 r2 g1 loss 3",
                                        "train report s0 r2 g1 loss 1", "evaluation report s0 r3 g1 loss 2"))
      << "reports of the last round and of the one before";
  core_.OnEnd();
  EXPECT_THAT(said_.Take(), ElementsAre("close"));
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEnded);
}

TEST_F(RoundCoreTest, BrokenStreamSubscribesAndPushesAgainWhatIsNotCommitted) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {3, 8});  // chunks 1 and 2
  ASSERT_TRUE(Commit(1, 2, 1).ok());
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnGradientReady(1, 0, {0, 3});
  core_.OnComputed(1, 0, {.loss = 9});
  EXPECT_THAT(said_.Take(), ElementsAre("compute g1 r1")) << "nothing goes to a stream that is down";
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(),
              ElementsAre("subscribe s0 0+1@1,2+1@2", "train report s0 r0 g1 loss 9", "push s0 c0 r0 g1 n3 count 5"));
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s1 1+1@1", "push s1 c1 r0 g1 n3 count 5"));
}

TEST_F(RoundCoreTest, WhatWasDeclinedIsPushedWhenTheServerAsks) {
  const auto again = [this](uint64_t generation, uint64_t chunk, uint64_t round) {
    v1::Later later;
    later.add_declined()->set_chunk(0);
    later.add_again()->set_chunk(chunk);
    later.mutable_again(0)->set_round(round);
    return core_.OnLater(generation, later);
  };
  Plan(1, 0);
  EXPECT_TRUE(again(1, 2, 0).ok()) << "nothing is computed yet: dropped";
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {3, 8});  // chunks 1 and 2
  said_.Take();
  EXPECT_TRUE(again(1, 2, 0).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("push s0 c2 r0 g1 n2 count 5"));
  EXPECT_TRUE(again(1, 0, 0).ok());
  EXPECT_TRUE(again(1, 2, 1).ok());
  EXPECT_TRUE(again(2, 2, 0).ok());
  EXPECT_THAT(said_.Take(), IsEmpty()) << "not pushed yet, another round, another generation";
  core_.OnGradientReady(1, 0, {0, 3});
  core_.OnComputed(1, 0, {.loss = 1});
  said_.Take();
  EXPECT_TRUE(again(1, 0, 0).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("push s0 c0 r0 g1 n3 count 5")) << "in the forward of the next round";
  ASSERT_TRUE(Commit(1, 0, 1).ok());
  said_.Take();
  EXPECT_TRUE(again(1, 0, 0).ok());
  EXPECT_THAT(said_.Take(), IsEmpty()) << "committed";
  EXPECT_EQ(again(1, 3, 0).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(RoundCoreTest, ReportOfTheRoundBeforeIsSentAgain) {
  Plan(1, 0, 5);
  Pulled(1, 0);
  WholeRound(1, 0);
  WholeRound(1, 1);
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@3", "train report s0 r1 g1 loss 1"));
}

// ---------------------------------------------------------------- the next round while commits are on the way
TEST_F(RoundCoreTest, NextRoundReadsWhatIsInPlace) {
  Plan(1, 0);
  Pulled(1, 0);
  EXPECT_TRUE(core_.InPlace({0, 8}));
  Computed(1, 0);
  EXPECT_EQ(core_.round(), 1u);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kComputing);
  EXPECT_FALSE(core_.InPlace({0, 1}));
  said_.Take();
  core_.OnBatch(1, 1, 5);
  ASSERT_TRUE(Commit(1, 0, 1).ok());
  EXPECT_FALSE(core_.InPlace({0, 3})) << "it is not in place yet";
  core_.OnInstalled(1, 0, 1);
  EXPECT_TRUE(core_.InPlace({0, 3}));
  EXPECT_TRUE(core_.InPlace({1, 1}));
  EXPECT_FALSE(core_.InPlace({0, 4}));
  EXPECT_EQ(core_.Describe(),
            "job job-1 generation 1 rank 0 round 1: waits for 2 of 3 chunks at version 1 (the first is chunk 1 from "
            "server-1 at server-1)");
  CommitAndInstall(1, 2, 1);
  EXPECT_FALSE(core_.InPlace({0, 8}));
  EXPECT_EQ(said_.in_place, 0u) << "the contribution to chunk 1 may have to be sent again";
  CommitAndInstall(1, 1, 1);
  EXPECT_TRUE(core_.InPlace({0, 8}));
  EXPECT_EQ(said_.in_place, 1u);
  EXPECT_THAT(said_.Take(), ElementsAre("install g1 c0 v1", "install g1 c2 v1", "install g1 c1 v1"));
  core_.OnGradientReady(1, 1, {3, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("push s1 c1 r1 g1 n3 count 5", "push s0 c2 r1 g1 n2 count 5"));
}

TEST_F(RoundCoreTest, NothingLeavesBeforeAllIsInPlace) {
  Plan(1, 0);
  Pulled(1, 0);
  Computed(1, 0);
  for (uint64_t chunk : {0, 1}) CommitAndInstall(1, chunk, 1);
  EXPECT_DEATH(core_.OnBatch(1, 1, 0), "");
  core_.OnBatch(1, 1, 5);
  EXPECT_DEATH(core_.OnGradientReady(1, 1, {0, 3}), "");
}

TEST_F(RoundCoreTest, BrokenStreamInTheForwardPushesTheRoundBeforeAgain) {
  Plan(1, 0);
  Pulled(1, 0);
  Computed(1, 0);
  core_.OnBatch(1, 1, 7);
  CommitAndInstall(1, 0, 1);
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(),
              ElementsAre("subscribe s0 0+1@2,2+1@1", "train report s0 r0 g1 loss 1", "push s0 c2 r0 g1 n2 count 5"));
  CommitAndInstall(1, 1, 1);
  CommitAndInstall(1, 2, 1);
  core_.OnGradientReady(1, 1, {3, 8});
  said_.Take();
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s1 1+1@2", "push s1 c1 r1 g1 n3 count 7"));
}

TEST_F(RoundCoreTest, ReportsAreKeptUntilALaterPushHasArrived) {
  Plan(1, 0, 5);
  Pulled(1, 0);
  WholeRound(1, 0);
  Computed(1, 1);  // its pushes may be lost with the stream, and the report before them
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(),
              ElementsAre("subscribe s0 0+3@2", "train report s0 r0 g1 loss 1", "train report s0 r1 g1 loss 1",
                          "push s0 c0 r1 g1 n3 count 5", "push s0 c2 r1 g1 n2 count 5"));
  for (uint64_t chunk : {0, 1, 2}) CommitAndInstall(1, chunk, 2);
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@3", "train report s0 r1 g1 loss 1"));
}

TEST_F(RoundCoreTest, EvaluationWaitsForAll) {
  Plan(1, 0, 5, 1);
  Pulled(1, 0);
  Computed(1, 0);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kWaiting);
  for (uint64_t chunk : {0, 1}) CommitAndInstall(1, chunk, 1);
  said_.Take();
  CommitAndInstall(1, 2, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("install g1 c2 v1", "evaluate g1 v1"));
}

TEST_F(RoundCoreTest, NewGenerationInTheForwardRecomputesTheOpenRound) {
  Plan(1, 0);
  Pulled(1, 0);
  Computed(1, 0);
  CommitAndInstall(1, 0, 1);
  ASSERT_TRUE(Commit(1, 1, 1).ok());  // the install stays under way
  said_.Take();
  Plan(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("cancel", "close"));
  EXPECT_FALSE(core_.InPlace({0, 3})) << "nothing of the old generation is read any more";
  core_.OnStopped(1);
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnInstalled(1, 1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2"));
  core_.OnStreamUp(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@0")) << "nothing is pushed again";
}

TEST_F(RoundCoreTest, DropsWhatItHasSeenAndWhatIsOfAnotherGeneration) {
  Plan(2, 0);
  Pulled(2, 0);
  EXPECT_TRUE(Commit(2, 0, 0).ok());
  EXPECT_TRUE(Commit(1, 0, 1).ok());
  EXPECT_TRUE(Commit(3, 0, 1).ok());
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  core_.OnStreamUp(1, 0);
  core_.OnStreamDown(1, 0);
  Plan(2, 0);
  Plan(1, 0);
  EXPECT_THAT(said_.Take(), IsEmpty());
  EXPECT_EQ(core_.generation(), 2u);
}

TEST_F(RoundCoreTest, RefusesWhatIsOutsideThePlanOrTheProtocol) {
  Plan(1, 0);
  Pulled(1, 0);
  EXPECT_EQ(Commit(1, 3, 1).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Commit(1, 0, 2).code(), absl::StatusCode::kInvalidArgument) << "version 1 was not sent";
  v1::ChunkHeader header;
  header.set_generation(1);
  header.set_round(1);
  header.set_elements(2);
  EXPECT_EQ(core_.OnCommit(header, nullptr).code(), absl::StatusCode::kInvalidArgument);
  header.set_elements(3);
  header.set_space(1);
  EXPECT_EQ(core_.OnCommit(header, nullptr).code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(Commit(1, 0, 1).ok());
  EXPECT_EQ(Commit(1, 0, 2).code(), absl::StatusCode::kInvalidArgument) << "two versions ahead of the open round";
  EXPECT_THAT(said_.Take(), IsEmpty());
}

// ---------------------------------------------------------------- new generations, one test per phase
TEST_F(RoundCoreTest, NewGenerationWhilePulling) {
  Plan(1, 0);
  core_.OnStreamUp(1, 0);
  ASSERT_TRUE(Commit(1, 0, 0).ok());
  said_.Take();
  Plan(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("close")) << "an install is under way";
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kStopping);
  core_.OnInstalled(1, 0, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2"));
  EXPECT_EQ(core_.installed(0), -1) << "a value of the generation before does not count";
}

TEST_F(RoundCoreTest, NewGenerationWhileComputing) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {3, 8});
  said_.Take();
  Plan(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("cancel", "close"));
  core_.OnGradientReady(1, 0, {0, 3});
  EXPECT_TRUE(Commit(2, 0, 0).ok());
  core_.OnStreamUp(2, 0);
  EXPECT_THAT(said_.Take(), IsEmpty()) << "nothing of the new generation before the computing has stopped";
  core_.OnStopped(1);
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2"));
  Pulled(2, 0);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kComputing);
}

TEST_F(RoundCoreTest, NewGenerationWhileComputingThatEndsAllTheSame) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  Plan(2, 0);
  said_.Take();
  core_.OnComputed(1, 0, {.loss = 1});
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2")) << "no report of the old round";
  core_.OnStreamUp(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0 0+3@0")) << "nothing of the old generation is pushed again";
}

TEST_F(RoundCoreTest, NewGenerationsWhileStopping) {
  Plan(1, 0);
  Pulled(1, 0);
  Plan(2, 0);
  Plan(3, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("cancel", "close", "close"));
  core_.OnStopped(1);
  EXPECT_THAT(said_.Take(), ElementsAre("open g3 2"));
}

TEST_F(RoundCoreTest, NewGenerationWhileEvaluating) {
  Plan(1, 2, 5, 2);
  Pulled(1, 2);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEvaluating);
  Plan(2, 2, 5, 2);
  EXPECT_THAT(said_.Take(), ElementsAre("cancel", "close"));
  core_.OnEvaluated(1, 2, {.loss = 1});
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2"));
  Pulled(2, 2);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEvaluating) << "evaluated again in the new generation";
  core_.OnEvaluated(2, 2, {.loss = 1});
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kComputing);
}

TEST_F(RoundCoreTest, NewGenerationWhileWaitingRecomputesTheOpenRound) {
  Plan(1, 0, 3, 1);
  Pulled(1, 0);
  Computed(1, 0);
  ASSERT_TRUE(Commit(1, 1, 1).ok());  // the install stays under way
  said_.Take();
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kWaiting);
  Plan(2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("close"));
  core_.OnInstalled(1, 1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("open g2 2"));
  core_.OnStreamUp(2, 0);
  core_.OnStreamUp(2, 1);
  said_.Take();
  CommitAndInstall(2, 1, 0);  // v-1 first, then v
  ASSERT_TRUE(Commit(2, 1, 1).ok());
  CommitAndInstall(2, 0, 0);
  said_.Take();
  CommitAndInstall(2, 2, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("install g2 c2 v0", "compute g2 r0"));
  for (uint64_t chunk : {0, 1, 2}) EXPECT_EQ(core_.installed(chunk), 0);
}

TEST_F(RoundCoreTest, NewGenerationWhenFinished) {
  Plan(1, 2);
  Pulled(1, 2);
  WholeRound(1, 2);
  core_.OnEvaluated(1, 3, {});
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kFinished);
  Plan(2, 3);
  Pulled(2, 3);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEvaluating);
  core_.OnEvaluated(2, 3, {.loss = 1});
  EXPECT_THAT(said_.Take(), ElementsAre("evaluation report s0 r3 g2 loss 1"));
  // And a rewind takes it back to work.
  Plan(3, 0, 3, 100, 3);
  Pulled(3, 0);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kComputing);
  EXPECT_EQ(core_.round(), 0u);
}

TEST_F(RoundCoreTest, EndWhileComputingCancelsAndStartsNothingMore) {
  Plan(1, 0);
  Pulled(1, 0);
  core_.OnEnd();
  EXPECT_THAT(said_.Take(), ElementsAre("cancel", "close"));
  core_.OnStopped(1);
  core_.OnEnd();
  Plan(2, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_TRUE(Commit(1, 0, 1).ok());
  EXPECT_THAT(said_.Take(), IsEmpty());
}

TEST_F(RoundCoreTest, EndBeforeAnyPlan) {
  core_.OnEnd();
  EXPECT_THAT(said_.Take(), IsEmpty());
}

TEST_F(RoundCoreTest, SaysWhomItWaitsFor) {
  EXPECT_EQ(core_.Describe(), "no plan yet");
  Plan(1, 0);
  core_.OnStreamUp(1, 0);
  CommitAndInstall(1, 0, 0);
  EXPECT_EQ(core_.Describe(),
            "job job-1 generation 1 rank 0 round 0: waits for 2 of 3 chunks at version 0 (the first is chunk 1 from "
            "server-1 at server-1, whose stream is down)");
}

}  // namespace
}  // namespace sluice
