#include "common/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <zlib.h>

#include <random>
#include <thread>

#include "common/file.h"
#include "common/layout.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Piece = ShardFileWriter::Piece;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// Element e of slot s of version v.
float ValueAt(const std::string& slot, uint64_t e, uint64_t version) {
  return static_cast<float>(e) + 1e6f * static_cast<float>(slot.size()) + 0.25f * static_cast<float>(version);
}

std::vector<float> Values(const std::string& slot, Range range, uint64_t version) {
  std::vector<float> values;
  for (uint64_t e = range.begin; e < range.end; ++e) values.push_back(ValueAt(slot, e, version));
  return values;
}

v1::CheckpointManifest Manifest(uint64_t timeline, uint64_t version, uint64_t parameters, uint64_t chunk,
                                uint32_t shards) {
  v1::CheckpointManifest manifest;
  manifest.set_job_id("kjv-3");
  manifest.set_timeline(timeline);
  manifest.set_version(version);
  manifest.mutable_spec()->set_name("kjv");
  manifest.mutable_spec()->mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
  manifest.set_parameters(parameters);
  manifest.set_chunk_elements(chunk);
  manifest.set_shards(shards);
  for (const char* slot : {"value", "m", "vv"}) manifest.add_slots(slot);
  manifest.set_data_position(version * 12);
  manifest.set_created_unix_seconds(1796000000.123456);
  return manifest;
}

// Writes a whole staging folder, the pieces of each shard in a shuffled order, and fills in the manifest's files.
void WriteShards(const std::string& base, v1::CheckpointManifest* manifest) {
  const ChunkTable table(manifest->parameters(), manifest->chunk_elements(), manifest->shards());
  const std::string staging = base + "/" + StagingFolderName(manifest->timeline(), manifest->version());
  std::mt19937 random(1);
  for (uint32_t shard = 0; shard < manifest->shards(); ++shard) {
    std::vector<Piece> pieces;
    for (const std::string& slot : manifest->slots()) {
      for (uint64_t chunk = 0; chunk < table.chunks(); ++chunk) {
        if (table.shard(chunk) == shard) pieces.push_back({slot, table.range(chunk).begin, table.range(chunk).size()});
      }
    }
    auto writer = ShardFileWriter::Create(staging + "/" + ShardFileName(shard, manifest->shards()), pieces);
    ASSERT_TRUE(writer.ok()) << writer.status();
    std::shuffle(pieces.begin(), pieces.end(), random);
    for (const Piece& p : pieces) {
      const std::vector<float> values = Values(p.slot, {p.first, p.first + p.elements}, manifest->version());
      ASSERT_TRUE((*writer)->Write(p.slot, p.first, values).ok());
    }
    const auto file = (*writer)->Finish();
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->shard(), shard);
    *manifest->add_files() = *file;
  }
}

std::string Publish(const std::string& base, v1::CheckpointManifest manifest) {
  WriteShards(base, &manifest);
  const auto published = PublishCheckpoint(base, manifest);
  EXPECT_TRUE(published.ok()) << published.status();
  return published.value_or("");
}

TEST(CheckpointTest, Names) {
  EXPECT_EQ(CheckpointFolderName(1, 400), "t1-v400");
  EXPECT_EQ(StagingFolderName(2, 0), "staging-t2-v0");
  EXPECT_EQ(ShardFileName(3, 16), "shard-00003-of-00016.safetensors");
}

TEST(CheckpointTest, ChecksumOfPiecesOutOfOrderIsTheFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / ("a/b/" + ShardFileName(2, 7));
  const auto writer =
      *ShardFileWriter::Create(path, {{"value", 0, 5}, {"value", 10, 0}, {"m", 0, 5}, {"value", 20, 1000}});
  ASSERT_TRUE(writer->Write("value", 20, Values("value", {20, 1020}, 1)).ok());
  ASSERT_TRUE(writer->Write("value", 10, {}).ok());
  ASSERT_TRUE(writer->Write("m", 0, Values("m", {0, 5}, 1)).ok());
  const absl::Status missing = writer->Finish().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(missing));
  EXPECT_THAT(Text(missing), AllOf(HasSubstr(path), HasSubstr("slot value from element 0")));
  ASSERT_TRUE(writer->Write("value", 0, Values("value", {0, 5}, 1)).ok());
  const v1::CheckpointFile file = *writer->Finish();
  const std::string bytes = Slurp(path);
  EXPECT_EQ(file.name(), ShardFileName(2, 7));
  EXPECT_EQ(file.shard(), 2u);
  EXPECT_EQ(file.bytes(), bytes.size());
  EXPECT_EQ(file.crc32(), crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

TEST(CheckpointTest, WriterRefusesWhatIsNotInItsTable) {
  const TemporaryFolder folder;
  const auto writer = *ShardFileWriter::Create(folder / "f", {{"value", 0, 2}});
  const std::vector<float> two = {1, 2}, three = {1, 2, 3};
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Write("value", 1, two)));
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Write("m", 0, two)));
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Write("value", 0, three)));
  EXPECT_TRUE(writer->Write("value", 0, two).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(writer->Write("value", 0, two)));
  EXPECT_TRUE(writer->Finish().ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ShardFileWriter::Create(folder / "g", {{"m", 0, 1}, {"m", 0, 2}}).status()));
}

