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
#include "tests/worker/mailroom.h"
#include "tests/worker/model_fixture.h"

namespace sluice {
namespace {

// A replica: one model a rank, each with a backend of its own and NaN wherever it holds nothing.
class Replica {
 public:
  Replica(const v1::ModelSpec& spec, const Mesh& mesh, const float* parameters,
          PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward, const std::string& device = "cpu",
          bool recompute = false)
      : mesh_(mesh) {
    for (uint32_t i = 0; i < mesh.pipeline; ++i) tensor_rooms_.push_back(std::make_unique<Mailroom>(mesh.tensor, 2));
    for (uint32_t i = 0; i < mesh.tensor; ++i) stage_rooms_.push_back(std::make_unique<Mailroom>(mesh.pipeline, 64));
    for (uint32_t r = 0; r < mesh.ranks_of_replica(); ++r) {
      auto rank = std::make_unique<Rank>();
      const Mesh::Place place = mesh.place(r);
      BackendOptions options;
      options.kind = device;
      options.delay_seed = device == "cpu" ? 0 : 1 + r;
      rank->backend = MakeBackend(options).value();
      rank->tensor = std::make_unique<Mailroom::Rank>(tensor_rooms_[place.stage].get(), place.tensor);
      rank->stages = std::make_unique<Mailroom::Rank>(stage_rooms_[place.tensor].get(), place.stage);
      ModelPart part{.mesh = mesh, .place = place, .schedule = schedule, .recompute = recompute};
      if (mesh.tensor > 1) part.tensor = rank->tensor.get();
      if (mesh.pipeline > 1) part.stages = rank->stages.get();
      auto model = MakeModel(spec, rank->backend.get(), part);
      EXPECT_TRUE(model.ok()) << model.status();
      rank->model = *std::move(model);
      Model& m = *rank->model;
      rank->view = ViewOf(spec, m.space(), mesh, place.stage, place.tensor);
      std::fill(m.parameters(), m.parameters() + m.space().size(), std::numeric_limits<float>::quiet_NaN());
      for (const Range& range : rank->view) {
        std::copy(parameters + range.begin, parameters + range.end, m.parameters() + range.begin);
      }
      m.ParametersChanged({0, m.space().size()});
      ranks_.push_back(std::move(rank));
    }
    segments_ = SegmentsOf(spec, ranks_[0]->model->space(), mesh);
  }

  // As servers would add it up: for each segment what its contributors have.
  Trained Train(const std::vector<Batch>& microbatches) {
    std::vector<LossSum> sums(ranks_.size());
    OnAll([&](uint32_t r) {
      Rank& rank = *ranks_[r];
      rank.ready.clear();
      const auto sum = rank.model->ForwardBackward(
          microbatches, [&](Range range) { return Held(rank, range); },
          [&](Range range) {
            EXPECT_TRUE(Held(rank, range).ok());
            rank.ready.push_back(range);
          },
          nullptr);
      EXPECT_TRUE(sum.ok()) << "rank " << r << ": " << sum.status();
      if (sum.ok()) sums[r] = *sum;
    });
    for (const auto& rank : ranks_) {
      uint64_t held = 0, ready = 0;
      for (const Range& range : rank->view) held += range.size();
      for (const Range& range : rank->ready) ready += range.size();
      EXPECT_EQ(ready, held) << "all that a rank holds becomes ready, once";
    }
    Trained result;
    result.loss = Sums(sums);
    result.gradients.resize(ranks_[0]->model->space().size());
    for (const Segment& segment : segments_) {
      for (const uint32_t r : segment.contributors) {
        for (uint64_t i = segment.range.begin; i < segment.range.end; ++i) {
          result.gradients[i] += ranks_[r]->model->gradients()[i];
        }
      }
    }
    return result;
  }

  LossSum Evaluate(const Batch& batch) {
    std::vector<LossSum> sums(ranks_.size());
    OnAll([&](uint32_t r) {
      const auto sum = ranks_[r]->model->Evaluate(batch, nullptr);
      EXPECT_TRUE(sum.ok()) << sum.status();
      if (sum.ok()) sums[r] = *sum;
    });
    return Sums(sums);
  }

  const Mailroom& tensor_room(uint32_t stage) const { return *tensor_rooms_[stage]; }
  const Mailroom& stage_room(uint32_t tensor) const { return *stage_rooms_[tensor]; }

 private:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<PeerGroup> tensor, stages;
    std::unique_ptr<Model> model;
    std::vector<Range> view, ready;
  };

  static absl::Status Held(const Rank& rank, Range range) {
    for (const Range& held : rank.view) {
      if (held.begin <= range.begin && range.end <= held.end) return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat("[", range.begin, ", ", range.end, ") is not this rank's"));
  }

  void OnAll(const std::function<void(uint32_t)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks_.size(); ++r) threads.emplace_back([&body, r] { body(r); });
    for (std::thread& thread : threads) thread.join();
  }

