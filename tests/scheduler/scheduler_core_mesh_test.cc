// Jobs whose replicas have several ranks, and workers that may not take every rank: what is refused, what waits, who
// replaces whom, what status says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/scheduler_core.h"
#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two stages of an MLP of 23 parameters: 15 and 8.
v1::JobSpec StagesSpec(uint32_t replicas) {
  v1::JobSpec spec = SmallSpec(replicas);
  spec.mutable_parallel()->set_pipeline(2);
  return spec;
}

class CoreMesh : public CoreFixture, public ::testing::Test {
 protected:
  void WorkerOn(const std::string& host, const std::string& name) { Start(name, v1::WORKER, "avx2/1", 0, host); }
  absl::StatusOr<v1::SubmitJobResponse> TrySubmit(const v1::JobSpec& spec,
                                                  const std::optional<ResumeFrom>& resume = std::nullopt) {
    v1::SubmitJobRequest request;
    *request.mutable_spec() = spec;
    return core().Submit(request, resume, now());
  }
  std::vector<std::string> Ranks(const std::string& job) {
    std::vector<std::string> names;
    for (const v1::Rank& rank : plan(job).ranks()) {
      names.push_back(absl::StrCat(rank.data(), rank.pipeline(), rank.tensor(), " ", rank.node().name()));
    }
    return names;
  }
};

TEST_F(CoreMesh, AGangThatIsTooLargeWaitsAndSaysWhatFor) {
  Server("s0");
  Worker("w0");
  Settle();
  const auto response = TrySubmit(StagesSpec(2));
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->warnings(response->warnings_size() - 1),
            "parallel.pipeline: found 2; parallel.data 2 x pipeline 2 x tensor 1 = 4 workers, there is 1; the nearest "
            "value allowed is 1 with parallel.data 1; the job waits in the queue until there are enough");
  const std::string job = response->job_id();
  EXPECT_EQ(status(job).message(),
            "waiting for 4 workers, parallel.data 2 x pipeline 2 x tensor 1 (1 idle of 1) and 1 server (1)");
  const v1::JobStatus queued = status(job);
  EXPECT_THAT(queued.warnings(), testing::Contains(HasSubstr("parallel.microbatches: 1 with 2 stages")));
  for (const std::string& warning : queued.warnings()) {
    EXPECT_THAT(warning, testing::Not(HasSubstr("waits in the queue"))) << "it is over when they have come";
  }
  for (const char* name : {"w1", "w2", "w3"}) Worker(name);
  Settle();
  EXPECT_THAT(Ranks(job), ElementsAre("000 w0", "010 w1", "100 w2", "110 w3"));
  const auto enough = TrySubmit(StagesSpec(1));
  ASSERT_TRUE(enough.ok());
  for (const std::string& warning : enough->warnings()) EXPECT_THAT(warning, testing::Not(HasSubstr("workers")));
  EXPECT_EQ(status(enough->job_id()).message(),
            "waiting for 2 workers, parallel.data 1 x pipeline 2 x tensor 1 (0 idle of 4) and 1 server (1)");
}

TEST_F(CoreMesh, AReplacementTakesTheLostRanksPlaceFromItsHostWhereItCan) {
  Server("s0");
  for (const char* name : {"a0", "a1", "a2"}) WorkerOn("a", name);
  for (const char* name : {"b0", "b1", "b2"}) WorkerOn("b", name);
  Settle();
  const std::string job = Submit(StagesSpec(2));
  Settle();
  ASSERT_THAT(Ranks(job), ElementsAre("000 a0", "010 a1", "100 b0", "110 b1"));
  Record(job, 0);
  Kill("b1");
  ReportAll(job, 1);
  EXPECT_THAT(Ranks(job), ElementsAre("000 a0", "010 a1", "100 b0", "110 b2")) << "a2 registered before";
  Settle();
  Kill("b0");  // nobody is left on its host
  ReportAll(job, 1);
  EXPECT_THAT(Ranks(job), ElementsAre("000 a0", "010 a1", "100 a2", "110 b2"));
  Settle();
  WorkerOn("b", "b3");
  WorkerOn("a", "a3");
  Settle();
  Kill("a2");  // its own host again, then that of its replica
  ReportAll(job, 1);
  EXPECT_THAT(Ranks(job), ElementsAre("000 a0", "010 a1", "100 a3", "110 b2"));
  Settle();
  Kill("a3");
  ReportAll(job, 1);
  EXPECT_THAT(Ranks(job), ElementsAre("000 a0", "010 a1", "100 b3", "110 b2"));
  Settle();
  Kill("a1");
  EXPECT_EQ(status(job).message(), "waiting for a worker: has 3 of 4; missing is rank 1, replica 0, stage 1, tensor 0");
  Restart();  // what it knew of hosts is in the row
  ConnectAll();
  WorkerOn("b", "b4");
  WorkerOn("a", "a4");
  Advance(absl::Seconds(3));  // a lease for who is missing
  ReportAll(job, 1);
  EXPECT_THAT(Ranks(job), ElementsAre("000 a0", "010 a4", "100 b3", "110 b2"));
}