TEST(CheckpointTest, AnyRangeIsReadFromAnyLayout) {
  std::mt19937 random(5);
  for (const uint64_t parameters : {0, 1, 2, 997, 5000}) {
    for (const uint64_t chunk : {1, 7, 256, 100000}) {
      if (parameters / chunk > 1000) continue;
      for (const uint32_t shards : {1, 3, 16}) {  // more shards than chunks: empty ones
        const TemporaryFolder folder;
        const v1::CheckpointManifest manifest = Manifest(1, 7, parameters, chunk, shards);
        const auto reader = CheckpointReader::Open(Publish(folder.path(), manifest), /*verify=*/true);
        ASSERT_TRUE(reader.ok()) << reader.status();
        EXPECT_EQ((*reader)->manifest().data_position(), 84u);
        EXPECT_EQ((*reader)->manifest().created_unix_seconds(), manifest.created_unix_seconds());
        for (int i = 0; i < 20; ++i) {
          Range range = {0, parameters};
          if (i > 0) range = {random() % (parameters + 1), random() % (parameters + 1)};
          if (range.begin > range.end) std::swap(range.begin, range.end);
          for (const std::string slot : {"value", "m", "vv"}) {
            std::vector<float> values(range.size());
            ASSERT_TRUE((*reader)->Read(slot, range.begin, absl::MakeSpan(values)).ok());
            ASSERT_EQ(values, Values(slot, range, 7));
          }
        }
        std::vector<float> past(2);
        EXPECT_TRUE(absl::IsOutOfRange((*reader)->Read("value", parameters, absl::MakeSpan(past))));
        EXPECT_TRUE(absl::IsNotFound((*reader)->Read("momentum", 0, absl::MakeSpan(past))));
      }
    }
  }
}

TEST(CheckpointTest, ReaderIsThreadSafe) {
  const TemporaryFolder folder;
  const auto reader = *CheckpointReader::Open(Publish(folder.path(), Manifest(1, 3, 20000, 128, 4)), true);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t first = 100 * t; first + 700 < 20000; first += 331) {
        std::vector<float> values(700);
        EXPECT_TRUE(reader->Read("m", first, absl::MakeSpan(values)).ok());
        EXPECT_EQ(values, Values("m", {first, first + 700}, 3));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CheckpointTest, PublishingTwiceLeavesTheFirst) {
  const TemporaryFolder folder;
  v1::CheckpointManifest manifest = Manifest(1, 4, 100, 10, 2);
  WriteShards(folder.path(), &manifest);
  EXPECT_EQ(*PublishCheckpoint(folder.path(), manifest), folder / "t1-v4");
  EXPECT_EQ(*PublishCheckpoint(folder.path(), manifest), folder / "t1-v4");
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("t1-v4"));
  // Also where another life has written the staging folder again.
  v1::CheckpointManifest again = Manifest(1, 4, 100, 10, 2);
  WriteShards(folder.path(), &again);
  EXPECT_EQ(*PublishCheckpoint(folder.path(), again), folder / "t1-v4");
  EXPECT_TRUE(CheckpointReader::Open(folder / "t1-v4", true).ok());
}

TEST(CheckpointTest, NothingIncompleteIsPublished) {
  const TemporaryFolder folder;
  v1::CheckpointManifest manifest = Manifest(1, 4, 100, 10, 2);
  EXPECT_TRUE(absl::IsNotFound(PublishCheckpoint(folder / "none", manifest).status()));
  WriteShards(folder.path(), &manifest);
  const std::string path = folder / ("staging-t1-v4/" + ShardFileName(1, 2)), bytes = Slurp(path);
  Spill(path, bytes.substr(1));
  EXPECT_TRUE(absl::IsDataLoss(PublishCheckpoint(folder.path(), manifest).status()));
  ASSERT_TRUE(RemoveTree(path).ok());
  const absl::Status status = PublishCheckpoint(folder.path(), manifest).status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(Text(status), HasSubstr(path));
  EXPECT_TRUE(ListCheckpoints(folder.path())->empty());
  Spill(path, bytes);
  EXPECT_TRUE(PublishCheckpoint(folder.path(), manifest).ok());
}

