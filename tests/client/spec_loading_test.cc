#include "client/spec_loading.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "common/gpt2_folder.h"
#include "common/job_spec.h"
#include "common/model_layout.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

class SpecLoading : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "sluice-spec-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = fs::canonical(name);
    before_ = fs::current_path();
    fs::create_directories(folder_ / "cwd");
    fs::create_directories(folder_ / "specs");
    fs::current_path(folder_ / "cwd");
  }
  void TearDown() override {
    fs::current_path(before_);
    fs::remove_all(folder_);
  }
  std::string Write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  std::string WriteSpec(const std::string& data,
                        const std::string& model = "{gpt2: {layers: 1, heads: 1, width: 8, context: 4}}") {
    return Write("specs/job.yaml", "name: job\nmodel: " + model + "\ndata: " + data +
                                       "\ntrain: {rounds: 10, batch: 2}\noptimizer: {sgd: {learning_rate: 0.1}}\n");
  }
  static SpecSource From(const std::string& path, std::vector<std::string> sets = {}) {
    SpecSource source;
    source.path = path;
    source.sets = std::move(sets);
    return source;
  }

  fs::path folder_, before_;
};

// A GPT-2 folder of 2 layers, width 8, context 6 and vocabulary 256 at `name`.
class InitLoading : public SpecLoading {
 protected:
  static v1::Gpt2Spec Model() {
    v1::Gpt2Spec model;
    model.set_layers(2);
    model.set_heads(4);
    model.set_width(8);
    model.set_context(6);
    model.set_vocabulary(256);
    model.set_layer_norm_epsilon(1e-6);
    return model;
  }
  // As a spec has it that leaves the rest open.
  static std::string Filled() {
    v1::Gpt2Spec model = Model();
    model.set_scaled_residual_init(true);
    return model.DebugString();
  }
  std::string Export(const std::string& name) const {
    v1::ModelSpec model;
    *model.mutable_gpt2() = Model();
    const std::vector<float> values(MakeParameterSpace(model)->size(), 0.5f);
    EXPECT_TRUE(ExportGpt2(Model(), values, (folder_ / name).string()).ok());
    return (folder_ / name).string();
  }
  SpecSource Init(const std::string& model, const std::string& path) {
    SpecSource source = From(WriteSpec("{text: {path: in.txt}}", model));
    source.init.emplace().set_path(path);
    return source;
  }
  void ExpectFault(const SpecSource& source, absl::StatusCode code, const std::string& message) {
    const absl::Status status = LoadSpec(source, DataPaths::kOfFile).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
};

TEST_F(InitLoading, MissingSizesComeFromTheFolder) {
  Write("specs/in.txt", "some text to learn, long enough");
  const std::string folder = Export("cwd/gpt2");
  for (const char* model : {"{gpt2: {}}", "{gpt2: {width: 8}}", "{gpt2: {layers: 2, heads: 4, vocabulary: 256}}"}) {
    for (const DataPaths paths : {DataPaths::kOfFile, DataPaths::kOfCluster}) {
      const auto spec = LoadSpec(Init(model, "gpt2"), paths);
      ASSERT_TRUE(spec.ok()) << spec.status();
      EXPECT_EQ(spec->model().gpt2().DebugString(), Filled());
      EXPECT_EQ(spec->init().path(), folder);
    }
  }
  // By the spec's own init.path, from the file's folder; and without a model.
  Export("specs/beside");
  const std::string file = Write("specs/own.yaml",
                                 "name: own\ndata: {text: {path: in.txt}}\ntrain: {rounds: 10, batch: 2}\n"
                                 "optimizer: {sgd: {learning_rate: 0.1}}\ninit: {path: beside}\n");
  const auto own = LoadSpec(From(file), DataPaths::kOfFile);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->model().gpt2().DebugString(), Filled());
  EXPECT_EQ(own->init().path(), (folder_ / "specs/beside").string());
  // The default text model takes the folder's sizes as a whole.
  SpecSource text;
  text.text = (folder_ / "specs/in.txt").string();
  text.init.emplace().set_path(folder);
  const auto by_text = LoadSpec(text, DataPaths::kOfFile);
  ASSERT_TRUE(by_text.ok()) << by_text.status();
  EXPECT_EQ(by_text->model().gpt2().DebugString(), Filled());
  text.sets = {"model.gpt2.layers=3"};
  ExpectFault(text, absl::StatusCode::kInvalidArgument, "n_layer is 2, but the job's model.gpt2.layers is 3");
}

