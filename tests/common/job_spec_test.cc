#include "common/job_spec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::util::MessageDifferencer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kYaml[] = R"(name: kjv-small
model: {gpt2: {layers: 4, heads: 4, width: 128, context: 64}}
data: {text: {path: kjv.txt}}
train: {rounds: 2000, batch: 12, nonfinite: skip_chunk}
optimizer: {adamw: {learning_rate: 1e-3, beta2: 0.99, weight_decay: 0.1}, clip_norm: 1.0, schedule: {cosine: {warmup_rounds: 100, final: 1e-4}}}
parallel: {data: 2}
)";

constexpr char kJson[] = R"({
  "name": "kjv-small",
  "model": {"gpt2": {"layers": 4, "heads": 4, "width": 128, "context": 64}},
  "data": {"text": {"path": "kjv.txt"}},
  "train": {"rounds": 2e3, "batch":12, "nonfinite": "SKIP_CHUNK"},
	"optimizer": {"adamw": {"learning_rate": 1e-3, "beta2": 0.99, "weight_decay": 0.1}, "clip_norm": 1,
                "schedule"
                : {"cosine": {"warmup_rounds": 100, "final": 0.0001}}},
  "parallel": {"data": 2}
})";

constexpr char kText[] = R"(# a comment
name: "kjv-" 'small'
model { gpt2 { layers: 4 heads: 0x4, width: 128; context: 64 } }
data: < text { path: "kjv.txt" } >
train { rounds: 2000 batch: 12 nonfinite: skip_chunk }
optimizer {
  adamw { learning_rate: 1e-3f beta2: .99 weight_decay: 0.1 }
  clip_norm: 1
  schedule { cosine { warmup_rounds: 100 final: 1e-4 } }
}
parallel { data: 2 }
)";

v1::JobSpec Parse(std::string_view text, SpecFormat format = SpecFormat::kYaml) {
  const auto spec = ParseJobSpec(text, format, "job");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.value_or(v1::JobSpec());
}

std::string ParseError(std::string_view text, SpecFormat format = SpecFormat::kYaml) {
  const auto spec = ParseJobSpec(text, format, "job");
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 200);
  return std::string(spec.status().message());
}

TEST(JobSpecTest, TheThreeFormatsSayTheSame) {
  const v1::JobSpec yaml = Parse(kYaml);
  EXPECT_EQ(yaml.model().gpt2().context(), 64u);
  EXPECT_EQ(yaml.optimizer().adamw().learning_rate(), 1e-3);
  EXPECT_EQ(yaml.train().nonfinite(), v1::TrainSpec::SKIP_CHUNK);
  EXPECT_FALSE(yaml.optimizer().adamw().has_beta1());
  EXPECT_EQ(yaml.DebugString(), Parse(kJson, SpecFormat::kJson).DebugString());
  v1::JobSpec text = Parse(kText, SpecFormat::kText);
  EXPECT_EQ(text.optimizer().adamw().beta2(), 0.99);
  EXPECT_EQ(yaml.DebugString(), text.DebugString());
}

TEST(JobSpecTest, FormatFollowsTheExtension) {
  for (const char* path : {"a.yaml", "b/c.YML"}) EXPECT_EQ(*SpecFormatOf(path), SpecFormat::kYaml);
  EXPECT_EQ(*SpecFormatOf("/x.y/a.json"), SpecFormat::kJson);
  for (const char* path : {"a.textproto", "a.txtpb", "a.pbtxt"}) EXPECT_EQ(*SpecFormatOf(path), SpecFormat::kText);
  EXPECT_THAT(std::string(SpecFormatOf("x.yaml/job").status().message()), HasSubstr("found no extension"));
  EXPECT_THAT(std::string(SpecFormatOf("job.toml").status().message()), HasSubstr("extension .toml"));
  EXPECT_FALSE(SpecFormatOf("").ok());
}

