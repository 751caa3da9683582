#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "common/checkpoint.h"
#include "common/file.h"
#include "common/model_layout.h"
#include "common/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

v1::Gpt2Spec SmallSpec() {
  v1::Gpt2Spec spec;
  spec.set_layers(2);
  spec.set_heads(2);
  spec.set_width(6);
  spec.set_context(5);
  spec.set_vocabulary(11);
  spec.set_layer_norm_epsilon(1e-5);
  return spec;
}

ParameterSpace SpaceOf(const v1::Gpt2Spec& spec) {
  v1::ModelSpec model;
  *model.mutable_gpt2() = spec;
  return *MakeParameterSpace(model);
}

std::vector<float> RandomValues(uint64_t n) {
  std::mt19937 random(3);
  std::vector<float> values(n);
  for (float& x : values) x = static_cast<float>(random()) * 0x1p-32f - 0.5f;
  return values;
}

std::vector<float> ReadWhole(const Gpt2FolderReader& reader, uint64_t n) {
  std::vector<float> values(n);
  EXPECT_TRUE(reader.Read(0, absl::MakeSpan(values)).ok());
  return values;
}

std::vector<float> Floats(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsTensor* const tensor = file.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(tensor->elements);
  EXPECT_TRUE(file.ReadFloats(*tensor, 0, absl::MakeSpan(values)).ok());
  return values;
}

TEST(Gpt2FolderTest, ExportAndImportAreInverse) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  const ParameterSpace space = SpaceOf(spec);
  const std::vector<float> values = RandomValues(space.size());
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "new/model").ok());
  EXPECT_THAT(*ListDirectory(folder / "new"), ElementsAre("model"));
  EXPECT_THAT(*ListDirectory(folder / "new/model"), ElementsAre("config.json", "model.safetensors"));
  const auto config = ReadGpt2Config(folder / "new/model");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->DebugString(), spec.DebugString());
  const auto reader = Gpt2FolderReader::Open(folder / "new/model", spec);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(ReadWhole(**reader, space.size()), values);
}

TEST(Gpt2FolderTest, EveryRangeIsTheSameAsTheWhole) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  const std::vector<float> values = RandomValues(SpaceOf(spec).size());
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "m").ok());
  const auto reader = *Gpt2FolderReader::Open(folder / "m", spec);
  std::mt19937 random(4);
  for (int i = 0; i < 3000; ++i) {
    const uint64_t first = random() % (values.size() + 1);
    const uint64_t n = random() % (std::min<uint64_t>(values.size() - first, i % 2 == 0 ? 20 : 500) + 1);
    std::vector<float> got(n);
    ASSERT_TRUE(reader->Read(first, absl::MakeSpan(got)).ok());
    ASSERT_EQ(got, std::vector<float>(values.begin() + first, values.begin() + first + n)) << first << " " << n;
  }
  std::vector<float> past(2);
  EXPECT_TRUE(absl::IsOutOfRange(reader->Read(values.size() - 1, absl::MakeSpan(past))));
}