TEST_F(InitLoading, WhatDoesNotFitIsFoundBeforeTheJobIsSubmitted) {
  Write("specs/in.txt", "some text to learn, long enough");
  const std::string folder = Export("cwd/gpt2");
  const auto invalid = absl::StatusCode::kInvalidArgument;
  ExpectFault(Init("{gpt2: {heads: 2}}", "gpt2"), invalid, "n_head is 4, but the job's model.gpt2.heads is 2");
  ExpectFault(Init("{mlp: {hidden: [3]}}", "gpt2"), invalid, "the model is of another kind");
  ExpectFault(Init("{gpt2: {}}", "nowhere"), absl::StatusCode::kNotFound, "nowhere: no such folder");
  ExpectFault(Init("{gpt2: {}}", folder_.string()), absl::StatusCode::kNotFound, "no GPT-2 folder (no config.json)");
  const std::string weights = folder + "/model.safetensors";
  Write("cwd/gpt2/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n");
  ExpectFault(Init("{gpt2: {}}", "gpt2"), invalid, "init.path: " + weights);
  ExpectFault(Init("{gpt2: {}}", "gpt2"), invalid, "Git LFS pointer");
  Write("cwd/gpt2/config.json", "{");
  ExpectFault(Init("{gpt2: {}}", "gpt2"), invalid, "config.json: expected JSON");
  // What a resume replaces is not looked at.
  SpecSource resumed = Init("{gpt2: {layers: 1, heads: 1, width: 8, context: 4}}", "gpt2");
  resumed.init->set_resume(true);
  EXPECT_TRUE(LoadSpec(resumed, DataPaths::kOfFile).ok());
  resumed.sets = {"init.path=gpt2"};
  resumed.init.emplace();
  const auto without = LoadSpec(resumed, DataPaths::kOfFile);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_FALSE(without->has_init());
}

TEST_F(SpecLoading, RelativePathsStartAtTheFilesFolder) {
  Write("specs/in.txt", "some text to learn");
  auto spec = LoadSpec(From(WriteSpec("{text: {path: in.txt}}")), DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().text().path(), (folder_ / "specs/in.txt").string());
  EXPECT_EQ(spec->model().gpt2().vocabulary(), 256u);  // filled in
  EXPECT_EQ(spec->train().eval_every(), 1u);
}

TEST_F(SpecLoading, ElseAtTheWorkingFolderAsSetsDoAlways) {
  Write("cwd/in.txt", "some text to learn");
  const std::string path = WriteSpec("{text: {path: in.txt}}");
  auto spec = LoadSpec(From(path), DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().text().path(), (folder_ / "cwd/in.txt").string());
  Write("specs/in.txt", "another text here");
  spec = LoadSpec(From(path, {"data.text.path=in.txt", "train.rounds=77"}), DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().text().path(), (folder_ / "cwd/in.txt").string());
  EXPECT_EQ(spec->train().rounds(), 77u);
}

TEST_F(SpecLoading, ClusterPathsStayUnlessTheFileIsHere) {
  const std::string path = WriteSpec("{text: {path: in.txt}}");
  auto spec = LoadSpec(From(path), DataPaths::kOfCluster);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().text().path(), "in.txt");
  Write("cwd/in.txt", "some text to learn");
  spec = LoadSpec(From(path), DataPaths::kOfCluster);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().text().path(), (folder_ / "cwd/in.txt").string());
}

TEST_F(SpecLoading, DataDecidesSizes) {
  std::string images("\0\0\x08\x03\0\0\0\x04\0\0\0\x02\0\0\0\x03", 16);
  images += std::string(24, 'x');
  Write("specs/images", images);
  Write("specs/labels", std::string("\0\0\x08\x01\0\0\0\x04\0\1\2\3", 12));
  const std::string path = WriteSpec("{idx: {images: images, labels: labels}}", "{mlp: {hidden: [5]}}");
  auto spec = LoadSpec(From(path), DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->model().mlp().inputs(), 6u);
  EXPECT_EQ(spec->model().mlp().classes(), 4u);
  EXPECT_FALSE(LoadSpec(From(path, {"model.mlp.inputs=7"}), DataPaths::kOfFile).ok());
}