TEST(JobSpecTest, UnknownFieldsComeWithASuggestion) {
  EXPECT_EQ(ParseError("train:\n  rouns: 5\n"), "job:2:3: unknown field train.rouns; did you mean train.rounds?");
  EXPECT_EQ(ParseError("trian: {}\n"), "job:1:1: unknown field trian; did you mean train?");
  EXPECT_THAT(ParseError("learningRate: 5\n"),
              HasSubstr("did you mean optimizer.sgd.learning_rate or optimizer.adam."));
  EXPECT_THAT(ParseError("rounds: 5\n"), HasSubstr("did you mean train.rounds?"));
  EXPECT_THAT(ParseError("zzzzzzzz: 5\n"), HasSubstr("the fields here are name, model, data, train"));
  EXPECT_EQ(ParseError("{\n \"train\": {\"bach\": 5}}", SpecFormat::kJson),
            "job:2:12: unknown field train.bach; did you mean train.batch?");
  EXPECT_EQ(ParseError("train {\n  bach: 5 }", SpecFormat::kText),
            "job:2:3: unknown field train.bach; did you mean train.batch?");
  EXPECT_THAT(ParseError("model: {gpt2: {layer_norm_eps: 1}}"),
              HasSubstr("did you mean model.gpt2.layer_norm_epsilon?"));
}

TEST(JobSpecTest, WrongTypesNameThePlaceAndWhatIsExpected) {
  const struct {
    const char* text;
    const char* error;
  } cases[] = {
      {"train: {rounds: many}",
       "job:1:17: train.rounds: found many, expected a whole number from 0 to 18446744073709551615"},
      {"train: {rounds: -5}", "job:1:17: train.rounds: found -5, expected a whole number from 0 to"},
      {"train: {rounds: \"5\"}", "found \"5\", expected a whole number"},
      {"train: {rounds: 1.5}", "found 1.5, expected a whole number"},
      {"train: {rounds: 1e-3}", "found 1e-3, expected a whole number"},
      {"train: {rounds: 0x10}", "found 0x10, expected a whole number"},
      {"train: {rounds: 1_000}", "found 1_000, expected a whole number"},
      {"train: {rounds: 010}", "without leading zeros"},
      {"train: {rounds: 18446744073709551616}", "found 18446744073709551616, expected"},
      {"train: {rounds: 1e20}", "found 1e20, expected"},
      {"train: {rounds: 1e999999999999999999999}", "expected a whole number"},
      {"train: {batch: 4294967296}",
       "job:1:16: train.batch: found 4294967296, expected a whole number from 0 to 4294967295"},
      {"train: {rounds: [5]}", "train.rounds: found a list, expected a whole number"},
      {"train: {rounds: {a: 5}}", "train.rounds: found a group of fields, expected a whole number"},
      {"train: {rounds: }", "train.rounds: found nothing, expected a whole number"},
      {"train: 5", "job:1:8: train: found 5, expected a group of fields"},
      {"train: [5]", "train: found a list, expected a group of fields"},
      {"train: {mode: snyc}",
       "train.mode: found snyc, expected one of sync, bounded_stale, async, local; did you mean sync?"},
      {"train: {mode: 1}", "train.mode: found 1, expected one of sync"},
      {"train: {mode: mode_unspecified}", "expected one of sync"},
      {"data: {shuffle: yes}", "data.shuffle: found yes, expected true or false"},
      {"data: {shuffle: 1}", "expected true or false"},
      {"optimizer: {clip_norm: high}", "optimizer.clip_norm: found high, expected a number"},
      {"optimizer: {clip_norm: .inf}", "found .inf, expected a number"},
      {"optimizer: {clip_norm: .nan}", "found .nan, expected a number"},
      {"optimizer: {clip_norm: nan}", "found nan, expected a number"},
      {"optimizer: {clip_norm: 1e999}", "found 1e999, expected a number within the range of float64"},
      {"model: {mlp: {hidden: 5}}", "model.mlp.hidden: found 5, expected a list, like [128, 64]"},
      {"model: {mlp: {hidden: [5, x]}}", "job:1:27: model.mlp.hidden[1]: found x, expected a whole number"},
      {"name: [a]", "name: found a list, expected text in quotes"},
      {"- a", "job:1:1: found a list, expected a group of fields"},
      {"a", "found a, expected a group of fields"},
      {"? [a]\n: 5", "expected the name of a field"},
      {"train: {rounds: !!int 5}", "the tag tag:yaml.org,2002:int is not supported"},
  };
  for (const auto& c : cases) EXPECT_THAT(ParseError(c.text), HasSubstr(c.error)) << c.text;
  EXPECT_EQ(ParseError("{\"train\": {\"rounds\": \"5\"}}", SpecFormat::kJson),
            "job:1:22: train.rounds: found \"5\", expected a whole number from 0 to 18446744073709551615");
  EXPECT_THAT(ParseError("{\"name\": 5}", SpecFormat::kJson),
              HasSubstr("job:1:10: name: found 5, expected text in quotes"));
  EXPECT_THAT(ParseError("name: kjv", SpecFormat::kText),
              HasSubstr("job:1:7: name: found kjv, expected text in quotes"));
  EXPECT_THAT(ParseError("train { rounds: - 5 }", SpecFormat::kText), HasSubstr("found -5, expected a whole number"));
  EXPECT_THAT(ParseError("optimizer { clip_norm: inf }", SpecFormat::kText), HasSubstr("found inf, expected a number"));
}