// The file's layout, element by element: c_attn [C, 3C] holds q, k, v side by side, as [in, out].
TEST(Gpt2FolderTest, ExportHasHuggingFaceLayout) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  const ParameterSpace space = SpaceOf(spec);
  const std::vector<float> values = RandomValues(space.size());
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "m").ok());
  const auto file = *SafetensorsFile::Open(folder / "m/model.safetensors");
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->tensors().size(), 2u + 12 * 2 + 2);
  const auto ours = [&](const std::string& name, uint64_t i) { return values[space.Find(name)->offset + i]; };
  const uint64_t c = 6;
  const std::vector<float> attn = Floats(*file, "h.1.attn.c_attn.weight"), bias = Floats(*file, "h.1.attn.c_attn.bias");
  const std::vector<float> proj = Floats(*file, "h.1.attn.c_proj.weight"), fc = Floats(*file, "h.1.mlp.c_fc.weight");
  const std::vector<float> out = Floats(*file, "h.1.mlp.c_proj.weight");
  EXPECT_THAT(file->Find("h.1.attn.c_attn.weight")->shape, ElementsAre(c, 3 * c));
  EXPECT_THAT(file->Find("h.1.mlp.c_fc.weight")->shape, ElementsAre(c, 4 * c));
  EXPECT_THAT(file->Find("h.1.mlp.c_proj.weight")->shape, ElementsAre(4 * c, c));
  const char* const parts[] = {"q", "k", "v"};
  for (uint64_t p = 0; p < 3; ++p) {
    const std::string name = std::string("h.1.attn.") + parts[p];
    for (uint64_t o = 0; o < c; ++o) {
      EXPECT_EQ(bias[p * c + o], ours(name + ".bias", o));
      for (uint64_t i = 0; i < c; ++i) EXPECT_EQ(attn[i * 3 * c + p * c + o], ours(name + ".weight", o * c + i));
    }
  }
  for (uint64_t i = 0; i < c * c; ++i) EXPECT_EQ(proj[i], ours("h.1.attn.proj.weight", i));
  for (uint64_t o = 0; o < 4 * c; ++o) {
    for (uint64_t i = 0; i < c; ++i) {
      EXPECT_EQ(fc[i * 4 * c + o], ours("h.1.mlp.fc.weight", o * c + i));
      EXPECT_EQ(out[o * c + i], ours("h.1.mlp.proj.weight", o * c + i));
    }
  }
  for (const char* name : {"h.0.ln_1.weight", "h.1.ln_2.bias", "ln_f.weight", "ln_f.bias"}) {
    const std::vector<float> in_file = Floats(*file, name);
    for (uint64_t i = 0; i < c; ++i) EXPECT_EQ(in_file[i], ours(name, i));
  }
  EXPECT_EQ(Floats(*file, "wte.weight")[7], ours("wte", 7));
  EXPECT_EQ(Floats(*file, "wpe.weight")[7], ours("wpe", 7));
  EXPECT_EQ(Floats(*file, "h.0.attn.c_proj.bias")[3], ours("h.0.attn.proj.bias", 3));
  EXPECT_EQ(Floats(*file, "h.0.mlp.c_proj.bias")[3], ours("h.0.mlp.proj.bias", 3));
  EXPECT_EQ(Floats(*file, "h.0.mlp.c_fc.bias")[3], ours("h.0.mlp.fc.bias", 3));
}

TEST(Gpt2FolderTest, ExportReplacesAnEarlierOneAndNothingElse) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  std::vector<float> values = RandomValues(SpaceOf(spec).size());
  ASSERT_TRUE(MakeDirectories(folder / "m").ok());  // an empty folder is fine
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "m/").ok());
  values[0] = 42;
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "m").ok());
  EXPECT_EQ(ReadWhole(**Gpt2FolderReader::Open(folder / "m", spec), values.size()), values);
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("m"));
  Spill(folder / "m/notes.txt", "mine");
  const absl::Status status = ExportGpt2(spec, values, folder / "m");
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("notes.txt"));
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("m"));
  values.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(ExportGpt2(spec, values, folder / "n")));
}

// Writes a folder like SmallSpec's with a change to its tensors and its config.
class DamagedFolderTest : public testing::Test {
 protected:
  using Tensors = std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>>;

  DamagedFolderTest() {
    EXPECT_TRUE(ExportGpt2(SmallSpec(), RandomValues(SpaceOf(SmallSpec()).size()), folder_ / "m").ok());
    const auto file = *SafetensorsFile::Open(folder_ / "m/model.safetensors");
    for (const SafetensorsTensor& t : file->tensors()) tensors_[t.name] = {t.shape, Floats(*file, t.name)};
    config_ = json::parse(Slurp(folder_ / "m/config.json"));
    whole_ = ReadWhole(**Gpt2FolderReader::Open(folder_ / "m", SmallSpec()), SpaceOf(SmallSpec()).size());
  }

  absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> Open() {
    std::vector<SafetensorsEntry> entries;
    std::string data;
    for (const auto& [name, tensor] : tensors_) {
      entries.push_back({name, tensor.first});
      data.append(reinterpret_cast<const char*>(tensor.second.data()), tensor.second.size() * sizeof(float));
    }
    std::string bytes = MakeSafetensorsPrefix(entries)->bytes + data;
    Spill(folder_ / "m/model.safetensors", bytes);
    Spill(folder_ / "m/config.json", config_.dump());
    return Gpt2FolderReader::Open(folder_ / "m", SmallSpec());
  }

  const TemporaryFolder folder_;
  Tensors tensors_;
  json config_;
  std::vector<float> whole_;
};

TEST_F(DamagedFolderTest, PrefixTiedHeadAndMasksMakeNoDifference) {
  Tensors prefixed;
  for (const auto& [name, tensor] : tensors_) prefixed["transformer." + name] = tensor;
  prefixed["lm_head.weight"] = prefixed["transformer.wte.weight"];
  prefixed["transformer.h.0.attn.bias"] = {{1, 1, 5, 5}, std::vector<float>(25, 1)};
  prefixed["transformer.h.0.attn.masked_bias"] = {{}, {-1e4f}};
  tensors_ = prefixed;
  const auto reader = Open();
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(ReadWhole(**reader, whole_.size()), whole_);
}

TEST_F(DamagedFolderTest, MissingTensor) {
  tensors_.erase("h.1.attn.c_attn.weight");
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors"), HasSubstr("\"h.1.attn.c_attn.weight\" is missing"),
                                  HasSubstr("[6, 18]")));
}

TEST_F(DamagedFolderTest, WrongShape) {
  tensors_["h.0.mlp.c_fc.weight"].first = {24, 6};
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("h.0.mlp.c_fc.weight"), HasSubstr("expected F32 [6, 24]"),
                                  HasSubstr("found F32 [24, 6]")));
}

TEST_F(DamagedFolderTest, TensorTwiceOrUnknown) {
  tensors_["transformer.ln_f.bias"] = tensors_["ln_f.bias"];
  EXPECT_THAT(Text(Open().status()), HasSubstr("\"ln_f.bias\" is there with and without the prefix"));
  tensors_.erase("transformer.ln_f.bias");
  tensors_["h.2.ln_1.bias"] = tensors_["h.1.ln_1.bias"];
  EXPECT_THAT(Text(Open().status()), HasSubstr("\"h.2.ln_1.bias\" does not belong"));
}

TEST_F(DamagedFolderTest, OtherDtype) {
  ASSERT_TRUE(Open().ok());
  const std::string path = folder_ / "m/model.safetensors";
  std::string bytes = Slurp(path);
  bytes.replace(bytes.find("F32"), 3, "I32");
  Spill(path, bytes);
  const absl::Status status = Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("found I32"), HasSubstr("convert the model to float32")));
}

TEST_F(DamagedFolderTest, ConfigsThatDifferOrAreNotSupported) {
  const struct {
    const char* key;
    json value;
    const char* message;
  } cases[] = {
      {"n_layer", 3, "n_layer is 3, but the job's model.gpt2.layers is 2"},
      {"n_head", 3, "n_head is 3, but the job's model.gpt2.heads is 2"},
      {"n_head", 4, "does not divide n_embd"},
      {"n_head", 0, "expected a whole number from 1 to 6"},
      {"vocab_size", 12, "model.gpt2.vocabulary is 11"},
      {"vocab_size", "11", "vocab_size is \"11\""},
      {"n_positions", -5, "n_positions is -5"},
      {"n_embd", 6.5, "n_embd is 6.5"},
      {"layer_norm_epsilon", 1e-6, "layer_norm_epsilon is 1e-06"},
      {"layer_norm_epsilon", 0, "expected a number between 0 and 1"},
      {"activation_function", "relu", "activation_function is \"relu\", supported is"},
      {"n_inner", 25, "n_inner is 25"},
      {"model_type", "llama", "model_type is \"llama\""},
      {"tie_word_embeddings", false, "tie_word_embeddings is false"},
      {"scale_attn_by_inverse_layer_idx", true, "scale_attn_by_inverse_layer_idx is true"},
  };
  const json good = config_;
  for (const auto& c : cases) {
    config_ = good;
    config_[c.key] = c.value;
    const absl::Status status = Open().status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << c.key << ": " << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("config.json"), HasSubstr(c.message)));
  }
  config_ = good;
  config_["n_inner"] = 24;
  config_["activation_function"] = "gelu_pytorch_tanh";
  EXPECT_TRUE(Open().ok());
  config_.erase("n_layer");
  EXPECT_THAT(Text(Open().status()), HasSubstr("n_layer is missing"));
}

