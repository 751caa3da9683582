// A GPT on several ranks against the same model on one: tensor ranks, stages, both; what they say to each other.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/mesh.h"
#include "tests/common/model_specs.h"
#include "tests/worker/replica.h"

namespace sluice {
namespace {

struct Case {
  Mesh mesh;
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
};

class ModelParallelTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Meshes, ModelParallelTest,
    ::testing::Values(Case{}, Case{{.tensor = 2}}, Case{{.tensor = 4}}, Case{{.pipeline = 2}}, Case{{.pipeline = 4}},
                      Case{{.pipeline = 2, .tensor = 2}}, Case{{.pipeline = 3, .tensor = 4}},
                      Case{{.pipeline = 3}, PipelineSchedule::kGPipe},
                      Case{{.pipeline = 2, .tensor = 2}, PipelineSchedule::kSequential},
                      Case{{.tensor = 2, .sequence_parallel = true}}, Case{{.tensor = 4, .sequence_parallel = true}},
                      Case{{.pipeline = 2, .tensor = 2, .sequence_parallel = true}},
                      Case{{.pipeline = 4, .tensor = 4, .sequence_parallel = true}},
                      Case{{.pipeline = 2, .tensor = 4, .sequence_parallel = true}, PipelineSchedule::kGPipe},
                      Case{{.pipeline = 3, .tensor = 2, .sequence_parallel = true}, PipelineSchedule::kSequential}),
    [](const auto& info) {
      return absl::StrCat("P", info.param.mesh.pipeline, "T", info.param.mesh.tensor,
                          info.param.mesh.sequence_parallel ? "sequence" : "", "schedule",
                          static_cast<int>(info.param.schedule));
    });

TEST_P(ModelParallelTest, TheSameLossAndGradientAsOnOneRank) {
  const v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);  // 27 rows on 2 or 4 ranks: uneven
  ModelFixture one(spec);
  const std::vector<Batch> batches = Microbatches(8, 27);
  const Trained expected = one.Train(batches);
  Replica replica(spec, GetParam().mesh, one.model().parameters(), {.schedule = GetParam().schedule});
  const Trained found = replica.Train(batches);
  EXPECT_NEAR(found.loss.loss, expected.loss.loss, 2e-6 * expected.loss.loss);
  EXPECT_EQ(found.loss.count, expected.loss.count);
  EXPECT_EQ(found.loss.correct, expected.loss.correct);
  ExpectSameGradient(one.model().space(), found.gradients, expected.gradients);
  const LossSum held_out = replica.Evaluate(batches[0]);
  EXPECT_NEAR(held_out.loss, one.Loss(batches[0]), 2e-6 * held_out.loss);
}

TEST_P(ModelParallelTest, TheSameBitsInEveryRunAndOnADeviceOfItsOwn) {
  const v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = Microbatches(8, 27);
  Replica replica(spec, GetParam().mesh, one.model().parameters(), {.schedule = GetParam().schedule});
  const Trained first = replica.Train(batches), again = replica.Train(batches);
  EXPECT_TRUE(SameBits(first.gradients, again.gradients));
  EXPECT_EQ(first.loss.loss, again.loss.loss);
  Replica device(spec, GetParam().mesh, one.model().parameters(),
                 {.schedule = GetParam().schedule, .device = "fake_device"});
  EXPECT_TRUE(SameBits(first.gradients, device.Train(batches).gradients));
}

// Masks follow from where an element lies in the job, not from who has it.
TEST_P(ModelParallelTest, TheSameLossAndGradientWithDropout) {
  v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);
  spec.mutable_gpt2()->set_dropout(0.1);
  ModelFixture one(spec, "cpu", 1, 0, {.seed = 5});
  one.model().UseVersion(7);
  const std::vector<Batch> batches = Microbatches(8, 27);
  const Trained expected = one.Train(batches);
  const ReplicaOptions options{.schedule = GetParam().schedule, .seed = 5, .round = 7};
  Replica replica(spec, GetParam().mesh, one.model().parameters(), options);
  const Trained found = replica.Train(batches);
  EXPECT_NEAR(found.loss.loss, expected.loss.loss, 2e-6 * expected.loss.loss);
  EXPECT_EQ(found.loss.correct, expected.loss.correct);
  ExpectSameGradient(one.model().space(), found.gradients, expected.gradients);
  EXPECT_NEAR(replica.Evaluate(batches[0]).loss, one.Loss(batches[0]), 2e-6 * expected.loss.loss);

  ReplicaOptions again = options;
  again.recompute = true;
  const Trained recomputed = Replica(spec, GetParam().mesh, one.model().parameters(), again).Train(batches);
  EXPECT_TRUE(SameBits(recomputed.gradients, found.gradients));
  EXPECT_EQ(recomputed.loss.loss, found.loss.loss);
  again = options;
  again.device = "fake_device";
  EXPECT_TRUE(SameBits(Replica(spec, GetParam().mesh, one.model().parameters(), again).Train(batches).gradients,
                       found.gradients));
}

