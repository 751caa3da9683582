#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "common/job_spec.h"
#include "common/mesh_rules.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr char kYaml[] = R"(name: kjv-small
model: {gpt2: {layers: 4, heads: 4, width: 128, context: 64}}
data: {text: {path: kjv.txt}}
train: {rounds: 2000, batch: 12}
optimizer: {adamw: {learning_rate: 1e-3}, schedule: {cosine: {warmup_rounds: 100}}}
)";

v1::JobSpec Parsed() {
  const auto spec = ParseJobSpec(kYaml, SpecFormat::kYaml, "job");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.value_or(v1::JobSpec());
}

v1::JobSpec Filled() {
  v1::JobSpec spec = Parsed();
  FillDefaults(&spec);
  return spec;
}

TEST(SpecValidateTest, AGoodSpecIsValid) { EXPECT_TRUE(ValidateJobSpec(Filled()).ok()) << ValidateJobSpec(Filled()); }

TEST(SpecValidateTest, EveryRuleIsCheckedByName) {
  const struct {
    const char* set;
    const char* error;
  } cases[] = {
      {"name=Upper", "name: found \"Upper\", allowed are 1 to 40 lower-case letters"},
      {"name=a23456789-123456789-123456789-123456789-1", "name: found"},
      {"model={}", "model: found no model, expected one of gpt2, mlp"},
      {"model.gpt2.layers=0", "model.gpt2.layers: found 0, allowed 1 to 1024"},
      {"model.gpt2.layers=1025", "model.gpt2.layers: found 1025, allowed 1 to 1024"},
      {"model.gpt2.heads=0", "model.gpt2.heads: found 0"},
      {"model.gpt2.heads=3", "model.gpt2.heads: found 3, which does not divide model.gpt2.width, 128"},
      {"model.gpt2.width=0", "model.gpt2.width: found 0, allowed 1 to 65536"},
      {"model.gpt2.width=65540", "model.gpt2.width: found 65540"},
      {"model.gpt2.context=0", "model.gpt2.context: found 0, allowed 1 to 1048576"},
      {"model.gpt2.vocabulary=0", "model.gpt2.vocabulary is 0: set it, or let the client read the data"},
      {"model.gpt2.vocabulary=1", "model.gpt2.vocabulary: found 1, allowed 2 to 16777216"},
      {"model.gpt2.layer_norm_epsilon=0", "model.gpt2.layer_norm_epsilon: found 0, allowed numbers greater than 0"},
      {"model.mlp={classes: 10}", "model.mlp.inputs is 0: set it, or let the client read the data"},
      {"model.mlp={inputs: 10, classes: 1}", "model.mlp.classes: found 1, allowed 2 to 1048576"},
      {"model.mlp={inputs: 10, classes: 2, hidden: [4, 0]}", "model.mlp.hidden[1]: found 0, allowed 1 to 4294967296"},
      {"model.mlp={inputs: 10, classes: 2}", "data: found text, which feeds the model gpt2, beside model.mlp"},
      {"data={}", "data: found no source, expected one of text, tokens, rows, idx"},
      {"transfer={host_sum: ON, push: {bf16: {}}}", "transfer.host_sum: found ON with transfer.push bf16"},
      {"transfer.push.top_k={density: 0}", "transfer.push.top_k.density: found 0, allowed more than 0 to 1"},
      {"transfer.push.top_k={density: 1.5}", "transfer.push.top_k.density: found 1.5"},
      {"transfer.push.top_k={density: 0.1, warmup_rounds: 2001}",
       "transfer.push.top_k.warmup_rounds: found 2001, allowed 0 to 2000"},
      {"transfer.push.error_feedback=true", "transfer.push.error_feedback: found true beside f32"},
      {"data.text.path=", "data.text.path: found nothing, expected the path of a file"},
      {"data.idx={images: a}", "data.idx.labels: found nothing"},
      {"data.idx={images: a, labels: b, validation_labels: c}", "data.idx.validation_images: found nothing"},
      {"data.idx={images: a, labels: b}", "data: found idx, which feeds a model of features, beside model.gpt2"},
      {"data.csv={path: a}", "data.csv.label: found nothing, expected the name of the class's column or its index"},
      {"data.csv={path: a, label: b}", "data: found csv, which feeds a model of features, beside model.gpt2"},
      {"data.csv={path: a, label: b}", "data.csv.schema: found none; the client fills it in"},
      {"data.csv={label: b}", "data.csv.path: found nothing"},
      {"data.csv={path: a, label: b, delimiter: ab}", "data.csv.delimiter: found \"ab\", allowed is one of , ; |"},
      {"data.csv={path: a, label: b, schema: {features: [x], mean: [1]}}",
       "data.csv.schema: found 1 means and 0 deviations, expected 1 each"},
      {"data.csv={path: a, label: b, standardize: false, schema: {features: [x], mean: [1], deviation: [1]}}",
       "found 1 means and 1 deviations, expected 0 each"},
      {"data.csv={path: a, label: b, schema: {features: [x], mean: [1], deviation: [0]}}",
       "deviation 0 of feature 0: expected finite numbers, a deviation greater than 0"},
      {"data.csv={path: a, label: b, standardize: false, schema: {features: [x], labels: [a, b, a]}}",
       "data.csv.schema.labels: found \"a\" twice"},
      {"model.softmax={classes: 3}", "model.softmax.inputs is 0: set it, or let the client read the data"},
      {"model.softmax={inputs: 3}", "model.softmax.classes is 0: set it, or let the client read the data"},
      {"model.logistic={}", "model.logistic.inputs is 0: set it, or let the client read the data"},
      {"model.logistic={inputs: 2}", "data: found text, which feeds the model gpt2, beside model.logistic"},
      {"data.text.tokenizer={}", "data.text.tokenizer: found no kind, expected gpt2_bpe"},
      {"data.text.tokenizer.gpt2_bpe.vocab=v", "data.text.tokenizer.gpt2_bpe.merges: found nothing, expected the path"},
      {"data.text.tokenizer.gpt2_bpe.merges=m", "data.text.tokenizer.gpt2_bpe.vocab: found nothing, expected the path"},
      {"data.text.separator=\"\\0\"", "data.text.separator: found \"\\000\", allowed is text without zero bytes"},
      {"data.text.path=\"a\\0b\"", "allowed is text without zero bytes"},
      {"data.validation_fraction=0.6", "data.validation_fraction: found 0.6, allowed 0 to 0.5"},
      {"data.validation_fraction=-0.1", "data.validation_fraction: found -0.1"},
      {"train.rounds=0", "train.rounds: found 0, allowed 1 to 1099511627776"},
      {"train.rounds=1099511627777", "train.rounds: found 1099511627777"},
      {"train.batch=0", "train.batch: found 0, allowed 1 to 16777216"},
      {"train.batch=4294967295", "train.batch: found 4294967295"},
      {"parallel.microbatches=0", "parallel.microbatches: found 0, allowed 1 to train.batch, 12"},
      {"parallel.microbatches=13", "parallel.microbatches: found 13, allowed 1 to train.batch, 12"},
      {"train.mode=local", "train.mode: LOCAL is not supported by this version yet; set it to sync or async"},
      {"train.staleness_scale=inverse", "train.staleness_scale: found INVERSE, which only train.mode async has"},
      {"train.mode=bounded_stale", "train.mode: BOUNDED_STALE is not supported by this version yet"},
      {"train.max_skipped_rounds=0", "train.max_skipped_rounds: found 0"},
      {"train.drop_slowest=1", "train.drop_slowest: 1 is not supported by this version yet; set it to 0"},
      {"optimizer={}", "optimizer: found no rule, expected one of sgd, adam, adamw"},
      {"optimizer.adamw.learning_rate=0", "optimizer.adamw.learning_rate: found 0, allowed numbers greater than 0"},
      {"optimizer.adamw.learning_rate=-1", "optimizer.adamw.learning_rate: found -1"},
      {"optimizer.adamw.learning_rate=1e300", "optimizer.adamw.learning_rate: found 1e+300"},
      {"optimizer.adamw.beta1=1", "optimizer.adamw.beta1: found 1, allowed 0 to less than 1"},
      {"optimizer.adamw.beta2=0.99999999999", "optimizer.adamw.beta2: found 1, allowed 0 to less than 1 (in float32)"},
      {"optimizer.adamw.beta2=-0.1", "optimizer.adamw.beta2: found -0.1"},
      {"optimizer.adamw.epsilon=1e-60", "optimizer.adamw.epsilon: found 1e-60"},
      {"optimizer.adamw.weight_decay=-1", "optimizer.adamw.weight_decay: found -1, allowed 0 and greater"},
      {"optimizer.sgd={learning_rate: 1, momentum: 1}", "optimizer.sgd.momentum: found 1, allowed 0 to less than 1"},
      {"optimizer.clip_norm=-1", "optimizer.clip_norm: found -1, allowed 0 and greater"},
      {"optimizer.schedule={}", "optimizer.schedule: found no kind, expected one of cosine, linear"},
      {"optimizer.schedule.cosine.final=-1", "optimizer.schedule.cosine.final: found -1"},
      {"parallel.data=0", "parallel.data: found 0, allowed 1 to 1024"},
      {"parallel.data=1025", "parallel.data: found 1025, allowed 1 to 1024"},
      {"parallel.tensor=0", "parallel.tensor: found 0, allowed 1 or more"},
      {"parallel.tensor=3",
       "parallel.tensor: found 3; it must divide the model's 4 attention heads (model.gpt2.heads); the nearest value "
       "allowed is 2"},
      {"parallel.tensor=64", "parallel.tensor: found 64; it must divide the model's 4 attention heads"},
      {"parallel.pipeline=0", "parallel.pipeline: found 0, allowed 1 or more"},
      {"parallel.pipeline=5",
       "parallel.pipeline: found 5; each stage needs at least one of the model's 4 layers; the nearest value allowed "
       "is 4"},
      {"parallel={data: 1024, pipeline: 4, tensor: 8}", "parallel.tensor: found 8; it must divide"},
      {"parallel.sequence_parallel=true", "parallel.sequence_parallel: found true with parallel.tensor 1"},
      {"parallel={tensor: 2, microbatches: 13}", "parallel.microbatches: found 13, allowed 1 to train.batch, 12"},
      {"model.gpt2.dropout=1", "model.gpt2.dropout: found 1, allowed 0 to less than 1"},
      {"model.gpt2.dropout=-0.1", "model.gpt2.dropout: found -0.1, allowed 0 to less than 1"},
      {"copies=2", "copies: 2 is not supported by this version yet; set it to 1 or leave it out"},
      {"copies=0", "copies: found 0, allowed 1"},
      {"checkpoint.keep=0", "checkpoint.keep: found 0"},
      {"checkpoint.directory=/etc", "checkpoint.directory: found \"/etc\", allowed is a folder below"},
      {"checkpoint.directory=a/../../b", "checkpoint.directory: found \"a/../../b\""},
      {"init.resume=true", "init.resume: found true without init.path"},
  };
  for (const auto& c : cases) {
    v1::JobSpec spec = Parsed();
    ASSERT_TRUE(SetSpecField(&spec, c.set).ok()) << c.set << ": " << SetSpecField(&spec, c.set);
    FillDefaults(&spec);
    if (std::string_view(c.set) == "model.gpt2.vocabulary=0") spec.mutable_model()->mutable_gpt2()->set_vocabulary(0);
    const absl::Status status = ValidateJobSpec(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.set;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.error)) << c.set;
  }
}

