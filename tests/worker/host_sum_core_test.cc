// Host sums by hand: leader and member as round cores, and what the leader's book takes.
#include "worker/host_sum_core.h"

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
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Value : MemberValue {};
class Nothing : public CommitValue {};

// Chunks 0, 1, 2 of 3, 3 and 2 elements; ranks 0 and 1 on one host, rank 2 alone.
std::shared_ptr<const Layout> Plan(uint64_t generation = 1, uint64_t start = 0) {
  return TestPlan{.replicas = 3, .rounds = 9, .generation = generation, .start = start, .hosts = {"a", "a", "b"}}
      .Make();
}

v1::ChunkHeader Header(uint64_t chunk, uint64_t round, uint64_t generation = 1, bool empty = false) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_round(round);
  header.set_generation(generation);
  header.set_contributor(1);
  header.set_elements(empty ? 0 : chunk == 2 ? 2 : 3);
  header.set_count(empty ? 0 : 3);
  return header;
}

class Recorder : public RoundActions {
 public:
  void OpenStreams(const std::shared_ptr<const Layout>&, const std::vector<ServerEnd>& ends) override {
    servers = ends;
  }
  void CloseStreams() override {}
  void Subscribe(size_t server, const v1::Subscribe&) override { Say("subscribe s", server); }
  void Push(size_t server, const v1::ChunkHeader& header) override {
    Say("push ", servers[server].node.name(), " c", header.chunk(), " r", header.round(), " ", header.contributor(),
        "+", header.contributors(), " n", header.elements(), " count ", header.count(),
        header.nonfinite_contributors_size() > 0 ? absl::StrCat(" bad ", header.nonfinite_contributors(0)) : "");
  }
  void Report(size_t, const v1::RoundReport&) override {}
  void Ask(size_t, const v1::LeaseRequest&) override {}
  void Install(uint64_t, uint64_t, uint64_t, std::shared_ptr<const CommitValue>) override {}
  void SumOnHost(HostSum sum) override {
    Say("sum c", sum.chunk, " r", sum.round, " g", sum.generation, sum.own ? " own" : "",
        sum.values[1] != nullptr ? " member" : "");
  }
  void AllInPlace(uint64_t) override {}
  void StartCompute(uint64_t, uint64_t round) override { Say("compute r", round); }
  void StartEvaluation(uint64_t, uint64_t) override {}
  void CancelWork() override {}

  std::vector<std::string> Take() { return std::exchange(said_, {}); }
  std::vector<ServerEnd> servers;

 private:
  template <typename... Args>
  void Say(const Args&... args) {
    said_.push_back(absl::StrCat(args...));
  }
  std::vector<std::string> said_;
};

class HostSumCoreTest : public ::testing::Test {
 protected:
  void Begin(uint32_t rank, uint64_t generation = 1, uint64_t start = 0) {
    core_.OnPlan(Plan(generation, start), rank);
    Pull(generation, start);
  }
  void Pull(uint64_t generation, uint64_t start) {
    for (size_t i = 0; i < said_.servers.size(); ++i) core_.OnStreamUp(generation, i);
    for (uint64_t chunk : {0, 1, 2}) Commit(generation, chunk, start);
    said_.Take();
  }
  void Commit(uint64_t generation, uint64_t chunk, uint64_t version) {
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(generation);
    header.set_round(version);
    header.set_elements(chunk == 2 ? 2 : 3);
    ASSERT_TRUE(core_.OnCommit(header, std::make_shared<Nothing>()).ok());
    core_.OnInstalled(generation, chunk, version);
  }
  absl::Status Member(const v1::ChunkHeader& header) {
    return core_.OnContribution(header, header.elements() > 0 ? std::make_shared<Value>() : nullptr);
  }

  Recorder said_;
  RoundCore core_{ProtocolRules(), &said_};
};

TEST_F(HostSumCoreTest, AMemberPushesToItsLeader) {
  Begin(1);
  ASSERT_EQ(said_.servers.size(), 3u);
  EXPECT_TRUE(said_.servers[2].leader);
  EXPECT_EQ(said_.servers[2].address, "worker-0");
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {3, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("push worker-0 c1 r0 1+0 n3 count 5", "push worker-0 c2 r0 1+0 n2 count 5"));
  Commit(1, 2, 1);
  core_.OnStreamDown(1, 2);
  core_.OnGradientReady(1, 0, {0, 3});
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnStreamUp(1, 2);  // what has no commit, again
  EXPECT_THAT(said_.Take(), ElementsAre("push worker-0 c0 r0 1+0 n3 count 5", "push worker-0 c1 r0 1+0 n3 count 5"));
}

TEST_F(HostSumCoreTest, ALeaderPushesWhatIsSummed) {
  Begin(0);
  ASSERT_EQ(said_.servers.size(), 2u);
  ASSERT_TRUE(Member(Header(2, 0)).ok());
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {3, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("sum c2 r0 g1 own member"));
  ASSERT_TRUE(Member(Header(1, 0)).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("sum c1 r0 g1 own member"));
  ASSERT_TRUE(Member(Header(1, 0)).ok());  // twice
  EXPECT_THAT(said_.Take(), IsEmpty());
  EXPECT_EQ(core_.summing(), 2u);
  core_.OnHostSum(1, 1, 0, {1});
  EXPECT_THAT(said_.Take(), ElementsAre("push server-1 c1 r0 0+2 n3 count 8 bad 1"));
  core_.OnStreamDown(1, 0);
  core_.OnHostSum(1, 2, 0, {});
  EXPECT_THAT(said_.Take(), IsEmpty());
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s0", "push server-0 c2 r0 0+2 n2 count 8"));
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("subscribe s1", "push server-1 c1 r0 0+2 n3 count 8 bad 1"));
}

