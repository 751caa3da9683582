#include "common/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/common/model_specs.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::ModelSpec Mlp(const std::vector<uint64_t>& widths) {
  v1::ModelSpec model;
  model.mutable_mlp()->set_inputs(widths.front());
  for (size_t i = 1; i + 1 < widths.size(); ++i) model.mutable_mlp()->add_hidden(widths[i]);
  model.mutable_mlp()->set_classes(static_cast<uint32_t>(widths.back()));
  return model;
}

ParameterSpace SpaceOf(const v1::ModelSpec& model) {
  auto space = MakeParameterSpace(model);
  EXPECT_TRUE(space.ok()) << space.status();
  return *std::move(space);
}

uint64_t Elements(const std::vector<Range>& ranges) {
  return std::accumulate(ranges.begin(), ranges.end(), uint64_t{0},
                         [](uint64_t sum, const Range& range) { return sum + range.size(); });
}

bool Holds(const std::vector<Range>& view, const Range& range) {
  return std::any_of(view.begin(), view.end(),
                     [&](const Range& held) { return held.begin <= range.begin && range.end <= held.end; });
}

TEST(MeshTest, RanksAreNumberedByReplicaThenStageThenTensorRank) {
  const Mesh mesh{.data = 3, .pipeline = 2, .tensor = 4};
  EXPECT_EQ(mesh.ranks(), 24u);
  uint32_t next = 0;
  for (uint32_t d = 0; d < 3; ++d) {
    for (uint32_t p = 0; p < 2; ++p) {
      for (uint32_t t = 0; t < 4; ++t) {
        EXPECT_EQ(mesh.rank({d, p, t}), next);
        EXPECT_EQ(mesh.place(next++), (Mesh::Place{d, p, t}));
      }
    }
  }
}

TEST(MeshTest, PartsDifferByARowAtMost) {
  EXPECT_EQ(PartOf(50257, 2, 0), (Range{0, 25129}));
  EXPECT_EQ(PartOf(50257, 2, 1), (Range{25129, 50257}));
  for (uint64_t n = 0; n < 40; ++n) {
    for (uint32_t parts = 1; parts < 12; ++parts) {
      uint64_t end = 0;
      for (uint32_t i = 0; i < parts; ++i) {
        const Range part = PartOf(n, parts, i);
        EXPECT_EQ(part.begin, end);
        EXPECT_GE(part.size(), n / parts);
        EXPECT_LE(part.size(), (n + parts - 1) / parts);
        end = part.end;
      }
      EXPECT_EQ(end, n);
    }
  }
}

// ---------------------------------------------------------------- dealing layers
struct Cost {
  uint64_t most = 0, squares = 0;
  auto operator<=>(const Cost&) const = default;
};

Cost CostOf(const std::vector<uint64_t>& costs, uint64_t first, uint64_t last, const std::vector<Range>& dealt) {
  Cost all;
  for (const Range& layers : dealt) {
    uint64_t cost = std::accumulate(costs.begin() + static_cast<long>(layers.begin),
                                    costs.begin() + static_cast<long>(layers.end), uint64_t{0});
    if (layers.begin == 0) cost += first;
    if (layers.end == costs.size()) cost += last;
    all.most = std::max(all.most, cost);
    all.squares += cost * cost;
  }
  return all;
}

// Every way to deal.
void Try(const std::vector<uint64_t>& costs, uint64_t first, uint64_t last, uint32_t stages, std::vector<Range>* dealt,
         Cost* best) {
  const uint64_t begin = dealt->empty() ? 0 : dealt->back().end;
  if (dealt->size() + 1 == stages) {
    if (begin == costs.size()) return;
    dealt->push_back({begin, costs.size()});
    *best = std::min(*best, CostOf(costs, first, last, *dealt));
    dealt->pop_back();
    return;
  }
  for (uint64_t end = begin + 1; end < costs.size(); ++end) {
    dealt->push_back({begin, end});
    Try(costs, first, last, stages, dealt, best);
    dealt->pop_back();
  }
}