TEST(SpecValidateTest, ATableFitsItsModel) {
  const auto error = [](const std::string& model) {
    v1::JobSpec spec = Parsed();
    EXPECT_TRUE(SetSpecField(&spec,
                             "data.csv={path: a, label: y, schema: {features: [u, v], labels: [a, b, c], "
                             "mean: [0, 1], deviation: [1, 2.5]}}")
                    .ok());
    EXPECT_TRUE(SetSpecField(&spec, model).ok());
    FillDefaults(&spec);
    return std::string(ValidateJobSpec(spec).message());
  };
  EXPECT_EQ(error("model.softmax={inputs: 2, classes: 3}"), "");
  EXPECT_EQ(error("model.mlp={inputs: 2, classes: 4}"), "");
  EXPECT_THAT(error("model.softmax={inputs: 3, classes: 3}"),
              HasSubstr("data.csv.schema.features: found 2 columns, beside model.softmax.inputs 3"));
  EXPECT_THAT(error("model.mlp={inputs: 2, classes: 2}"),
              HasSubstr("data.csv.schema.labels: found 3 classes, beside model.mlp.classes 2"));
  EXPECT_THAT(error("model.logistic={inputs: 2}"), HasSubstr("beside model.logistic, which tells 2 apart"));
}

TEST(SpecValidateTest, ACheckpointsTableGoesOn) {
  v1::JobSpec checkpoint, spec;
  TakeTableSchema(checkpoint, &spec);
  EXPECT_FALSE(spec.has_data());
  checkpoint.mutable_data()->mutable_csv()->mutable_schema()->add_labels("a");
  TakeTableSchema(checkpoint, &spec);
  EXPECT_FALSE(spec.has_data()) << "not a table";
  spec.mutable_data()->mutable_csv()->mutable_schema()->add_labels("b");
  TakeTableSchema(v1::JobSpec(), &spec);
  EXPECT_EQ(spec.data().csv().schema().labels(0), "b");
  TakeTableSchema(checkpoint, &spec);
  EXPECT_EQ(spec.data().csv().schema().labels(0), "a");
  EXPECT_EQ(spec.data().csv().schema().labels_size(), 1);
}