TEST(MlpPipelineTest, TheSameLossAndGradientAsOnOneRank) {
  v1::ModelSpec spec;
  spec.mutable_mlp()->set_inputs(9);
  for (const uint64_t width : {12, 5, 17, 8}) spec.mutable_mlp()->add_hidden(width);
  spec.mutable_mlp()->set_classes(4);
  ModelFixture one(spec);
  std::vector<Batch> batches = {Features(5, 9, 4, 10), Features(3, 9, 4, 20), Features(0, 9, 4, 30),
                                Features(6, 9, 4, 40)};
  batches[1].labels[0] = -1;
  const Trained expected = one.Train(batches);
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kGPipe, PipelineSchedule::kSequential}) {
    for (const uint32_t stages : {1u, 2u, 3u, 5u}) {
      Replica replica(spec, {.pipeline = stages}, one.model().parameters(), {.schedule = schedule});
      const Trained found = replica.Train(batches);
      EXPECT_EQ(found.loss.loss, expected.loss.loss) << stages;
      EXPECT_EQ(found.loss.count, expected.loss.count);
      EXPECT_TRUE(SameBits(found.gradients, expected.gradients)) << stages << ": stages change no arithmetic";
      EXPECT_EQ(replica.Evaluate(batches[0]).loss, one.Loss(batches[0]));
    }
  }
}

TEST_P(ModelParallelTest, RecomputationHasTheSameBits) {
  const v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = Microbatches(8, 27);
  Replica kept(spec, GetParam().mesh, one.model().parameters(), {.schedule = GetParam().schedule});
  Replica again(spec, GetParam().mesh, one.model().parameters(), {.schedule = GetParam().schedule, .recompute = true});
  const Trained expected = kept.Train(batches), found = again.Train(batches);
  EXPECT_EQ(found.loss.loss, expected.loss.loss);
  EXPECT_TRUE(SameBits(found.gradients, expected.gradients));
  EXPECT_TRUE(SameBits(again.Train(batches).gradients, expected.gradients));
}

// Schedules change when something is computed, not what.
TEST(ModelParallelScheduleTest, SchedulesHaveTheSameBits) {
  const v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = Microbatches(8, 27);
  const Mesh mesh{.pipeline = 4};
  std::vector<Trained> trained;
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kGPipe, PipelineSchedule::kSequential}) {
    trained.push_back(Replica(spec, mesh, one.model().parameters(), {.schedule = schedule}).Train(batches));
  }
  EXPECT_TRUE(SameBits(trained[0].gradients, trained[1].gradients));
  EXPECT_TRUE(SameBits(trained[0].gradients, trained[2].gradients));
}