TEST(JobSpecTest, NumbersAreTakenExactly) {
  EXPECT_EQ(Parse("train: {rounds: 1e3}").train().rounds(), 1000u);
  EXPECT_EQ(Parse("train: {rounds: 1.5e3}").train().rounds(), 1500u);
  EXPECT_EQ(Parse("train: {rounds: 2500e-2}").train().rounds(), 25u);
  EXPECT_EQ(Parse("train: {rounds: 5.0}").train().rounds(), 5u);
  EXPECT_EQ(Parse("train: {rounds: +7}").train().rounds(), 7u);
  EXPECT_EQ(Parse("train: {rounds: 0e99999}").train().rounds(), 0u);
  EXPECT_EQ(Parse("train: {seed: 18446744073709551615}").train().seed(), UINT64_MAX);
  EXPECT_EQ(Parse("train: {seed: 9007199254740993}").train().seed(), 9007199254740993u);  // no double has it
  EXPECT_EQ(Parse("train: {batch: 4294967295}").train().batch(), 4294967295u);
  EXPECT_EQ(Parse("optimizer: {clip_norm: 1}").optimizer().clip_norm(), 1.0);
  EXPECT_EQ(Parse("optimizer: {clip_norm: -1e-3}").optimizer().clip_norm(), -1e-3);
  EXPECT_EQ(Parse("name: 123").name(), "123");
  EXPECT_EQ(Parse("name: \"a\\tb\"").name(), "a\tb");
  EXPECT_EQ(Parse("{\"name\": \"\\ud83d\\ude00\\/\\u00e9\"}", SpecFormat::kJson).name(), "\xf0\x9f\x98\x80/\xc3\xa9");
  EXPECT_EQ(Parse("train { seed: 0x10 }", SpecFormat::kText).train().seed(), 16u);
  EXPECT_EQ(Parse("model { mlp { hidden: 5 hidden: [6, 7] } }", SpecFormat::kText).model().mlp().hidden_size(), 3);
}

TEST(JobSpecTest, FieldsGivenTwiceAndAlternativesAreRefused) {
  EXPECT_EQ(ParseError("train:\n  rounds: 5\n  rounds: 6\n"),
            "job:3:3: train.rounds is given twice, first in line 2; remove one");
  EXPECT_THAT(ParseError("{\"name\": \"a\",\n \"name\": \"a\"}", SpecFormat::kJson),
              HasSubstr("job:2:2: name is given twice"));
  EXPECT_THAT(ParseError("name: 'a' name: 'b'", SpecFormat::kText), HasSubstr("job:1:11: name is given twice"));
  EXPECT_EQ(ParseError("model:\n  gpt2: {layers: 1}\n  mlp: {}\n"),
            "job:3:3: model.mlp excludes model.gpt2 of line 2; remove one");
  EXPECT_THAT(ParseError("optimizer { sgd {} adam {} }", SpecFormat::kText),
              HasSubstr("optimizer.adam excludes optimizer.sgd"));
}