TEST(SpecValidateTest, OnlyAModelOfLayersRecomputes) {
  v1::JobSpec spec = Filled();
  spec.mutable_train()->set_recompute(true);
  EXPECT_TRUE(ValidateJobSpec(spec).ok()) << ValidateJobSpec(spec);
  ASSERT_TRUE(SetSpecField(&spec, "model.softmax={inputs: 2, classes: 3}").ok());
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()),
              HasSubstr("train.recompute: found true; only gpt2 models have layers"));
}

TEST(SpecValidateTest, AsyncRefusesWhatNeedsOneDecisionForAll) {
  v1::JobSpec good = Parsed();
  ASSERT_TRUE(SetSpecField(&good, "train.mode=async").ok());
  FillDefaults(&good);
  EXPECT_TRUE(ValidateJobSpec(good).ok()) << ValidateJobSpec(good);
  EXPECT_EQ(good.train().nonfinite(), v1::TrainSpec::SKIP_CHUNK);
  EXPECT_EQ(good.train().staleness_scale(), v1::TrainSpec::NONE);
  EXPECT_FALSE(NeedsVerdict(good));
  const struct {
    const char* set;
    const char* error;
  } cases[] = {
      {"train.nonfinite=skip_round", "train.nonfinite: found skip_round, which train.mode async does not have"},
      {"train.drop_slowest=1", "train.drop_slowest: 1 is not supported"},
      {"parallel.tensor=2", "parallel.tensor: found 2, allowed with train.mode async is 1"},
      {"parallel.pipeline=4", "parallel.pipeline: found 4, allowed with train.mode async is 1"},
  };
  for (const auto& c : cases) {
    v1::JobSpec spec = good;
    ASSERT_TRUE(SetSpecField(&spec, c.set).ok()) << c.set;
    EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr(c.error)) << c.set;
  }
}

