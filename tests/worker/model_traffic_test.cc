// What ranks say to each other, counted, against the arithmetic of common/mesh_costs.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/mesh_costs.h"
#include "tests/common/model_specs.h"
#include "tests/worker/replica.h"

namespace sluice {
namespace {

struct Traffic {
  Mesh mesh;
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  bool recompute = false;
};

class ModelTrafficTest : public ::testing::TestWithParam<Traffic> {};

v1::ParallelSpec::Schedule InSpec(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::kGPipe:
      return v1::ParallelSpec::GPIPE;
    case PipelineSchedule::kSequential:
      return v1::ParallelSpec::SEQUENTIAL;
    case PipelineSchedule::kOneForwardOneBackward:
      break;
  }
  return v1::ParallelSpec::ONE_F_ONE_B;
}

TEST_P(ModelTrafficTest, AsManyMessagesAndBytesAsComputed) {
  const Mesh mesh = GetParam().mesh;
  const uint64_t width = 16, context = 8;
  const v1::ModelSpec spec = GptSpec(6, 4, width, context, 27);
  ModelFixture one(spec);
  Replica replica(spec, mesh, one.model().parameters(),
                  {.schedule = GetParam().schedule, .recompute = GetParam().recompute});
  // 5 rows in 3 parts, as MicrobatchSlots cuts them.
  replica.Train({Tokens(2, context, 27, 10), Tokens(2, context, 27, 20), Tokens(1, context, 27, 30)});
  const RoundWork work{
      .rows = 5, .microbatches = 3, .schedule = InSpec(GetParam().schedule), .recompute = GetParam().recompute};
  const std::vector<RankCosts> costs = CostsOf(spec, one.model().space(), mesh, work);
  const uint64_t t = mesh.tensor;
  for (uint32_t stage = 0; stage < mesh.pipeline; ++stage) {
    // Arrays as small as these go directly from everybody to everybody, whole in an all-reduce, else a rank's part.
    const RankCosts& rank = costs[stage * t];
    EXPECT_EQ(replica.tensor_room(stage).messages(), rank.tensor_operations() * t * (t - 1)) << "stage " << stage;
    const uint64_t reduced = rank.sums / work.microbatches * work.rows * context * width;  // floats of all arrays
    EXPECT_EQ(replica.tensor_room(stage).most_floats(),
              (rank.tensor_bytes / 4 - 2 * reduced) * (t - 1) / t + reduced * (t - 1))
        << "stage " << stage;
  }
  for (uint32_t tensor = 0; tensor < mesh.tensor; ++tensor) {
    uint64_t messages = 0, most = 0;
    for (uint32_t stage = 0; stage < mesh.pipeline; ++stage) {
      messages += costs[stage * t + tensor].sent;
      most = std::max(most, costs[stage * t + tensor].sent_bytes / 4);
    }
    EXPECT_EQ(replica.stage_room(tensor).messages(), messages) << "tensor rank " << tensor;
    EXPECT_EQ(replica.stage_room(tensor).most_floats(), most) << "tensor rank " << tensor;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, ModelTrafficTest,
    ::testing::Values(Traffic{{.tensor = 2}}, Traffic{{.tensor = 4}}, Traffic{{.tensor = 2, .sequence_parallel = true}},
                      Traffic{{.pipeline = 3}}, Traffic{{.pipeline = 2, .tensor = 2}},
                      Traffic{{.pipeline = 2, .tensor = 4, .sequence_parallel = true}},
                      Traffic{{.tensor = 2}, PipelineSchedule::kOneForwardOneBackward, true},
                      Traffic{{.tensor = 2}, PipelineSchedule::kGPipe, true},
                      Traffic{{.pipeline = 3, .tensor = 2}, PipelineSchedule::kOneForwardOneBackward, true},
                      Traffic{{.pipeline = 3, .tensor = 2}, PipelineSchedule::kGPipe, true},
                      Traffic{{.pipeline = 3, .tensor = 2}, PipelineSchedule::kSequential, true},
                      Traffic{{.pipeline = 2, .tensor = 2, .sequence_parallel = true},
                              PipelineSchedule::kOneForwardOneBackward,
                              true}),
    [](const auto& info) {
      const Mesh& mesh = info.param.mesh;
      return absl::StrCat("P", mesh.pipeline, "T", mesh.tensor, mesh.sequence_parallel ? "Own" : "", "Schedule",
                          static_cast<int>(info.param.schedule), info.param.recompute ? "Again" : "");
    });

}  // namespace
}  // namespace sluice
