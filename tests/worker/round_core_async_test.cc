// The round core in an async job by hand: leases, answers, evaluations, reconnects.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/worker/test_plan.h"
#include "worker/round_core.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Nothing : public CommitValue {};

class Recorder : public RoundActions {
 public:
  void OpenStreams(const std::shared_ptr<const Layout>&, const std::vector<ServerEnd>& servers) override {
    Say("open ", servers.size());
  }
  void CloseStreams() override { Say("close"); }
  void Subscribe(size_t server, const v1::Subscribe& subscribe) override {
    std::string wants;
    for (const v1::Want& want : subscribe.wants()) absl::StrAppend(&wants, " ", want.first_chunk(), "+", want.chunks());
    Say("subscribe s", server, wants);
  }
  void Push(size_t server, const v1::ChunkHeader& header) override {
    pushed = header;
    Say("push s", server, " c", header.chunk(), " from ", header.round(), " at ", header.position(), "+",
        header.positions(), " n", header.elements());
  }
  void Report(size_t, const v1::RoundReport&) override { Say("report"); }
  void Ask(size_t server, const v1::LeaseRequest& request) override {
    asked = request;
    Say("ask s", server, " ", request.number());
  }
  void Install(uint64_t, uint64_t chunk, uint64_t version, std::shared_ptr<const CommitValue>) override {
    Say("install c", chunk, " v", version);
  }
  void AllInPlace(uint64_t version) override { ADD_FAILURE() << "in async there is no version of all"; }
  void StartCompute(uint64_t, uint64_t round) override { Say("compute ", round); }
  void StartEvaluation(uint64_t, uint64_t version) override { Say("evaluate ", version); }
  void CancelWork() override { Say("cancel"); }

  std::vector<std::string> Take() { return std::exchange(said_, {}); }
  v1::LeaseRequest asked;
  v1::ChunkHeader pushed;

 private:
  template <typename... Args>
  void Say(const Args&... args) {
    said_.push_back(absl::StrCat(args...));
  }
  std::vector<std::string> said_;
};

// 8 parameters in chunks of 3: chunks 0 and 2 on server 0, chunk 1 on server 1; batch 4, 2 replicas, this is rank 1.
class RoundCoreAsyncTest : public ::testing::Test {
 protected:
  RoundCoreAsyncTest() : core_(ProtocolRules(), &actions_) {
    plan_.replicas = 2;
    plan_.async = true;
  }
  void Begin() {
    core_.OnPlan(plan_.Make(), 1);
    Up();
    Take();
    for (uint64_t chunk : {0, 1, 2}) Commit(chunk, 5 + chunk);
  }
  void Up() {
    for (size_t server : {0, 1}) core_.OnStreamUp(plan_.generation, server);
  }
  // Installed at once; 0 positions: of a subscribe.
  void Commit(uint64_t chunk, uint64_t version, uint64_t position = 0, uint64_t positions = 0, uint64_t staleness = 0,
              bool repeated = false, bool nonfinite = false) {
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(plan_.generation);
    header.set_round(version);
    header.set_elements(chunk == 2 ? 2 : 3);
    header.set_position(position);
    header.set_positions(positions);
    header.set_staleness(staleness);
    header.set_repeated(repeated);
    header.set_nonfinite(nonfinite);
    const absl::Status status = core_.OnCommit(header, std::make_shared<Nothing>());
    EXPECT_TRUE(status.ok()) << status;
    for (const std::string& action : Take()) {
      said_.push_back(action);
      if (action == absl::StrCat("install c", chunk, " v", version)) {
        core_.OnInstalled(plan_.generation, chunk, version);
      }
    }
  }
  absl::Status Lease(uint64_t number, uint64_t position, uint64_t positions, uint64_t version = 0,
                     uint32_t slices = 0) {
    v1::Lease lease;
    lease.set_generation(plan_.generation);
    lease.set_number(number);
    lease.set_position(position);
    lease.set_positions(positions);
    lease.set_version(version);
    lease.set_slices(slices);
    return core_.OnLease(lease);
  }
  std::vector<std::string> Take() {
    std::vector<std::string> all = std::exchange(said_, {});
    for (std::string& action : actions_.Take()) all.push_back(std::move(action));
    return all;
  }