TEST(CheckpointTest, ListIsByTimelineThenVersionAsNumbers) {
  const TemporaryFolder folder;
  EXPECT_TRUE(ListCheckpoints(folder / "none")->empty());
  for (const auto& [timeline, version] : {std::pair(2, 5), {1, 100}, {10, 1}, {1, 20}, {1, 3}}) {
    Publish(folder.path(), Manifest(timeline, version, 10, 5, 2));
  }
  v1::CheckpointManifest open = Manifest(3, 3, 10, 5, 2);
  WriteShards(folder.path(), &open);  // stays in staging
  Spill(folder / "t1-v7", "a file");
  ASSERT_TRUE(MakeDirectories(folder / "t1-v8").ok());        // no manifest
  ASSERT_TRUE(MakeDirectories(folder / "t1-v08").ok());       // not one of our names
  std::filesystem::copy(folder / "t1-v3", folder / "t1-v9");  // a manifest of another version
  std::vector<std::string> names;
  const auto found = ListCheckpoints(folder.path());
  ASSERT_TRUE(found.ok()) << found.status();
  for (const v1::CheckpointManifest& m : *found) names.push_back(CheckpointFolderName(m.timeline(), m.version()));
  EXPECT_THAT(names, ElementsAre("t1-v3", "t1-v20", "t1-v100", "t2-v5", "t10-v1"));
}

TEST(CheckpointTest, RemoveTakesCheckpointFoldersOnly) {
  const TemporaryFolder folder;
  Publish(folder.path(), Manifest(1, 4, 10, 5, 2));
  v1::CheckpointManifest staged = Manifest(1, 5, 10, 5, 2);
  WriteShards(folder.path(), &staged);
  ASSERT_TRUE(MakeDirectories(folder / "removing-t1-v4/rest").ok());  // a life that died in the middle
  for (int twice = 0; twice < 2; ++twice) {
    EXPECT_TRUE(RemoveCheckpoint(folder / "t1-v4").ok());
    EXPECT_TRUE(RemoveCheckpoint(folder / "staging-t1-v5/").ok());
  }
  EXPECT_TRUE(ListDirectory(folder.path())->empty());
  ASSERT_TRUE(MakeDirectories(folder / "precious").ok());
  for (const char* name : {"precious", "t1", "t1-v", "tx-v1", "staging-", "t1-v1x", "t-1-v1", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(RemoveCheckpoint(folder / name))) << name;
  }
  EXPECT_TRUE(PathExists(folder / "precious"));
}

TEST(CheckpointTest, EveryFlippedByteIsFound) {
  const TemporaryFolder folder;
  const std::string checkpoint = Publish(folder.path(), Manifest(1, 2, 20, 7, 2));
  const std::string manifest = (*CheckpointReader::Open(checkpoint, true))->manifest().SerializeAsString();
  const std::vector<std::string> names = *ListDirectory(checkpoint);
  for (const std::string& name : names) {
    const std::string path = checkpoint + "/" + name, good = Slurp(path);
    for (size_t i = 0; i < good.size(); ++i) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << i % 8));
      Spill(path, bad);
      const auto reader = CheckpointReader::Open(checkpoint, true);
      if (reader.ok() && name == "manifest.json") {  // one kind of white space for another
        ASSERT_EQ((*reader)->manifest().SerializeAsString(), manifest);
        continue;
      }
      const absl::Status status = reader.status();
      ASSERT_FALSE(status.ok()) << name << " byte " << i;
      ASSERT_THAT(Text(status), HasSubstr(path)) << "byte " << i;
      // The manifest's format version may be what changed.
      const bool other_version = name == "manifest.json" && absl::IsFailedPrecondition(status);
      ASSERT_TRUE(absl::IsDataLoss(status) || other_version) << status;
    }
    Spill(path, good);
  }
  EXPECT_TRUE(CheckpointReader::Open(checkpoint, true).ok());
}

TEST(CheckpointTest, CutAndMissingFilesAreNamed) {
  const TemporaryFolder folder;
  const std::string checkpoint = Publish(folder.path(), Manifest(1, 2, 20, 7, 2));
  const std::vector<std::string> names = *ListDirectory(checkpoint);
  for (const std::string& name : names) {
    const std::string path = checkpoint + "/" + name, good = Slurp(path);
    for (const size_t size : {size_t{0}, size_t{5}, good.size() / 2, good.size() - 2}) {
      Spill(path, good.substr(0, size));
      const absl::Status status = CheckpointReader::Open(checkpoint, false).status();
      EXPECT_TRUE(absl::IsDataLoss(status)) << name << " " << size << ": " << status;
      EXPECT_THAT(Text(status), HasSubstr(path));
    }
    ASSERT_TRUE(RemoveTree(path).ok());
    const absl::Status status = CheckpointReader::Open(checkpoint, false).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_THAT(Text(status), HasSubstr(path));
    Spill(path, good);
  }
  EXPECT_TRUE(absl::IsNotFound(CheckpointReader::Open(folder / "t9-v9", false).status()));
}

