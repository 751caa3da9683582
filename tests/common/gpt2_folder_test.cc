#include "common/gpt2_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "common/file.h"
#include "nlohmann/json.hpp"
#include "tests/common/gpt2_fixture.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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

// config.json names the dropout of a model's training; what is read back is what the model is.
TEST(Gpt2FolderTest, DropoutGoesOutAndDoesNotComeIn) {
  const TemporaryFolder folder;
  v1::Gpt2Spec spec = SmallSpec();
  const std::vector<float> values = RandomValues(SpaceOf(spec).size());
  for (const double dropout : {0.0, 0.125}) {
    if (dropout > 0) spec.set_dropout(dropout);
    ASSERT_TRUE(ExportGpt2(spec, values, folder / "m").ok());
    const nlohmann::json config = nlohmann::json::parse(Slurp(folder / "m/config.json"));
    for (const char* key : {"embd_pdrop", "attn_pdrop", "resid_pdrop"}) EXPECT_EQ(config[key], dropout) << key;
    EXPECT_FALSE(ReadGpt2Config(folder / "m")->has_dropout());
  }
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