TEST(JobSpecTest, AllProblemsAreReported) {
  const std::string error = ParseError("nme: a\ntrain:\n  rounds: x\n  bach: 3\ndata: 4\n");
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 3) << error;
  EXPECT_THAT(error,
              AllOf(HasSubstr("job:1:1: "), HasSubstr("job:3:11: "), HasSubstr("job:4:3: "), HasSubstr("job:5:7: ")));
  std::string many;
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&many, "f", i, ": 1\n");
  EXPECT_THAT(ParseError(many), HasSubstr("... and more"));
  EXPECT_LT(ParseError(many).size(), 10000u);
}

TEST(JobSpecTest, BrokenSyntaxNamesLineAndColumn) {
  EXPECT_THAT(ParseError("train:\n  rounds: [5\n"), AllOf(StartsWith("job:"), HasSubstr("not YAML: ")));
  EXPECT_THAT(ParseError("train: {rounds: 5}}\n"), StartsWith("job:1:"));
  EXPECT_THAT(ParseError("a: b\n\tc: d\n"), StartsWith("job:2:"));
  EXPECT_THAT(ParseError("name: a\n---\nname: b\n"), HasSubstr("job:2:1: expected one document, found more here"));
  EXPECT_THAT(ParseError("{name: a}, {name: b}"), HasSubstr("job:1:10: "));
  EXPECT_THAT(ParseError("name: a\nb\x04: c"), HasSubstr("job:2:2: control character 0x04"));
  EXPECT_THAT(ParseError("name: *x"), StartsWith("job:1:"));
  EXPECT_THAT(ParseError("{\"a\": 1,}", SpecFormat::kJson),
              AllOf(StartsWith("job:1:9: not JSON: "), HasSubstr("syntax error")));
  EXPECT_THAT(ParseError("{\n\"a\": nope}", SpecFormat::kJson), StartsWith("job:2:7: not JSON: "));
  EXPECT_THAT(ParseError("{name: 1}", SpecFormat::kJson), HasSubstr("not JSON"));  // YAML is not enough
  EXPECT_THAT(ParseError("{\"a\": 1e999}", SpecFormat::kJson), HasSubstr("not JSON: number overflow"));
  EXPECT_THAT(ParseError("{} {}", SpecFormat::kJson), HasSubstr("job:1:4: not JSON"));
  EXPECT_THAT(ParseError("{\"name\": \"a", SpecFormat::kJson), HasSubstr("not JSON"));
  EXPECT_THAT(ParseError("train {\n rounds 5 }", SpecFormat::kText),
              HasSubstr("job:2:9: not text format: expected ':' or '{' after rounds, found '5'"));
  EXPECT_THAT(ParseError("train {", SpecFormat::kText), HasSubstr("found the end of the file"));
  EXPECT_THAT(ParseError("train: }", SpecFormat::kText), HasSubstr("expected a value, found '}'"));
  EXPECT_THAT(ParseError("name: \"a\nb", SpecFormat::kText), StartsWith("job:"));
  EXPECT_THAT(ParseError("name: \"a\\q\"", SpecFormat::kText), HasSubstr("Invalid escape"));
  EXPECT_THAT(ParseError("[a.b.c]: 5", SpecFormat::kText), HasSubstr("expected the name of a field, found '['"));
  for (SpecFormat format : {SpecFormat::kYaml, SpecFormat::kJson, SpecFormat::kText}) {
    EXPECT_THAT(ParseError("", format), HasSubstr("empty document"));
    EXPECT_THAT(ParseError(" \n", format), HasSubstr("empty document"));
    EXPECT_THAT(ParseError("x: 1\ny\xff: 2", format), HasSubstr("job:2:2: byte 0xff is not UTF-8"));
    EXPECT_THAT(ParseError("\xed\xa0\x80", format), HasSubstr("byte 0xed is not UTF-8"));  // a surrogate
    EXPECT_THAT(ParseError("\xc0\xaf", format), HasSubstr("not UTF-8"));
    EXPECT_THAT(ParseError(std::string((1 << 20) + 1, ' '), format), HasSubstr("allowed at most 1048576"));
  }
  EXPECT_EQ(Parse("\xef\xbb\xbfname: a").name(), "a");
  EXPECT_EQ(Parse("\xef\xbb\xbf{\"name\": \"a\"}", SpecFormat::kJson).name(), "a");
}

