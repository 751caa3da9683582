// Dropout in a GPT on one rank: gradients, and what the masks depend on. On several ranks: model_parallel_test.cc.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/common/model_specs.h"
#include "tests/worker/model_fixture.h"

namespace sluice {
namespace {

v1::ModelSpec Spec(double dropout) {
  v1::ModelSpec spec = GptSpec(2, 2, 10, 7, 13);
  spec.mutable_gpt2()->set_dropout(dropout);
  return spec;
}

Batch Samples(uint64_t first_position = 1000) {
  Batch batch = Tokens(7, 7, 13, 30);
  batch.first_position = first_position;
  batch.targets[4] = batch.targets[20] = -1;
  return batch;
}

TEST(ModelDropout, GradientsAreThoseOfFiniteDifferences) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture fixture(Spec(0.3), kind, 1, 0, {.seed = 3});
    fixture.model().UseVersion(2);
    CheckDifferences(fixture, Rows(Samples(), 0, 3), 0.01, /*dropout=*/true);
  }
}

TEST(ModelDropout, MasksFollowFromSeedRoundAndPosition) {
  const auto run = [](uint64_t seed, uint64_t round, uint64_t position) {
    ModelFixture fixture(Spec(0.1), "cpu", 1, 0, {.seed = seed});
    fixture.model().UseVersion(round);
    return fixture.Train({Samples(position)});
  };
  const Trained first = run(1, 4, 1000), again = run(1, 4, 1000);
  EXPECT_TRUE(SameBits(first.gradients, again.gradients));
  EXPECT_EQ(first.loss.loss, again.loss.loss);
  for (const Trained& other : {run(2, 4, 1000), run(1, 5, 1000), run(1, 4, 1001), run(1, 4, 1000 + (1ull << 32))}) {
    EXPECT_GT(std::abs(other.loss.loss - first.loss.loss), 1e-4 * first.loss.loss);
    EXPECT_FALSE(SameBits(first.gradients, other.gradients));
  }
}

TEST(ModelDropout, EverySiteHasItsOwnMasks) {
  // With zeros for everything that a layer adds, what is left of the stream is the embedding's dropout; with one
  // layer's projections alone, theirs. So each site is seen to act, and two equal layers act differently.
  const auto loss_with = [](const std::vector<std::string>& kept, double dropout) {
    ModelFixture fixture(Spec(dropout));
    for (const Tensor& tensor : fixture.model().space().tensors()) {
      bool keep = tensor.name == "wte" || tensor.name == "wpe" || tensor.name.starts_with("ln_f");
      for (const std::string& name : kept) keep = keep || tensor.name == name;
      if (!keep) std::fill_n(fixture.model().parameters() + tensor.offset, tensor.elements, 0.0f);
      if (tensor.name.ends_with("proj.bias") && keep) {
        for (uint64_t i = 0; i < tensor.elements; ++i) {
          fixture.model().parameters()[tensor.offset + i] = Uniform(i, 55);
        }
      }
    }
    return fixture.TrainLoss(Samples());
  };
  const auto differs = [](double a, double b) { return std::abs(a - b) > 1e-4 * a; };
  EXPECT_TRUE(differs(loss_with({}, 0.5), loss_with({}, 0))) << "after the embedding";
  std::vector<double> losses;
  for (const std::string name :
       {"h.0.attn.proj.bias", "h.0.mlp.proj.bias", "h.1.attn.proj.bias", "h.1.mlp.proj.bias"}) {
    losses.push_back(loss_with({name}, 0.5));
    EXPECT_EQ(loss_with({name}, 0), loss_with({"h.0.attn.proj.bias"}, 0)) << "without dropout all are the same";
  }
  for (size_t i = 0; i < losses.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_TRUE(differs(losses[i], losses[j])) << i << " and " << j;
  }
}

// The attention's weights: values that are the same at all positions pass unchanged unless weights are left out.
TEST(ModelDropout, AttentionLeavesOutWeights) {
  const auto gradients = [](double dropout) {
    ModelFixture fixture(Spec(dropout));
    const auto set = [&](const std::string& name, float value) {
      const Tensor& tensor = *fixture.model().space().Find(name);
      std::fill_n(fixture.model().parameters() + tensor.offset, tensor.elements, value);
    };
    set("h.0.attn.v.weight", 0);
    set("h.0.attn.v.bias", 1);
    set("wpe", 0);
    Batch batch = Tokens(1, 7, 13, 31);
    batch.tokens.assign(7, 3);
    const Trained trained = fixture.Train({batch});
    const Tensor& query = *fixture.model().space().Find("h.0.attn.q.bias");
    double norm = 0;
    for (uint64_t i = 0; i < query.elements; ++i) norm += std::abs(trained.gradients[query.offset + i]);
    return norm;
  };
  // Equal values: how much each weighs makes no difference, so queries have no gradient but for dropout.
  EXPECT_LT(gradients(0), 1e-4);
  EXPECT_GT(gradients(0.3), 1e-2);
}