TEST_F(CoreMesh, AModelThatNoWorkerHoldsIsRefusedWithTheArithmetic) {
  Server("s0");
  const auto nobody = TrySubmit(SmallSpec(1, "early"));
  EXPECT_TRUE(nobody.ok()) << "no worker has said how little it may take";
  Start("w0", v1::WORKER, "avx2/1", 100);
  Start("w1", v1::WORKER, "avx2/1", 150);
  Settle();
  EXPECT_EQ(
      status(nobody->job_id()).message(),
      "waiting for workers with a larger --memory_limit: a rank holds up to 23 parameters x 8 bytes (parameter 4 + "
      "gradient 4) = 184 bytes, activations not counted; 0 of 1 rank find one among 2 idle workers");
  const absl::Status refused = TrySubmit(SmallSpec(1)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(
      refused.message(),
      "parallel.pipeline: found 1; with parallel.data 1 x pipeline 1 x tensor 1 a rank holds up to 23 parameters x "
      "8 bytes (parameter 4 + gradient 4) = 184 bytes, activations not counted; the --memory_limit of 2 "
      "registered workers is at most 150 bytes; the nearest value allowed is 2, or start workers with a larger "
      "--memory_limit");
  const std::string job = Submit(StagesSpec(1));
  Settle();
  EXPECT_THAT(Ranks(job), ElementsAre("000 w1", "010 w0")) << "120 and 64 bytes";
  v1::JobSpec larger = StagesSpec(1);
  larger.mutable_model()->mutable_mlp()->set_inputs(40);
  EXPECT_THAT(
      std::string(TrySubmit(larger).status().message()),
      HasSubstr("model: with parallel.data 1 x pipeline 2 x tensor 1 a rank holds up to 123 parameters x 8 bytes"));
  Start("w2", v1::WORKER);
  EXPECT_TRUE(TrySubmit(larger).ok()) << "w2 may take all there is";
}

// Twice as many tensor ranks, half as much to hold.
TEST_F(CoreMesh, AGptThatOneWorkerCannotHoldTrainsOnTwo) {
  v1::JobSpec spec = SmallSpec(1, "gpt");
  v1::Gpt2Spec& gpt2 = *spec.mutable_model()->mutable_gpt2();
  gpt2.set_layers(2);
  gpt2.set_heads(4);
  gpt2.set_width(16);
  gpt2.set_context(8);
  gpt2.set_vocabulary(256);
  spec.mutable_data()->mutable_text()->set_path("text");
  spec.mutable_parallel()->set_chunk_elements(997);
  const uint64_t whole = RankBytes(spec)[0];
  spec.mutable_parallel()->set_tensor(2);
  const uint64_t half = RankBytes(spec)[0];
  ASSERT_LT(half, 0.6 * static_cast<double>(whole));
  Server("s0");
  Start("w0", v1::WORKER, "avx2/1", whole - 1);
  Start("w1", v1::WORKER, "avx2/1", half);
  Settle();
  spec.mutable_parallel()->set_tensor(1);
  const absl::Status refused = TrySubmit(spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("parallel.tensor: found 1; "));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("= ", whole, " bytes, activations not counted")));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the nearest value allowed is 2"));
  spec.mutable_parallel()->set_tensor(2);
  const std::string job = Submit(spec);
  Settle();
  EXPECT_EQ(plan(job).ranks_size(), 2);
}