  // The last stage's, the same on all of its tensor ranks; the others' are zero.
  LossSum Sums(const std::vector<LossSum>& sums) const {
    const LossSum& last = sums.back();
    for (uint32_t r = 0; r < sums.size(); ++r) {
      const bool has = mesh_.place(r).stage + 1 == mesh_.pipeline;
      EXPECT_EQ(sums[r].loss, has ? last.loss : 0) << "rank " << r;
      EXPECT_EQ(sums[r].count, has ? last.count : 0) << "rank " << r;
      EXPECT_EQ(sums[r].correct, has ? last.correct : 0) << "rank " << r;
    }
    return last;
  }

  const Mesh mesh_;
  std::vector<std::unique_ptr<Mailroom>> tensor_rooms_, stage_rooms_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Segment> segments_;
};

struct Case {
  Mesh mesh;
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
};

std::vector<Batch> Microbatches(int64_t context, int32_t vocabulary) {
  std::vector<Batch> batches = {Tokens(3, context, vocabulary, 10), Tokens(2, context, vocabulary, 20),
                                Tokens(0, context, vocabulary, 30), Tokens(1, context - 2, vocabulary, 40),
                                Tokens(2, context, vocabulary, 50)};
  for (size_t i = 0; i < batches[1].targets.size(); i += 3) batches[1].targets[i] = -1;
  return batches;
}

// Relative to each tensor's own size.
void ExpectSameGradient(const ParameterSpace& space, const std::vector<float>& found,
                        const std::vector<float>& expected) {
  for (const Tensor& tensor : space.tensors()) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + static_cast<long>(tensor.offset),
                                all.begin() + static_cast<long>(tensor.offset + tensor.elements));
    };
    // A key's bias cannot change a softmax: its gradient is rounding errors around zero.
    if (tensor.name.ends_with("attn.k.bias")) {
      for (uint64_t i = tensor.offset; i < tensor.offset + tensor.elements; ++i) {
        EXPECT_NEAR(found[i], expected[i], 1e-4) << tensor.name;
      }
      continue;
    }
    EXPECT_LT(RelativeError(part(found), part(expected)), 5e-6) << tensor.name;
  }
}

class ModelParallelTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Meshes, ModelParallelTest,
                         ::testing::Values(Case{}, Case{{.tensor = 2}}, Case{{.tensor = 4}}, Case{{.pipeline = 2}},
                                           Case{{.pipeline = 4}}, Case{{.pipeline = 2, .tensor = 2}},
                                           Case{{.pipeline = 3, .tensor = 4}},
                                           Case{{.pipeline = 3}, PipelineSchedule::kGPipe},
                                           Case{{.pipeline = 2, .tensor = 2}, PipelineSchedule::kSequential}),
                         [](const auto& info) {
                           return absl::StrCat("P", info.param.mesh.pipeline, "T", info.param.mesh.tensor, "schedule",
                                               static_cast<int>(info.param.schedule));
                         });

TEST_P(ModelParallelTest, TheSameLossAndGradientAsOnOneRank) {
  const v1::ModelSpec spec = GptSpec(4, 4, 16, 8, 27);  // 27 rows on 2 or 4 ranks: uneven
  ModelFixture one(spec);
  const std::vector<Batch> batches = Microbatches(8, 27);
  const Trained expected = one.Train(batches);
  Replica replica(spec, GetParam().mesh, one.model().parameters(), GetParam().schedule);
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
  Replica replica(spec, GetParam().mesh, one.model().parameters(), GetParam().schedule);
  const Trained first = replica.Train(batches), again = replica.Train(batches);
  EXPECT_TRUE(SameBits(first.gradients, again.gradients));
  EXPECT_EQ(first.loss.loss, again.loss.loss);
  Replica device(spec, GetParam().mesh, one.model().parameters(), GetParam().schedule, "fake_device");
  EXPECT_TRUE(SameBits(first.gradients, device.Train(batches).gradients));
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
      Replica replica(spec, {.pipeline = stages}, one.model().parameters(), schedule);
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
  Replica kept(spec, GetParam().mesh, one.model().parameters(), GetParam().schedule);
  Replica again(spec, GetParam().mesh, one.model().parameters(), GetParam().schedule, "cpu", /*recompute=*/true);
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
    trained.push_back(Replica(spec, mesh, one.model().parameters(), schedule).Train(batches));
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
  Replica replica(spec, {.pipeline = 3}, one.model().parameters());
  replica.Train(batches);
  EXPECT_EQ(replica.stage_room(0).messages(), batches.size() * 2 * 2);
  EXPECT_EQ(replica.stage_room(0).most_floats(), batches.size() * 2 * n * width) << "the middle one";
}

TEST(ModelParallelRefusalTest, WhatCannotBeCut) {
  const auto backend = MakeBackend({}).value();
  const auto model = MakeModel(GptSpec(2, 4, 16, 8, 27), backend.get(), {.mesh = {.tensor = 3}});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
