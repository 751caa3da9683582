#include "common/model_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

namespace sluice {
namespace {

using ::testing::HasSubstr;

v1::ModelSpec Gpt2(uint32_t layers, uint32_t heads, uint32_t width, uint32_t context, uint32_t vocabulary) {
  v1::ModelSpec model;
  model.mutable_gpt2()->set_layers(layers);
  model.mutable_gpt2()->set_heads(heads);
  model.mutable_gpt2()->set_width(width);
  model.mutable_gpt2()->set_context(context);
  model.mutable_gpt2()->set_vocabulary(vocabulary);
  return model;
}

v1::ModelSpec Mlp(uint64_t inputs, const std::vector<uint64_t>& hidden, uint32_t classes) {
  v1::ModelSpec model;
  model.mutable_mlp()->set_inputs(inputs);
  for (uint64_t width : hidden) model.mutable_mlp()->add_hidden(width);
  model.mutable_mlp()->set_classes(classes);
  return model;
}

// One tensor a line, as docs/parameter_space.md lists them.
std::string Table(const ParameterSpace& space) {
  std::string table;
  for (const Tensor& tensor : space.tensors()) {
    table += std::to_string(tensor.offset) + " " + tensor.name + " [";
    for (size_t i = 0; i < tensor.shape.size(); ++i) table += (i > 0 ? ", " : "") + std::to_string(tensor.shape[i]);
    table += tensor.cut ? "] cut\n" : "]\n";
  }
  return table;
}

// Offsets are a file format: this table never changes.
TEST(ModelLayoutTest, Gpt2IsLaidOutAsTheFormatSays) {
  const auto space = MakeParameterSpace(Gpt2(1, 2, 4, 3, 5));
  ASSERT_TRUE(space.ok()) << space.status();
  EXPECT_EQ(Table(*space),
            "0 wpe [3, 4]\n"
            "12 wte [5, 4] cut\n"
            "32 h.0.ln_1.weight [4]\n"
            "36 h.0.ln_1.bias [4]\n"
            "40 h.0.ln_2.weight [4]\n"
            "44 h.0.ln_2.bias [4]\n"
            "48 h.0.attn.proj.bias [4]\n"
            "52 h.0.mlp.proj.bias [4]\n"
            "56 h.0.attn.q.weight [4, 4] cut\n"
            "72 h.0.attn.k.weight [4, 4] cut\n"
            "88 h.0.attn.v.weight [4, 4] cut\n"
            "104 h.0.attn.q.bias [4] cut\n"
            "108 h.0.attn.k.bias [4] cut\n"
            "112 h.0.attn.v.bias [4] cut\n"
            "116 h.0.attn.proj.weight [4, 4] cut\n"
            "132 h.0.mlp.fc.weight [16, 4] cut\n"
            "196 h.0.mlp.fc.bias [16] cut\n"
            "212 h.0.mlp.proj.weight [16, 4] cut\n"
            "276 ln_f.weight [4]\n"
            "280 ln_f.bias [4]\n");
  EXPECT_EQ(space->size(), 284u);
}

TEST(ModelLayoutTest, Gpt2SmallHasItsPublishedSize) {
  const auto space = MakeParameterSpace(Gpt2(12, 12, 768, 1024, 50257));
  ASSERT_TRUE(space.ok());
  EXPECT_EQ(space->size(), 124439808u);
}

TEST(ModelLayoutTest, Gpt2InitialValues) {
  const auto space = MakeParameterSpace(Gpt2(8, 2, 4, 3, 5));
  ASSERT_TRUE(space.ok());
  EXPECT_EQ(space->Find("h.7.ln_2.weight")->init.kind, Initializer::kOnes);
  EXPECT_EQ(space->Find("h.7.mlp.fc.bias")->init.kind, Initializer::kZeros);
  EXPECT_EQ(space->Find("wte")->init.kind, Initializer::kNormal);
  EXPECT_FLOAT_EQ(space->Find("wte")->init.scale, 0.02f);
  EXPECT_FLOAT_EQ(space->Find("h.3.attn.proj.weight")->init.scale, 0.005f);  // 0.02 / sqrt(2 * 8)
  EXPECT_FLOAT_EQ(space->Find("h.3.mlp.proj.weight")->init.scale, 0.005f);
  v1::ModelSpec plain = Gpt2(8, 2, 4, 3, 5);
  plain.mutable_gpt2()->set_scaled_residual_init(false);
  EXPECT_FLOAT_EQ(MakeParameterSpace(plain)->Find("h.3.mlp.proj.weight")->init.scale, 0.02f);
  EXPECT_TRUE(space->Find("wte")->decays());
  EXPECT_FALSE(space->Find("h.0.attn.q.bias")->decays());
}

TEST(ModelLayoutTest, MlpIsLaidOutAsTheFormatSays) {
  const auto space = MakeParameterSpace(Mlp(7, {5, 3}, 2));
  ASSERT_TRUE(space.ok());
  EXPECT_EQ(Table(*space),
            "0 layer.0.bias [5]\n5 layer.0.weight [5, 7] cut\n"
            "40 layer.1.bias [3]\n43 layer.1.weight [3, 5] cut\n"
            "58 layer.2.bias [2]\n60 layer.2.weight [2, 3] cut\n");
  EXPECT_EQ(space->Find("layer.1.weight")->init.kind, Initializer::kUniform);
  EXPECT_FLOAT_EQ(space->Find("layer.1.weight")->init.scale, 0.4472136f);  // 1 / sqrt(5)
  const auto linear = MakeParameterSpace(Mlp(1, {}, 2));
  ASSERT_TRUE(linear.ok());
  EXPECT_EQ(linear->size(), 4u);
}

TEST(ModelLayoutTest, RegressionsAreLaidOutAsTheFormatSays) {
  v1::ModelSpec softmax, logistic;
  softmax.mutable_softmax()->set_inputs(4);
  softmax.mutable_softmax()->set_classes(3);
  logistic.mutable_logistic()->set_inputs(4);
  for (const auto& [model, outputs] : {std::pair<v1::ModelSpec, uint64_t>{softmax, 3}, {logistic, 1}}) {
    const ParameterSpace space = MakeParameterSpace(model).value();
    ASSERT_EQ(space.tensors().size(), 2u);
    EXPECT_EQ(space.size(), outputs * 5);
    const Tensor &bias = space.tensors()[0], &weight = space.tensors()[1];
    EXPECT_EQ(bias.name, "bias");
    EXPECT_EQ(bias.shape, std::vector<uint64_t>({outputs}));
    EXPECT_FALSE(bias.cut);
    EXPECT_EQ(weight.name, "weight");
    EXPECT_EQ(weight.shape, std::vector<uint64_t>({outputs, 4}));
    EXPECT_EQ(weight.offset, outputs);
    EXPECT_TRUE(weight.cut);
    EXPECT_TRUE(weight.decays() && !bias.decays());
    EXPECT_EQ(bias.init.kind, Initializer::kZeros);
    EXPECT_EQ(weight.init.kind, Initializer::kZeros);
  }
  softmax.mutable_softmax()->set_classes(0);
  EXPECT_EQ(std::string(MakeParameterSpace(softmax).status().message()),
            "model.softmax.classes is 0; set it, or let the client read the data");
  logistic.mutable_logistic()->set_inputs(0);
  EXPECT_FALSE(MakeParameterSpace(logistic).ok());
}

TEST(ModelLayoutTest, ClassifiersSaySizes) {
  v1::ModelSpec model;
  EXPECT_FALSE(ClassifierSizesOf(model).has_value());
  model.mutable_gpt2();
  EXPECT_FALSE(ClassifierSizesOf(model).has_value());
  model.mutable_logistic()->set_inputs(7);
  EXPECT_EQ(ClassifierSizesOf(model)->kind, "logistic");
  EXPECT_EQ(ClassifierSizesOf(model)->inputs, 7u);
  EXPECT_EQ(ClassifierSizesOf(model)->classes, 2u);
}

TEST(ModelLayoutTest, EveryElementBelongsToOneTensor) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto pick = [&](uint64_t most) { return random() % most + 1; };
    const auto u32 = [&](uint64_t most) { return static_cast<uint32_t>(pick(most)); };
    const bool gpt2 = seed % 2 == 0;
    const auto space = MakeParameterSpace(gpt2 ? Gpt2(u32(4), 1, u32(40), u32(40), u32(997))
                                               : Mlp(pick(997), {pick(97), pick(5)}, u32(9)));
    ASSERT_TRUE(space.ok());
    uint64_t next = 0;
    for (size_t i = 0; i < space->tensors().size(); ++i) {
      const Tensor& tensor = space->tensors()[i];
      ASSERT_EQ(tensor.offset, next);
      uint64_t product = 1;
      for (uint64_t dimension : tensor.shape) product *= dimension;
      ASSERT_EQ(tensor.elements, product);
      ASSERT_EQ(space->TensorAt(tensor.offset), i);
      ASSERT_EQ(space->TensorAt(tensor.offset + tensor.elements / 2), i);
      ASSERT_EQ(space->TensorAt(tensor.offset + tensor.elements - 1), i);
      ASSERT_EQ(space->Find(tensor.name), &tensor);
      next += tensor.elements;
    }
    ASSERT_EQ(space->size(), next);
    EXPECT_EQ(space->Find("h.99.ln_1.weight"), nullptr);
    EXPECT_EQ(space->Find(""), nullptr);
  }
}

