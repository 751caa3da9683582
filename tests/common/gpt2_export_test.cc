// Writing Hugging Face GPT-2 folders: dtypes, shards, and nothing half-written on a full disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <limits>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "common/file.h"
#include "common/weight_files.h"
#include "nlohmann/json.hpp"
#include "tests/common/gpt2_fixture.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<float> Rounded(const std::vector<float>& values, FloatFormat format) {
  std::vector<float> rounded(values.size());
  std::vector<char> bytes(values.size() * BytesOf(format));
  Narrow(format, values, bytes.data());
  Widen(format, bytes.data(), absl::MakeSpan(rounded));
  return rounded;
}

TEST(Gpt2ExportTest, ImportExportImportIsEqualInEveryDtype) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  const std::vector<float> values = RandomValues(SpaceOf(spec).size());
  const std::pair<FloatFormat, const char*> cases[] = {
      {FloatFormat::kF32, "float32"}, {FloatFormat::kF16, "float16"}, {FloatFormat::kBF16, "bfloat16"}};
  for (const auto& [format, torch_dtype] : cases) {
    const std::string name = folder / DtypeOf(format);
    ASSERT_TRUE(ExportGpt2(spec, values, name, {.format = format}).ok());
    EXPECT_EQ(json::parse(Slurp(name + "/config.json"))["torch_dtype"], torch_dtype);
    const std::vector<float> first = Import(name, spec);
    EXPECT_EQ(first, Rounded(values, format));
    // As F32 of the same values, and as the same dtype: the values stay.
    ASSERT_TRUE(ExportGpt2(spec, first, name + "-wide").ok());
    EXPECT_EQ(Import(name + "-wide", spec), first);
    ASSERT_TRUE(ExportGpt2(spec, first, name + "-again", {.format = format}).ok());
    EXPECT_EQ(Slurp(name + "-again/model.safetensors"), Slurp(name + "/model.safetensors"));
  }
}

TEST(Gpt2ExportTest, AValueBeyondTheDtypeIsRefused) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  std::vector<float> values = RandomValues(SpaceOf(spec).size());
  float& value = values[SpaceOf(spec).Find("ln_f.bias")->offset + 2];
  value = 65519;  // rounds down
  EXPECT_TRUE(ExportGpt2(spec, values, folder / "a", {.format = FloatFormat::kF16}).ok());
  value = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(ExportGpt2(spec, values, folder / "b", {.format = FloatFormat::kF16}).ok());
  value = -65520;
  const absl::Status status = ExportGpt2(spec, values, folder / "c", {.format = FloatFormat::kF16});
  EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("\"ln_f.bias\": element 2 is -65520"), HasSubstr("65504")));
  EXPECT_TRUE(ExportGpt2(spec, values, folder / "d", {.format = FloatFormat::kBF16}).ok());
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("a", "b", "d"));
}

