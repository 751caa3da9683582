// Models against finite differences and against themselves: microbatches, backends, repetition, replaced parameters.
// References of another program: model_golden_test.cc.
#include "worker/model/model.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model_fixture.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

v1::ModelSpec TinyGpt() {
  v1::ModelSpec spec;
  v1::Gpt2Spec* gpt = spec.mutable_gpt2();
  gpt->set_layers(2);
  gpt->set_heads(2);
  gpt->set_width(10);
  gpt->set_context(7);
  gpt->set_vocabulary(13);
  return spec;
}

v1::ModelSpec TinyMlp() {
  v1::ModelSpec spec;
  spec.mutable_mlp()->set_inputs(5);
  spec.mutable_mlp()->add_hidden(9);
  spec.mutable_mlp()->add_hidden(6);
  spec.mutable_mlp()->set_classes(4);
  return spec;
}

v1::ModelSpec TinySoftmax() {
  v1::ModelSpec spec;
  spec.mutable_softmax()->set_inputs(5);
  spec.mutable_softmax()->set_classes(4);
  return spec;
}

v1::ModelSpec TinyLogistic() {
  v1::ModelSpec spec;
  spec.mutable_logistic()->set_inputs(5);
  return spec;
}

TEST(Model, GptGradientsAreThoseOfFiniteDifferences) {
  ModelFixture fixture(TinyGpt());
  Batch batch = Tokens(3, 7, 13, 30);
  batch.targets[4] = batch.targets[20] = -1;
  CheckDifferences(fixture, batch, 0.01);
}

TEST(Model, GptGradientsOnADeviceAreThoseOfFiniteDifferences) {
  ModelFixture fixture(TinyGpt(), "fake_device");
  CheckDifferences(fixture, Tokens(2, 5, 13, 31), 0.01);
}

TEST(Model, MlpGradientsAreThoseOfFiniteDifferences) {
  ModelFixture fixture(TinyMlp());
  CheckDifferences(fixture, Features(3, 5, 4, 32), 0.002);
}

TEST(Model, MlpWithoutHiddenLayers) {
  v1::ModelSpec spec;
  spec.mutable_mlp()->set_inputs(3);
  spec.mutable_mlp()->set_classes(2);
  ModelFixture fixture(spec);
  CheckDifferences(fixture, Features(5, 3, 2, 33), 0.01);
}

TEST(Model, RegressionGradientsAreThoseOfFiniteDifferences) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture softmax(TinySoftmax(), kind), logistic(TinyLogistic(), kind);
    CheckDifferences(softmax, Features(5, 5, 4, 34), 0.01);
    CheckDifferences(logistic, Features(5, 5, 2, 35), 0.01);
  }
}

// Loss, hits and gradients of a regression in float64, straight from the formulas.
struct Reference {
  double loss = 0, correct = 0;
  std::vector<double> gradients;  // bias, weight
};
Reference RegressionOf(const float* parameters, const Batch& batch, int64_t inputs, int64_t outputs) {
  Reference sum;
  sum.gradients.assign(outputs * (inputs + 1), 0.0);
  const int64_t classes = std::max<int64_t>(outputs, 2);
  for (int64_t row = 0; row < batch.rows; ++row) {
    const float* x = batch.features.data() + row * inputs;
    std::vector<double> z(classes, 0.0);  // one output: the logit of class 1 against 0 for class 0
    for (int64_t o = 0; o < outputs; ++o) {
      double& logit = z[outputs == 1 ? 1 : o];
      logit = parameters[o];
      for (int64_t i = 0; i < inputs; ++i) logit += double{parameters[outputs + o * inputs + i]} * x[i];
    }
    double total = 0;
    for (const double logit : z) total += std::exp(logit);
    const int32_t label = batch.labels[row];
    sum.loss += std::log(total) - z[label];
    sum.correct += std::max_element(z.begin(), z.end()) - z.begin() == label;
    for (int64_t o = 0; o < outputs; ++o) {
      const int64_t c = outputs == 1 ? 1 : o;
      const double d = std::exp(z[c]) / total - (label == c ? 1 : 0);
      sum.gradients[o] += d;
      for (int64_t i = 0; i < inputs; ++i) sum.gradients[outputs + o * inputs + i] += d * x[i];
    }
  }
  return sum;
}

