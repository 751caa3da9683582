// The round core with error feedback, by hand: when contributions are encoded, and how residuals go into checkpoints
// and come back out of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "tests/worker/test_plan.h"
#include "worker/round_core.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Nothing : public CommitValue {};

// Writes down what error feedback is about.
class Recorder : public RoundActions {
 public:
  void OpenStreams(const std::shared_ptr<const Layout>&, const std::vector<ServerEnd>&) override {}
  void CloseStreams() override {}
  void Subscribe(size_t server, const v1::Subscribe& subscribe) override {
    if (subscribe.residuals()) Say("fetch s", server);
  }
  void Encode(uint64_t chunk, uint64_t round) override { Say("encode c", chunk, " r", round); }
  void Push(size_t server, const v1::ChunkHeader& header) override {
    Say("push s", server, " c", header.chunk(), " r", header.round());
  }
  void Report(size_t, const v1::RoundReport&) override {}
  void Ask(size_t, const v1::LeaseRequest&) override {}
  void Install(uint64_t, uint64_t, uint64_t, std::shared_ptr<const CommitValue>) override {}
  void AllInPlace(uint64_t) override {}
  void StartCompute(uint64_t, uint64_t round) override { Say("compute r", round); }
  void StartEvaluation(uint64_t, uint64_t) override {}
  void CancelWork() override {}
  bool BeginResidual(const std::shared_ptr<const Layout>&, uint32_t) override { return restores; }
  void InstallResidual(uint64_t generation, uint64_t chunk, std::shared_ptr<const CommitValue>) override {
    Say("restore g", generation, " c", chunk);
  }
  void KeepResidual(uint64_t version) override { Say("keep v", version); }
  void PushResidual(size_t server, const v1::ChunkHeader& header) override {
    EXPECT_TRUE(header.residual());
    Say("residual s", server, " c", header.chunk(), " v", header.round());
  }

  std::vector<std::string> Take() { return std::exchange(said_, {}); }
  bool restores = false;

 private:
  template <typename... Args>
  void Say(const Args&... args) {
    said_.push_back(absl::StrCat(args...));
  }
  std::vector<std::string> said_;
};

// Three chunks: 0 and 2 on server-0, 1 on server-1; version 2 of 4 is a checkpoint.
class RoundCoreResidualTest : public ::testing::Test {
 protected:
  void Plan(uint64_t generation, uint64_t start, uint64_t checkpoint = 0, uint64_t every = 2) {
    v1::Plan plan = TestPlan{.rounds = 4, .generation = generation, .start = start}.Make()->plan();
    EXPECT_TRUE(SetSpecField(plan.mutable_spec(), "transfer.push={int8: {}}").ok());
    plan.mutable_spec()->mutable_checkpoint()->set_every_rounds(every);
    FillDefaults(plan.mutable_spec());
    if (checkpoint > 0) plan.mutable_checkpoint()->set_version(checkpoint);
    plan.set_hash(PlanHash(plan));
    core_.OnPlan(*Layout::Make(plan), 0);
  }
  absl::Status Commit(uint64_t generation, uint64_t chunk, uint64_t version) {
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(generation);
    header.set_round(version);
    header.set_elements(chunk == 2 ? 2 : 3);
    return core_.OnCommit(header, std::make_shared<Nothing>());
  }
  void InPlace(uint64_t generation, uint64_t chunk, uint64_t version) {
    ASSERT_TRUE(Commit(generation, chunk, version).ok());
    core_.OnInstalled(generation, chunk, version);
  }
  void AllInPlace(uint64_t generation, uint64_t version) {
    for (uint64_t chunk : {0, 1, 2}) InPlace(generation, chunk, version);
  }
  void Up(uint64_t generation) {
    core_.OnStreamUp(generation, 0);
    core_.OnStreamUp(generation, 1);
  }
  void Computed(uint64_t generation, uint64_t round) {
    core_.OnBatch(generation, round, 5);
    core_.OnGradientReady(generation, round, {0, 8});
    core_.OnComputed(generation, round, {.loss = 1, .count = 5});
  }
  absl::Status Residual(uint64_t generation, uint64_t chunk, uint64_t elements) {
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(generation);
    header.set_residual(true);
    header.set_elements(elements);
    return core_.OnResidual(header, std::make_shared<Nothing>());
  }

  Recorder said_;
  RoundCore core_{ProtocolRules(), &said_};
};

