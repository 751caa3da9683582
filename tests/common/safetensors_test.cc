#include "common/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
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
      {FileOf(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", ""),
       "more than 2^64 bits"},
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
      {FileOf("\xef\xbb\xbf{}", ""), "not JSON"},
      {FileOf(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "12"), "has 12 bits, no whole number"},
      {FileOf(R"({"a":{"dtype":"F6_E2M3","shape":[2],"data_offsets":[0,1]}})", "1"), "has 12 bits, no whole number"},
      {FileOf(R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,8]}})", eight), "BF16 [2] needs 4"},
      {FileOf(R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", ""),
       "more than 2^64 bits"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}})", four), "fraction"},
      {FileOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", four), "needs 4"},
      {FileOf(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
           four + eight),
       "\"b\": data_offsets [4, 12] leave a hole or overlap: the tensors before it end at 8"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n", "`git lfs pull`"},
      {"<!DOCTYPE html><html><body>404</body></html>", "HTML or XML page"},
      {"<html>", "HTML or XML page"},
      {"{\"error\":\"not found\"}", "it is JSON text"},
      {std::string("PK\x03\x04\0\0\x08\x08 archive/data.pkl", 24), "zip archive"},
      {std::string("\x80\x02\x8a\nl\xfc\x9c\x46\xf9", 10), "pickle"},
      {std::string("\x1f\x8b\x08\x00xxxxxxxx", 12), "gzip"},
  };
  for (const auto& c : cases) {
    const absl::Status status = OpenStatus(c.contents);
    EXPECT_TRUE(absl::IsDataLoss(status)) << c.contents << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message)) << c.contents;
  }
}

// Headers that look odd and are legal; data at odd offsets in the file too.
TEST(SafetensorsTest, LegalOddities) {
  const TemporaryFolder folder;
  for (
      const char* header : {
          R"({"t":{"data_offsets":[1,9],"dtype":"F32","shape":[2]},"s":{"shape":[1],"dtype":"U8","data_offsets":[0,1]}})",
          R"(  {"s":{"dtype":"BOOL","shape":[1,1,1],"data_offsets":[0,1]},"t":{"dtype":"F32","shape":[2,1],"data_offsets":[1,9]}}   )",
          R"({"none":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"s":{"dtype":"F4","shape":[2],"data_offsets":[0,1]},"end":{"dtype":"I64","shape":[0],"data_offsets":[9,9]},"\u0074":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
      }) {
    const float values[2] = {1.5f, -2};
    Spill(folder / "f", FileOf(header, "x" + std::string(reinterpret_cast<const char*>(values), 8)));
    const auto file = SafetensorsFile::Open(folder / "f");
    ASSERT_TRUE(file.ok()) << header << file.status();
    std::vector<float> got(2);
    ASSERT_TRUE((*file)->ReadFloats(*(*file)->Find("t"), 0, absl::MakeSpan(got)).ok());
    EXPECT_EQ(got, std::vector<float>(values, values + 2)) << header;
  }
}