// Within a layer what tensor parallelism does not cut comes first: a rank then holds few ranges.
TEST(ModelLayoutTest, UncutTensorsComeFirstInEveryLayer) {
  const auto space = MakeParameterSpace(Gpt2(3, 2, 8, 4, 11));
  ASSERT_TRUE(space.ok());
  std::string layer;
  bool cut = false;
  for (const Tensor& tensor : space->tensors()) {
    const std::string prefix = tensor.name.substr(0, tensor.name.rfind("h.", 0) == 0 ? 4 : 0);
    if (prefix != layer) cut = false;
    layer = prefix;
    if (prefix.empty()) continue;
    EXPECT_FALSE(cut && !tensor.cut) << tensor.name << " is not cut but follows one that is";
    cut |= tensor.cut;
  }
}

TEST(ModelLayoutTest, EmptyTensorsAndSpacesAreLegal) {
  EXPECT_EQ(ParameterSpace({}).size(), 0u);
  EXPECT_EQ(ParameterSpace({}).Find("a"), nullptr);
  const ParameterSpace space({{"a", {2}, 0, 2, false, {}}, {"b", {0}, 0, 0, false, {}}, {"c", {1}, 0, 1, false, {}}});
  EXPECT_EQ(space.TensorAt(1), 0u);
  EXPECT_EQ(space.TensorAt(2), 2u);
  EXPECT_EQ(space.Find("b")->offset, 2u);
}

