// Reading Hugging Face GPT-2 folders: what is accepted, and the message for everything else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "common/file.h"
#include "common/weight_files.h"
#include "nlohmann/json.hpp"
#include "tests/common/gpt2_fixture.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

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

  static std::string FileOf(const Tensors& tensors, FloatFormat format = FloatFormat::kF32) {
    std::vector<SafetensorsEntry> entries;
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back({name, tensor.first, format});
      std::string bytes(tensor.second.size() * BytesOf(format), '\0');
      Narrow(format, tensor.second, bytes.data());
      data += bytes;
    }
    return MakeSafetensorsPrefix(entries)->bytes + data;
  }

  absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> Open() {
    Spill(folder_ / "m/model.safetensors", FileOf(tensors_, format_));
    Spill(folder_ / "m/config.json", config_.dump());
    return Gpt2FolderReader::Open(folder_ / "m", SmallSpec());
  }

  const TemporaryFolder folder_;
  Tensors tensors_;
  FloatFormat format_ = FloatFormat::kF32;
  json config_;
  std::vector<float> whole_;
};

using ImportTest = DamagedFolderTest;

TEST_F(ImportTest, PrefixTiedHeadAndMasksMakeNoDifference) {
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

TEST_F(ImportTest, ADtypeOfTwoBytesIsWidenedExactly) {
  for (const FloatFormat format : {FloatFormat::kF16, FloatFormat::kBF16}) {
    format_ = format;
    std::vector<float> want = whole_;
    std::vector<char> narrow(want.size() * BytesOf(format));
    Narrow(format, whole_, narrow.data());
    Widen(format, narrow.data(), absl::MakeSpan(want));
    EXPECT_NE(want, whole_);
    const auto reader = Open();
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ReadWhole(**reader, whole_.size()), want) << DtypeOf(format);
    std::mt19937 random(5);
    for (int i = 0; i < 500; ++i) {
      const uint64_t first = random() % want.size(), n = random() % std::min<uint64_t>(want.size() - first, 100);
      std::vector<float> got(n);
      ASSERT_TRUE((*reader)->Read(first, absl::MakeSpan(got)).ok());
      ASSERT_EQ(got, std::vector<float>(want.begin() + first, want.begin() + first + n)) << first << " " << n;
    }
  }
}

TEST_F(ImportTest, AHeadOfItsOwnIsRefusedByTheRangeThatHoldsTheDifference) {
  tensors_["lm_head.weight"] = tensors_["wte.weight"];
  tensors_["lm_head.weight"].second[40] += 1;
  const auto reader = Open();
  ASSERT_TRUE(reader.ok()) << reader.status();  // headers alone are read
  std::vector<float> values(whole_.size());
  const absl::Status status = (*reader)->Read(0, absl::MakeSpan(values));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors"), HasSubstr("lm_head.weight"), HasSubstr("wte.weight"),
                                  HasSubstr("element 40"), HasSubstr("tied")));
  const uint64_t wte = SpaceOf(SmallSpec()).Find("wte")->offset;
  EXPECT_TRUE((*reader)->Read(0, absl::MakeSpan(values).subspan(0, wte + 40)).ok());
  EXPECT_FALSE((*reader)->Read(wte + 40, absl::MakeSpan(values).subspan(0, 1)).ok());
  EXPECT_TRUE((*reader)->Read(wte + 41, absl::MakeSpan(values).subspan(0, values.size() - wte - 41)).ok());
  tensors_["lm_head.weight"].first = {6, 11};
  EXPECT_THAT(Text(Open().status()), AllOf(HasSubstr("lm_head.weight"), HasSubstr("expected F32 [11, 6]")));
}

TEST_F(DamagedFolderTest, MissingTensorsAreListed) {
  tensors_.erase("h.1.attn.c_attn.weight");
  absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors"),
                                  HasSubstr("missing: \"h.1.attn.c_attn.weight\" [6, 18]"), HasSubstr("2 layers")));
  tensors_.erase("wpe.weight");
  EXPECT_THAT(Text(Open().status()), HasSubstr("missing: \"wpe.weight\" [5, 6], \"h.1.attn.c_attn.weight\" [6, 18]"));
  tensors_.clear();
  EXPECT_THAT(Text(Open().status()), AllOf(HasSubstr("\"wte.weight\""), HasSubstr(" and 20 more")));
}

TEST_F(DamagedFolderTest, WrongShape) {
  tensors_["h.0.mlp.c_fc.weight"].first = {24, 6};
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), HasSubstr("tensor \"h.0.mlp.c_fc.weight\": expected F32 [6, 24], found F32 [24, 6]"));
}

TEST_F(DamagedFolderTest, TensorTwiceOrUnknown) {
  tensors_["transformer.ln_f.bias"] = tensors_["ln_f.bias"];
  EXPECT_THAT(Text(Open().status()), HasSubstr("\"ln_f.bias\" is there with and without the prefix"));
  tensors_.erase("transformer.ln_f.bias");
  tensors_["h.2.ln_1.bias"] = tensors_["h.1.ln_1.bias"];
  tensors_["score.weight"] = tensors_["h.1.ln_1.bias"];
  EXPECT_THAT(Text(Open().status()), HasSubstr("unknown: \"h.2.ln_1.bias\", \"score.weight\""));
}