TEST(JobSpecTest, HostileDocumentsAreRefused) {
  const auto repeat = [](const std::string& what, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += what;
    return text;
  };
  EXPECT_THAT(ParseError(repeat("[", 100000)), HasSubstr("nested deeper than 32"));
  ParseError(repeat("{a: ", 100000));
  ParseError(repeat("- ", 100000));
  ParseError(repeat(", ", 100000));
  ParseError(repeat("? ", 2000));
  EXPECT_THAT(ParseError(repeat("[", 100) + repeat("]", 100)), HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ParseError(absl::StrCat("{\"a\":", repeat("[", 100000), repeat("]", 100000), "}"), SpecFormat::kJson),
              HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ParseError(repeat("{\"a\":", 100000) + "1" + repeat("}", 100000), SpecFormat::kJson),
              HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ParseError(repeat("a {", 100000), SpecFormat::kText), HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ParseError(absl::StrCat("a: ", repeat("[", 100000)), SpecFormat::kText),
              HasSubstr("nested deeper than 32"));
  std::string bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string previous = absl::StrCat("*a", i - 1);
    absl::StrAppend(&bomb, "a", i, ": &a", i, " [", previous);
    for (int k = 0; k < 9; ++k) absl::StrAppend(&bomb, ", ", previous);
    bomb += "]\n";
  }
  EXPECT_THAT(ParseError(bomb), HasSubstr("aliases counted each time"));
  ParseError("a: &x {b: *x}\n");  // contains itself
  EXPECT_EQ(Parse("train: {batch: &n 5, rounds: *n}").train().rounds(), 5u);
}

TEST(JobSpecTest, NoTruncationOfAGoodDocumentCrashes) {
  for (const auto& [text, format] : {std::pair<std::string, SpecFormat>(kYaml, SpecFormat::kYaml),
                                     {kJson, SpecFormat::kJson},
                                     {kText, SpecFormat::kText}}) {
    for (size_t n = 0; n < text.size(); ++n) (void)ParseJobSpec(text.substr(0, n), format, "job").status();
    for (uint32_t seed = 1; seed <= 2000; ++seed) {
      std::mt19937 random(seed);
      std::string broken = text;
      for (int k = 0; k < 3; ++k) broken[random() % broken.size()] = "{}[]:,\"'\\#&*!|>%@`-\n\t0aA\x7f"[random() % 26];
      const auto spec = ParseJobSpec(broken, format, "job");
      if (!spec.ok()) {
        EXPECT_THAT(std::string(spec.status().message()), StartsWith("job:")) << "seed " << seed;
      }
    }
  }
}

TEST(JobSpecTest, SetReplacesOneField) {
  v1::JobSpec spec = Parse(kYaml);
  const auto set = [&](const char* assignment) { return SetSpecField(&spec, assignment); };
  EXPECT_TRUE(set("train.rounds=500").ok());
  EXPECT_EQ(spec.train().rounds(), 500u);
  EXPECT_EQ(spec.train().batch(), 12u);
  EXPECT_TRUE(set("train.mode=Async").ok());
  EXPECT_EQ(spec.train().mode(), v1::TrainSpec::ASYNC);
  EXPECT_TRUE(set("data.text.path=a = b: {c} #d").ok());
  EXPECT_EQ(spec.data().text().path(), "a = b: {c} #d");
  EXPECT_TRUE(set("data.text.path='x y'").ok());
  EXPECT_EQ(spec.data().text().path(), "x y");
  EXPECT_TRUE(set("data.shuffle=false").ok());
  EXPECT_TRUE(spec.data().has_shuffle());
  EXPECT_TRUE(set("optimizer.sgd.learning_rate=1e-1").ok());
  EXPECT_FALSE(spec.optimizer().has_adamw());
  EXPECT_EQ(spec.optimizer().clip_norm(), 1.0);
  EXPECT_TRUE(set("model.mlp.hidden=[128,64]").ok());
  EXPECT_TRUE(set("model.mlp.hidden=[32]").ok());
  EXPECT_FALSE(spec.model().has_gpt2());
  EXPECT_EQ(spec.model().mlp().hidden_size(), 1);
  EXPECT_EQ(spec.model().mlp().hidden(0), 32u);
  EXPECT_TRUE(set("optimizer.schedule={linear: {warmup_rounds: 5}}").ok());
  EXPECT_EQ(spec.optimizer().schedule().linear().warmup_rounds(), 5u);
  EXPECT_FALSE(spec.optimizer().schedule().has_cosine());
}

