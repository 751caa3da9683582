#include "common/mesh_costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/common/model_specs.h"

namespace sluice {
namespace {

ParameterSpace SpaceOf(const v1::ModelSpec& model) { return *MakeParameterSpace(model); }

TEST(MeshCostsTest, OneRankSaysNothingToOthers) {
  const v1::ModelSpec model = GptSpec(3, 4, 16, 8, 27);
  const auto costs = CostsOf(model, SpaceOf(model), {.data = 4}, {.rows = 6, .microbatches = 2, .recompute = true});
  ASSERT_EQ(costs.size(), 1u);
  EXPECT_EQ(costs[0].layers, (Range{0, 3}));
  EXPECT_EQ(costs[0].held, SpaceOf(model).size());
  EXPECT_EQ(costs[0].pushed, SpaceOf(model).size());
  EXPECT_EQ(costs[0].tensor_operations() + costs[0].tensor_bytes + costs[0].sent, 0u);
}

// 2 L + 1 sums of [N, C] forward and 2 L + 1 backward, one gathering of 4 numbers a position.
TEST(MeshCostsTest, TensorRanks) {
  const uint64_t layers = 3, width = 16, context = 8, rows = 6, microbatches = 2;
  const v1::ModelSpec model = GptSpec(layers, 4, width, context, 27);
  for (const uint32_t t : {2u, 4u}) {
    for (const bool recompute : {false, true}) {
      const auto costs = CostsOf(model, SpaceOf(model), {.tensor = t},
                                 {.rows = rows, .microbatches = microbatches, .recompute = recompute});
      const uint64_t sums = 2 * (2 * layers + 1) + (recompute ? layers - 1 : 0);
      for (const RankCosts& rank : costs) {
        EXPECT_EQ(rank.sums, sums * microbatches);
        EXPECT_EQ(rank.scatters + rank.gathers, 0u);
        EXPECT_EQ(rank.loss_gathers, microbatches);
        EXPECT_EQ(rank.tensor_bytes, 2 * sums * rows * context * width * 4 + t * rows * context * 16);
        EXPECT_EQ(rank.sent, 0u);
      }
      EXPECT_LT(costs[1].pushed, costs[0].pushed) << "what all hold is pushed by the first";
    }
  }
}

// Each sum in two halves: the same bytes. Between stages everybody sends its own rows.
TEST(MeshCostsTest, SequenceParallelism) {
  const v1::ModelSpec model = GptSpec(4, 4, 16, 7, 27);
  const Mesh mesh{.pipeline = 2, .tensor = 2};
  Mesh own = mesh;
  own.sequence_parallel = true;
  const RoundWork work{.rows = 5, .microbatches = 2};
  const auto costs = CostsOf(model, SpaceOf(model), mesh, work), halves = CostsOf(model, SpaceOf(model), own, work);
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(halves[r].sums, 0u);
    EXPECT_EQ(halves[r].scatters, costs[r].sums);
    EXPECT_EQ(halves[r].gathers, costs[r].sums);
    EXPECT_EQ(halves[r].tensor_bytes, costs[r].tensor_bytes);
    EXPECT_EQ(halves[r].sent, costs[r].sent);
  }
  // 3 and 2 rows of 7 positions: 11 + 10, 7 + 7.
  EXPECT_EQ(halves[0].sent_bytes, 4u * 16 * (11 + 7));
  EXPECT_EQ(halves[1].sent_bytes, 4u * 16 * (10 + 7));
  EXPECT_EQ(costs[0].sent_bytes, 4u * 16 * (5 * 7));
}

// [N, C] forward and backward over each border.
TEST(MeshCostsTest, Stages) {
  const uint64_t width = 16, context = 8, rows = 6, microbatches = 3;
  const v1::ModelSpec model = GptSpec(3, 4, width, context, 27);
  const auto costs = CostsOf(model, SpaceOf(model), {.pipeline = 3}, {.rows = rows, .microbatches = microbatches});
  const uint64_t border = rows * context * width * 4;
  EXPECT_EQ(costs[0].sent, microbatches);
  EXPECT_EQ(costs[1].sent, 2 * microbatches);
  EXPECT_EQ(costs[2].sent, microbatches);
  EXPECT_EQ(costs[0].sent_bytes, border);
  EXPECT_EQ(costs[1].sent_bytes, 2 * border);
  EXPECT_EQ(costs[2].sent_bytes, border);
  uint64_t held = 0;
  for (const RankCosts& rank : costs) {
    EXPECT_EQ(rank.pushed, rank.held);
    held += rank.held;
  }
  EXPECT_EQ(held, SpaceOf(model).size() + 27 * width) << "the embedding is the head as well";
}

TEST(MeshCostsTest, StagesOfAnMlpSendWhatLiesBetween) {
  v1::ModelSpec model;
  model.mutable_mlp()->set_inputs(9);
  for (const uint64_t hidden : {12, 5, 17}) model.mutable_mlp()->add_hidden(hidden);
  model.mutable_mlp()->set_classes(4);
  const auto costs = CostsOf(model, SpaceOf(model), {.pipeline = 4}, {.rows = 10, .microbatches = 2});
  EXPECT_EQ(costs[0].sent_bytes, 10 * 12 * 4u);
  EXPECT_EQ(costs[1].sent_bytes, 10 * (12 + 5) * 4u);
  EXPECT_EQ(costs[2].sent_bytes, 10 * (5 + 17) * 4u);
  EXPECT_EQ(costs[3].sent_bytes, 10 * 17 * 4u);
}

// With recomputation the last layer's attention is not summed again where backward follows forward at once.
TEST(MeshCostsTest, RecomputationFollowsTheSchedule) {
  const v1::ModelSpec model = GptSpec(6, 4, 16, 8, 27);
  const auto sums = [&](v1::ParallelSpec::Schedule schedule, uint64_t microbatches, uint32_t stage) {
    const auto costs = CostsOf(model, SpaceOf(model), {.pipeline = 2, .tensor = 2},
                               {.rows = 12, .microbatches = microbatches, .schedule = schedule, .recompute = true});
    const RankCosts& rank = costs[stage * 2];
    return rank.sums - microbatches * (4 * rank.layers.size() + 1) - microbatches * rank.layers.size();
  };
  const uint64_t none = 0;
  EXPECT_EQ(sums(v1::ParallelSpec::ONE_F_ONE_B, 4, 0), none);
  EXPECT_EQ(sums(v1::ParallelSpec::ONE_F_ONE_B, 4, 1), none - 4);
  EXPECT_EQ(sums(v1::ParallelSpec::GPIPE, 4, 1), none);
  EXPECT_EQ(sums(v1::ParallelSpec::GPIPE, 1, 1), none - 1);
  EXPECT_EQ(sums(v1::ParallelSpec::SEQUENTIAL, 4, 0), none - 4);
}

TEST(MeshCostsTest, WorkOfASpec) {
  v1::JobSpec spec;
  spec.mutable_train()->set_batch(7);
  spec.mutable_parallel()->set_data(3);
  spec.mutable_parallel()->set_microbatches(5);
  const RoundWork work = RoundWorkOf(spec);
  EXPECT_EQ(work.rows, 3u) << "7 samples for 3 replicas: 3, 2, 2";
  EXPECT_EQ(work.microbatches, 3u) << "the others are empty";
}

// Over random meshes: every element is pushed by as many ranks as its segment has contributors, nobody pushes for what
// it does not hold, and the messages over a border are the same from both sides.
TEST(MeshCostsTest, RandomMeshes) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const uint32_t layers = 1 + static_cast<uint32_t>(random() % 6);
    Mesh mesh{.pipeline = 1 + static_cast<uint32_t>(random() % layers), .tensor = 1u << (random() % 3)};
    mesh.sequence_parallel = mesh.tensor > 1 && random() % 2 == 0;
    const v1::ModelSpec model = GptSpec(layers, 4, 8, 1 + random() % 9, 5 + random() % 30);
    const ParameterSpace space = SpaceOf(model);
    const RoundWork work{.rows = 1 + random() % 20, .microbatches = 1 + random() % 4};
    const auto costs = CostsOf(model, space, mesh, work);
    ASSERT_EQ(costs.size(), mesh.ranks_of_replica());
    uint64_t pushed = 0, expected = 0, sent = 0;
    for (const RankCosts& rank : costs) {
      ASSERT_LE(rank.pushed, rank.held);
      pushed += rank.pushed;
      sent += rank.sent;
    }
    for (const Segment& segment : SegmentsOf(model, space, mesh)) {
      expected += segment.range.size() * segment.contributors.size();
    }
    ASSERT_EQ(pushed, expected);
    ASSERT_EQ(sent, 2 * (mesh.pipeline - 1) * work.microbatches * mesh.tensor);
  }
}

}  // namespace
}  // namespace sluice