TEST_F(CoreMesh, AReplacementMustHoldItsRank) {
  Server("s0");
  Start("w0", v1::WORKER, "avx2/1", 120);
  Start("w1", v1::WORKER, "avx2/1", 64);
  Settle();
  const std::string job = Submit(StagesSpec(1));
  Settle();
  ASSERT_THAT(Ranks(job), ElementsAre("000 w0", "010 w1"));
  Start("w2", v1::WORKER, "avx2/1", 119);
  Settle();
  Kill("w0");
  EXPECT_EQ(status(job).message(),
            "waiting for a worker: has 1 of 2; missing is rank 0, replica 0, stage 0, tensor 0; 1 idle worker may hold "
            "less than the 120 bytes of rank 0 (--memory_limit)");
  Start("w3", v1::WORKER, "avx2/1", 120);
  Settle();
  ReportAll(job, 0);
  EXPECT_THAT(Ranks(job), ElementsAre("000 w3", "010 w1"));
  Restart();
  ConnectAll();
  Settle();
  Kill("w3");
  EXPECT_EQ(state(job), v1::RECOVERING) << "what a rank needs follows from the spec also after a restart";
  EXPECT_THAT(status(job).message(), HasSubstr("less than the 120 bytes of rank 0"));
}

TEST_F(CoreMesh, OfTwoLostRanksTheLargerOneChoosesFirst) {
  v1::JobSpec spec = StagesSpec(1);
  v1::MlpSpec* mlp = spec.mutable_model()->mutable_mlp();
  mlp->set_inputs(1);
  mlp->clear_hidden();
  mlp->add_hidden(1);
  mlp->set_classes(20);
  ASSERT_THAT(RankBytes(spec), ElementsAre(16, 320));
  Server("s0");
  for (const char* name : {"w0", "w1"}) Worker(name);
  Settle();
  const std::string job = Submit(spec);
  Settle();
  ASSERT_THAT(Ranks(job), ElementsAre("000 w0", "010 w1"));
  Kill("w0");
  Kill("w1");
  Start("w2", v1::WORKER, "avx2/1", 320);  // could be either; the other one only the first
  Start("w3", v1::WORKER, "avx2/1", 16);
  Settle();
  ReportAll(job, 0);
  EXPECT_THAT(Ranks(job), ElementsAre("000 w3", "010 w2"));
}

TEST_F(CoreMesh, AWorkerThatTakesNoMailGetsNoRankOfAMesh) {
  Server("s0");
  Worker("w0");
  Start("stock", v1::WORKER);
  Break("stock");
  node("stock").serves_peers = false;
  Connect("stock");
  Settle();
  const std::string job = Submit(StagesSpec(1));
  Settle();
  EXPECT_THAT(status(job).message(), HasSubstr("waiting for 2 workers"));
  Worker("w1");
  Settle();
  EXPECT_THAT(Ranks(job), ElementsAre("000 w0", "010 w1"));
  Kill("w1");
  Settle();
  EXPECT_EQ(state(job), v1::RECOVERING) << "the stock client is no replacement either";
  const std::string alone = Submit(SmallSpec(1));
  Settle();
  EXPECT_THAT(Ranks(alone), ElementsAre("000 stock"));
}

TEST_F(CoreMesh, StatusHasEachRanksTimes) {
  Server("s0");
  Worker("w0");
  Worker("w1");
  Settle();
  const std::string job = Submit(StagesSpec(1));
  Settle();
  EXPECT_EQ(status(job).rank_times_size(), 0);
  for (uint64_t round = 0; round < 2; ++round) {
    v1::NodeMessage message;
    v1::RoundRecord& record = *message.mutable_round_record();
    record.set_job_id(job);
    record.set_generation(1);
    record.set_timeline(1);
    record.set_round(round);
    record.set_count(4);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      v1::RankTime& time = *record.add_times();
      time.set_contributor(rank);
      time.set_compute(static_cast<float>(1 + rank));
      time.set_exposed(static_cast<float>(round));
    }
    record.add_times()->set_contributor(99);
    Say(Tail(job, 0), message);
  }
  const v1::JobStatus seen = status(job);
  ASSERT_EQ(seen.rank_times_size(), 2);
  EXPECT_EQ(seen.rank_times(0).compute(), 1);
  EXPECT_EQ(seen.rank_times(1).compute(), 2);
  EXPECT_EQ(seen.rank_times(1).exposed(), 0.5);
  EXPECT_EQ(seen.rank_times(1).total(), 2.5);
  EXPECT_EQ(core().Status(*core().job(job), /*with_plan=*/false).rank_times_size(), 0);
}