TEST(JobSpecTest, SetRefusesWithoutChangingAnything) {
  v1::JobSpec spec = Parse(kYaml);
  const std::string before = spec.SerializeAsString();
  const auto error = [&](const std::string& assignment) {
    const absl::Status status = SetSpecField(&spec, assignment);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << assignment;
    EXPECT_EQ(spec.SerializeAsString(), before) << assignment;
    return std::string(status.message());
  };
  EXPECT_THAT(error("train.rouns=5"), HasSubstr("unknown field train.rouns; did you mean train.rounds?"));
  EXPECT_THAT(error("rounds=5"), HasSubstr("did you mean train.rounds?"));
  EXPECT_THAT(error("train.rounds=x"), HasSubstr("train.rounds: found x, expected a whole number"));
  EXPECT_THAT(error("train.rounds="), HasSubstr("found nothing"));
  EXPECT_THAT(error("train.rounds.x=5"), HasSubstr("train.rounds is a value: it has no field x"));
  EXPECT_THAT(error("train.batch=-1"), HasSubstr("found -1"));
  EXPECT_THAT(error("train=5"), HasSubstr("train: found 5, expected a group of fields"));
  EXPECT_THAT(error("train"), HasSubstr("expected FIELD=VALUE"));
  EXPECT_THAT(error("=5"), HasSubstr("expected FIELD=VALUE"));
  EXPECT_THAT(error("train..rounds=5"), HasSubstr("unknown field train."));
  EXPECT_THAT(error("model.mlp.hidden[0]=5"), HasSubstr("give the whole list"));
  EXPECT_THAT(error("model.mlp.hidden=5"), HasSubstr("expected a list"));
  EXPECT_THAT(error("optimizer.sgd.momentum=[1"), HasSubstr("not YAML"));
  EXPECT_THAT(error("optimizer={sgd: {}, adam: {}}"), HasSubstr("optimizer.adam excludes optimizer.sgd"));
  EXPECT_THAT(error(std::string("name=a\xff")), HasSubstr("not UTF-8"));
}

TEST(JobSpecTest, DefaultsAreThoseOfTheProto) {
  v1::JobSpec spec = Parse(
      "model: {gpt2: {layers: 1, heads: 1, width: 1, context: 1}}\ndata: {text: {path: a}}\n"
      "train: {rounds: 52, batch: 1}\noptimizer: {adamw: {learning_rate: 1}}");
  FillDefaults(&spec);
  EXPECT_EQ(JobSpecToYaml(spec), R"(name: gpt2
model:
  gpt2:
    layers: 1
    heads: 1
    width: 1
    context: 1
    vocabulary: 256
    layer_norm_epsilon: 1e-05
    scaled_residual_init: true
data:
  text:
    path: a
    documents: whole_file
    invalid_utf8: refuse
  shuffle: true
  validation_fraction: 0.1
train:
  rounds: 52
  batch: 1
  seed: 1
  eval_every: 5
  eval_samples: 0
  mode: sync
  nonfinite: skip_round
  max_skipped_rounds: 10
  drop_slowest: 0
  recompute: false
optimizer:
  adamw:
    learning_rate: 1
    beta1: 0.9
    beta2: 0.999
    epsilon: 1e-08
    weight_decay: 0.01
  clip_norm: 0
parallel:
  data: 1
  tensor: 1
  pipeline: 1
  chunk_elements: 0
  microbatches: 1
  schedule: one_f_one_b
  sequence_parallel: false
checkpoint:
  every_rounds: 10
  keep: 3
copies: 1
allow_profile_change: true
transfer:
  push:
    f32: {}
  pull:
    f32: {}
  host_sum: auto
)");
  EXPECT_TRUE(ValidateJobSpec(spec).ok()) << ValidateJobSpec(spec);
  const std::string once = spec.SerializeAsString();
  FillDefaults(&spec);
  EXPECT_EQ(spec.SerializeAsString(), once);
}