TEST(Gpt2ExportTest, ShardsFollowHuggingFacesConvention) {
  const TemporaryFolder folder;
  const v1::Gpt2Spec spec = SmallSpec();
  const std::vector<float> values = RandomValues(SpaceOf(spec).size());
  uint64_t total = values.size() * sizeof(float);
  for (const uint64_t limit : {uint64_t{1}, uint64_t{400}, uint64_t{1000}, total - 1, total}) {
    const std::string name = folder / std::to_string(limit);
    ASSERT_TRUE(ExportGpt2(spec, values, name, {.max_shard_bytes = limit}).ok());
    EXPECT_EQ(Import(name, spec), values);
    if (limit >= total) {
      EXPECT_THAT(*ListDirectory(name), ElementsAre("config.json", "model.safetensors"));
      continue;
    }
    const json index = json::parse(Slurp(name + "/model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], total);
    EXPECT_EQ(index["weight_map"].size(), 28u);
    const std::vector<std::string> files = *ListDirectory(name);
    const size_t shards = files.size() - 2;
    EXPECT_GE(shards, 2u);
    if (limit == 1) {
      EXPECT_EQ(shards, 28u);
    }
    for (size_t i = 1; i <= shards; ++i) {
      const auto file = *SafetensorsFile::Open(name + "/" + WeightsShardName(i, shards));
      uint64_t bytes = 0;
      for (const SafetensorsTensor& tensor : file->tensors()) {
        bytes += tensor.end - tensor.begin;
        EXPECT_EQ(index["weight_map"][tensor.name], WeightsShardName(i, shards));
      }
      EXPECT_TRUE(bytes <= limit || file->tensors().size() == 1) << limit << " " << i;
    }
  }
  // Shards give way to one file and the other way round; nothing of the former export stays.
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "1").ok());
  EXPECT_THAT(*ListDirectory(folder / "1"), ElementsAre("config.json", "model.safetensors"));
  ASSERT_TRUE(ExportGpt2(spec, values, folder / "1", {.max_shard_bytes = 3000}).ok());
  EXPECT_THAT(*ListDirectory(folder / "1"),
              ElementsAre("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
  EXPECT_EQ(Import(folder / "1", spec), values);
}

// After every failure: the folder has its former contents, or is not there; and nothing lies beside it.
class FullDiskTest : public testing::Test {
 protected:
  // The state after an export of `values_` was tried.
  void Check(const std::string& parent, const std::string& name, const absl::Status& status) {
    const bool there = former_.has_value() || status.ok();
    EXPECT_EQ(*ListDirectory(parent), there ? std::vector<std::string>{name} : std::vector<std::string>{});
    if (there) {
      EXPECT_EQ(Import(parent + "/" + name, spec_), status.ok() ? values_ : *former_);
    }
    if (status.ok()) return;
    ++failures_;
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(Text(status), HasSubstr(name));
  }

  const v1::Gpt2Spec spec_ = SmallSpec(32);
  const std::vector<float> values_ = RandomValues(SpaceOf(spec_).size());
  std::optional<std::vector<float>> former_;
  int failures_ = 0;
};

TEST_F(FullDiskTest, AFileThatMayNotGrowLeavesNothingBehind) {
  const TemporaryFolder folder;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const uint64_t max_shard_bytes : {uint64_t{1} << 40, uint64_t{20000}}) {
    former_.reset();
    for (int round = 0; round < 2; ++round) {  // then over an earlier export
      bool done = false;
      for (rlim_t limit = 0; !done; limit += 5000) {
        ASSERT_LT(limit, rlim_t{1} << 20);
        rlimit lower = before;
        lower.rlim_cur = limit;
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &lower), 0);
        const absl::Status status =
            ExportGpt2(spec_, values_, folder / "exported", {.max_shard_bytes = max_shard_bytes});
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
        Check(folder.path(), "exported", status);
        done = status.ok();
      }
      former_ = RandomValues(values_.size(), 8);
      ASSERT_TRUE(ExportGpt2(spec_, *former_, folder / "exported").ok());
    }
    ASSERT_TRUE(RemoveTree(folder / "exported").ok());
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_GT(failures_, 50);
}

TEST_F(FullDiskTest, AFullFileSystemLeavesNothingBehind) {
  const TemporaryFolder folder;
  const std::string disk = folder / "disk";
  ASSERT_TRUE(MakeDirectories(disk).ok());
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=4k") != 0) GTEST_SKIP() << "SKIPPED: mounting needs root";
  const auto unmounted = absl::MakeCleanup([&] { umount2(disk.c_str(), MNT_DETACH); });
  for (const uint64_t max_shard_bytes : {uint64_t{1} << 40, uint64_t{20000}}) {
    former_.reset();
    for (int round = 0; round < 2; ++round) {
      bool done = false;
      for (int kib = 4; !done; kib += 12) {
        ASSERT_LT(kib, 1024);
        // A tmpfs cannot shrink below what it holds.
        if (mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, absl::StrCat("size=", kib, "k").c_str()) != 0) continue;
        const absl::Status status =
            ExportGpt2(spec_, values_, disk + "/exported", {.max_shard_bytes = max_shard_bytes});
        Check(disk, "exported", status);
        done = status.ok();
      }
      ASSERT_EQ(mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=1m"), 0);
      former_ = RandomValues(values_.size(), 8);
      ASSERT_TRUE(ExportGpt2(spec_, *former_, disk + "/exported").ok());
    }
    ASSERT_TRUE(RemoveTree(disk + "/exported").ok());
  }
  EXPECT_GT(failures_, 20);
}

}  // namespace
}  // namespace sluice