TEST_F(DamagedFolderTest, BrokenAndMissingFiles) {
  Spill(folder_ / "m/config.json", "{\"n_layer\": 2,");
  EXPECT_TRUE(absl::IsDataLoss(ReadGpt2Config(folder_ / "m").status()));
  Spill(folder_ / "m/config.json", "[]");
  EXPECT_TRUE(absl::IsDataLoss(ReadGpt2Config(folder_ / "m").status()));
  ASSERT_TRUE(Open().ok());
  Spill(folder_ / "m/model.safetensors", Slurp(folder_ / "m/model.safetensors").substr(0, 3000));
  EXPECT_TRUE(absl::IsDataLoss(Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status()));
  for (const char* name : {"model.safetensors", "config.json"}) {
    ASSERT_TRUE(RemoveTree(folder_ / (std::string("m/") + name)).ok());
    const absl::Status status = Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status();
    EXPECT_TRUE(absl::IsNotFound(status));
    EXPECT_THAT(Text(status), HasSubstr(name));
  }
}

TEST(Gpt2FolderTest, RealFolders) {
  const std::string shared = SharedFolder();
  if (shared.empty()) GTEST_SKIP() << "SKIPPED: no shared folder";
  const struct {
    const char *config, *model;
    bool prefixed;
  } cases[] = {{"synth/synth_gpt2_config.json", "synth/synth_gpt2_model.safetensors", true},
               {"synth/synth_gpt2_config.json", "synth/synth_gpt2_noprefix_model.safetensors", false},
               {"ckpt/tiny_gpt2_config.json", "ckpt/tiny_gpt2_model.safetensors", false}};
  std::vector<float> first;
  for (const auto& c : cases) {
    const TemporaryFolder folder;
    ASSERT_TRUE(MakeDirectories(folder / "in").ok());
    Spill(folder / "in/config.json", Slurp(shared + "/data/" + c.config));
    Spill(folder / "in/model.safetensors", Slurp(shared + "/data/" + c.model));
    const auto spec = ReadGpt2Config(folder / "in");
    ASSERT_TRUE(spec.ok()) << spec.status();
    const auto reader = Gpt2FolderReader::Open(folder / "in", *spec);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const std::vector<float> values = ReadWhole(**reader, SpaceOf(*spec).size());
    ASSERT_TRUE(ExportGpt2(*spec, values, folder / "out").ok());
    EXPECT_EQ(ReadWhole(**Gpt2FolderReader::Open(folder / "out", *spec), values.size()), values);
    // What was read and written again is the original, tensor by tensor.
    const auto in = *SafetensorsFile::Open(folder / "in/model.safetensors");
    const auto out = *SafetensorsFile::Open(folder / "out/model.safetensors");
    for (const SafetensorsTensor& tensor : out->tensors()) {
      const std::string name = (c.prefixed ? "transformer." : "") + tensor.name;
      ASSERT_NE(in->Find(name), nullptr) << name;
      EXPECT_EQ(in->Find(name)->shape, tensor.shape);
      EXPECT_EQ(Floats(*in, name), Floats(*out, tensor.name)) << name;
    }
  }
}

}  // namespace
}  // namespace sluice