  TestPlan plan_;
  Recorder actions_;
  RoundCore core_;
  std::vector<std::string> said_;
};

TEST_F(RoundCoreAsyncTest, PullsAsksComputesAndReports) {
  core_.OnPlan(plan_.Make(), 1);
  EXPECT_THAT(Take(), ElementsAre("open 2"));
  Up();
  EXPECT_THAT(Take(), ElementsAre("subscribe s0 0+3", "subscribe s1 1+1"));
  for (uint64_t chunk : {0, 1, 2}) Commit(chunk, 5 + chunk);
  EXPECT_THAT(Take(), ElementsAre("install c0 v5", "install c1 v6", "install c2 v7", "ask s0 1"));
  EXPECT_FALSE(actions_.asked.has_report());
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kAsking);
  ASSERT_TRUE(Lease(1, 6, 2).ok());
  EXPECT_THAT(Take(), ElementsAre("compute 1"));
  core_.OnBatch(1, 1, 2);
  core_.OnGradientReady(1, 1, {3, 8});
  EXPECT_THAT(Take(), ElementsAre("push s1 c1 from 6 at 6+2 n3", "push s0 c2 from 7 at 6+2 n2"));
  Commit(1, 9, 6, 2, /*staleness=*/2);  // put in place while the backward goes on
  core_.OnGradientReady(1, 1, {0, 3});
  core_.OnComputed(1, 1, {.loss = 4, .count = 2, .correct = 1, .seconds = .5});
  EXPECT_THAT(Take(), ElementsAre("install c1 v9", "push s0 c0 from 5 at 6+2 n3"));
  Commit(0, 6, 6, 2);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kWaiting);
  Commit(2, 9, 6, 2, /*staleness=*/1, /*repeated=*/false, /*nonfinite=*/true);
  EXPECT_THAT(Take(), ElementsAre("install c0 v6", "install c2 v9", "ask s0 2"));
  const v1::RoundReport& report = actions_.asked.report();
  EXPECT_EQ(report.contributor(), 1u);
  EXPECT_EQ(report.loss_sum(), 4);
  EXPECT_EQ(report.staleness_sum(), 3);
  EXPECT_EQ(report.staleness_max(), 2u);
  EXPECT_EQ(report.staleness_count(), 3u);
  EXPECT_TRUE(report.nonfinite());
}

TEST_F(RoundCoreAsyncTest, AnswersToOtherLeasesAndSecondCopiesAreDropped) {
  Begin();
  ASSERT_TRUE(Lease(1, 0, 2).ok());
  core_.OnBatch(1, 0, 2);
  Take();
  Commit(0, 8, 0, 2);  // not pushed yet
  core_.OnGradientReady(1, 0, {0, 8});
  core_.OnComputed(1, 0, {.count = 2});
  Take();
  Commit(0, 8, 2, 2);  // of another lease
  Commit(0, 9);        // of a subscribe
  EXPECT_THAT(Take(), IsEmpty());
  Commit(0, 9, 0, 2, 7, /*repeated=*/true);
  Commit(0, 10, 0, 2);
  EXPECT_THAT(Take(), ElementsAre("install c0 v9"));
  Commit(1, 7, 0, 2);
  Commit(2, 8, 0, 2);
  EXPECT_EQ(actions_.asked.number(), 2u);
  EXPECT_EQ(actions_.asked.report().staleness_count(), 2u);  // the repeated one was not applied now
}

TEST_F(RoundCoreAsyncTest, AReconnectSaysAgainWhatHasNoAnswer) {
  core_.OnPlan(plan_.Make(), 1);
  Up();
  Commit(2, 4);
  Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(Take(), ElementsAre("subscribe s0 0+1"));
  Commit(0, 4);
  Commit(1, 4);
  Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(Take(), ElementsAre("ask s0 1"));
  ASSERT_TRUE(Lease(1, 0, 2).ok());
  ASSERT_TRUE(Lease(1, 0, 2).ok());  // a second copy
  core_.OnBatch(1, 0, 2);
  EXPECT_THAT(Take(), ElementsAre("compute 0"));
  core_.OnStreamDown(1, 0);
  core_.OnGradientReady(1, 0, {0, 8});
  core_.OnComputed(1, 0, {.count = 2});
  EXPECT_THAT(Take(), ElementsAre("push s1 c1 from 4 at 0+2 n3"));
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(Take(), ElementsAre("push s0 c0 from 4 at 0+2 n3", "push s0 c2 from 4 at 0+2 n2"));
  Commit(0, 5, 0, 2);
  Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(Take(), ElementsAre("push s0 c2 from 4 at 0+2 n2"));
}