v1::JobSpec With(std::initializer_list<const char*> sets) {
  v1::JobSpec spec = Parsed();
  for (const char* set : sets) EXPECT_TRUE(SetSpecField(&spec, set).ok()) << set << ": " << SetSpecField(&spec, set);
  FillDefaults(&spec);
  return spec;
}

TEST(SpecValidateTest, MeshesThatModelsCanBeCutInto) {
  for (const char* parallel :
       {"parallel={tensor: 2}", "parallel={tensor: 4, pipeline: 4, data: 3}", "parallel={pipeline: 3}",
        "parallel={tensor: 2, sequence_parallel: true, microbatches: 12, schedule: gpipe}",
        "parallel={pipeline: 2, schedule: sequential}", "parallel={data: 1024, pipeline: 4, tensor: 4}"}) {
    EXPECT_TRUE(ValidateJobSpec(With({parallel})).ok()) << parallel << ": " << ValidateJobSpec(With({parallel}));
  }
  EXPECT_TRUE(ValidateJobSpec(With({"model.gpt2.dropout=0.1"})).ok());
  EXPECT_EQ(With({}).parallel().schedule(), v1::ParallelSpec::ONE_F_ONE_B);
}

TEST(SpecValidateTest, WhatDoesNotGoWithAMesh) {
  const auto error = [](std::initializer_list<const char*> sets) {
    return std::string(ValidateJobSpec(With(sets)).message());
  };
  EXPECT_THAT(
      error({"parallel.tensor=2", "transfer.host_sum=on"}),
      HasSubstr("transfer.host_sum: found ON with parallel.pipeline 1 x tensor 2, where workers of one host push "
                "for different parts of the model; leave it out (AUTO"));
  EXPECT_EQ(error({"parallel.tensor=2", "transfer.host_sum=auto"}), "");
  EXPECT_THAT(error({"parallel.pipeline=2", "transfer.push.int8={}"}),
              HasSubstr("transfer.push.error_feedback: found true with transfer.push int8 and parallel.pipeline 2 x "
                        "tensor 1: what a lossy format leaves out is kept for whole replicas only; set it to false"));
  EXPECT_EQ(error({"parallel.pipeline=2", "transfer.push.int8={}", "transfer.push.error_feedback=false"}), "");
  EXPECT_EQ(error({"parallel.pipeline=2", "transfer.push.top_k={density: 0.1}", "transfer.push.error_feedback=false"}),
            "");
  EXPECT_EQ(error({"transfer.push.int8={}"}), "") << "whole replicas keep what is left out";
  const char* const mlp = "model.mlp={inputs: 4, hidden: [8], classes: 3}";
  const char* const idx = "data.idx={images: a, labels: b}";
  EXPECT_EQ(error({mlp, idx, "parallel.pipeline=2"}), "");
  EXPECT_EQ(
      error({mlp, idx, "parallel={tensor: 2, pipeline: 3}"}),
      "parallel.pipeline: found 3; each stage needs at least one of the model's 2 layers; the nearest value allowed "
      "is 2\nparallel.tensor: found 2; only gpt2 models are cut within a layer; the nearest value allowed is 1");
  EXPECT_EQ(error({"model.gpt2.width=0", "parallel.tensor=3"}), "model.gpt2.width: found 0, allowed 1 to 65536")
      << "a model that is wrong itself is not measured against the mesh";
  const char* const wide = "model.gpt2={layers: 32, heads: 1024, width: 1024, context: 2, vocabulary: 5000}";
  EXPECT_THAT(
      error({wide, "parallel={data: 3, pipeline: 32, tensor: 256}"}),
      HasSubstr(
          "parallel.data: found 3; parallel.data 3 x pipeline 32 x tensor 256 are more than the 16384 workers that "
          "a job may have; the nearest value allowed is 2"));
  EXPECT_THAT(error({wide, "parallel={pipeline: 32, tensor: 1024}"}),
              HasSubstr("lower parallel.tensor or parallel.pipeline"));
  v1::JobSpec odd = Filled();
  odd.mutable_parallel()->set_schedule(static_cast<v1::ParallelSpec::Schedule>(9));
  EXPECT_THAT(std::string(ValidateJobSpec(odd).message()),
              HasSubstr("parallel.schedule: found 9, allowed one_f_one_b, gpipe, sequential"));
}