TEST(SafetensorsTest, FormatsOfTwoBytes) {
  const TemporaryFolder folder;
  const std::vector<SafetensorsEntry> entries = {
      {"one", {1}, FloatFormat::kBF16}, {"half", {10000}, FloatFormat::kF16}, {"brain", {3}, FloatFormat::kBF16}};
  const SafetensorsPrefix prefix = *MakeSafetensorsPrefix(entries);
  std::vector<float> values(10004);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 2048) - 1024;
  std::string data(2 * values.size(), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const bool half = i >= 1 && i < 10001;
    const uint16_t bits = half ? NarrowF16(values[i]) : NarrowBf16(values[i] = static_cast<float>(i % 128));
    std::memcpy(data.data() + 2 * i, &bits, 2);
  }
  Spill(folder / "f", prefix.bytes + data);
  EXPECT_EQ(prefix.file_bytes, prefix.bytes.size() + data.size());
  const auto file = *SafetensorsFile::Open(folder / "f");
  EXPECT_EQ(file->Find("half")->dtype, "F16");
  std::vector<float> got(9999);
  ASSERT_TRUE(file->ReadFloats(*file->Find("half"), 1, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, std::vector<float>(values.begin() + 2, values.begin() + 10001));
  got.resize(2);
  ASSERT_TRUE(file->ReadFloats(*file->Find("brain"), 1, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, std::vector<float>(values.begin() + 10002, values.end()));
  EXPECT_TRUE(absl::IsOutOfRange(file->ReadFloats(*file->Find("brain"), 2, absl::MakeSpan(got))));
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

// What the message of each file that must be refused says of the cause.
TEST(SafetensorsTest, NastyFiles) {
  const std::string shared = SharedFolder();
  if (shared.empty()) GTEST_SKIP() << "SKIPPED: no shared folder";
  const std::map<std::string, std::string> causes = {
      {"empty", "found 0 bytes"},
      {"seven_bytes", "found 7 bytes"},
      {"len_1000_small_file", "the header has 1000 bytes, the file only 84"},
      {"len_huge", "at most 100000000"},
      {"html_page", "HTML or XML page"},
      {"header_not_utf8", "the header is not JSON: byte 1"},
      {"header_is_array", "the header is a list, expected an object"},
      {"truncated_data", "the header describes 16 bytes of data, the file has 14: it is cut short"},
      {"hole", "\"b\": data_offsets [8, 12] leave a hole or overlap: the tensors before it end at 4"},
      {"overlap_full_tied", "data_offsets [0, 4] leave a hole or overlap"},
      {"reversed_offsets", "\"a\": data_offsets [4, 0] end before they begin"},
      {"negative_offset", "\"a\": data_offsets holds the negative number -4"},
      {"size_mismatch", "\"test\": data_offsets [0, 4] hold 4 bytes, but I32 [2, 2] needs 16"},
      {"shape_overflow", "\"test\": shape [2, 18446744073709551614] has more than 2^64 bits"},
      {"float_shape", "\"t\": shape holds the fraction 4.0"},
      {"three_offsets", "\"t\": data_offsets has 3 numbers, expected 2"},
      {"unknown_dtype", "\"t\": unknown dtype \"Q4_K\""},
      {"empty_dtype", "\"lm_head.weight\": unknown dtype \"\""},
      {"duplicate_key", "\"a\": the name is given twice"},
      {"metadata_non_string", "__metadata__: \"n\" is the number 1, expected a string"},
      {"alias_10_tensors", "data_offsets [0, 16] leave a hole or overlap"},
  };
  size_t accepted = 0, refused = 0;
  for (const auto& entry : nlohmann::json::parse(Slurp(shared + "/data/nasty/MANIFEST.json"))) {
    const std::string name = entry["file"], expect = entry["expect"];
    if (name.rfind("safetensors/", 0) != 0) continue;
    const auto file = SafetensorsFile::Open(shared + "/data/nasty/" + name);
    const bool accept = expect.find("ACCEPT") != std::string::npos;
    EXPECT_EQ(file.ok(), accept) << name << ": " << expect << "; found " << file.status();
    accepted += file.ok();
    refused += !file.ok();
    if (file.ok()) continue;
    EXPECT_TRUE(absl::IsDataLoss(file.status())) << file.status();
    const std::string stem = std::filesystem::path(name).stem();
    const auto cause = causes.find(stem);
    EXPECT_THAT(std::string(file.status().message()),
                AllOf(HasSubstr(name + ": "), HasSubstr(cause == causes.end() ? "?" : cause->second)))
        << stem;
  }
  EXPECT_GE(accepted, 6u);
  EXPECT_EQ(refused, causes.size());
  const auto unordered = SafetensorsFile::Open(shared + "/data/nasty/safetensors/ok_unordered_header.safetensors");
  ASSERT_TRUE(unordered.ok());
  for (const auto& [name, want] : std::map<std::string, float>{{"a", 1}, {"b", 2}}) {
    float got = 0;
    ASSERT_TRUE((*unordered)->ReadFloats(*(*unordered)->Find(name), 0, absl::MakeSpan(&got, 1)).ok());
    EXPECT_EQ(got, want);
  }
}

}  // namespace
}  // namespace sluice
