// Classifiers from the client's side: specs made from data alone, a resumed table, exports as other programs read them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "client/default_specs.h"
#include "client/model_files.h"
#include "client/spec_loading.h"
#include "common/checkpoint.h"
#include "common/classifier_folder.h"
#include "common/job_spec.h"
#include "common/model_layout.h"
#include "common/safetensors.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

class Classifiers : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }
  // `rows` rows of two features in `classes` classes.
  std::string Table(const std::string& name, int rows, int classes) const {
    std::string bytes = "a,b,y\n";
    for (int i = 0; i < rows; ++i) {
      bytes += std::to_string(i % 7) + "," + std::to_string(i % 11) + ",c" + std::to_string(i % classes) + "\n";
    }
    return Write(name, bytes);
  }
  static v1::DataSpec Csv(const std::string& path) {
    v1::DataSpec data;
    data.mutable_csv()->set_path(path);
    data.mutable_csv()->set_label("y");
    return data;
  }
  // A checkpoint of the spec whose parameter i is i.
  std::string Publish(const v1::JobSpec& spec) const {
    const std::string base = (folder_ / "checkpoints").string();
    v1::CheckpointManifest manifest;
    manifest.set_job_id("job-1");
    manifest.set_timeline(1);
    manifest.set_version(3);
    manifest.set_shards(1);
    manifest.add_slots("value");
    *manifest.mutable_spec() = spec;
    std::vector<float> values(MakeParameterSpace(spec.model())->size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    manifest.set_parameters(values.size());
    manifest.set_chunk_elements(values.size());
    auto writer = ShardFileWriter::Create(base + "/" + StagingFolderName(1, 3) + "/" + ShardFileName(0, 1),
                                          {{"value", 0, values.size()}});
    EXPECT_TRUE(writer.ok() && (*writer)->Write("value", 0, values).ok());
    *manifest.add_files() = *(*writer)->Finish();
    return PublishCheckpoint(base, manifest).value();
  }
  nlohmann::json Config(const std::string& folder) const {
    std::ifstream in(folder + "/config.json");
    return nlohmann::json::parse(in);
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

TEST_F(Classifiers, SpecsAreMadeFromTheData) {
  const struct {
    int rows, classes;
    v1::ModelSpec::KindCase kind;
    uint32_t batch;
    uint64_t rounds;
    std::string description;
  } cases[] = {
      {150, 3, v1::ModelSpec::kSoftmax, 8, 60 * 135 / 8,
       "135 training samples of 2 features in 3 classes, 15 held out"},
      {150, 2, v1::ModelSpec::kLogistic, 8, 60 * 135 / 8,
       "135 training samples of 2 features in 2 classes, 15 held out"},
      {2000, 2, v1::ModelSpec::kMlp, 64, 60 * 1800 / 64,
       "1800 training samples of 2 features in 2 classes, 200 held out"},
      {1, 1, v1::ModelSpec::kLogistic, 1, 200,
       "1 training samples of 2 features in 1 class (nothing to tell apart), 0 held out"},
  };
  for (const auto& c : cases) {
    const auto made = DefaultClassifierSpec(Csv(Table("My Table.v2.csv", c.rows, c.classes)), {});
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->spec.model().kind_case(), c.kind);
    EXPECT_EQ(made->spec.train().batch(), c.batch);
    EXPECT_EQ(made->spec.train().rounds(), c.rounds);
    EXPECT_EQ(made->spec.name(), "my-table");
    EXPECT_EQ(made->description, c.description);
    EXPECT_FALSE(made->spec.data().csv().has_schema()) << "a spec to keep says nothing of these data";
    // The printed spec is one that loads, and means the same job.
    SpecSource base, printed;
    base.base = &made->spec;
    printed.path = Write("printed.yaml", made->yaml);
    const auto loaded = LoadSpec(base, DataPaths::kOfFile), reloaded = LoadSpec(printed, DataPaths::kOfFile);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ASSERT_TRUE(reloaded.ok()) << reloaded.status();
    EXPECT_EQ(JobSpecToYaml(*loaded), JobSpecToYaml(*reloaded));
  }
}

TEST_F(Classifiers, SetsHoldWhileTheSpecIsMade) {
  const std::string path = Write("t.csv", "a;y\n1;k\n2;l\n");
  EXPECT_FALSE(DefaultClassifierSpec(Csv(path), {}).ok());
  const auto made = DefaultClassifierSpec(Csv(path), {"data.csv.delimiter=;", "train.rounds=7"});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_NE(made->yaml.find("delimiter: \";\""), std::string::npos) << made->yaml;
  EXPECT_NE(made->yaml.find("rounds: 7"), std::string::npos) << made->yaml;
  const auto wrong = DefaultClassifierSpec(Csv(path), {"data.csv.delimitr=;"});
  EXPECT_NE(wrong.status().message().find("--set data.csv.delimitr"), absl::string_view::npos) << wrong.status();
}

TEST_F(Classifiers, ImagesGetAnMlp) {
  std::string images("\0\0\x08\x03\0\0\0\x28\0\0\0\x02\0\0\0\x03", 16), labels("\0\0\x08\x01\0\0\0\x28", 8);
  for (int i = 0; i < 40; ++i) {
    images += std::string(6, static_cast<char>(i));
    labels.push_back(static_cast<char>(i % 4));
  }
  v1::DataSpec data;
  data.mutable_idx()->set_images(Write("train-images.gz", images));
  data.mutable_idx()->set_labels(Write("labels", labels));
  const auto made = DefaultClassifierSpec(data, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->spec.model().mlp().hidden(0), 256u);
  EXPECT_EQ(made->spec.train().batch(), 2u);
  EXPECT_EQ(made->spec.name(), "train-images");
  EXPECT_EQ(made->description, "36 training samples of 6 features in 4 classes, 4 held out");
}

TEST_F(Classifiers, AJobThatBeginsFromACheckpointKeepsItsSchema) {
  const std::string path = Table("t.csv", 200, 2);
  const auto made = DefaultClassifierSpec(Csv(path), {});
  ASSERT_TRUE(made.ok()) << made.status();
  SpecSource source;
  source.base = &made->spec;
  const auto first = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string checkpoint = Publish(*first);
  // More rows, other means.
  Write("t.csv", "a,b,y\n1000,0,c0\n2000,5,c1\n");
  const auto anew = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_NE(anew->data().csv().schema().mean(0), first->data().csv().schema().mean(0));
  source.init.emplace().set_path(checkpoint);
  const auto resumed = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->data().csv().schema().SerializeAsString(), first->data().csv().schema().SerializeAsString());
  source.init.reset();
  source.sets = {"init.path=" + checkpoint};
  EXPECT_EQ(LoadSpec(source, DataPaths::kOfFile)->data().csv().schema().mean(0), first->data().csv().schema().mean(0));
  Write("t.csv", "a,b,y\n1,0,c0\n2,5,other\n");
  const auto refused = LoadSpec(source, DataPaths::kOfFile);
  EXPECT_NE(refused.status().message().find("t.csv:3: label \"other\" is not among the classes"),
            absl::string_view::npos)
      << refused.status();
}