// Per microbatch of N positions, between T tensor ranks: 2 L + 1 sums of [N, C] forward and 2 L + 1 backward, and one
// gathering of 4 numbers a position. Between stages: [N, C] forward and backward.
TEST(ModelParallelTrafficTest, WhatIsSaid) {
  const uint64_t layers = 3, width = 16, context = 8;
  const v1::ModelSpec spec = GptSpec(layers, 4, width, context, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = {Tokens(2, context, 27, 10), Tokens(2, context, 27, 20)};
  const uint64_t n = 2 * context;
  for (const uint32_t t : {2u, 4u}) {
    Replica replica(spec, {.tensor = t}, one.model().parameters());
    replica.Train(batches);
    // Arrays this small go directly from everybody to everybody.
    EXPECT_EQ(replica.tensor_room(0).messages(), batches.size() * (2 * (2 * layers + 1) + 1) * t * (t - 1));
    EXPECT_EQ(replica.tensor_room(0).most_floats(),
              batches.size() * (t - 1) * (2 * (2 * layers + 1) * n * width + n * 4));
  }
  // Sequence parallelism: each sum in two halves, the same bytes less what went around twice in one step.
  for (const uint32_t t : {2u, 4u}) {
    Replica replica(spec, {.tensor = t, .sequence_parallel = true}, one.model().parameters());
    replica.Train(batches);
    EXPECT_EQ(replica.tensor_room(0).messages(), batches.size() * (4 * (2 * layers + 1) + 1) * t * (t - 1));
    EXPECT_EQ(replica.tensor_room(0).most_floats(),
              batches.size() * (t - 1) * (4 * (2 * layers + 1) * n * width / t + n * 4));
  }
  Replica replica(spec, {.pipeline = 3}, one.model().parameters());
  replica.Train(batches);
  EXPECT_EQ(replica.stage_room(0).messages(), batches.size() * 2 * 2);
  EXPECT_EQ(replica.stage_room(0).most_floats(), batches.size() * 2 * n * width) << "the middle one";
  Replica cut(spec, {.pipeline = 3, .tensor = 2, .sequence_parallel = true}, one.model().parameters());
  cut.Train(batches);
  for (const uint32_t t : {0u, 1u}) {
    EXPECT_EQ(cut.stage_room(t).messages(), batches.size() * 2 * 2);
    EXPECT_EQ(cut.stage_room(t).most_floats(), batches.size() * 2 * n * width / 2) << "own rows";
  }
}

// Arrays beyond kDirectFloats go around the ring, whose parts are whole rows too.
TEST(ModelParallelTrafficTest, LargeArraysOnTheRing) {
  v1::ModelSpec spec = GptSpec(2, 4, 64, 50, 27);
  spec.mutable_gpt2()->set_dropout(0.1);
  ModelFixture one(spec);
  const std::vector<Batch> batches = {Tokens(3, 50, 27, 10), Tokens(3, 49, 27, 20)};  // 147 rows: not in 2 or 4 parts
  const Trained expected = one.Train(batches);
  for (const uint32_t t : {2u, 4u}) {
    const Mesh mesh{.tensor = t, .sequence_parallel = true};
    const Trained found = Replica(spec, mesh, one.model().parameters()).Train(batches);
    EXPECT_NEAR(found.loss.loss, expected.loss.loss, 2e-6 * expected.loss.loss);
    ExpectSameGradient(one.model().space(), found.gradients, expected.gradients);
  }
}

// Fewer rows than ranks: some have none.
TEST(ModelParallelTrafficTest, RanksWithoutRows) {
  const v1::ModelSpec spec = GptSpec(2, 4, 16, 8, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = {Tokens(1, 1, 27, 10), Tokens(1, 3, 27, 20)};
  const Trained expected = one.Train(batches);
  const Mesh mesh{.pipeline = 2, .tensor = 4, .sequence_parallel = true};
  const Trained found = Replica(spec, mesh, one.model().parameters()).Train(batches);
  EXPECT_NEAR(found.loss.loss, expected.loss.loss, 2e-6 * expected.loss.loss);
  ExpectSameGradient(one.model().space(), found.gradients, expected.gradients);
}

// Per row and layer, with c = C/T: 4 C + 12 c without, 2 C + 14 c with it (what enters the tensor-parallel parts is
// whole).
TEST(ModelParallelMemoryTest, SequenceParallelismTakesLess) {
  const int64_t layers = 6, width = 64, n = 4 * 16;
  const v1::ModelSpec spec = GptSpec(layers, 4, width, 16, 27);
  ModelFixture one(spec);
  const std::vector<Batch> batches = {Tokens(4, 16, 27, 10)};
  for (const uint32_t t : {2u, 4u}) {
    std::vector<int64_t> bytes;
    for (const bool sequence : {false, true}) {
      Replica replica(spec, {.tensor = t, .sequence_parallel = sequence}, one.model().parameters());
      replica.Train(batches);
      bytes.push_back(replica.activation_bytes());
    }
    // Of each layer two arrays [N, C], of the whole the stream's last value and its gradient.
    EXPECT_LE(bytes[1], bytes[0] - 4 * (2 * layers + 2) * n * width * (t - 1) / t);
  }
}

TEST(ModelParallelRefusalTest, WhatCannotBeCut) {
  const auto backend = MakeBackend({}).value();
  const auto model = MakeModel(GptSpec(2, 4, 16, 8, 27), backend.get(), {.mesh = {.tensor = 3}});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