TEST(Model, RegressionsAgreeWithFloat64) {
  for (const auto& [spec, outputs] : {std::pair<v1::ModelSpec, int64_t>{TinySoftmax(), 4}, {TinyLogistic(), 1}}) {
    ModelFixture fixture(spec);
    const Batch batch = Features(200, 5, static_cast<int32_t>(std::max<int64_t>(outputs, 2)), 36);
    const Reference reference = RegressionOf(fixture.model().parameters(), batch, 5, outputs);
    const Trained trained = fixture.Train({Rows(batch, 0, 70), Rows(batch, 70, 200)});
    EXPECT_NEAR(trained.loss.loss, reference.loss, 1e-6 * reference.loss);
    EXPECT_EQ(trained.loss.correct, reference.correct);
    EXPECT_EQ(trained.loss.count, 200);
    EXPECT_LT(RelativeError(trained.gradients, reference.gradients), 2e-6);
    EXPECT_NEAR(fixture.Loss(batch), reference.loss, 1e-6 * reference.loss);
  }
}

TEST(Model, RegressionsRefuseClassesTheyDoNotHave) {
  ModelFixture softmax(TinySoftmax()), logistic(TinyLogistic());
  Batch batch = Features(1, 5, 1, 37);
  batch.labels[0] = 2;
  EXPECT_TRUE(softmax.model().Evaluate(batch, nullptr).ok());
  const auto refused = logistic.model().Evaluate(batch, nullptr);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("label 2; the model has 2 classes"));
}

TEST(Model, BlocksBecomeReadyLastLayerFirstAndCoverTheSpace) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture fixture(TinyGpt(), kind, 1, 5);
    const Trained trained = fixture.Train({Tokens(2, 7, 13, 40), Tokens(1, 3, 13, 41)});
    ASSERT_EQ(trained.ready.size(), 6u) << kind << ": embedding, attention and MLP of each layer, last layer norm";
    uint64_t end = fixture.size();
    for (const Range& range : trained.ready) {  // this model's backward order is that of the space, from its end
      EXPECT_EQ(range.end, end);
      end = range.begin;
    }
    EXPECT_EQ(end, 0u);
  }
}

TEST(Model, ParametersMayBeReplacedOnceTheirRangeIsReady) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    for (const bool gpt : {true, false}) {
      ModelFixture fixture(gpt ? TinyGpt() : TinyMlp(), kind);
      const std::vector<Batch> batches = {gpt ? Tokens(2, 7, 13, 42) : Features(4, 5, 4, 42)};
      const Trained calm = fixture.Train(batches);
      const Trained replaced = fixture.Train(batches, /*poison=*/true);
      EXPECT_TRUE(SameBits(calm.gradients, replaced.gradients)) << kind << gpt;
      EXPECT_EQ(calm.loss.loss, replaced.loss.loss);
    }
  }
}

TEST(Model, MicrobatchesAddUpToTheBatch) {
  for (const bool gpt : {true, false}) {
    ModelFixture fixture(gpt ? TinyGpt() : TinyMlp());
    const Batch whole = gpt ? Tokens(7, 7, 13, 50) : Features(7, 5, 4, 50);
    const Trained one = fixture.Train({whole});
    const Trained four = fixture.Train({Rows(whole, 0, 0), Rows(whole, 0, 3), Rows(whole, 3, 4), Rows(whole, 4, 7)});
    EXPECT_NEAR(one.loss.loss, four.loss.loss, 1e-6 * one.loss.loss);
    EXPECT_EQ(one.loss.count, four.loss.count);
    EXPECT_EQ(one.loss.correct, four.loss.correct);
    EXPECT_LT(RelativeError(four.gradients, one.gradients), 1e-6);
    EXPECT_EQ(one.ready.size(), four.ready.size());
  }
}

TEST(Model, PaddingChangesNothing) {
  ModelFixture fixture(TinyGpt());
  const Batch shorter = Tokens(2, 4, 13, 51);
  Batch padded;
  padded.rows = 3;  // one row of nothing but padding
  padded.length = 7;
  padded.tokens.assign(21, 0);
  padded.targets.assign(21, -1);
  for (int row = 0; row < 2; ++row) {
    for (int t = 0; t < 4; ++t) {
      padded.tokens[row * 7 + t] = shorter.tokens[row * 4 + t];
      padded.targets[row * 7 + t] = shorter.targets[row * 4 + t];
    }
  }
  const Trained plain = fixture.Train({shorter}), more = fixture.Train({padded});
  EXPECT_EQ(plain.loss.count, 8);
  EXPECT_EQ(more.loss.count, 8);
  EXPECT_NEAR(plain.loss.loss, more.loss.loss, 1e-6 * plain.loss.loss);
  EXPECT_LT(RelativeError(more.gradients, plain.gradients), 1e-6);
}