TEST(MeshTest, TheCostliestStageIsAsCheapAsCanBeAndTheOthersEven) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::vector<uint64_t> costs(1 + random() % 9);
    for (uint64_t& cost : costs) cost = random() % 2 == 0 ? 10 : random() % 30;
    const uint64_t first = random() % 20, last = random() % 60;
    const uint32_t stages = 1 + static_cast<uint32_t>(random() % costs.size());
    const std::vector<Range> dealt = DealLayers(costs, first, last, stages);
    ASSERT_EQ(dealt.size(), stages);
    uint64_t end = 0;
    for (const Range& layers : dealt) {
      ASSERT_EQ(layers.begin, end);
      ASSERT_GT(layers.size(), 0u);
      end = layers.end;
    }
    ASSERT_EQ(end, costs.size());
    Cost best{UINT64_MAX, UINT64_MAX};
    std::vector<Range> tried;
    Try(costs, first, last, stages, &tried, &best);
    const Cost found = CostOf(costs, first, last, dealt);
    ASSERT_EQ(found.most, best.most) << "stages " << stages;
    ASSERT_EQ(found.squares, best.squares) << "stages " << stages;
  }
}

TEST(MeshTest, OfEqualDealingsTheFirstStagesHaveFewerLayers) {
  EXPECT_THAT(DealLayers(std::vector<uint64_t>(10, 1), 0, 0, 4),
              ElementsAre(Range{0, 2}, Range{2, 4}, Range{4, 7}, Range{7, 10}));
}

TEST(MeshTest, TheHeadWeighs) {
  // A head of the weight of 5.3 layers.
  EXPECT_THAT(StageLayers(GptSpec(12, 12, 768, 1024, 50257), 2), ElementsAre(Range{0, 8}, Range{8, 12}));
  EXPECT_THAT(StageLayers(GptSpec(4, 8, 256, 128, 256), 2), ElementsAre(Range{0, 2}, Range{2, 4}));
  EXPECT_THAT(StageLayers(Mlp({784, 1000, 10, 10}), 2), ElementsAre(Range{0, 1}, Range{1, 3}));
  // The largest sizes that a spec can name.
  EXPECT_EQ(StageLayers(GptSpec(1024, 1, 65536, 1 << 20, 1 << 24), 64).size(), 64u);
}

// ---------------------------------------------------------------- what is not allowed
std::string Refusal(const v1::ModelSpec& model, const Mesh& mesh) {
  return std::string(CheckMesh(model, mesh).message());
}

TEST(MeshTest, WhatCannotBeCutIsRefusedWithTheNearestValue) {
  const v1::ModelSpec gpt = GptSpec(4, 12, 768, 128, 50257);
  EXPECT_TRUE(CheckMesh(gpt, {.data = 3, .pipeline = 4, .tensor = 6, .sequence_parallel = true}).ok());
  EXPECT_EQ(Refusal(gpt, {.tensor = 5}),
            "parallel.tensor: found 5; it must divide the model's 12 attention heads (model.gpt2.heads); the nearest "
            "value allowed is 4");
  EXPECT_THAT(Refusal(gpt, {.tensor = 24}), HasSubstr("the nearest value allowed is 12"));
  EXPECT_EQ(Refusal(gpt, {.pipeline = 5}),
            "parallel.pipeline: found 5; each stage needs at least one of the model's 4 layers; the nearest value "
            "allowed is 4");
  EXPECT_THAT(Refusal(gpt, {.sequence_parallel = true}),
              HasSubstr("the nearest value allowed is false, or true with parallel.tensor 2"));
  EXPECT_THAT(Refusal(Mlp({4, 8, 3}), {.tensor = 2}), HasSubstr("only gpt2 models"));
  EXPECT_TRUE(CheckMesh(Mlp({4, 8, 3}), {.data = 2, .pipeline = 2}).ok());
  EXPECT_THAT(Refusal(Mlp({4, 8, 3}), {.pipeline = 3}), HasSubstr("the nearest value allowed is 2"));
  EXPECT_THAT(Refusal(Mlp({4, 3}), {.pipeline = 2}), HasSubstr("found 2; the model has one layer"));
  EXPECT_THAT(Refusal(GptSpec(1, 8, 8, 4, 3), {.tensor = 4}),
              HasSubstr("and be at most model.gpt2.vocabulary, 3; the nearest value allowed is 2"));
  EXPECT_THAT(Refusal(gpt, {.pipeline = 9, .tensor = 7}), testing::ContainsRegex("found 9.*\n.*found 7"));
}

