#include "common/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string FileOf(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

absl::Status OpenStatus(const std::string& contents) {
  const TemporaryFolder folder;
  Spill(folder / "m.safetensors", contents);
  const absl::Status status = SafetensorsFile::Open(folder / "m.safetensors").status();
  if (!status.ok()) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder / "m.safetensors"));
  }
  return status;
}

TEST(SafetensorsTest, WhatIsWrittenIsRead) {
  const TemporaryFolder folder;
  const std::vector<SafetensorsEntry> entries = {
      {"b", {2, 3}}, {"a", {}}, {"empty", {4, 0, 2}}, {"strange \"name\"\n\xe6\x9d\x83", {5}}};
  const SafetensorsPrefix prefix = *MakeSafetensorsPrefix(entries, {{"format", "pt"}});
  EXPECT_EQ(prefix.bytes.size() % 8, 0u);
  EXPECT_EQ(prefix.file_bytes, prefix.bytes.size() + 12 * 4);
  std::vector<float> data(12);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) - 3.5f;
  Spill(folder / "f", prefix.bytes + std::string(reinterpret_cast<const char*>(data.data()), 48));

  const auto opened = SafetensorsFile::Open(folder / "f");
  ASSERT_TRUE(opened.ok()) << opened.status();
  const SafetensorsFile& file = **opened;
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.tensors().size(), 4u);
  for (const SafetensorsEntry& entry : entries) {
    const SafetensorsTensor* const tensor = file.Find(entry.name);
    ASSERT_NE(tensor, nullptr) << entry.name;
    EXPECT_EQ(tensor->shape, entry.shape);
    EXPECT_EQ(tensor->dtype, "F32");
  }
  EXPECT_EQ(file.Find("c"), nullptr);
  std::vector<float> got(4);
  ASSERT_TRUE(file.ReadFloats(*file.Find("b"), 2, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, std::vector<float>(data.begin() + 2, data.begin() + 6));
  float scalar = 0;
  ASSERT_TRUE(file.ReadFloats(*file.Find("a"), 0, absl::MakeSpan(&scalar, 1)).ok());
  EXPECT_EQ(scalar, data[6]);
  EXPECT_TRUE(absl::IsOutOfRange(file.ReadFloats(*file.Find("b"), 3, absl::MakeSpan(got))));
  EXPECT_TRUE(absl::IsOutOfRange(file.ReadFloats(*file.Find("b"), ~uint64_t{0}, absl::MakeSpan(got))));
  EXPECT_TRUE(file.ReadFloats(*file.Find("empty"), 0, {}).ok());
}

TEST(SafetensorsTest, PrefixRefusesWhatCannotBeWritten) {
  EXPECT_TRUE(absl::IsInvalidArgument(MakeSafetensorsPrefix({{"a", {1}}, {"a", {1}}}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeSafetensorsPrefix({{"__metadata__", {1}}}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeSafetensorsPrefix({{"a", {uint64_t{1} << 40, uint64_t{1} << 40}}}).status()));
  EXPECT_TRUE(OpenStatus(MakeSafetensorsPrefix({})->bytes).ok());
}

TEST(SafetensorsTest, RefusesOtherDtypesAsFloats) {
  const TemporaryFolder folder;
  Spill(folder / "f", FileOf(R"({"t":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})", "1234"));
  const auto file = *SafetensorsFile::Open(folder / "f");
  float x;
  const absl::Status status = file->ReadFloats(*file->Find("t"), 0, absl::MakeSpan(&x, 1));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("\"t\""), HasSubstr("I32"), HasSubstr("F32")));
}