TEST(Model, BitsAreEqualOverBackendsDelaysAndRepetition) {
  const v1::ModelSpec specs[] = {TinyGpt(), TinyMlp(), TinySoftmax(), TinyLogistic()};
  for (const v1::ModelSpec& spec : specs) {
    const bool gpt = spec.has_gpt2();
    const int32_t classes = spec.has_logistic() ? 2 : 4;
    const std::vector<Batch> batches = {gpt ? Tokens(5, 6, 13, 60) : Features(9, 5, classes, 60),
                                        gpt ? Tokens(2, 7, 13, 61) : Features(2, 5, classes, 61)};
    const std::vector<Batch> larger = {gpt ? Tokens(40, 7, 13, 62) : Features(300, 5, classes, 62)};
    for (const int threads : {1, 2}) {
      ModelFixture cpu(spec, "cpu", threads);
      const Trained first = cpu.Train(batches);
      cpu.Train(larger);
      EXPECT_TRUE(SameBits(first.gradients, cpu.Train(batches).gradients)) << "after other work, gpt " << gpt;
      for (const uint64_t delays : {0, 1, 2}) {
        ModelFixture device(spec, "fake_device", threads, delays);
        const Trained trained = device.Train(batches);
        EXPECT_TRUE(SameBits(first.gradients, trained.gradients)) << "delays " << delays << " threads " << threads;
        EXPECT_EQ(first.loss.loss, trained.loss.loss);
        EXPECT_EQ(first.loss.correct, trained.loss.correct);
      }
    }
  }
}

TEST(Model, OnlyAnnouncedParametersReachADevice) {
  ModelFixture fixture(TinyMlp(), "fake_device");
  const Batch batch = Features(4, 5, 4, 63);
  const double before = fixture.Loss(batch);
  Model& model = fixture.model();
  for (uint64_t i = 0; i < fixture.size(); ++i) model.parameters()[i] *= 0.5f;
  EXPECT_EQ(model.Evaluate(batch, nullptr)->loss, before);
  for (uint64_t i = 0; i < fixture.size(); i += 7) model.ParametersChanged({i, std::min(i + 7, fixture.size())});
  const double after = model.Evaluate(batch, nullptr)->loss;
  EXPECT_NE(after, before);
  EXPECT_EQ(after, fixture.Loss(batch));
}

TEST(Model, WithoutTargetsNothingHappens) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture fixture(TinyGpt(), kind);
    const Trained before = fixture.Train({Tokens(2, 7, 13, 70)});
    Batch nothing = Tokens(2, 7, 13, 71);
    nothing.targets.assign(14, -1);
    for (const std::vector<Batch>& batches : {std::vector<Batch>{}, {Batch()}, {nothing, Batch()}}) {
      const Trained after = fixture.Train(batches);
      EXPECT_EQ(after.loss.loss, 0);
      EXPECT_EQ(after.loss.count, 0);
      EXPECT_TRUE(after.ready.empty());
      EXPECT_TRUE(SameBits(before.gradients, after.gradients));
    }
    EXPECT_EQ(fixture.model().Evaluate(Batch(), nullptr)->count, 0);
  }
}

TEST(Model, CancelStopsAPassAndTheNextOneIsWhole) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture fixture(TinyGpt(), kind);
    const std::vector<Batch> batches = {Tokens(2, 7, 13, 72)};
    const Trained whole = fixture.Train(batches);
    std::atomic<bool> cancel = false;
    int calls = 0;
    const auto stopped = fixture.model().ForwardBackward(
        batches, nullptr,
        [&](Range) {
          ++calls;
          cancel = true;
        },
        &cancel);
    EXPECT_EQ(stopped.status().code(), absl::StatusCode::kCancelled);
    EXPECT_LT(calls, 4);
    EXPECT_EQ(fixture.model().ForwardBackward(batches, nullptr, nullptr, &cancel).status().code(),
              absl::StatusCode::kCancelled);
    EXPECT_EQ(fixture.model().Evaluate(batches[0], &cancel).status().code(), absl::StatusCode::kCancelled);
    EXPECT_TRUE(SameBits(whole.gradients, fixture.Train(batches).gradients));
  }
}

