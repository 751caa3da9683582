#include "server/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "common/optimizer.h"
#include "tests/server/server_test_plan.h"

namespace sluice {
namespace {

v1::RoundReport Report(uint32_t contributor, double loss, double count) {
  v1::RoundReport r;
  r.set_contributor(contributor);
  r.set_loss_sum(loss);
  r.set_count(count);
  r.set_correct(count / 2);
  return r;
}

// What a server measures of one chunk whose sum is `gradient` (of the whole space).
void Measure(const Layout& layout, uint64_t chunk, const std::vector<float>& gradient, v1::NormReport* report) {
  const Range range = layout.table().range(chunk);
  const uint64_t block = layout.plan().norm_block();
  for (uint64_t b = range.begin / block; b * block < range.end; ++b) {
    const uint64_t begin = std::max(range.begin, b * block), end = std::min(range.end, (b + 1) * block);
    const uint64_t whole = std::min<uint64_t>((b + 1) * block, gradient.size()) - b * block;
    if (end - begin == whole) {
      report->add_block(b);
      report->add_sum(SumOfSquares(gradient.data() + begin, end - begin));
    } else {
      v1::NormFragment* f = report->add_fragments();
      f->set_offset(begin);
      for (uint64_t i = begin; i < end; ++i) f->add_values(gradient[i]);
    }
  }
}

RoundTally Tally(std::shared_ptr<const Layout> layout, const std::vector<float>& gradient, double count) {
  RoundTally tally(layout, 3);
  for (uint32_t s = 0; s < layout->plan().shards() && s < layout->table().chunks(); ++s) {
    v1::NormReport norm;
    norm.set_shard(s);
    norm.set_finite(true);
    norm.set_count(count);
    for (const uint64_t c : layout->table().chunks_of(s)) {
      Measure(*layout, c, gradient, &norm);
    }
    EXPECT_TRUE(tally.AddNorm(norm).ok());
  }
  for (uint32_t c = 0; c < layout->ranks(); ++c) {
    EXPECT_TRUE(tally.AddReport(Report(c, 1.5, count / layout->ranks())).ok());
  }
  EXPECT_TRUE(tally.norms_complete());
  EXPECT_TRUE(tally.reports_complete());
  return tally;
}

TEST(Verdict, NormHasTheSameBitsForEveryChunkSizeAndNumberOfShards) {
  std::mt19937 rng(5);
  ServerTestPlan plan;
  plan.hidden = 37;
  plan.norm_block = 64;
  std::vector<float> gradient;
  std::optional<v1::Verdict> first;
  for (const uint64_t chunk : {1, 7, 16, 63, 64, 65, 128, 200, 1000}) {
    for (const uint32_t shards : {1u, 2u, 3u, 5u}) {
      plan.chunk_elements = chunk;
      plan.shards = shards;
      auto layout = plan.Make();
      if (gradient.empty()) {
        for (uint64_t i = 0; i < layout->space().size(); ++i) gradient.push_back(static_cast<float>(rng()) / 1e9f - 2);
      }
      absl::StatusOr<v1::Verdict> verdict = Tally(layout, gradient, 12).Decide();
      ASSERT_TRUE(verdict.ok()) << verdict.status();
      if (!first) first = *verdict;
      EXPECT_EQ(verdict->SerializeAsString(), first->SerializeAsString()) << chunk << " elements, " << shards;
    }
  }
  double want = 0;
  for (float g : gradient) want += static_cast<double>(g) * g;
  EXPECT_NEAR(first->gradient_norm(), std::sqrt(want) / 12, 1e-9);
  EXPECT_EQ(first->gradient_scale(), static_cast<float>(1.0 / 12));
}

TEST(Verdict, ClippingTakesTheMeanGradientsNorm) {
  ServerTestPlan plan;
  plan.clip_norm = 1;
  const auto layout = plan.Make();
  std::vector<float> gradient(layout->space().size(), 0);
  gradient[0] = 30;
  gradient[5] = 40;  // norm of the sum 50, of the mean of 10 samples 5
  absl::StatusOr<v1::Verdict> verdict = Tally(layout, gradient, 10).Decide();
  ASSERT_TRUE(verdict.ok());
  EXPECT_DOUBLE_EQ(verdict->gradient_norm(), 5);
  EXPECT_EQ(verdict->gradient_scale(), static_cast<float>(0.2 / 10));
  verdict = Tally(layout, gradient, 100).Decide();  // norm 0.5: not clipped
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->gradient_scale(), static_cast<float>(1.0 / 100));
}

TEST(Verdict, SkipsWhatIsNotFiniteAndNamesTheContributors) {
  const auto layout = ServerTestPlan{}.Make();
  RoundTally tally(layout, 0);
  for (uint32_t s = 0; s < 3; ++s) {
    v1::NormReport norm;
    norm.set_shard(s);
    norm.set_count(4);
    norm.set_finite(s == 0);
    if (s > 0) norm.add_nonfinite_contributors(1);
    ASSERT_TRUE(tally.AddNorm(norm).ok());
  }
  absl::StatusOr<v1::Verdict> verdict = tally.Decide();
  ASSERT_TRUE(verdict.ok());
  EXPECT_TRUE(verdict->skip());
  EXPECT_THAT(tally.nonfinite_contributors(), ::testing::ElementsAre(1));
}

TEST(Verdict, ARoundWithoutSamplesIsSkipped) {
  const auto layout = ServerTestPlan{}.Make();
  absl::StatusOr<v1::Verdict> verdict = Tally(layout, std::vector<float>(8, 0), 0).Decide();
  ASSERT_TRUE(verdict.ok());
  EXPECT_TRUE(verdict->skip());
}

TEST(Verdict, ShardsThatDisagreeOrAMissingBlockAreErrors) {
  const auto layout = ServerTestPlan{}.Make();
  RoundTally disagree(layout, 0), missing(layout, 0);
  for (uint32_t s = 0; s < 3; ++s) {
    v1::NormReport norm;
    norm.set_shard(s);
    norm.set_finite(true);
    norm.set_count(4 + s % 2);
    ASSERT_TRUE(disagree.AddNorm(norm).ok());
    norm.set_count(4);
    ASSERT_TRUE(missing.AddNorm(norm).ok());
  }
  EXPECT_EQ(disagree.Decide().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(missing.Decide().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Verdict, ReportsOutsideThePlanAreRefusedAndRepeatedOnesDropped) {
  const auto layout = ServerTestPlan{}.Make();
  RoundTally tally(layout, 0);
  v1::NormReport norm;
  norm.set_shard(3);
  EXPECT_EQ(tally.AddNorm(norm).code(), absl::StatusCode::kInvalidArgument);
  norm.set_shard(0);
  norm.add_block(2);
  norm.add_sum(1);
  EXPECT_EQ(tally.AddNorm(norm).code(), absl::StatusCode::kInvalidArgument);
  norm.clear_block();
  EXPECT_EQ(tally.AddNorm(norm).code(), absl::StatusCode::kInvalidArgument);
  norm.clear_sum();
  norm.add_fragments()->set_offset(UINT64_MAX);
  EXPECT_EQ(tally.AddNorm(norm).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tally.AddReport(Report(2, 1, 1)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(tally.AddReport(Report(0, 1, 1)).ok());
  EXPECT_TRUE(tally.AddReport(Report(0, 5, 5)).ok());
  EXPECT_EQ(tally.loss_sum(), 1);
  EXPECT_THAT(tally.Missing(), ::testing::HasSubstr("report of contributor 1"));
}

TEST(Verdict, ShardsWithoutChunksAreNotWaitedFor) {
  ServerTestPlan plan;
  plan.chunk_elements = 8;  // one chunk, three shards
  const auto layout = plan.Make();
  RoundTally tally(layout, 0);
  v1::NormReport norm;
  norm.set_finite(true);
  ASSERT_TRUE(tally.AddNorm(norm).ok());
  EXPECT_TRUE(tally.norms_complete());
}

}  // namespace
}  // namespace sluice