TEST(MeshTest, DegreesThatAreLeftOutAreOne) {
  v1::ParallelSpec parallel;
  EXPECT_EQ(MeshText(MeshOf(parallel)), "parallel.data 1 x pipeline 1 x tensor 1");
  parallel.set_data(2);
  parallel.set_pipeline(3);
  parallel.set_tensor(4);
  parallel.set_sequence_parallel(true);
  const Mesh mesh = MeshOf(parallel);
  EXPECT_EQ(mesh.ranks(), 24u);
  EXPECT_TRUE(mesh.sequence_parallel);
  EXPECT_EQ(MeshText(mesh), "parallel.data 2 x pipeline 3 x tensor 4");
}

// ---------------------------------------------------------------- views and segments
TEST(MeshTest, OneRankHoldsAndPushesAll) {
  const v1::ModelSpec model = GptSpec(2, 2, 8, 4, 11);
  const ParameterSpace space = SpaceOf(model);
  EXPECT_THAT(SegmentsOf(model, space, {.data = 5}), ElementsAre(Segment{{0, space.size()}, {0}}));
  EXPECT_THAT(ViewOf(model, space, {.data = 5}, 0, 0), ElementsAre(Range{0, space.size()}));
}

TEST(MeshTest, ExampleOfTwoStagesOfTwoTensorRanks) {
  const v1::ModelSpec model = GptSpec(2, 2, 4, 3, 5);
  const ParameterSpace space = SpaceOf(model);
  const Mesh mesh{.pipeline = 2, .tensor = 2};
  const std::vector<Segment> segments = SegmentsOf(model, space, mesh);
  const uint64_t wte = space.Find("wte")->offset, layer = space.Find("h.0.ln_1.weight")->offset,
                 q = space.Find("h.0.attn.q.weight")->offset;
  ASSERT_GE(segments.size(), 5u);
  EXPECT_EQ(segments[0], (Segment{{0, wte}, {0}})) << "positions: the first stage";
  EXPECT_EQ(segments[1], (Segment{{wte, wte + 3 * 4}, {0, 2}})) << "3 of 5 rows of the embedding, which is the head";
  EXPECT_EQ(segments[2], (Segment{{wte + 3 * 4, layer}, {1, 3}}));
  EXPECT_EQ(segments[3], (Segment{{layer, q}, {0}})) << "what is not cut: both hold it, the first one pushes";
  EXPECT_EQ(segments[4], (Segment{{q, q + 2 * 4}, {0}})) << "the first half of q";
  EXPECT_EQ(segments[5], (Segment{{q + 2 * 4, q + 4 * 4}, {1}}));
  EXPECT_EQ(segments.back(), (Segment{{space.Find("ln_f.weight")->offset, space.size()}, {2}}));
  const auto partial = SegmentsOf(model, space, {.pipeline = 2, .tensor = 2, .sequence_parallel = true});
  EXPECT_EQ(partial[0], (Segment{{0, wte}, {0, 1}}));
  EXPECT_EQ(partial.back().contributors, (std::vector<uint32_t>{2, 3}));
}