TEST_F(SpecLoading, ATableDecidesSizesAndSchema) {
  Write("specs/train.csv", "a,b,y\n1,10,k\n3,30,l\n");
  const std::string path = WriteSpec("{csv: {path: train.csv, label: y}, validation_fraction: 0}", "{softmax: {}}");
  auto spec = LoadSpec(From(path), DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().csv().path(), (folder_ / "specs/train.csv").string());
  EXPECT_EQ(spec->model().softmax().inputs(), 2u);
  EXPECT_EQ(spec->model().softmax().classes(), 2u);
  const v1::TableSchema& schema = spec->data().csv().schema();
  EXPECT_EQ(schema.features(1), "b");
  EXPECT_EQ(schema.labels(1), "l");
  EXPECT_EQ(schema.mean(1), 20);
  EXPECT_EQ(schema.deviation(1), 10);

  // What is printed is a spec that says the same.
  SpecSource printed = From(Write("cwd/printed.yaml", JobSpecToYaml(*spec)));
  const auto again = LoadSpec(printed, DataPaths::kOfCluster);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->SerializeAsString(), spec->SerializeAsString());

  // Errors of the data come through, and a cluster's file that is not here asks for the schema.
  Write("specs/train.csv", "a,b,y\n1,10,k\n3,,l\n");
  EXPECT_NE(LoadSpec(From(path), DataPaths::kOfFile).status().message().find("train.csv:3: column 2"),
            absl::string_view::npos);
  EXPECT_NE(LoadSpec(From(path, {"model.softmax={inputs: 2, classes: 2}", "data.csv.path=elsewhere.csv"}),
                     DataPaths::kOfCluster)
                .status()
                .message()
                .find("data.csv.schema: found none; the client fills it in where it can read the file"),
            absl::string_view::npos);
}

TEST_F(SpecLoading, MistakesNameTheirPlace) {
  auto message = [](const absl::StatusOr<v1::JobSpec>& spec) {
    EXPECT_FALSE(spec.ok());
    return std::string(spec.status().message());
  };
  EXPECT_NE(message(LoadSpec(From("absent.yaml"), DataPaths::kOfFile)).find("absent.yaml"), std::string::npos);
  EXPECT_NE(message(LoadSpec(From("spec.cfg"), DataPaths::kOfFile)).find("spec.cfg"), std::string::npos);
  EXPECT_NE(message(LoadSpec(From(Write("specs/bad.yaml", "nmae: x\n")), DataPaths::kOfFile)).find("bad.yaml:1:1"),
            std::string::npos);
  const std::string path = WriteSpec("{text: {path: in.txt}}");
  EXPECT_NE(message(LoadSpec(From(path), DataPaths::kOfFile)).find("specs/in.txt"), std::string::npos);
  Write("specs/in.txt", "abc");
  EXPECT_NE(message(LoadSpec(From(path), DataPaths::kOfFile)).find("3 bytes"), std::string::npos);
  EXPECT_NE(message(LoadSpec(From(path, {"train.batch=0"}), DataPaths::kOfFile)).find("train.batch"),
            std::string::npos);
  EXPECT_NE(message(LoadSpec(From(path, {"train.bach=1"}), DataPaths::kOfFile)).find("--set train.bach=1"),
            std::string::npos);
}

TEST_F(SpecLoading, ATextAloneIsAJob) {
  SpecSource source;
  source.text = Write("cwd/My Book.txt", std::string(1000, 'a'));
  auto spec = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "my-book");
  source.name = "other";
  spec = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->name(), "other");
}

TEST(JobName, LegalWhateverTheText) {
  EXPECT_EQ(JobNameFrom("My Book (2nd).v1"), "my-book-2nd-v1");
  EXPECT_EQ(JobNameFrom("..."), "job");
  EXPECT_EQ(JobNameFrom(std::string(100, 'A')).size(), 40u);
  EXPECT_EQ(JobNameFrom("\xc3\xa9t\xc3\xa9"), "t");
}

TEST_F(SpecLoading, SchedulerAddressInItsOrder) {
  std::map<std::string, std::string> variables;
  auto getenv = [&](const std::string& name) { return variables.count(name) ? variables[name] : std::string(); };
  auto address = [&](const std::string& flag) {
    auto found = FindScheduler(flag, getenv);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->address : "";
  };
  EXPECT_EQ(address(""), "127.0.0.1:7700");
  variables["HOME"] = folder_.string();
  EXPECT_EQ(address(""), "127.0.0.1:7700");
  Write(".config/sluice/config.yaml", "scheduler: config.example:1\n");
  EXPECT_EQ(address(""), "config.example:1");
  variables["SLUICE_SCHEDULER"] = "variable.example:2";
  EXPECT_EQ(address(""), "variable.example:2");
  EXPECT_EQ(address("flag.example"), "flag.example:7700");
  EXPECT_FALSE(FindScheduler("host:port", getenv).ok());
  EXPECT_FALSE(FindScheduler("host:0", getenv).ok());
  variables.erase("SLUICE_SCHEDULER");
  const std::string config = Write(".config/sluice/config.yaml", "sheduler: x\n");
  auto wrong = FindScheduler("", getenv);
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(std::string(wrong.status().message()).find(config + ":1:1: unknown setting 'sheduler'"), std::string::npos);
  Write(".config/sluice/config.yaml", "scheduler: [1, 2\n");
  EXPECT_FALSE(FindScheduler("", getenv).ok());
}

}  // namespace
}  // namespace sluice