// Parameters come in only at the gate: a pass that read any of them before would compute with NaN.
TEST(Model, ReadsNothingThatTheGateHasNotLetThrough) {
  for (const bool gpt : {true, false}) {
    for (const std::string kind : {"cpu", "fake_device"}) {
      ModelFixture fixture(gpt ? TinyGpt() : TinyMlp(), kind);
      const auto some = [&](int64_t seed) { return gpt ? Tokens(2, 7, 13, seed) : Features(3, 5, 4, seed); };
      const std::vector<Batch> batches = {some(90), some(91)};
      const Trained whole = fixture.Train(batches);
      float* const parameters = fixture.model().parameters();
      const std::vector<float> values(parameters, parameters + fixture.size());
      std::fill_n(parameters, fixture.size(), std::numeric_limits<float>::quiet_NaN());
      fixture.Changed();
      uint64_t next = 0;
      bool gradients = false;
      const auto loss = fixture.model().ForwardBackward(
          batches,
          [&](Range range) {
            EXPECT_EQ(range.begin, next) << "in the order of the space, which servers send in";
            EXPECT_FALSE(gradients) << "a gradient before the whole forward";
            std::copy(values.begin() + range.begin, values.begin() + range.end, parameters + range.begin);
            next = range.end;
            return absl::OkStatus();
          },
          [&](Range) { gradients = true; }, nullptr);
      ASSERT_TRUE(loss.ok()) << loss.status();
      EXPECT_EQ(next, fixture.size());
      EXPECT_EQ(loss->loss, whole.loss.loss);
      EXPECT_EQ(std::memcmp(fixture.model().gradients(), whole.gradients.data(), fixture.size() * sizeof(float)), 0);

      // One that is turned away in the middle writes no gradient, and the next pass is whole.
      int calls = 0;
      const absl::Status status =
          fixture.model()
              .ForwardBackward(
                  batches, [&](Range) { return ++calls < 2 ? absl::OkStatus() : absl::CancelledError("turned away"); },
                  [&](Range) { ADD_FAILURE() << "a gradient of a pass that was turned away"; }, nullptr)
              .status();
      EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
      EXPECT_EQ(calls, 2);
      EXPECT_EQ(std::memcmp(fixture.model().gradients(), whole.gradients.data(), fixture.size() * sizeof(float)), 0);
      EXPECT_TRUE(SameBits(whole.gradients, fixture.Train(batches).gradients));
    }
  }
}

TEST(Model, BadBatchesAreRefused) {
  ModelFixture gpt(TinyGpt());
  const auto message = [](ModelFixture& fixture, const Batch& batch) {
    const absl::Status status = fixture.model().ForwardBackward({batch}, nullptr, nullptr, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(fixture.model().Evaluate(batch, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(gpt, Tokens(1, 8, 13, 80)), HasSubstr("context of 7"));
  Batch batch = Tokens(2, 7, 13, 80);
  batch.tokens[9] = 13;
  EXPECT_THAT(message(gpt, batch), HasSubstr("row 1, position 2: token 13"));
  batch = Tokens(2, 7, 13, 80);
  batch.targets[0] = -2;
  EXPECT_THAT(message(gpt, batch), HasSubstr("target -2"));
  batch = Tokens(2, 7, 13, 80);
  batch.targets.pop_back();
  EXPECT_THAT(message(gpt, batch), HasSubstr("13 targets"));
  ModelFixture mlp(TinyMlp());
  batch = Features(2, 5, 4, 80);
  batch.labels[1] = 4;
  EXPECT_THAT(message(mlp, batch), HasSubstr("row 1: label 4"));
  batch.features.pop_back();
  EXPECT_THAT(message(mlp, batch), HasSubstr("9 features"));
  EXPECT_EQ(mlp.model().NextLogits({1}).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(gpt.model().NextLogits({}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gpt.model().NextLogits({1, 2, 3, 4, 5, 6, 7, 8}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Model, NextLogitsAreThoseOfTheLoss) {
  for (const std::string kind : {"cpu", "fake_device"}) {
    ModelFixture fixture(TinyGpt(), kind);
    Batch batch = Tokens(1, 6, 13, 90);
    const std::vector<float> logits = fixture.model().NextLogits(batch.tokens).value();
    ASSERT_EQ(logits.size(), 13u);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double{logit});
    batch.targets.assign(6, -1);
    batch.targets[5] = 3;
    const LossSum loss = fixture.model().Evaluate(batch, nullptr).value();
    EXPECT_EQ(loss.count, 1);
    EXPECT_NEAR(loss.loss, std::log(sum) - logits[3], 1e-5);
  }
}

TEST(Model, NanInAParameterReachesTheLoss) {
  ModelFixture fixture(TinyGpt());
  fixture.model().parameters()[fixture.model().space().Find("h.1.mlp.fc.weight")->offset] =
      std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(fixture.Loss(Tokens(1, 7, 13, 91))));
}

TEST(Model, ModelsOfOneProcessDoNotMeet) {
  ModelFixture alone(TinyGpt(), "cpu", 2);
  const std::vector<Batch> batches = {Tokens(3, 7, 13, 92)};
  const std::vector<float> expected = alone.Train(batches).gradients;
  std::vector<std::thread> threads;
  std::atomic<int> equal = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      ModelFixture fixture(TinyGpt(), i % 2 ? "fake_device" : "cpu", 2);
      for (int round = 0; round < 5; ++round) equal += SameBits(expected, fixture.Train(batches).gradients);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, 20);
}

}  // namespace
}  // namespace sluice