TEST_F(RoundCoreAsyncTest, AnEvaluationPullsTheNewestFirst) {
  Begin();
  Take();
  ASSERT_TRUE(Lease(1, 0, 0, 3, 2).ok());
  EXPECT_THAT(Take(), ElementsAre("subscribe s0 0+3", "subscribe s1 1+1"));
  for (uint64_t chunk : {0, 1, 2}) Commit(chunk, 9);
  EXPECT_THAT(Take(), ElementsAre("install c0 v9", "install c1 v9", "install c2 v9", "evaluate 3"));
  core_.OnEvaluated(1, 3, {.loss = 2, .count = 4});
  EXPECT_THAT(Take(), ElementsAre("ask s0 2"));
  EXPECT_EQ(actions_.asked.report().kind(), v1::RoundReport::EVALUATION);
  EXPECT_EQ(actions_.asked.report().count(), 4);
  EXPECT_FALSE(Lease(2, 0, 0).ok());   // no slice of none
  EXPECT_FALSE(Lease(2, 11, 2).ok());  // the job has 12 positions
}

TEST_F(RoundCoreAsyncTest, AnEmptyLeaseIsPushedEmpty) {
  Begin();
  ASSERT_TRUE(Lease(1, 0, 2).ok());
  Take();
  core_.OnBatch(1, 0, 0);
  EXPECT_THAT(Take(),
              ElementsAre("push s0 c0 from 5 at 0+2 n0", "push s1 c1 from 6 at 0+2 n0", "push s0 c2 from 7 at 0+2 n0"));
}

TEST_F(RoundCoreAsyncTest, ClippingWaitsForTheWholeGradient) {
  plan_.clip_norm = 2;
  Begin();
  ASSERT_TRUE(Lease(1, 0, 2).ok());
  core_.OnBatch(1, 0, 2);
  core_.OnGradientReady(1, 0, {0, 8});
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kComputing);
  Take();
  core_.OnComputed(1, 0, {.count = 2, .gradient_norm = 8});
  EXPECT_EQ(Take().size(), 3u);
  EXPECT_EQ(actions_.pushed.scale(), .25f);
  for (uint64_t chunk : {0, 1, 2}) Commit(chunk, 9, 0, 2);
  ASSERT_TRUE(Lease(2, 4, 2).ok());
  core_.OnBatch(1, 1, 2);
  core_.OnGradientReady(1, 1, {0, 8});
  core_.OnComputed(1, 1, {.count = 2, .gradient_norm = 1});
  EXPECT_EQ(actions_.pushed.position(), 4u);
  EXPECT_EQ(actions_.pushed.scale(), 0);
}

TEST_F(RoundCoreAsyncTest, ANewGenerationDropsTheLease) {
  Begin();
  ASSERT_TRUE(Lease(1, 0, 2).ok());
  core_.OnBatch(1, 0, 2);
  core_.OnGradientReady(1, 0, {0, 3});
  Take();
  plan_.generation = 2;
  core_.OnPlan(plan_.Make(), 0);
  EXPECT_THAT(Take(), ElementsAre("cancel", "close"));
  core_.OnStopped(1);
  EXPECT_THAT(Take(), ElementsAre("open 2"));
  Up();
  EXPECT_THAT(Take(), ElementsAre("subscribe s0 0+3", "subscribe s1 1+1"));
  for (uint64_t chunk : {0, 1, 2}) Commit(chunk, 5);
  EXPECT_EQ(actions_.asked.number(), 1u);
  EXPECT_EQ(actions_.asked.contributor(), 0u);
  ASSERT_TRUE(Lease(1, 2, 2).ok());
  core_.OnEnd();
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kEnded);
}

}  // namespace
}  // namespace sluice