TEST(ModelLayoutTest, OffsetsPassTwoToThe31) {
  const auto space = MakeParameterSpace(Mlp(65537, {65536, 3}, 2));
  ASSERT_TRUE(space.ok());
  const uint64_t weight = 65536ull * 65537;
  EXPECT_EQ(space->Find("layer.1.bias")->offset, 65536 + weight);
  EXPECT_EQ(space->TensorAt(65536 + weight - 1), 1u);
  EXPECT_EQ(space->TensorAt(65536 + weight), 2u);
}

TEST(ModelLayoutTest, WrongSizesAreRefusedByName) {
  const auto error = [](const v1::ModelSpec& model) {
    return std::string(MakeParameterSpace(model).status().message());
  };
  EXPECT_THAT(error({}), HasSubstr("expected one of gpt2, mlp"));
  EXPECT_THAT(error(Gpt2(0, 1, 1, 1, 2)), HasSubstr("model.gpt2.layers is 0"));
  EXPECT_THAT(error(Gpt2(4294967295u, 1, 1, 1, 2)), HasSubstr("allowed at most 1024"));
  EXPECT_THAT(error(Gpt2(1, 1, 0, 1, 2)), HasSubstr("model.gpt2.width is 0"));
  EXPECT_THAT(error(Gpt2(1, 1, 1, 0, 2)), HasSubstr("model.gpt2.context is 0"));
  EXPECT_THAT(error(Gpt2(1, 1, 1, 1, 0)), HasSubstr("model.gpt2.vocabulary is 0; set it, or let the client read"));
  EXPECT_THAT(error(Mlp(0, {}, 2)), HasSubstr("model.mlp.inputs is 0; set it, or let the client read"));
  EXPECT_THAT(error(Mlp(1, {}, 0)), HasSubstr("model.mlp.classes is 0"));
  EXPECT_THAT(error(Mlp(1, {4, 0}, 2)), HasSubstr("model.mlp.hidden[1] is 0"));
  EXPECT_THAT(error(Mlp(1, std::vector<uint64_t>(1024, 1), 2)), HasSubstr("allowed at most 1024"));
}

TEST(ModelLayoutTest, MoreThanTwoToThe62ElementsAreRefused) {
  const uint64_t two31 = uint64_t{1} << 31;
  EXPECT_FALSE(MakeParameterSpace(Mlp(two31, {two31}, 2)).ok());  // 2^62 and the rest
  EXPECT_TRUE(MakeParameterSpace(Mlp(two31, {two31 - 8}, 2)).ok());
  EXPECT_FALSE(MakeParameterSpace(Mlp(UINT64_MAX, {UINT64_MAX}, 2)).ok());                // a product that overflows
  EXPECT_FALSE(MakeParameterSpace(Mlp(uint64_t{1} << 32, {uint64_t{1} << 32}, 2)).ok());  // exactly to zero
  EXPECT_FALSE(MakeParameterSpace(Mlp(1u << 30, {two31, 1u << 30, two31, 1u << 30}, 2)).ok());  // a sum
}

}  // namespace
}  // namespace sluice