TEST(SpecValidateTest, TooFewWorkersNameTheDegreeToLower) {
  const v1::ModelSpec model = Filled().model();  // 4 layers, 4 heads
  EXPECT_EQ(TooFewWorkers(model, {.data = 2, .pipeline = 2}, 4), "");
  EXPECT_EQ(
      TooFewWorkers(model, {.data = 2, .pipeline = 2}, 3),
      "parallel.data: found 2; parallel.data 2 x pipeline 2 x tensor 1 = 4 workers, there are 3; the nearest value "
      "allowed is 1");
  EXPECT_THAT(
      TooFewWorkers(model, {.data = 2, .tensor = 4}, 3),
      HasSubstr("parallel.tensor: found 4; parallel.data 2 x pipeline 1 x tensor 4 = 8 workers, there are 3; the "
                "nearest value allowed is 2 with parallel.data 1"));
  EXPECT_THAT(TooFewWorkers(model, {.pipeline = 4}, 3), HasSubstr("parallel.pipeline: found 4;"));
  EXPECT_THAT(TooFewWorkers(model, {.pipeline = 4}, 3), HasSubstr("there are 3; the nearest value allowed is 3"));
  EXPECT_THAT(TooFewWorkers(model, {.pipeline = 4, .tensor = 4}, 1),
              HasSubstr("there is 1; the nearest value allowed is 1 and parallel.tensor 1"));
  EXPECT_EQ(TooFewWorkers(model, {}, 0),
            "parallel.data: found 1; parallel.data 1 x pipeline 1 x tensor 1 = 1 worker, there are none");
}

