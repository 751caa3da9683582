#include "client/default_token_spec.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "client/spec_loading.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

TEST(DefaultTokenSpecTest, GrowsWithTheData) {
  uint64_t before = 0;
  for (const uint64_t tokens : {1000, 29'999, 30'000, 4'999'999, 5'000'000}) {
    const v1::JobSpec spec = DefaultTokenSpec(tokens, 256);
    const v1::Gpt2Spec& model = spec.model().gpt2();
    const uint64_t size = uint64_t{model.layers()} * model.width() * model.width();
    EXPECT_GE(size, before);
    EXPECT_EQ(model.width() % model.heads(), 0u);
    before = size;
  }
  EXPECT_EQ(DefaultTokenSpec(1'000'000, 256).model().gpt2().width(), 128u);
  EXPECT_EQ(DefaultTokenSpec(1'000'000, 256).train().rounds(), 2000u);
  EXPECT_EQ(DefaultTokenSpec(1'000'000, 50257).train().rounds(), 1000u);
}

TEST(DefaultTokenSpecTest, EveryTextOfThreeBytesOrMoreCanBeLearned) {
  TemporaryFolder folder;
  for (const size_t bytes : {3, 4, 19, 20, 21, 40, 41, 200, 639, 640, 641, 5000}) {
    Spill(folder / "t.txt", std::string(bytes, 'x'));
    SpecSource source;
    source.text = folder / "t.txt";
    const auto spec = LoadSpec(source, DataPaths::kOfFile);
    EXPECT_TRUE(spec.ok()) << bytes << ": " << spec.status();
  }
}

TEST(DefaultTokenSpecTest, FoldersAndPatternsCountAllFiles) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder / "my books");
  Spill(folder / "my books/a.txt", std::string(20'000, 'a'));
  Spill(folder / "my books/b.txt", std::string(20'000, 'b'));
  for (const char* path : {"my books", "my books/", "my books/*.txt"}) {
    auto made = DefaultTextSpec(folder / path);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->description, "40000 bytes of text in 2 files");
    EXPECT_EQ(made->spec.model().gpt2().layers(), 4u);
    EXPECT_EQ(made->spec.name(), "my-books");
    SpecSource source;
    source.text = folder / path;
    auto spec = LoadSpec(source, DataPaths::kOfFile);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->model().gpt2().vocabulary(), 256u);
  }
  EXPECT_EQ(DefaultTextSpec(folder / "my books/a.txt")->spec.name(), "a");
  EXPECT_EQ(DefaultTextSpec(folder / "none*").status().code(), absl::StatusCode::kNotFound);
}

TEST(DefaultTokenSpecTest, TokenFilesSayTheirVocabulary) {
  TemporaryFolder folder;
  std::string tokens;
  for (int i = 0; i < 500; ++i) tokens += std::string{static_cast<char>(i % 65), '\0'};
  Spill(folder / "train.bin", tokens);
  SpecSource source;
  source.tokens = folder / "train.bin";
  auto spec = LoadSpec(source, DataPaths::kOfFile);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->model().gpt2().vocabulary(), 65u);
  EXPECT_EQ(spec->model().gpt2().context(), 25u);
  EXPECT_EQ(spec->name(), "train");
  source.tokens = folder / "absent.bin";
  EXPECT_EQ(LoadSpec(source, DataPaths::kOfFile).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace sluice
