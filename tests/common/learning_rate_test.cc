#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "common/job_spec.h"

namespace sluice {
namespace {

TEST(LearningRateTest, WithoutScheduleItIsConstant) {
  v1::OptimizerSpec optimizer;
  EXPECT_EQ(LearningRate(optimizer, 0, 10), 0);
  optimizer.mutable_adam()->set_learning_rate(0.25);
  for (uint64_t r : {uint64_t{0}, uint64_t{9}, uint64_t{1} << 40}) EXPECT_EQ(LearningRate(optimizer, r, 10), 0.25);
}

TEST(LearningRateTest, CosineScheduleFollowsItsFormula) {
  v1::OptimizerSpec optimizer;
  optimizer.mutable_sgd()->set_learning_rate(0.8);
  v1::CosineSchedule* cosine = optimizer.mutable_schedule()->mutable_cosine();
  cosine->set_warmup_rounds(3);
  cosine->set_final(0.2);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 0, 13), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 2, 13), 0.6);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 3, 13), 0.8);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 8, 13), 0.5);  // half way
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 13, 13), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 1000, 13), 0.2);
  const double pi = std::acos(-1.0);
  for (uint64_t r = 3; r < 13; ++r) {
    const double t = static_cast<double>(r - 3) / 10;
    EXPECT_NEAR(LearningRate(optimizer, r, 13), 0.2 + 0.5 * 0.6 * (1 + std::cos(pi * t)), 1e-15) << r;
  }
  cosine->set_warmup_rounds(20);  // never done
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 12, 13), 0.8 * 13 / 21);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 20, 13), 0.2);
}

TEST(LearningRateTest, LinearScheduleFollowsItsFormula) {
  v1::OptimizerSpec optimizer;
  optimizer.mutable_adamw()->set_learning_rate(1);
  v1::LinearSchedule* linear = optimizer.mutable_schedule()->mutable_linear();
  linear->set_warmup_rounds(1);
  linear->set_final(0.5);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 0, 11), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 1, 11), 1);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 2, 11), 0.95);
  EXPECT_DOUBLE_EQ(LearningRate(optimizer, 11, 11), 0.5);
}

TEST(LearningRateTest, NeverLeavesItsBounds) {
  for (uint32_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    v1::OptimizerSpec optimizer;
    optimizer.mutable_sgd()->set_learning_rate(0.1);
    const uint64_t rounds = random() % 1000 + 1, warmup = random() % 300;
    if (seed % 2 == 0) {
      optimizer.mutable_schedule()->mutable_cosine()->set_warmup_rounds(warmup);
    } else {
      optimizer.mutable_schedule()->mutable_linear()->set_warmup_rounds(warmup);
    }
    double previous = -1;
    for (uint64_t r = 0; r <= rounds; ++r) {
      const double rate = LearningRate(optimizer, r, rounds);
      ASSERT_TRUE(std::isfinite(rate) && rate >= 0 && rate <= 0.1) << "seed " << seed << " round " << r << ": " << rate;
      if (r > 0 && r < warmup) {
        ASSERT_GT(rate, previous) << "seed " << seed << " round " << r;
      }
      if (r > warmup) {
        ASSERT_LE(rate, previous) << "seed " << seed << " round " << r;
      }
      previous = rate;
    }
  }
}

TEST(OptimizerSpecTest, DisciplineAndSlots) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->set_clip_norm(1);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  EXPECT_TRUE(NeedsVerdict(spec));
  spec.mutable_optimizer()->set_clip_norm(0);
  EXPECT_FALSE(NeedsVerdict(spec));
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_ROUND);
  EXPECT_TRUE(NeedsVerdict(spec));
  v1::OptimizerSpec optimizer;
  optimizer.mutable_sgd()->set_learning_rate(1);
  EXPECT_TRUE(OptimizerSlots(optimizer).empty());
  optimizer.mutable_sgd()->set_momentum(0.9);
  EXPECT_EQ(OptimizerSlots(optimizer), (std::vector<std::string>{"momentum"}));
  optimizer.mutable_adam();
  EXPECT_EQ(OptimizerSlots(optimizer), (std::vector<std::string>{"m", "v"}));
  optimizer.mutable_adamw();
  EXPECT_EQ(OptimizerSlots(optimizer), (std::vector<std::string>{"m", "v"}));
}

}  // namespace
}  // namespace sluice