TEST(JobSpecTest, DefaultsLeaveWhatTheUserSaid) {
  v1::JobSpec spec = Parse(
      "train: {rounds: 3, seed: 0, eval_every: 0}\ncheckpoint: {every_rounds: 0}\n"
      "data: {shuffle: false, validation_fraction: 0}\nallow_profile_change: false\n"
      "optimizer: {adam: {learning_rate: 1, beta1: 0}}");
  FillDefaults(&spec);
  EXPECT_EQ(spec.train().seed(), 0u);
  EXPECT_EQ(spec.train().eval_every(), 0u);
  EXPECT_EQ(spec.checkpoint().every_rounds(), 0u);
  EXPECT_FALSE(spec.data().shuffle());
  EXPECT_EQ(spec.data().validation_fraction(), 0);
  EXPECT_FALSE(spec.allow_profile_change());
  EXPECT_EQ(spec.optimizer().adam().beta1(), 0);
  EXPECT_EQ(spec.optimizer().adam().weight_decay(), 0);
}

// Random legal and illegal messages: what is printed is read back as the same message, in YAML and in protobuf's own
// text.
void Randomize(google::protobuf::Message* message, std::mt19937_64* random) {
  const auto* r = message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    if ((*random)() % 3 == 0) continue;
    const double doubles[] = {0, 1, -2.5, 1e-5, 1e300, 4.9e-320, 0.1, 123456789.123456789, std::nextafter(1, 2)};
    const std::string strings[] = {
        "a", "no",  "1e3",  "a b: c #d", "\"\\'", "\n\t\r\x01\x7f",     "\xc3\xa9\xf0\x9f\x98\x80", "/x", "~",
        " ", "- a", "null", "{}",        "&a",    std::string("\0z", 2)};
    const uint64_t number = (*random)() >> ((*random)() % 64);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_UINT32:
        r->SetUInt32(message, field, static_cast<uint32_t>(number));
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        if (field->is_repeated()) {
          for (uint64_t k = 0; k < (*random)() % 4; ++k) r->AddUInt64(message, field, number + k);
        } else {
          r->SetUInt64(message, field, number);
        }
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        if (field->is_repeated()) {
          for (uint64_t k = 0; k < number % 4; ++k) {
            r->AddDouble(message, field, doubles[(*random)() % std::size(doubles)]);
          }
        } else {
          r->SetDouble(message, field, doubles[(*random)() % std::size(doubles)]);
        }
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        r->SetBool(message, field, number % 2 == 0);
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        r->SetEnumValue(message, field,
                        static_cast<int>(number % static_cast<uint64_t>(field->enum_type()->value_count())));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        if (field->is_repeated()) {
          for (uint64_t k = 0; k < number % 4; ++k) {
            r->AddString(message, field, strings[(*random)() % std::size(strings)]);
          }
        } else {
          r->SetString(message, field, strings[(*random)() % std::size(strings)]);
        }
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Randomize(r->MutableMessage(message, field), random);
        break;
      default:
        FAIL() << field->full_name() << " has a type that the parser does not read";
    }
  }
}

TEST(JobSpecTest, WhatIsPrintedIsReadBack) {
  for (uint32_t seed = 1; seed <= 1000; ++seed) {
    std::mt19937_64 random(seed);
    v1::JobSpec spec;
    Randomize(&spec, &random);
    const std::string yaml = JobSpecToYaml(spec);
    const auto from_yaml = ParseJobSpec(yaml, SpecFormat::kYaml, "job");
    ASSERT_TRUE(from_yaml.ok()) << "seed " << seed << ": " << from_yaml.status() << "\n" << yaml;
    ASSERT_TRUE(MessageDifferencer::Equals(*from_yaml, spec)) << "seed " << seed << "\n" << yaml;
    const std::string text = spec.DebugString();
    if (text.empty()) continue;
    const auto from_text = ParseJobSpec(text, SpecFormat::kText, "job");
    ASSERT_TRUE(from_text.ok()) << "seed " << seed << ": " << from_text.status() << "\n" << text;
    ASSERT_TRUE(MessageDifferencer::Equals(*from_text, spec)) << "seed " << seed << "\n" << text;
  }
}

}  // namespace
}  // namespace sluice