TEST_F(DamagedFolderTest, OtherDtype) {
  ASSERT_TRUE(Open().ok());
  const std::string path = folder_ / "m/model.safetensors";
  std::string bytes = Slurp(path);
  bytes.replace(bytes.find("F32"), 3, "I32");
  Spill(path, bytes);
  const absl::Status status = Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), AllOf(HasSubstr("expected F32, F16 or BF16 [18]"), HasSubstr("found I32 [18]")));
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
      {"scale_attn_weights", false, "scale_attn_weights is false"},
      {"add_cross_attention", true, "add_cross_attention is true"},
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
  Spill(folder_ / "m/config.json", R"({"n_layer": 2, "n_layer": 3})");
  EXPECT_THAT(Text(ReadGpt2Config(folder_ / "m").status()), HasSubstr("\"n_layer\" is given twice"));
  Spill(folder_ / "m/config.json", "<html>404</html>");
  EXPECT_THAT(Text(ReadGpt2Config(folder_ / "m").status()), HasSubstr("HTML"));
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

TEST_F(DamagedFolderTest, OtherThingsInPlaceOfWeights) {
  ASSERT_TRUE(Open().ok());
  const struct {
    const char *contents, *message;
  } cases[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 548105171\n", "Git LFS pointer"},
      {"<!DOCTYPE html><html><body>404</body></html>", "HTML"},
      {"\n<html lang=en><head><title>Sign in</title>", "HTML"},
      {"{\"error\": \"Repository not found\"}", "JSON"},
      {"PK\x03\x04xxxxxxxxxxxxxxxxxxxx", "zip archive"},
      {"GGUF\x03xxxxxxxxxxxxxxxxxxxx", "GGUF"},
  };
  for (const auto& c : cases) {
    Spill(folder_ / "m/model.safetensors", c.contents);
    const absl::Status status = Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << c.contents;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("m/model.safetensors"), HasSubstr(c.message)));
  }
  ASSERT_TRUE(RemoveTree(folder_ / "m/model.safetensors").ok());
  Spill(folder_ / "m/pytorch_model.bin", "x");
  EXPECT_THAT(Text(Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status()), HasSubstr("safe_serialization"));
}

// The same weights in shards: two files and their index.
class ShardsTest : public DamagedFolderTest {
 protected:
  ShardsTest() {
    size_t i = 0;
    for (const auto& [name, tensor] : tensors_) {
      const bool second = i++ % 3 == 0;
      shards_[second][name] = tensor;
      index_["weight_map"][name] = WeightsShardName(second + 1, 2);
    }
    index_["metadata"]["total_size"] = 1;
    EXPECT_TRUE(RemoveTree(folder_ / "m/model.safetensors").ok());
  }

  absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> OpenShards() {
    for (size_t i : {0, 1}) Spill(folder_ / "m/" + WeightsShardName(i + 1, 2), FileOf(shards_[i]));
    return OpenAgain();
  }
  absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> OpenAgain() {
    Spill(folder_ / "m/model.safetensors.index.json", index_.dump());
    return Gpt2FolderReader::Open(folder_ / "m", SmallSpec());
  }
  void ExpectFault(const std::string& message) {
    const absl::Status status = OpenAgain().status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors.index.json"), HasSubstr(message)));
  }

  Tensors shards_[2];
  json index_;
};

TEST_F(ShardsTest, HoldTheSameParameters) {
  const auto reader = OpenShards();
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(ReadWhole(**reader, whole_.size()), whole_);
}

TEST_F(ShardsTest, IndexAndFilesMustAgree) {
  ASSERT_TRUE(OpenShards().ok());
  const json good = index_;
  index_["weight_map"].erase("ln_f.bias");
  ExpectFault("tensor \"ln_f.bias\" of model-0000");
  index_ = good;
  index_["weight_map"]["more"] = WeightsShardName(1, 2);
  ExpectFault("tensor \"more\" is not in model-00001-of-00002.safetensors");
  for (const char* elsewhere : {"../m/model-00001-of-00002.safetensors", "/etc/passwd", "..", "", "model.bin"}) {
    index_ = good;
    index_["weight_map"]["ln_f.bias"] = elsewhere;
    ExpectFault("expected a .safetensors file of this folder");
  }
  index_["weight_map"]["ln_f.bias"] = 3;
  ExpectFault("expected a file name, found 3");
  index_["weight_map"]["ln_f.bias"] = "absent.safetensors";
  ExpectFault("absent.safetensors");
  index_ = good;
  ASSERT_EQ(index_["weight_map"]["wte.weight"], WeightsShardName(2, 2));
  index_["weight_map"]["wte.weight"] = WeightsShardName(1, 2);
  ExpectFault("\"wte.weight\" is in model-00002-of-00002.safetensors, but weight_map says \"model-00001-of-00002");
  for (const json& wrong :
       {json({{"metadata", {}}}), json({{"weight_map", json::array()}}), json({{"weight_map", json::object()}})}) {
    index_ = wrong;
    ExpectFault("expected \"weight_map\"");
  }
  index_ = good;
  ASSERT_TRUE(OpenAgain().ok());
  Spill(folder_ / "m/model-00002-of-00002.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  ExpectFault("model-00002-of-00002.safetensors: expected a safetensors file, but it is a Git LFS pointer");
  Spill(folder_ / "m/model.safetensors.index.json", R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})");
  EXPECT_THAT(Text(Gpt2FolderReader::Open(folder_ / "m", SmallSpec()).status()), HasSubstr("\"a\" is given twice"));
}

}  // namespace
}  // namespace sluice