// Segments tile the space; who pushes for one holds it; who holds it pushes, or another rank of its stage does with the
// same gradient; every element is held by as many ranks as the cut says.
TEST(MeshTest, RandomMeshes) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    Mesh mesh;
    v1::ModelSpec model;
    if (random() % 4 == 0) {
      std::vector<uint64_t> widths(2 + random() % 6);
      for (uint64_t& width : widths) width = 2 + random() % 20;
      model = Mlp(widths);
      mesh.pipeline = 1 + static_cast<uint32_t>(random() % (widths.size() - 1));
    } else {
      const uint32_t layers = 1 + static_cast<uint32_t>(random() % 5);
      mesh.tensor = 1 + static_cast<uint32_t>(random() % 4);
      mesh.pipeline = 1 + static_cast<uint32_t>(random() % layers);
      mesh.sequence_parallel = mesh.tensor > 1 && random() % 2 == 0;
      const uint32_t heads = mesh.tensor * (1 + static_cast<uint32_t>(random() % 3));
      model = GptSpec(layers, heads, heads * (1 + static_cast<uint32_t>(random() % 4)), 1 + random() % 9,
                      mesh.tensor + static_cast<uint32_t>(random() % 30));
    }
    ASSERT_TRUE(CheckMesh(model, mesh).ok()) << CheckMesh(model, mesh);
    const ParameterSpace space = SpaceOf(model);
    std::vector<std::vector<Range>> views;
    for (uint32_t r = 0; r < mesh.ranks_of_replica(); ++r) {
      views.push_back(ViewOf(model, space, mesh, mesh.place(r).stage, mesh.place(r).tensor));
      for (size_t k = 1; k < views[r].size(); ++k) ASSERT_LT(views[r][k - 1].end, views[r][k].begin);
    }
    uint64_t end = 0;
    const std::vector<Segment> segments = SegmentsOf(model, space, mesh);
    std::pair<std::vector<uint32_t>, std::vector<uint32_t>> before;  // contributors, holders
    for (const Segment& segment : segments) {
      ASSERT_EQ(segment.range.begin, end);
      ASSERT_GT(segment.range.size(), 0u);
      end = segment.range.end;
      ASSERT_TRUE(std::is_sorted(segment.contributors.begin(), segment.contributors.end()));
      std::set<uint32_t> stages;
      std::vector<uint32_t> holders;
      for (const uint32_t r : segment.contributors) {
        ASSERT_TRUE(Holds(views[r], segment.range));
        stages.insert(mesh.place(r).stage);
      }
      for (uint32_t r = 0; r < mesh.ranks_of_replica(); ++r) {
        if (!Holds(views[r], segment.range)) {
          for (const Range& held : views[r]) {
            ASSERT_TRUE(held.end <= segment.range.begin || segment.range.end <= held.begin) << "holds a part of it";
          }
          continue;
        }
        ASSERT_TRUE(stages.contains(mesh.place(r).stage));
        holders.push_back(r);
      }
      std::pair<std::vector<uint32_t>, std::vector<uint32_t>> present(segment.contributors, holders);
      ASSERT_NE(before, present) << "not maximal";
      before = std::move(present);
      ASSERT_LE(stages.size(), 2u);
    }
    ASSERT_EQ(end, space.size());
    // Element counts by tensor.
    uint64_t held = 0;
    for (const Tensor& tensor : space.tensors()) {
      const uint64_t copies = (tensor.cut ? 1 : mesh.tensor) * (tensor.name == "wte" && mesh.pipeline > 1 ? 2 : 1);
      held += copies * tensor.elements;
    }
    uint64_t all = 0;
    for (const auto& view : views) all += Elements(view);
    const std::vector<uint64_t> elements = ViewElements(model, space, mesh);
    ASSERT_EQ(elements.size(), views.size());
    for (size_t r = 0; r < views.size(); ++r) ASSERT_EQ(elements[r], Elements(views[r]));
    ASSERT_EQ(all, held);
  }
}

// A worker of two holds little more than half.
// What a worker holds of a model, at most, by the share of its parameters.
double LargestShare(const v1::ModelSpec& model, const Mesh& mesh, double whole) {
  const ParameterSpace space = SpaceOf(model);
  uint64_t most = 0;
  for (uint32_t r = 0; r < mesh.ranks_of_replica(); ++r) {
    most = std::max(most, Elements(ViewOf(model, space, mesh, mesh.place(r).stage, mesh.place(r).tensor)));
  }
  return static_cast<double>(most) / whole;
}

TEST(MeshTest, HalfTheModelHalfTheMemory) {
  for (const auto& [name, model] : {std::pair{"small GPT", GptSpec(4, 8, 256, 128, 256)},
                                    std::pair{"GPT-2 124M", GptSpec(12, 12, 768, 1024, 50257)}}) {
    const double p = static_cast<double>(SpaceOf(model).size());
    const double share = LargestShare(model, {.tensor = 2}, p);
    EXPECT_LE(share, 0.52);
    std::printf("ROW %s, T=2: a worker holds, of P | <= 0.52 | %.4f | %s\n", name, share,
                share <= 0.52 ? "ok" : "SHORT");
  }
  const v1::ModelSpec model = GptSpec(4, 8, 256, 128, 256);
  const ParameterSpace space = SpaceOf(model);
  const double with_tied = static_cast<double>(space.size() + space.Find("wte")->elements);
  const double share = LargestShare(model, {.pipeline = 2}, with_tied);
  EXPECT_LE(share, 0.52);
  std::printf("ROW small GPT, P=2: a worker holds, of P + tied | <= 0.52 | %.4f | %s\n", share,
              share <= 0.52 ? "ok" : "SHORT");
}

}  // namespace
}  // namespace sluice