// ---------------------------------------------------------------------------------------------------------- resume
class CoreMeshResume : public CoreMesh {
 protected:
  CoreMeshResume() : from_{"/elsewhere/t1-v4", {}} {
    Server("s0");
    for (const char* name : {"w0", "w1", "w2", "w3"}) Worker(name);
    Settle();
    v1::CheckpointManifest& manifest = from_.manifest;
    *manifest.mutable_spec() = SmallSpec(2);
    manifest.set_parameters(23);
    manifest.set_timeline(1);
    manifest.set_version(4);
    manifest.set_data_position(16);
    for (const char* slot : {"value", "m", "v"}) manifest.add_slots(slot);
  }
  std::string Refusal(const v1::JobSpec& spec) {
    const absl::Status status = TrySubmit(spec, from_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  }

  ResumeFrom from_;
};

TEST_F(CoreMeshResume, InAnotherLayout) {
  const auto response = TrySubmit(StagesSpec(2), from_);
  ASSERT_TRUE(response.ok()) << response.status();
  const v1::JobStatus seen = status(response->job_id());
  EXPECT_EQ(seen.plan().start(), 4u);
  EXPECT_EQ(seen.plan().ranks_size(), 4);
  EXPECT_EQ(seen.plan().checkpoint().directory(), "/elsewhere/t1-v4");
  EXPECT_EQ(seen.rounds_done(), 4u);
  EXPECT_EQ(seen.exact_until_round(), 4u);
  EXPECT_EQ(seen.warnings(0),
            "goes on in another layout, parallel.pipeline 1 to 2: sums are taken in another order from round 4 on");
}

TEST_F(CoreMeshResume, InTheSameLayoutNothingIsSaid) {
  const auto response = TrySubmit(SmallSpec(2), from_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_FALSE(status(response->job_id()).has_exact_until_round());
  EXPECT_THAT(status(response->job_id()).warnings(0), HasSubstr("copies: 1"));
}

TEST_F(CoreMeshResume, AnotherBatchGoesOnElsewhereInTheData) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_train()->set_batch(8);
  const auto response = TrySubmit(spec, from_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(status(response->job_id()).warnings(0),
            "train.batch 4 to 8: the data goes on at position 32, the checkpoint had come to 16");
}

TEST_F(CoreMeshResume, WhatCannotChangeIsNamed) {
  v1::JobSpec spec = StagesSpec(1);
  spec.mutable_model()->mutable_mlp()->set_hidden(0, 5);
  EXPECT_EQ(Refusal(spec),
            "model.mlp.hidden: found [5], but /elsewhere/t1-v4 is of [3]; a job that resumes keeps its model");
  spec = StagesSpec(1);
  spec.mutable_model()->mutable_mlp()->set_inputs(5);
  EXPECT_THAT(Refusal(spec), HasSubstr("model.mlp.inputs: found 5, but"));
  spec = SmallSpec(1);
  spec.mutable_model()->mutable_softmax()->set_inputs(4);
  spec.mutable_model()->mutable_softmax()->set_classes(2);
  EXPECT_THAT(Refusal(spec), HasSubstr("model: found softmax, but /elsewhere/t1-v4 is of mlp"));
  spec = StagesSpec(1);
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(1);
  spec.mutable_optimizer()->mutable_sgd()->set_momentum(0.5);
  EXPECT_THAT(Refusal(spec), HasSubstr("has no optimizer state \"momentum\""));
  spec = StagesSpec(1);
  spec.mutable_train()->set_rounds(4);
  EXPECT_THAT(Refusal(spec), HasSubstr("has seen 4 rounds already and train.rounds is 4; ask for more rounds"));
  // As many parameters, another function of them.
  v1::JobSpec gpt = SmallSpec(1);
  v1::Gpt2Spec& gpt2 = *gpt.mutable_model()->mutable_gpt2();
  gpt2.set_layers(1);
  gpt2.set_heads(2);
  gpt2.set_width(8);
  gpt2.set_context(4);
  gpt2.set_vocabulary(16);
  gpt.mutable_data()->mutable_text()->set_path("text");
  *from_.manifest.mutable_spec() = gpt;
  from_.manifest.set_parameters(MakeParameterSpace(gpt.model())->size());
  gpt2.set_heads(4);
  EXPECT_THAT(Refusal(gpt), HasSubstr("model.gpt2.heads: found 4, but /elsewhere/t1-v4 is of 2"));
  EXPECT_THAT(core().JobIds(), IsEmpty());
}

}  // namespace
}  // namespace sluice
