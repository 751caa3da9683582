// GPT against float64 references of another program: Hugging Face names and layouts.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"
#include "tests/worker/model_fixture.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

using Tensors = std::map<std::string, std::vector<float>>;

Tensors ReadSafetensors(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), 8);
  std::string header(size, ' ');
  file.read(header.data(), static_cast<std::streamsize>(size));
  const nlohmann::json table = nlohmann::json::parse(header);
  Tensors tensors;
  for (const auto& [name, value] : table.items()) {
    if (name == "__metadata__") continue;
    const uint64_t begin = value["data_offsets"][0], end = value["data_offsets"][1];
    std::vector<float> data((end - begin) / 4);
    file.seekg(static_cast<std::streamoff>(8 + size + begin));
    file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(end - begin));
    const std::string prefix = "transformer.";
    tensors[name.starts_with(prefix) ? name.substr(prefix.size()) : name] = std::move(data);
  }
  EXPECT_TRUE(file.good()) << path;
  return tensors;
}

// The Hugging Face tensor that holds a tensor of ours, and the index there of each of our elements.
struct Place {
  std::string name;
  std::vector<size_t> index;
};
Place PlaceOf(const Tensor& tensor, size_t c) {
  const auto place = [&](const std::string& name, size_t rows, size_t cols, size_t stride, size_t first,
                         bool transposed) {
    Place result{name, {}};
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < cols; ++j) result.index.push_back(first + (transposed ? j * stride + i : i * stride + j));
    }
    return result;
  };
  const std::string& name = tensor.name;
  const size_t n = tensor.elements;
  if (name == "wpe" || name == "wte") return place(name + ".weight", 1, n, n, 0, false);
  const std::string layer = name.substr(0, name.find('.', 2) + 1);
  const std::string rest = name.substr(layer.size());
  const std::string kind = rest.substr(rest.rfind('.') + 1);
  if (name.starts_with("h.") && rest.starts_with("attn.") && !rest.starts_with("attn.proj")) {
    const size_t third = std::string("qkv").find(rest[5]) * c;
    return kind == "weight" ? place(layer + "attn.c_attn.weight", c, c, 3 * c, third, true)
                            : place(layer + "attn.c_attn.bias", 1, c, c, third, false);
  }
  if (rest == "mlp.fc.weight") return place(layer + "mlp.c_fc.weight", 4 * c, c, 4 * c, 0, true);
  if (rest == "mlp.fc.bias") return place(layer + "mlp.c_fc.bias", 1, n, n, 0, false);
  if (rest.starts_with("attn.proj")) return place(layer + "attn.c_proj." + kind, 1, n, n, 0, false);
  if (rest.starts_with("mlp.proj")) return place(layer + "mlp.c_proj." + kind, 1, n, n, 0, false);
  return place(name, 1, n, n, 0, false);
}

class ModelGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    if (SharedFolder().empty()) GTEST_SKIP() << "SKIPPED: the shared folder with the reference files is absent";
    data_ = fs::path(SharedFolder()) / "data";
    v1::ModelSpec spec;
    spec.mutable_gpt2()->set_layers(2);
    spec.mutable_gpt2()->set_heads(4);
    spec.mutable_gpt2()->set_width(32);
    spec.mutable_gpt2()->set_context(64);
    spec.mutable_gpt2()->set_vocabulary(96);
    fixture_ = std::make_unique<ModelFixture>(spec);
    const Tensors tensors = ReadSafetensors(data_ / "synth" / "synth_gpt2_model.safetensors");
    for (const Tensor& tensor : fixture_->model().space().tensors()) {
      const Place place = PlaceOf(tensor, 32);
      for (size_t i = 0; i < tensor.elements; ++i) {
        fixture_->model().parameters()[tensor.offset + i] = tensors.at(place.name).at(place.index[i]);
      }
    }
    fixture_->Changed();
  }

  nlohmann::json Json(const std::string& path) {
    std::ifstream file(data_ / path);
    return nlohmann::json::parse(file);
  }

  fs::path data_;
  std::unique_ptr<ModelFixture> fixture_;
};

TEST_F(ModelGolden, LogitsAndLossOfTheSyntheticModel) {
  const nlohmann::json reference = Json("synth/synth_gpt2_reference.json");
  const std::vector<int32_t> ids = reference["input_ids"];
  double largest = 0, worst = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    const std::vector<float> found =
        fixture_->model().NextLogits(std::vector<int32_t>(ids.begin(), ids.begin() + t + 1)).value();
    const std::vector<double> expected = reference["logits"][t];
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_TRUE(std::isfinite(found[i]));
      largest = std::max(largest, std::abs(expected[i]));
      worst = std::max(worst, std::abs(found[i] - expected[i]));
    }
  }
  EXPECT_LT(worst, 1e-6 * largest);
  Batch batch;
  batch.rows = 1;
  batch.length = static_cast<int64_t>(ids.size()) - 1;
  batch.tokens.assign(ids.begin(), ids.end() - 1);
  batch.targets.assign(ids.begin() + 1, ids.end());
  const LossSum loss = fixture_->model().Evaluate(batch, nullptr).value();
  EXPECT_NEAR(loss.loss / loss.count, reference["mean_nll"].get<double>(), 1e-6);
}

TEST_F(ModelGolden, FirstRoundOfTraining) {
  const nlohmann::json training = Json("golden/gpt2_training.json");
  Batch batch;
  for (const std::vector<int32_t> row : training["rounds"][0]) {
    ++batch.rows;
    batch.length = static_cast<int64_t>(row.size()) - 1;
    batch.tokens.insert(batch.tokens.end(), row.begin(), row.end() - 1);
    batch.targets.insert(batch.targets.end(), row.begin() + 1, row.end());
  }
  const Trained trained = fixture_->Train({batch});
  EXPECT_NEAR(trained.loss.loss / trained.loss.count, training["cases"]["sgd"]["losses"][0].get<double>(), 1e-6);
  const Tensors expected = ReadSafetensors(data_ / "golden" / "gpt2_round0_gradient.safetensors");
  Tensors found;
  double norm = 0;
  for (const Tensor& tensor : fixture_->model().space().tensors()) {
    const Place place = PlaceOf(tensor, 32);
    std::vector<float>& into = found[place.name];
    into.resize(expected.at(place.name).size());
    for (size_t i = 0; i < tensor.elements; ++i) {
      into.at(place.index[i]) = static_cast<float>(trained.gradients[tensor.offset + i] / trained.loss.count);
      norm += std::pow(into[place.index[i]], 2);
    }
  }
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) EXPECT_LT(RelativeError(found[name], values), 2e-6) << name;
  EXPECT_NEAR(std::sqrt(norm), training["cases"]["sgd"]["gradient_norms"][0].get<double>(), 1e-6);
}

}  // namespace
}  // namespace sluice