TEST(SpecValidateTest, StagesThatHaveLittleToDoAreTold) {
  EXPECT_EQ(IdleStages(Filled()), "");
  EXPECT_EQ(IdleStages(With({"parallel={pipeline: 4, microbatches: 4}"})), "");
  EXPECT_EQ(IdleStages(With({"parallel={pipeline: 4, schedule: sequential}"})), "") << "as asked for";
  EXPECT_EQ(IdleStages(With({"parallel={pipeline: 4}"})),
            "parallel.microbatches: 1 with 4 stages: each has nothing to do for 75 % of a round; with 12 it is 20 % "
            "(docs/parallel.md)")
      << "no more microbatches than samples";
  EXPECT_EQ(IdleStages(With({"parallel={pipeline: 4, data: 12}"})),
            "parallel.microbatches: 1 with 4 stages: each has nothing to do for 75 % of a round (docs/parallel.md)");
}

TEST(SpecValidateTest, AllBrokenRulesAreReportedOneALine) {
  v1::JobSpec spec = Filled();
  spec.mutable_train()->set_batch(0);
  spec.mutable_model()->mutable_gpt2()->set_heads(5);
  spec.set_copies(3);
  const std::string error(ValidateJobSpec(spec).message());
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 2) << error;
  EXPECT_FALSE(ValidateJobSpec(v1::JobSpec()).ok());
}

TEST(SpecValidateTest, ProductsThatOverflowAreRefused) {
  v1::JobSpec spec = Filled();
  spec.mutable_train()->set_rounds(uint64_t{1} << 40);
  spec.mutable_train()->set_batch(1u << 24);
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("makes more than 2^62 samples"));
  spec = Filled();
  spec.mutable_train()->set_batch(1u << 24);
  spec.mutable_model()->mutable_gpt2()->set_context(1048576);
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("has more than 2^44 elements"));
  spec = Filled();
  ASSERT_TRUE(SetSpecField(&spec, "data.idx={images: a, labels: b}").ok());
  ASSERT_TRUE(SetSpecField(&spec, "model.mlp={inputs: 4294967296, hidden: [4294967296], classes: 2}").ok());
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("more than 2^62 elements"));
  ASSERT_TRUE(SetSpecField(&spec, "model.mlp={inputs: 4294967296, hidden: [65536], classes: 2}").ok());
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("parameters, allowed at most 2^42"));
  ASSERT_TRUE(SetSpecField(&spec, "model.mlp={inputs: 9000, hidden: [65536], classes: 2}").ok());
  EXPECT_TRUE(ValidateJobSpec(spec).ok()) << ValidateJobSpec(spec);  // 2.2 GiB
  spec.mutable_parallel()->set_chunk_elements(1);
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("parallel.chunk_elements: found 1, which cuts"));
  spec.mutable_parallel()->set_chunk_elements(997);
  EXPECT_TRUE(ValidateJobSpec(spec).ok()) << ValidateJobSpec(spec);
}

TEST(SpecValidateTest, FieldsOfALaterVersionAreRefused) {
  v1::JobSpec spec = Filled();
  v1::TrainSpec* train = spec.mutable_train();
  train->GetReflection()->MutableUnknownFields(train)->AddVarint(77, 1);
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("train: field number 77 is not known"));
  spec = Filled();
  spec.mutable_train()->set_mode(static_cast<v1::TrainSpec::Mode>(9));
  EXPECT_THAT(std::string(ValidateJobSpec(spec).message()), HasSubstr("train.mode: 9 is not supported"));
}

}  // namespace
}  // namespace sluice
