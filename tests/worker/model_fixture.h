// What the tests of models share: batches, a model with a backend of its own, comparisons.
#ifndef SLUICE_TESTS_WORKER_MODEL_FIXTURE_H_
#define SLUICE_TESTS_WORKER_MODEL_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/philox.h"
#include "worker/model/model.h"

namespace sluice {

inline uint32_t Random(uint64_t i, uint32_t stream) {
  return Philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), stream, 0}, {17, 4})[0];
}
inline float Uniform(uint64_t i, uint32_t stream) {
  return static_cast<float>(Random(i, stream)) / 2147483648.0f - 1.0f;
}

inline Batch Tokens(int64_t rows, int64_t length, int32_t vocabulary, uint32_t stream) {
  Batch batch;
  batch.rows = rows;
  batch.length = length;
  for (int64_t i = 0; i < rows * length; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(Random(i, stream) % vocabulary));
    batch.targets.push_back(static_cast<int32_t>(Random(i, stream + 1) % vocabulary));
  }
  batch.count = rows * length;
  return batch;
}

inline Batch Features(int64_t rows, int64_t inputs, int32_t classes, uint32_t stream) {
  Batch batch;
  batch.rows = rows;
  for (int64_t i = 0; i < rows * inputs; ++i) batch.features.push_back(Uniform(i, stream));
  for (int64_t i = 0; i < rows; ++i) batch.labels.push_back(static_cast<int32_t>(Random(i, stream + 1) % classes));
  batch.count = rows;
  return batch;
}

// Rows [begin, end) of a batch.
inline Batch Rows(const Batch& from, int64_t begin, int64_t end) {
  const auto cut = [&](const auto& v) {
    const int64_t width = from.rows == 0 ? 0 : static_cast<int64_t>(v.size()) / from.rows;
    return std::decay_t<decltype(v)>(v.begin() + begin * width, v.begin() + end * width);
  };
  Batch part;
  part.rows = end - begin;
  part.length = from.length;
  part.first_position = from.first_position + static_cast<uint64_t>(begin);
  part.tokens = cut(from.tokens);
  part.targets = cut(from.targets);
  part.features = cut(from.features);
  part.labels = cut(from.labels);
  return part;
}

struct Trained {
  LossSum loss;
  std::vector<float> gradients;
  std::vector<Range> ready;
};

// A model with a backend of its own, parameters random and large enough for every part to matter.
class ModelFixture {
 public:
  explicit ModelFixture(const v1::ModelSpec& spec, const std::string& kind = "cpu", int threads = 1,
                        uint64_t delays = 0, const ModelPart& part = {}) {
    BackendOptions options;
    options.kind = kind;
    options.threads = threads;
    options.delay_seed = delays;
    backend_ = MakeBackend(options).value();
    auto model = MakeModel(spec, backend_.get(), part);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    for (const Tensor& tensor : model_->space().tensors()) {
      const float center =
          tensor.name.find("ln_") != std::string::npos && tensor.name.ends_with("weight") ? 1.0f : 0.0f;
      for (uint64_t i = 0; i < tensor.elements; ++i) {
        model_->parameters()[tensor.offset + i] = center + 0.4f * Uniform(tensor.offset + i, 1);
      }
    }
    Changed();
  }

  Model& model() { return *model_; }
  uint64_t size() const { return model_->space().size(); }
  void Changed() { model_->ParametersChanged({0, size()}); }

  Trained Train(const std::vector<Batch>& batches, bool poison = false) {
    Trained result;
    const std::vector<float> before(model_->parameters(), model_->parameters() + size());
    std::vector<float> seen(size(), -1.0f);
    auto loss = model_->ForwardBackward(
        batches, nullptr,
        [&](Range range) {
          result.ready.push_back(range);
          // The values are final when the sink is called.
          std::copy(model_->gradients() + range.begin, model_->gradients() + range.end, seen.begin() + range.begin);
          if (!poison) return;
          std::fill(model_->parameters() + range.begin, model_->parameters() + range.end,
                    std::numeric_limits<float>::quiet_NaN());
          model_->ParametersChanged(range);
        },
        nullptr);
    EXPECT_TRUE(loss.ok()) << loss.status();
    result.loss = *loss;
    result.gradients.assign(model_->gradients(), model_->gradients() + size());
    if (!result.ready.empty()) {
      EXPECT_EQ(std::memcmp(seen.data(), result.gradients.data(), size() * sizeof(float)), 0);
    }
    std::copy(before.begin(), before.end(), model_->parameters());
    Changed();
    return result;
  }

  double Loss(const Batch& batch) {
    Changed();
    return model_->Evaluate(batch, nullptr).value().loss;
  }
  double TrainLoss(const Batch& batch) {  // with dropout
    Changed();
    return model_->ForwardBackward({batch}, nullptr, nullptr, nullptr).value().loss;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
};

// The gradient of every tensor along a random direction, against differences of losses (five-point formula), those of
// training where there is dropout.
// `h` small enough for no ReLU to switch.
inline void CheckDifferences(ModelFixture& fixture, const Batch& batch, double h, bool dropout = false) {
  const auto loss = [&] { return dropout ? fixture.TrainLoss(batch) : fixture.Loss(batch); };
  const Trained trained = fixture.Train({batch});
  ASSERT_EQ(trained.loss.loss, loss());
  float* parameters = fixture.model().parameters();
  for (const Tensor& tensor : fixture.model().space().tensors()) {
    const std::vector<float> before(parameters + tensor.offset, parameters + tensor.offset + tensor.elements);
    double along = 0, norm = 0;
    std::vector<double> direction(tensor.elements);
    for (uint64_t i = 0; i < tensor.elements; ++i) norm += std::pow(Uniform(i, 99), 2);
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      direction[i] = Uniform(i, 99) / std::sqrt(norm);
      along += direction[i] * trained.gradients[tensor.offset + i];
    }
    const auto at = [&](double h) {
      for (uint64_t i = 0; i < tensor.elements; ++i) {
        parameters[tensor.offset + i] = static_cast<float>(before[i] + h * direction[i]);
      }
      return loss();
    };
    const double numeric = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
    std::copy(before.begin(), before.end(), parameters + tensor.offset);
    EXPECT_TRUE(std::isfinite(numeric)) << tensor.name;
    EXPECT_NEAR(along, numeric, 2e-3 + 2e-3 * std::abs(numeric)) << tensor.name;
  }
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline double RelativeError(const std::vector<float>& found, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += std::pow(found[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return std::sqrt(difference / norm);
}
inline double RelativeError(const std::vector<float>& found, const std::vector<float>& expected) {
  return RelativeError(found, std::vector<double>(expected.begin(), expected.end()));
}

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_MODEL_FIXTURE_H_