// Files that are sound in themselves but do not make up the space.
TEST(CheckpointTest, HolesOverlapsAndStraysAreRefused) {
  const struct {
    std::vector<Piece> pieces;
    const char* message;
  } cases[] = {
      {{{"value", 0, 10}, {"m", 0, 4}, {"m", 5, 5}}, "begins at element 5 of slot m"},
      {{{"value", 0, 10}, {"m", 0, 6}, {"m", 5, 5}}, "begins at element 5 of slot m"},
      {{{"value", 0, 10}, {"m", 0, 9}}, "slot m has 9 elements"},
      {{{"value", 0, 10}, {"m", 1, 9}}, "the pieces begin at 0"},
      {{{"value", 0, 10}}, "slot m has 0 elements"},
      {{{"value", 0, 11}, {"m", 0, 10}}, "ends past the parameters"},
      {{{"value", 0, 10}, {"m", 0, 10}, {"x", 0, 10}}, "of a slot that the manifest does not list"},
  };
  for (const auto& c : cases) {
    const TemporaryFolder folder;
    v1::CheckpointManifest manifest = Manifest(1, 1, 10, 10, 1);
    manifest.clear_slots();
    manifest.add_slots("value");
    manifest.add_slots("m");
    const auto writer = *ShardFileWriter::Create(folder / ("staging-t1-v1/" + ShardFileName(0, 1)), c.pieces);
    for (const Piece& p : c.pieces) {
      ASSERT_TRUE(writer->Write(p.slot, p.first, std::vector<float>(p.elements)).ok());
    }
    *manifest.add_files() = *writer->Finish();
    const absl::Status status = CheckpointReader::Open(*PublishCheckpoint(folder.path(), manifest), true).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(Text(status), HasSubstr(c.message));
  }
}

TEST(CheckpointTest, ManifestsFilesMustBeTheShards) {
  for (const int fault : {0, 1, 2, 3}) {
    const TemporaryFolder folder;
    v1::CheckpointManifest manifest = Manifest(1, 1, 10, 5, 2);
    WriteShards(folder.path(), &manifest);
    if (fault == 0) manifest.mutable_files()->RemoveLast();
    if (fault == 1) *manifest.mutable_files(1) = manifest.files(0);
    if (fault == 2) manifest.mutable_files(1)->set_shard(2);
    if (fault == 3) manifest.mutable_files(1)->set_name("../staging-t1-v1/" + ShardFileName(1, 2));
    const absl::Status status = CheckpointReader::Open(*PublishCheckpoint(folder.path(), manifest), false).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << fault << ": " << status;
    EXPECT_THAT(Text(status), HasSubstr("manifest.json"));
  }
}

TEST(CheckpointTest, OtherFormatVersionsAndOtherFilesAreNamed) {
  const TemporaryFolder folder;
  ASSERT_TRUE(MakeDirectories(folder / "t1-v1").ok());
  Spill(folder / "t1-v1/manifest.json", R"({"format_version": 3, "news": [1]})");
  absl::Status status = CheckpointReader::Open(folder / "t1-v1", false).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("format version 3"));
  for (const char* contents : {"", "not JSON", "[]", "{\"version\": \"x\"}"}) {
    Spill(folder / "t1-v1/manifest.json", contents);
    status = CheckpointReader::Open(folder / "t1-v1", false).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << contents << ": " << status;
    EXPECT_THAT(Text(status), HasSubstr("t1-v1/manifest.json"));
  }
}

TEST(CheckpointTest, AFullDiskIsLoudAndLeavesTheOlderCheckpoint) {
  const TemporaryFolder folder;
  const std::string older = Publish(folder.path(), Manifest(1, 1, 4000, 1000, 2));
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string path = folder / ("staging-t1-v2/" + ShardFileName(0, 1));
  const auto writer = ShardFileWriter::Create(path, {{"value", 0, 4000}});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_TRUE(absl::IsResourceExhausted(writer.status())) << writer.status();
  EXPECT_THAT(Text(writer.status()), HasSubstr(path));
  EXPECT_EQ(ListCheckpoints(folder.path())->size(), 1u);
  EXPECT_TRUE(CheckpointReader::Open(older, true).ok());
  EXPECT_TRUE(RemoveCheckpoint(folder / "staging-t1-v2").ok());
}

}  // namespace
}  // namespace sluice