TEST(SafetensorsTest, BadHeadersAreRefusedWithTheirFault) {
  const std::string four(4, '\0'), eight(8, '\0'), sixteen(16, '\0');
  const struct {
    std::string contents, message;
  } cases[] = {
      {"", "found 0 bytes"},
      {"1234567", "found 7 bytes"},
      {FileOf("{}", "").substr(0, 9), "cut short"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10), "at most 100000000"},
      {FileOf("[]", ""), "expected an object"},
      {FileOf("", ""), "not JSON"},
      {FileOf("{}x", ""), "not JSON"},
      {FileOf("\xff", ""), "not JSON"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", four), "not JSON"},
      {FileOf(R"({"a":3})", ""), "expected an object"},
      {FileOf(R"({"a":[1]})", ""), "expected an object"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1]}})", ""), "is missing"},
      {FileOf(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", four), "twice"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":{}}})", four), "unknown field"},
      {FileOf(R"({"a":{"dtype":4,"shape":[1],"data_offsets":[0,4]}})", four), "dtype holds the number 4"},
      {FileOf(R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", four), "dtype holds a list"},
      {FileOf(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", four), "shape holds the number 1"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", four), "shape holds a list"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", four), "a boolean"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[null],"data_offsets":[0,4]}})", four), "null"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", four), "fraction"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})", four), "fraction"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", four), "negative"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", ""), "negative"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", four), "1 numbers"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", four), "3 numbers"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", four), "end before they begin"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", four), "needs 8"},
      {FileOf(R"({"a":{"dtype":"","shape":[1],"data_offsets":[0,4]}})", four), "unknown dtype \"\""},
      {FileOf(R"({"a":{"dtype":"Q4_K","shape":[4],"data_offsets":[0,16]}})", sixteen), "unknown dtype \"Q4_K\""},
      {FileOf(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", ""), "more than 2^64"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", eight), "hole or overlap"},
      {FileOf(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           four),
       "hole or overlap"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", eight), "the file has 8"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "123"), "cut short"},
      {FileOf(R"({"__metadata__":{"n":1}})", ""), "expected a string"},
      {FileOf(R"({"__metadata__":{"n":{"m":"x"}}})", ""), "expected a string"},
      {FileOf(R"({"__metadata__":{"n":"1"},"__metadata__":{"m":"2"}})", ""), "twice"},
      {FileOf(std::string(1000, '['), ""), "expected an object"},
  };
  for (const auto& c : cases) {
    const absl::Status status = OpenStatus(c.contents);
    EXPECT_TRUE(absl::IsDataLoss(status)) << c.contents << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message)) << c.contents;
  }
}

// Whatever bytes come, the answer is a status or a file whose every tensor can be read.
TEST(SafetensorsTest, RandomlyDamagedFilesAreHarmless) {
  const std::string good = FileOf(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[],"data_offsets":[16,20]}})",
      std::string(20, 'x'));
  const TemporaryFolder folder;
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = good;
    for (uint32_t k = random() % 3 + 1; k > 0; --k) damaged[random() % damaged.size()] = static_cast<char>(random());
    if (random() % 4 == 0) damaged.resize(random() % damaged.size());
    Spill(folder / "f", damaged);
    const auto file = SafetensorsFile::Open(folder / "f");
    if (!file.ok()) continue;
    ++accepted;
    for (const SafetensorsTensor& tensor : (*file)->tensors()) {
      if (tensor.dtype != "F32") continue;
      std::vector<float> values(tensor.elements);
      EXPECT_TRUE((*file)->ReadFloats(tensor, 0, absl::MakeSpan(values)).ok());
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 1000);
}

TEST(SafetensorsTest, NastyFiles) {
  const std::string shared = SharedFolder();
  if (shared.empty()) GTEST_SKIP() << "SKIPPED: no shared folder";
  int files = 0;
  for (const auto& entry : nlohmann::json::parse(Slurp(shared + "/data/nasty/MANIFEST.json"))) {
    const std::string name = entry["file"], expect = entry["expect"];
    if (name.rfind("safetensors/", 0) != 0) continue;
    ++files;
    const auto file = SafetensorsFile::Open(shared + "/data/nasty/" + name);
    const bool accept = expect.find("ACCEPT") != std::string::npos;
    EXPECT_EQ(file.ok(), accept) << name << ": " << expect << "; found " << file.status();
    if (!file.ok()) {
      EXPECT_TRUE(absl::IsDataLoss(file.status())) << file.status();
      EXPECT_THAT(std::string(file.status().message()), HasSubstr(name));
    }
  }
  EXPECT_GE(files, 20);
}

}  // namespace
}  // namespace sluice