TEST_F(HostSumCoreTest, WhatIsEmptyIsNotAdded) {
  Begin(0);
  core_.OnBatch(1, 0, 0);
  ASSERT_TRUE(Member(Header(0, 0, 1, /*empty=*/true)).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("push server-0 c0 r0 0+2 n0 count 0"));
  ASSERT_TRUE(Member(Header(1, 0)).ok());
  EXPECT_THAT(said_.Take(), ElementsAre("sum c1 r0 g1 member"));
  core_.OnHostSum(1, 1, 0, {});
  EXPECT_THAT(said_.Take(), ElementsAre("push server-1 c1 r0 0+2 n3 count 3"));
}

TEST_F(HostSumCoreTest, AMemberIsARoundAhead) {
  Begin(0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  for (uint64_t chunk : {0, 1, 2}) {
    ASSERT_TRUE(Member(Header(chunk, 0)).ok());
    core_.OnHostSum(1, chunk, 0, {});
  }
  ASSERT_TRUE(Member(Header(0, 1)).ok());  // it has seen every commit; this rank has seen none
  EXPECT_TRUE(absl::IsInvalidArgument(Member(Header(0, 2))));
  core_.OnComputed(1, 0, {.loss = 1, .count = 5});
  for (uint64_t chunk : {0, 1, 2}) Commit(1, chunk, 1);
  said_.Take();
  core_.OnBatch(1, 1, 5);
  core_.OnGradientReady(1, 1, {0, 3});
  EXPECT_THAT(said_.Take(), ElementsAre("sum c0 r1 g1 own member"));
  ASSERT_TRUE(Member(Header(0, 0)).ok());  // again, of a round that is over
  EXPECT_THAT(said_.Take(), IsEmpty());
}

// The sum of a chunk that an older generation committed may still be under way when the next round is computed.
TEST_F(HostSumCoreTest, TheNextGradientWaitsForTheSum) {
  Begin(0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  ASSERT_TRUE(Member(Header(0, 0)).ok());
  core_.OnComputed(1, 0, {.loss = 1, .count = 5});
  for (uint64_t chunk : {0, 1, 2}) Commit(1, chunk, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("sum c0 r0 g1 own member", "compute r1"));
  EXPECT_FALSE(core_.InPlace({0, 8}));
  core_.OnHostSum(1, 0, 0, {});
  EXPECT_TRUE(core_.InPlace({0, 8}));
  EXPECT_THAT(said_.Take(), IsEmpty()) << "it is committed";
}

TEST_F(HostSumCoreTest, ANewGenerationWaitsForTheSumAndForgetsIt) {
  Begin(0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  ASSERT_TRUE(Member(Header(0, 0)).ok());
  core_.OnComputed(1, 0, {.loss = 1, .count = 5});
  ASSERT_TRUE(Member(Header(1, 0, 2)).ok());  // the member has the plan already
  core_.OnPlan(Plan(2), 0);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kStopping);
  ASSERT_TRUE(Member(Header(2, 0, 1)).ok());  // too late
  core_.OnStopped(1);
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kStopping);
  core_.OnHostSum(1, 0, 0, {});
  EXPECT_EQ(core_.phase(), RoundCore::Phase::kPulling);
  Pull(2, 0);
  core_.OnBatch(2, 0, 5);
  core_.OnGradientReady(2, 0, {0, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("sum c1 r0 g2 own member"));
}

TEST_F(HostSumCoreTest, WhatAMemberSaysOnANewStreamReplacesWhatWaits) {
  core_.OnMember(1);
  ASSERT_TRUE(Member(Header(0, 0)).ok());
  core_.OnMember(1);
  ASSERT_TRUE(Member(Header(1, 0)).ok());
  Begin(0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  EXPECT_THAT(said_.Take(), ElementsAre("sum c1 r0 g1 own member"));
}

TEST_F(HostSumCoreTest, WhatIsOutsideThePlanIsRefused) {
  Begin(0);
  const auto with = [](auto change) {
    v1::ChunkHeader header = Header(0, 0);
    change(&header);
    return header;
  };
  EXPECT_TRUE(absl::IsOutOfRange(Member(with([](auto* h) { h->set_chunk(3); }))));
  EXPECT_TRUE(absl::IsOutOfRange(Member(with([](auto* h) { h->set_space(1); }))));
  for (const uint32_t stranger : {0, 2, 7}) {
    EXPECT_THAT(Member(with([&](auto* h) { h->set_contributor(stranger); })).message(),
                HasSubstr("by the plan it is not added up by rank 0"));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Member(with([](auto* h) { h->set_elements(2); }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Member(with([](auto* h) { h->set_encoding(v1::BF16); }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Member(with([](auto* h) { h->set_contributors(2); }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Member(with([](auto* h) { h->set_count(-1); }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Member(with([](auto* h) { h->set_round(2); }))));
}

TEST_F(HostSumCoreTest, PeopleAreToldWhoIsMissing) {
  Begin(0);
  core_.OnBatch(1, 0, 5);
  core_.OnGradientReady(1, 0, {0, 8});
  core_.OnComputed(1, 0, {.loss = 1, .count = 5});
  EXPECT_THAT(core_.Describe(), HasSubstr("the host's sum lacks rank 1"));
}

}  // namespace
}  // namespace sluice
