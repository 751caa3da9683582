#include "client/model_files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "client/spec_loading.h"
#include "common/checkpoint.h"
#include "common/checkpoint_manifest.h"
#include "common/job_spec.h"
#include "common/layout.h"
#include "common/philox.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

class ModelFiles : public testing::Test {
 protected:
  // A published checkpoint of a small model with initial values of the seed; its folder.
  std::string Publish(const v1::ModelSpec& model, uint64_t version, uint64_t seed) const {
    const std::string base = (folder_ / "run/checkpoints/job-1").string();
    v1::CheckpointManifest manifest;
    manifest.set_format_version(kCheckpointFormatVersion);
    manifest.set_job_id("job-1");
    manifest.set_timeline(1);
    manifest.set_version(version);
    manifest.set_shards(1);
    manifest.add_slots("value");
    manifest.set_created_unix_seconds(1000.0 + static_cast<double>(version));
    *manifest.mutable_spec()->mutable_model() = model;
    auto space = MakeParameterSpace(model);
    EXPECT_TRUE(space.ok()) << space.status();
    std::vector<float> values(space->size());
    for (const Tensor& tensor : space->tensors()) {
      FillInitial(tensor, seed, 0, tensor.elements, values.data() + tensor.offset);
    }
    manifest.set_parameters(space->size());
    manifest.set_chunk_elements(space->size());
    auto writer = ShardFileWriter::Create(base + "/" + StagingFolderName(1, version) + "/" + ShardFileName(0, 1),
                                          {{"value", 0, space->size()}});
    EXPECT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE((*writer)->Write("value", 0, values).ok());
    auto file = (*writer)->Finish();
    EXPECT_TRUE(file.ok()) << file.status();
    *manifest.add_files() = *file;
    auto published = PublishCheckpoint(base, manifest);
    EXPECT_TRUE(published.ok()) << published.status();
    return published.ok() ? *published : "";
  }
  static v1::ModelSpec Bytes() {
    v1::ModelSpec model;
    v1::Gpt2Spec* gpt2 = model.mutable_gpt2();
    gpt2->set_layers(2);
    gpt2->set_heads(2);
    gpt2->set_width(16);
    gpt2->set_context(8);
    gpt2->set_vocabulary(256);
    gpt2->set_layer_norm_epsilon(1e-5);
    return model;
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

std::vector<int32_t> Drawn(LoadedModel* model, const SampleOptions& options) {
  std::vector<int32_t> tokens;
  EXPECT_TRUE(Sample(model, {'a'}, options, [&](int32_t token) {
                tokens.push_back(token);
                return true;
              }).ok());
  return tokens;
}

TEST_F(ModelFiles, AnExportHasTheCheckpointsLogits) {
  const std::string checkpoint = Publish(Bytes(), 4, 1), target = (folder_ / "export").string();
  ASSERT_TRUE(ExportModel(checkpoint, target).ok());
  auto a = LoadedModel::Load(checkpoint, 1), b = LoadedModel::Load(target, 1);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_TRUE((*a)->bytes());
  EXPECT_TRUE((*b)->bytes());
  // More tokens than the context holds: the last ones count.
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const auto logits = (*a)->Logits(tokens), exported = (*b)->Logits({tokens.begin() + 3, tokens.end()});
  ASSERT_TRUE(logits.ok()) << logits.status();
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(logits->size(), 256u);
  EXPECT_EQ(*logits, *exported);
  EXPECT_EQ(ExportModel(checkpoint, target).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ((*a)->Logits({256}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*a)->Logits({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ModelFiles, AFolderIsConvertedByExportingIt) {
  const std::string checkpoint = Publish(Bytes(), 4, 1);
  const auto path = [&](const char* name) { return (folder_ / name).string(); };
  ASSERT_TRUE(ExportModel(checkpoint, path("wide")).ok());
  ASSERT_TRUE(ExportModel(path("wide"), path("brain"), {.format = FloatFormat::kBF16, .max_shard_bytes = 4000}).ok());
  ASSERT_TRUE(ExportModel(checkpoint, path("same"), {.format = FloatFormat::kBF16, .max_shard_bytes = 4000}).ok());
  EXPECT_TRUE(fs::exists(folder_ / "brain/model.safetensors.index.json"));
  const auto a = LoadedModel::Load(path("brain"), 1), b = LoadedModel::Load(path("same"), 1);
  const auto wide = LoadedModel::Load(path("wide"), 1);
  ASSERT_TRUE(a.ok() && b.ok() && wide.ok());
  const auto rounded = (*a)->Logits({1, 2, 3});
  EXPECT_EQ(*rounded, *(*b)->Logits({1, 2, 3}));
  EXPECT_NE(*rounded, *(*wide)->Logits({1, 2, 3}));
}

// Hugging Face exports with logits computed in float64.
TEST_F(ModelFiles, LogitsOfImportedFoldersEqualTheReferences) {
  const char* const given = std::getenv("SLUICE_SHARED");
  const fs::path data = fs::path(given != nullptr ? given : SLUICE_SOURCE_DIR "/../shared") / "data";
  if (!fs::exists(data)) GTEST_SKIP() << "SKIPPED: no shared folder";
  const struct {
    const char *base, *weights, *logits;
  } cases[] = {{"synth/synth_gpt2_", "model.safetensors", "logits"},
               {"synth/synth_gpt2_", "noprefix_model.safetensors", "logits"},
               {"ckpt/tiny_gpt2_", "model.safetensors", "logits_tied"}};
  for (const auto& c : cases) {
    const std::string base = (data / c.base).string(), folder = (folder_ / "imported").string();
    fs::remove_all(folder);
    fs::create_directories(folder);
    fs::copy(base + "config.json", folder + "/config.json");
    fs::copy(base + c.weights, folder + "/model.safetensors");
    const auto model = LoadedModel::Load(folder, 1);
    ASSERT_TRUE(model.ok()) << model.status();
    const auto reference = nlohmann::json::parse(std::ifstream(base + "reference.json"));
    std::vector<int32_t> tokens;
    for (const auto& expected : reference[c.logits]) {
      tokens.push_back(reference["input_ids"][tokens.size()]);
      const auto logits = (*model)->Logits(tokens);
      ASSERT_TRUE(logits.ok()) << logits.status();
      ASSERT_EQ(logits->size(), expected.size());
      for (size_t i = 0; i < logits->size(); ++i) {
        ASSERT_TRUE(std::isfinite((*logits)[i]));
        ASSERT_NEAR((*logits)[i], expected[i].get<double>(), 1e-5) << c.weights << " " << tokens.size() << " " << i;
      }
    }
    EXPECT_GE(tokens.size(), 8u);
  }
}

TEST_F(ModelFiles, SamplesRepeatBySeed) {
  auto model = LoadedModel::Load(Publish(Bytes(), 4, 1), 1);
  ASSERT_TRUE(model.ok()) << model.status();
  SampleOptions options;
  options.tokens = 40;
  const std::vector<int32_t> first = Drawn(model->get(), options);
  EXPECT_EQ(first.size(), 40u);
  EXPECT_EQ(Drawn(model->get(), options), first);
  options.seed = 2;
  EXPECT_NE(Drawn(model->get(), options), first);
  options.temperature = 0;
  const std::vector<int32_t> greedy = Drawn(model->get(), options);
  options.seed = 3;
  EXPECT_EQ(Drawn(model->get(), options), greedy);
}

TEST_F(ModelFiles, TheNewestCheckpointOfARun) {
  EXPECT_FALSE(CheckpointFolder((folder_ / "run").string()).ok());
  const std::string old = Publish(Bytes(), 4, 1), newest = Publish(Bytes(), 10, 2);
  for (const char* what : {"run", "run/checkpoints/job-1"}) {
    auto found = CheckpointFolder((folder_ / what).string());
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, newest);
  }
  EXPECT_EQ(*CheckpointFolder(old), old);
}

TEST_F(ModelFiles, WhatCannotBeExportedOrSampled) {
  v1::ModelSpec mlp;
  mlp.mutable_mlp()->set_inputs(3);
  mlp.mutable_mlp()->set_classes(2);
  const std::string folder = Publish(mlp, 4, 1);
  auto model = LoadedModel::Load(folder, 1);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->Logits({0}).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(LoadedModel::Load(folder_.string(), 1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelFiles, AFlippedByteIsFound) {
  const std::string folder = Publish(Bytes(), 4, 1), file = folder + "/" + ShardFileName(0, 1);
  std::fstream edit(file, std::ios::in | std::ios::out | std::ios::binary);
  edit.seekp(-5, std::ios::end);
  edit.put('\x55');
  edit.close();
  const absl::Status status = ExportModel(folder, (folder_ / "out").string());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST(DrawToken, SharesFollowTheLogits) {
  const std::vector<float> logits = {0, std::log(3.0f), -std::numeric_limits<float>::infinity()};
  EXPECT_EQ(DrawToken(logits, 1, 0.0), 0);
  EXPECT_EQ(DrawToken(logits, 1, 0.249), 0);
  EXPECT_EQ(DrawToken(logits, 1, 0.251), 1);
  EXPECT_EQ(DrawToken(logits, 1, 0.9999999), 1);
  EXPECT_EQ(DrawToken(logits, 0, 0.0), 1);
  EXPECT_EQ(DrawToken({std::nanf(""), std::nanf("")}, 1, 0.5), 0);
  EXPECT_EQ(DrawToken({std::nanf(""), 1}, 1, 0.0), 1);
}

}  // namespace
}  // namespace sluice