TEST(ModelDropout, EvaluationAndLogitsHaveNone) {
  ModelFixture with(Spec(0.3)), without(Spec(0));
  const Batch batch = Samples();
  const double trained = with.TrainLoss(batch);  // leaves nothing behind
  EXPECT_EQ(with.Loss(batch), without.Loss(batch));
  EXPECT_GT(std::abs(trained - without.Loss(batch)), 1e-3 * trained);
  EXPECT_EQ(without.TrainLoss(batch), without.Loss(batch));
  EXPECT_EQ(with.model().NextLogits({1, 2, 3}).value(), without.model().NextLogits({1, 2, 3}).value());
  EXPECT_EQ(with.TrainLoss(batch), trained);
}

TEST(ModelDropout, MicrobatchesAndReplicasHaveTheMasksOfTheWhole) {
  const Batch whole = Samples();
  ModelFixture fixture(Spec(0.1));
  const Trained one = fixture.Train({whole});
  const Trained four = fixture.Train({Rows(whole, 0, 0), Rows(whole, 0, 3), Rows(whole, 3, 4), Rows(whole, 4, 7)});
  EXPECT_NEAR(one.loss.loss, four.loss.loss, 1e-6 * one.loss.loss);
  EXPECT_LT(RelativeError(four.gradients, one.gradients), 1e-6);

  ModelFixture second(Spec(0.1), "fake_device", 2, 7);
  Trained half = fixture.Train({Rows(whole, 0, 4)});
  const Trained other = second.Train({Rows(whole, 4, 6), Rows(whole, 6, 7)});
  EXPECT_NEAR(half.loss.loss + other.loss.loss, one.loss.loss, 1e-6 * one.loss.loss);
  for (size_t i = 0; i < half.gradients.size(); ++i) half.gradients[i] += other.gradients[i];
  EXPECT_LT(RelativeError(half.gradients, one.gradients), 1e-6);

  Batch elsewhere = Rows(whole, 3, 4);
  elsewhere.first_position += 1;
  const Trained wrong = fixture.Train({Rows(whole, 0, 3), elsewhere, Rows(whole, 4, 7)});
  EXPECT_GT(RelativeError(wrong.gradients, one.gradients), 1e-3);
}

// A row that is shorter than the microbatch's longest has the masks that it has alone.
TEST(ModelDropout, PaddingMovesNoMask) {
  ModelFixture fixture(Spec(0.2));
  const Batch shorter = Tokens(2, 4, 13, 51);
  Batch padded;
  padded.rows = 2;
  padded.length = 7;
  padded.tokens.assign(14, 0);
  padded.targets.assign(14, -1);
  for (int i = 0; i < 8; ++i) {
    padded.tokens[i / 4 * 7 + i % 4] = shorter.tokens[i];
    padded.targets[i / 4 * 7 + i % 4] = shorter.targets[i];
  }
  const Trained plain = fixture.Train({shorter}), more = fixture.Train({padded});
  EXPECT_NEAR(plain.loss.loss, more.loss.loss, 1e-6 * plain.loss.loss);
  EXPECT_LT(RelativeError(more.gradients, plain.gradients), 1e-6);
}

TEST(ModelDropout, TheSameBitsWithRecomputationThreadsAndDevices) {
  const std::vector<Batch> batches = {Rows(Samples(), 0, 4), Rows(Samples(), 4, 7)};
  const Trained expected = ModelFixture(Spec(0.1)).Train(batches);
  ModelFixture recomputed(Spec(0.1), "cpu", 1, 0, {.recompute = true});
  EXPECT_TRUE(SameBits(recomputed.Train(batches).gradients, expected.gradients));
  EXPECT_TRUE(SameBits(recomputed.Train(batches).gradients, expected.gradients));
  for (const uint64_t delays : {0, 1, 2}) {
    ModelFixture device(Spec(0.1), "fake_device", 1, delays);
    EXPECT_TRUE(SameBits(device.Train(batches).gradients, expected.gradients)) << delays;
  }
}

TEST(ModelDropout, WhatIsNoProbabilityIsRefused) {
  const std::unique_ptr<Backend> backend = MakeBackend({}).value();
  for (const double value : {-0.1, 1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    const absl::Status status = MakeModel(Spec(value), backend.get()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << value;
    EXPECT_NE(status.message().find("model.gpt2.dropout"), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace sluice