TEST_F(Classifiers, ExportsHavePyTorchsNames) {
  const struct {
    std::string model;
    std::vector<std::pair<std::string, std::vector<uint64_t>>> tensors;
    std::vector<float> first;  // elements of the tensors
  } cases[] = {
      {"model.mlp={hidden: [5, 4]}",
       {{"0.bias", {5}},
        {"0.weight", {5, 2}},
        {"2.bias", {4}},
        {"2.weight", {4, 5}},
        {"4.bias", {3}},
        {"4.weight", {3, 4}}},
       {0, 5, 15, 19, 39, 42}},
      {"model.softmax={}", {{"bias", {3}}, {"weight", {3, 2}}}, {0, 3}},
  };
  for (const auto& c : cases) {
    auto made = DefaultClassifierSpec(Csv(Table("t.csv", 90, 3)), {});
    ASSERT_TRUE(made.ok()) << made.status();
    SpecSource source;
    source.base = &made->spec;
    source.sets = {c.model};
    const auto spec = LoadSpec(source, DataPaths::kOfFile);
    ASSERT_TRUE(spec.ok()) << spec.status();
    fs::remove_all(folder_ / "checkpoints");
    const std::string checkpoint = Publish(*spec), target = (folder_ / ("export-" + c.model.substr(6, 3))).string();
    const absl::Status exported = ExportModel(checkpoint, target);
    ASSERT_TRUE(exported.ok()) << exported;
    const auto file = SafetensorsFile::Open(target + "/model.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ((*file)->tensors().size(), c.tensors.size());
    for (size_t i = 0; i < c.tensors.size(); ++i) {
      const SafetensorsTensor* tensor = (*file)->Find(c.tensors[i].first);
      ASSERT_NE(tensor, nullptr) << c.tensors[i].first;
      EXPECT_EQ(tensor->shape, c.tensors[i].second);
      float value = -1;
      ASSERT_TRUE((*file)->ReadFloats(*tensor, 0, absl::MakeSpan(&value, 1)).ok());
      EXPECT_EQ(value, c.first[i]) << tensor->name;
    }
    const nlohmann::json config = Config(target);
    EXPECT_EQ(config["labels"], nlohmann::json({"c0", "c1", "c2"}));
    EXPECT_EQ(config["features"], nlohmann::json({"a", "b"}));
    EXPECT_EQ(config["inputs"], 2);
    EXPECT_EQ(config["outputs"], 3);
    EXPECT_EQ(config["output_activation"], "softmax");
    EXPECT_EQ(config["standardization"]["mean"][0].get<double>(), spec->data().csv().schema().mean(0));
    EXPECT_EQ(config["standardization"]["deviation"][1].get<double>(), spec->data().csv().schema().deviation(1));
    EXPECT_FALSE(config.contains("scale"));
    EXPECT_EQ(ExportModel(checkpoint, target).code(), absl::StatusCode::kAlreadyExists);
  }
}

TEST_F(Classifiers, ExportsOfLogisticRegressionAndOfImages) {
  v1::JobSpec spec;
  spec.mutable_model()->mutable_logistic()->set_inputs(2);
  spec.mutable_data()->mutable_csv()->set_standardize(false);
  for (const char* label : {"no", "yes"}) spec.mutable_data()->mutable_csv()->mutable_schema()->add_labels(label);
  const std::string logistic = (folder_ / "logistic").string(), images = (folder_ / "images").string();
  ASSERT_TRUE(ExportClassifier(spec, std::vector<float>{1, 2, 3}, logistic).ok());
  nlohmann::json config = Config(logistic);
  EXPECT_EQ(config["model_type"], "logistic");
  EXPECT_EQ(config["outputs"], 1);
  EXPECT_EQ(config["output_activation"], "sigmoid");
  EXPECT_EQ(config["labels"], nlohmann::json({"no", "yes"}));
  EXPECT_FALSE(config.contains("standardization"));

  spec.mutable_model()->mutable_softmax()->set_inputs(2);
  spec.mutable_model()->mutable_softmax()->set_classes(2);
  spec.mutable_data()->mutable_idx();
  ASSERT_TRUE(ExportClassifier(spec, std::vector<float>(6), images).ok());
  config = Config(images);
  EXPECT_EQ(config["scale"].get<double>(), 1.0 / 255);
  EXPECT_EQ(config["labels"], nlohmann::json({"0", "1"}));

  EXPECT_FALSE(ExportClassifier(spec, std::vector<float>(5), (folder_ / "x").string()).ok());
  spec.mutable_model()->mutable_gpt2();
  EXPECT_FALSE(ExportClassifier(spec, std::vector<float>(6), (folder_ / "x").string()).ok());
  EXPECT_FALSE(fs::exists(folder_ / "x"));
}

}  // namespace
}  // namespace sluice