TEST_F(RoundCoreResidualTest, ItLeavesWhenEveryChunkIsAtTheVersionAndBeforeTheNextRound) {
  Plan(1, 0);
  Up(1);
  AllInPlace(1, 0);
  Computed(1, 0);
  AllInPlace(1, 1);
  said_.Take();
  Computed(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("encode c0 r1", "push s0 c0 r1", "encode c1 r1", "push s1 c1 r1",
                                        "encode c2 r1", "push s0 c2 r1", "compute r2"));
  InPlace(1, 0, 2);
  InPlace(1, 2, 2);
  EXPECT_THAT(said_.Take(), IsEmpty());
  InPlace(1, 1, 2);
  EXPECT_THAT(said_.Take(), ElementsAre("keep v2", "residual s0 c0 v2", "residual s1 c1 v2", "residual s0 c2 v2"));
  // Until the commits of the next round are seen it is said again, before the contributions.
  Computed(1, 2);
  said_.Take();
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("residual s0 c0 v2", "push s0 c0 r2", "residual s0 c2 v2", "push s0 c2 r2"));
  InPlace(1, 0, 3);
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  EXPECT_THAT(said_.Take(), ElementsAre("residual s0 c2 v2", "push s0 c2 r2"));
  InPlace(1, 1, 3);
  InPlace(1, 2, 3);
  Computed(1, 3);
  said_.Take();
  AllInPlace(1, 4);  // the last version always is a checkpoint
  EXPECT_THAT(said_.Take(), ElementsAre("keep v4", "residual s0 c0 v4", "residual s1 c1 v4", "residual s0 c2 v4"));
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("residual s1 c1 v4"));
}

TEST_F(RoundCoreResidualTest, AnOrderWantsItOfTheServersThatWereOrdered) {
  Plan(1, 0, 0, /*every=*/0);
  Up(1);
  AllInPlace(1, 0);
  core_.OnCheckpoint(1, 1, 1);
  core_.OnCheckpoint(0, 0, 1);  // of another generation
  Computed(1, 0);
  said_.Take();
  AllInPlace(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("keep v1", "residual s1 c1 v1"));
  core_.OnCheckpoint(1, 1, 3);  // and what is on the way stays wanted
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("residual s1 c1 v1"));
}

TEST_F(RoundCoreResidualTest, AGenerationThatStartsAtACheckpointSendsItAgain) {
  Plan(1, 0);
  Up(1);
  AllInPlace(1, 0);
  Plan(2, 2);
  core_.OnStopped(1);
  said_.Take();
  Up(2);
  AllInPlace(2, 2);
  EXPECT_THAT(said_.Take(),
              ElementsAre("keep v2", "residual s0 c0 v2", "residual s1 c1 v2", "residual s0 c2 v2", "compute r2"));
  // Also of a chunk that was committed in the generation before: what is left out of it counts from now on.
  EXPECT_TRUE(Commit(2, 1, 3).ok());
  core_.OnBatch(2, 2, 5);
  core_.OnGradientReady(2, 2, {3, 6});
  EXPECT_THAT(said_.Take(), ElementsAre("encode c1 r2"));
}

TEST_F(RoundCoreResidualTest, ARoundBeginsWhenAllOfItIsFetched) {
  said_.restores = true;
  Plan(1, 2, /*checkpoint=*/2);
  Up(1);
  EXPECT_THAT(said_.Take(), ElementsAre("fetch s0", "fetch s1"));
  EXPECT_TRUE(Residual(1, 0, 3).ok());
  EXPECT_EQ(Residual(1, 1, 2).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Residual(1, 3, 3).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(Residual(1, 2, 0).ok()) << "zeros";
  EXPECT_THAT(said_.Take(), ElementsAre("restore g1 c0", "restore g1 c2"));
  core_.OnStreamDown(1, 0);
  core_.OnStreamUp(1, 0);
  core_.OnStreamDown(1, 1);
  core_.OnStreamUp(1, 1);
  EXPECT_THAT(said_.Take(), ElementsAre("fetch s1"));
  EXPECT_TRUE(Residual(1, 0, 3).ok());
  EXPECT_THAT(said_.Take(), IsEmpty()) << "said again";
  core_.OnResidualInstalled(1, 0);
  core_.OnResidualInstalled(1, 2);
  AllInPlace(1, 2);
  EXPECT_THAT(said_.Take(), IsEmpty()) << "neither a round, nor the checkpoint that there is";
  EXPECT_TRUE(Residual(1, 1, 3).ok());
  said_.Take();
  Plan(2, 2, 2);
  EXPECT_THAT(said_.Take(), IsEmpty()) << "nothing begins while one is being put in place";
  core_.OnResidualInstalled(1, 1);
  Up(2);
  EXPECT_THAT(said_.Take(), ElementsAre("fetch s0", "fetch s1"));
  for (uint64_t chunk : {0, 1, 2}) {
    EXPECT_TRUE(Residual(2, chunk, 0).ok());
    core_.OnResidualInstalled(2, chunk);
  }
  said_.Take();
  AllInPlace(2, 2);
  EXPECT_THAT(said_.Take(), ElementsAre("compute r2"));
}

}  // namespace
}  // namespace sluice
