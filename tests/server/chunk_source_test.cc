// Where the first values of chunks come from: checkpoints, init folders, paths.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "common/checkpoint.h"
#include "common/float_formats.h"
#include "common/gpt2_folder.h"
#include "common/mesh.h"
#include "tests/common/model_specs.h"
#include "tests/server/chunk_store_fixture.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

class ChunkSourceTest : public ::testing::Test {
 protected:
  ChunkSourceTest() {
    std::string pattern = testing::TempDir() + "/chunk_source_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  ~ChunkSourceTest() override { std::filesystem::remove_all(root_); }

  // Writes the store's chunks into the shards' files and publishes them as a checkpoint under `base`; `fill` puts each
  // chunk into the store first.
  static std::string PublishStore(const Layout& layout, ChunkStore* store, const std::string& base, uint64_t version,
                                  const std::function<void(uint64_t chunk)>& fill) {
    const uint32_t shards = layout.plan().shards();
    v1::CheckpointManifest manifest;
    manifest.set_job_id("job");
    manifest.set_timeline(1);
    manifest.set_version(version);
    *manifest.mutable_spec() = layout.plan().spec();
    manifest.set_parameters(layout.space().size());
    manifest.set_chunk_elements(layout.plan().chunk_elements());
    manifest.set_shards(shards);
    manifest.add_slots("value");
    manifest.add_slots("momentum");
    for (uint32_t s = 0; s < shards; ++s) {
      std::vector<ShardFileWriter::Piece> pieces;
      for (const std::string& slot : manifest.slots()) {
        for (const uint64_t c : layout.table().chunks_of(s)) {
          pieces.push_back({slot, layout.table().range(c).begin, layout.table().range(c).size()});
        }
      }
      auto writer =
          ShardFileWriter::Create(base + "/" + StagingFolderName(1, version) + "/" + ShardFileName(s, shards), pieces);
      EXPECT_TRUE(writer.ok()) << writer.status();
      for (const uint64_t c : layout.table().chunks_of(s)) {
        fill(c);
        EXPECT_TRUE(store->Save(c, writer->get()).ok());
      }
      absl::StatusOr<v1::CheckpointFile> file = (*writer)->Finish();
      EXPECT_TRUE(file.ok()) << file.status();
      *manifest.add_files() = *file;
      manifest.mutable_files(static_cast<int>(s))->set_shard(s);
    }
    absl::StatusOr<std::string> folder = PublishCheckpoint(base, manifest);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return folder.ok() ? *folder : "";
  }
  // The chunk's contribution to a round by itself.
  static void Update(const Layout& layout, ChunkStore* store, uint64_t chunk, uint64_t round) {
    const Range range = layout.table().range(chunk);
    const std::vector<float> g = Gradient(layout.space().size(), round, 0);
    store->Add(chunk, 0, 1, Bytes({g.begin() + range.begin, g.begin() + range.end}));
    store->Apply(chunk, Go(round), false);
  }

  // Trains two rounds with chunks of 3 and publishes version 2 as <root>/job/t1-v2.
  std::string Publish(Whole* at_two) {
    const auto layout = ServerTestPlan{.shards = 2, .chunk_elements = 3}.Make();
    ChunkStore store(layout);
    auto source = ChunkSource::Open(*layout, "", "");
    at_two->value.resize(8);
    return PublishStore(*layout, &store, root_ + "/job", 2, [&](uint64_t c) {
      EXPECT_TRUE(store.Load(**source, c, 0).ok());
      for (uint64_t round = 0; round < 2; ++round) Update(*layout, &store, c, round);
      const Range range = layout->table().range(c);
      std::copy_n((*store.Get(c, 2)).data.get(), range.size(), at_two->value.begin() + range.begin);
    });
  }

  // One round more from what the plan says it starts from; `rounds` 0: the first values.
  static absl::StatusOr<std::vector<float>> From(const ServerTestPlan& plan, uint64_t version, bool one_more,
                                                 const std::string& data_root = "",
                                                 const std::string& checkpoint_root = "") {
    const auto layout = plan.Make();
    ChunkStore store(layout);
    auto source = ChunkSource::Open(*layout, data_root, checkpoint_root);
    if (!source.ok()) return source.status();
    std::vector<float> out;
    for (uint64_t c = 0; c < layout->table().chunks(); ++c) {
      if (absl::Status s = store.Load(**source, c, version); !s.ok()) return s;
      const Range range = layout->table().range(c);
      if (one_more) {
        const std::vector<float> g = Gradient(8, version, 0);
        store.Add(c, 0, 1, Bytes({g.begin() + range.begin, g.begin() + range.end}));
        store.Apply(c, Go(version), false);
      }
      absl::StatusOr<ChunkValue> value = store.Get(c, version + one_more);
      if (!value.ok()) return value.status();
      out.insert(out.end(), value->data.get(), value->data.get() + value->elements);
    }
    return out;
  }

  std::string root_;
};

TEST_F(ChunkSourceTest, ACheckpointGoesOnInAnyLayout) {
  Whole at_two;
  const std::string folder = Publish(&at_two);
  // Three rounds without a break.
  std::vector<float> want;
  {
    const auto layout = ServerTestPlan{.chunk_elements = 8}.Make();
    ChunkStore store(layout);
    ASSERT_TRUE(store.Load(**ChunkSource::Open(*layout, "", ""), 0, 0).ok());
    for (uint64_t round = 0; round < 3; ++round) {
      store.Add(0, 0, 1, Bytes(Gradient(8, round, 0)));
      store.Apply(0, Go(round), false);
    }
    want.assign((*store.Get(0, 3)).data.get(), (*store.Get(0, 3)).data.get() + 8);
  }
  for (const uint64_t chunk : {1, 2, 5, 8}) {
    ServerTestPlan plan{.chunk_elements = chunk, .start = 2};
    plan.checkpoint.emplace().set_directory(folder);
    plan.checkpoint->set_version(2);
    absl::StatusOr<std::vector<float>> got = From(plan, 2, /*one_more=*/true);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(SameBits(*got, want)) << chunk;
  }
}

// A GPT on a mesh, checkpointed at version 1: by the shards of one layout, then read through the chunks of another.
TEST_F(ChunkSourceTest, ValueAndOptimizerStateAreTheSameBitsInAnyMeshsLayout) {
  // 3 layers, 4 heads; from a checkpoint of version `start` where one is given.
  const auto make = [](const Mesh& mesh, uint64_t chunk_elements, uint32_t shards, uint64_t start,
                       const std::string& from) {
    ServerTestPlan base{.replicas = mesh.data,
                        .shards = shards,
                        .chunk_elements = chunk_elements,
                        .start = start,
                        .pipeline = mesh.pipeline,
                        .tensor = mesh.tensor};
    if (!from.empty()) {
      base.checkpoint.emplace().set_directory(from);
      base.checkpoint->set_version(start);
    }
    v1::Plan plan = base.Proto();
    *plan.mutable_spec()->mutable_model() = GptSpec(3, 4, 8, 5, 13);
    plan.set_hash(PlanHash(plan));
    auto layout = Layout::Make(plan);
    EXPECT_TRUE(layout.ok()) << layout.status();
    return *layout;
  };
  int folders = 0;
  const auto write = [&](const std::shared_ptr<const Layout>& layout, bool update) {
    ChunkStore store(layout);
    const auto source = ChunkSource::Open(*layout, "", "");
    EXPECT_TRUE(source.ok()) << source.status();
    const std::string base = root_ + "/" + std::to_string(folders++);
    return PublishStore(*layout, &store, base, layout->plan().start() + 1, [&](uint64_t c) {
      EXPECT_TRUE(store.Load(**source, c, layout->plan().start()).ok());
      if (update) Update(*layout, &store, c, 0);
    });
  };
  const auto read = [](const std::string& folder, const std::string& slot, uint64_t parameters) {
    const auto reader = CheckpointReader::Open(folder, /*verify=*/true);
    EXPECT_TRUE(reader.ok()) << reader.status();
    std::vector<float> values(parameters);
    EXPECT_TRUE((*reader)->Read(slot, 0, absl::MakeSpan(values)).ok());
    return values;
  };
  const auto one = make({}, 1000, 2, 0, "");
  const std::string saved = write(one, true);
  const uint64_t parameters = one->space().size();
  const std::vector<float> value = read(saved, "value", parameters), momentum = read(saved, "momentum", parameters);
  EXPECT_TRUE(std::any_of(momentum.begin(), momentum.end(), [](float x) { return x != 0; }));
  for (const Mesh& mesh : {Mesh{.tensor = 2}, Mesh{.pipeline = 3}, Mesh{.data = 2, .pipeline = 2, .tensor = 4}}) {
    const std::string again = write(make(mesh, 97, 5, 1, saved), false);
    EXPECT_TRUE(SameBits(read(again, "value", parameters), value));
    EXPECT_TRUE(SameBits(read(again, "momentum", parameters), momentum));
    const std::string back = write(make({}, 300, 3, 2, again), false);
    EXPECT_TRUE(SameBits(read(back, "value", parameters), value));
    EXPECT_TRUE(SameBits(read(back, "momentum", parameters), momentum));
  }
}

TEST_F(ChunkSourceTest, InitTakesTheValuesAndAFreshOptimizer) {
  Whole at_two;
  ServerTestPlan plan{.init_path = Publish(&at_two)};
  absl::StatusOr<std::vector<float>> got = From(plan, 0, false);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(SameBits(*got, at_two.value));
  got = From(plan, 0, true);
  ASSERT_TRUE(got.ok());
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR((*got)[i], at_two.value[i] - 0.5 * 0.25 * Gradient(8, 0, 0)[i], 1e-6);
}

TEST_F(ChunkSourceTest, PathsStayUnderTheRoots) {
  Whole at_two;
  const std::string folder = Publish(&at_two);
  std::filesystem::create_directories(root_ + "/data");
  ServerTestPlan plan{.init_path = folder};
  EXPECT_TRUE(From(plan, 0, false, root_ + "/data", root_).ok());  // a checkpoint of this cluster
  const absl::Status outside = From(plan, 0, false, root_ + "/data", root_ + "/elsewhere").status();
  EXPECT_EQ(outside.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(outside.message()), HasSubstr("--data_root"));
  plan.init_path = "job/t1-v2";
  EXPECT_TRUE(From(plan, 0, false, root_, "").ok());
  plan.init_path = "../" + std::filesystem::path(root_).filename().string() + "/job/t1-v2";
  EXPECT_TRUE(From(plan, 0, false, root_, "").ok());
  EXPECT_EQ(From(plan, 0, false, root_ + "/data", "").status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(ChunkSourceTest, WrongFoldersAreNamed) {
  ServerTestPlan plan{.init_path = root_ + "/nothing"};
  EXPECT_EQ(From(plan, 0, false).status().code(), absl::StatusCode::kInvalidArgument);  // an MLP has no other format
  plan.init_path = "";
  plan.checkpoint.emplace().set_directory(root_ + "/nothing");
  const absl::Status missing = From(plan, 0, false).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("nothing"));
  Whole at_two;
  plan.checkpoint->set_directory(Publish(&at_two));
  plan.hidden = 3;  // another model
  EXPECT_EQ(From(plan, 0, false).status().code(), absl::StatusCode::kInvalidArgument);
}

// Bytes that this process has read from files; -1 where the system does not say.
int64_t BytesRead() {
  std::ifstream io("/proc/self/io");
  std::string key;
  int64_t value = 0;
  while (io >> key >> value) {
    if (key == "rchar:") return value;
  }
  return -1;
}

// A folder of 64 Ki parameters whose weights are in one file; what the server of every second chunk reads of it.
TEST_F(ChunkSourceTest, AServerReadsTheRangesOfItsShardsOfAGpt2Folder) {
  v1::Plan proto = ServerTestPlan{.shards = 2, .chunk_elements = 4096, .norm_block = 4096}.Proto();
  v1::Gpt2Spec* model = proto.mutable_spec()->mutable_model()->mutable_gpt2();
  model->set_layers(2);
  model->set_heads(2);
  model->set_width(64);
  model->set_context(32);
  model->set_vocabulary(300);
  proto.mutable_spec()->mutable_init()->set_path(root_ + "/gpt2");
  proto.set_hash(PlanHash(proto));
  const auto layout = Layout::Make(proto);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const uint64_t parameters = (*layout)->space().size(), chunks = (*layout)->table().chunks();
  const std::vector<float> values = Gradient(parameters, 1, 1);
  for (const FloatFormat format : {FloatFormat::kF32, FloatFormat::kBF16}) {
    std::filesystem::remove_all(root_ + "/gpt2");
    ASSERT_TRUE(ExportGpt2(*model, values, root_ + "/gpt2", {.format = format, .max_shard_bytes = 100000}).ok());
    int64_t read[3] = {};  // by the first server, by the second, by one that has everything
    std::vector<float> found(parameters);
    for (const int server : {0, 1, 2}) {
      const int64_t before = BytesRead();
      const auto source = ChunkSource::Open(**layout, "", "");
      ASSERT_TRUE(source.ok()) << source.status();
      for (uint64_t c = server % 2; c < chunks; c += server == 2 ? 1 : 2) {
        const Range range = (*layout)->table().range(c);
        ASSERT_TRUE((*source)->Load(**layout, range, found.data() + range.begin, {}).ok());
      }
      read[server] = BytesRead() - before;
    }
    std::vector<char> narrow(parameters * BytesOf(format));
    std::vector<float> want(parameters);
    Narrow(format, values, narrow.data());
    Widen(format, narrow.data(), absl::MakeSpan(want));
    EXPECT_TRUE(SameBits(found, want));
    if (BytesRead() <= 0) GTEST_SKIP() << "SKIPPED: /proc/self/io does not count here";
    const int64_t whole = static_cast<int64_t>(parameters * BytesOf(format));
    EXPECT_LT(read[0], whole * 6 / 10) << DtypeOf(format);  // a little more than half: headers, rows at edges
    EXPECT_LT(read[1], whole * 6 / 10) << DtypeOf(format);
    EXPECT_LT(read[0] + read[1], whole * 12 / 10) << DtypeOf(format);
    EXPECT_GE(read[2], whole);
  }
}

}  // namespace
}  // namespace sluice
