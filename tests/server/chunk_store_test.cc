#include "server/chunk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/float_formats.h"
#include "common/job_spec.h"
#include "common/philox.h"
#include "tests/common/model_specs.h"
#include "tests/server/server_test_plan.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Payload Bytes(const std::vector<float>& values) {
  return Payload({grpc::Slice(values.data(), values.size() * sizeof(float))});
}

// The whole space as a server without any sharding holds it: filled, then `rounds` updates with pushed gradients.
struct Whole {
  std::vector<float> value, momentum;
};

std::vector<float> Gradient(uint64_t parameters, uint64_t round, uint32_t contributor) {
  std::mt19937 rng(static_cast<uint32_t>(round * 100 + contributor));
  std::vector<float> g(parameters);
  for (float& x : g) x = static_cast<float>(rng()) / 2147483648.0f - 1;
  return g;
}

v1::Verdict Go(uint64_t round, float scale = 0.25f) {
  v1::Verdict verdict;
  verdict.set_round(round);
  verdict.set_gradient_scale(scale);
  return verdict;
}

Whole Train(const ServerTestPlan& plan, uint64_t rounds) {
  const auto layout = plan.Make();
  const uint64_t parameters = layout->space().size();
  ChunkStore store(layout);
  auto source = ChunkSource::Open(*layout, "", "");
  EXPECT_TRUE(source.ok()) << source.status();
  Whole whole;
  for (uint64_t c = 0; c < layout->table().chunks(); ++c) {
    EXPECT_TRUE(store.Load(**source, c, 0).ok());
    const Range range = layout->table().range(c);
    for (uint64_t round = 0; round < rounds; ++round) {
      for (uint32_t who : {1u, 0u, 2u}) {
        const std::vector<float> g = Gradient(parameters, round, who);
        store.Add(c, who, 3, Bytes({g.begin() + range.begin, g.begin() + range.end}));
      }
      EXPECT_TRUE(store.Finish(c, 3).finite);
      store.Apply(c, Go(round), false);
    }
    absl::StatusOr<ChunkValue> value = store.Get(c, rounds);
    EXPECT_TRUE(value.ok());
    whole.value.insert(whole.value.end(), value->data.get(), value->data.get() + value->elements);
  }
  return whole;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Workers of the host map each of the two places once (worker/model/parameter_memory.h).
TEST(ChunkStore, EvenAndOddVersionsOfAChunkLieInTwoPlaces) {
  ServerTestPlan plan;
  plan.hidden = 50;
  plan.chunk_elements = 100;
  const auto layout = plan.Make();
  ChunkStore store(layout, /*share=*/true);
  auto source = ChunkSource::Open(*layout, "", "");
  ASSERT_TRUE(source.ok()) << source.status();
  const uint64_t chunks = layout->table().chunks();
  ASSERT_GT(chunks, 2u);
  for (uint64_t c = 0; c < chunks; ++c) ASSERT_TRUE(store.Load(**source, c, 0).ok());
  std::vector<std::vector<const float*>> places(chunks);
  std::mt19937 random(1);
  for (uint64_t round = 0; round < 8; ++round) {
    std::vector<uint64_t> order(chunks);
    for (uint64_t c = 0; c < chunks; ++c) order[c] = c;
    std::shuffle(order.begin(), order.end(), random);
    for (const uint64_t c : order) {
      const Range range = layout->table().range(c);
      store.Add(c, 0, 1, Bytes(std::vector<float>(range.size(), 1)));
      store.Finish(c, 1);
      store.Apply(c, Go(round), false);
      places[c].push_back(store.Get(c, round + 1)->data.get());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(places[c].back()) % 4096, 0u);
    }
  }
  for (uint64_t c = 0; c < chunks; ++c) {
    EXPECT_NE(places[c][0], places[c][1]);
    for (uint64_t round = 2; round < 8; ++round) EXPECT_EQ(places[c][round], places[c][round - 2]) << c;
  }
}

TEST(ChunkStore, TheChunkSizeChangesNoBit) {
  ServerTestPlan plan;
  plan.hidden = 50;
  plan.chunk_elements = 1000;
  const Whole whole = Train(plan, 3);
  for (const uint64_t chunk : {1, 3, 16, 37, 100, 255}) {
    plan.chunk_elements = chunk;
    EXPECT_TRUE(SameBits(Train(plan, 3).value, whole.value)) << chunk;
  }
  // It did move: and by the rule of SGD with momentum, of the first round at least.
  const Whole first = Train(plan, 1), initial = Train(plan, 0);
  const auto layout = plan.Make();
  for (size_t i = 0; i < first.value.size(); ++i) {
    const float sum = Gradient(first.value.size(), 0, 0)[i] + Gradient(first.value.size(), 0, 1)[i] +
                      Gradient(first.value.size(), 0, 2)[i];
    EXPECT_NEAR(first.value[i], initial.value[i] - 0.5f * 0.25f * sum, 1e-6);
  }
}

TEST(ChunkStore, InitialValuesComeFromTheSeedAndTheTensor) {
  ServerTestPlan plan;
  const auto layout = plan.Make();
  const Whole initial = Train(plan, 0);
  for (const Tensor& t : layout->space().tensors()) {
    std::vector<float> want(t.elements);
    FillInitial(t, layout->plan().spec().train().seed(), 0, t.elements, want.data());
    EXPECT_TRUE(SameBits({initial.value.begin() + t.offset, initial.value.begin() + t.offset + t.elements}, want));
  }
}

class ChunkStoreTest : public ::testing::Test {
 protected:
  ChunkStoreTest() : layout_(ServerTestPlan{.chunk_elements = 8}.Make()), store_(layout_) {
    source_ = *ChunkSource::Open(*layout_, "", "");
    EXPECT_TRUE(store_.Load(*source_, 0, 0).ok());
  }
  void Push(uint32_t who, float x) { store_.Add(0, who, 2, Bytes(std::vector<float>(8, x))); }
  std::vector<float> Value(uint64_t version) {
    absl::StatusOr<ChunkValue> value = store_.Get(0, version);
    if (!value.ok()) return {};
    return {value->data.get(), value->data.get() + value->elements};
  }

  const std::shared_ptr<const Layout> layout_;
  ChunkStore store_;
  std::shared_ptr<const ChunkSource> source_;
};

TEST_F(ChunkStoreTest, TwoVersionsAreThere) {
  const std::vector<float> v0 = Value(0);
  for (uint64_t round = 0; round < 3; ++round) {
    Push(0, 1);
    Push(1, 2);
    store_.Apply(0, Go(round), false);
  }
  EXPECT_EQ(store_.Get(0, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Value(2).size(), 8u);
  EXPECT_EQ(Value(3).size(), 8u);
  EXPECT_EQ(store_.Get(0, 4).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_.Get(1, 0).status().code(), absl::StatusCode::kNotFound);
  store_.DropPrevious(0);
  EXPECT_EQ(store_.Get(0, 2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(Value(3), v0);
}

TEST_F(ChunkStoreTest, ValuesThatSomebodyHoldsDoNotChange) {
  absl::StatusOr<ChunkValue> held = store_.Get(0, 0);
  ASSERT_TRUE(held.ok());
  const std::vector<float> before = Value(0);
  for (uint64_t round = 0; round < 5; ++round) {
    Push(0, 1);
    Push(1, 1);
    store_.Apply(0, Go(round), false);
  }
  EXPECT_EQ(std::memcmp(held->data.get(), before.data(), 32), 0);
}

TEST_F(ChunkStoreTest, ASkipKeepsTheValueUnderTheNextVersion) {
  const std::vector<float> v0 = Value(0);
  v1::Verdict skip;
  skip.set_skip(true);
  Push(0, 1);
  Push(1, 1);
  store_.Apply(0, skip, false);
  EXPECT_EQ(Value(1), v0);
  EXPECT_EQ(Value(0), v0);
  // The optimizer's state did not move either: the next round is a first one.
  Push(0, 1);
  Push(1, 1);
  store_.Apply(0, Go(1), false);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(Value(2)[i], v0[i] - 0.5 * 0.25 * 2, 1e-6);
}

TEST_F(ChunkStoreTest, ANonFiniteSumKeepsTheValueWhereAsked) {
  const std::vector<float> v0 = Value(0);
  Push(0, 1);
  Push(1, std::numeric_limits<float>::infinity());
  const SumResult sum = store_.Finish(0, 2);
  EXPECT_FALSE(sum.finite);
  EXPECT_THAT(sum.nonfinite_contributors, ElementsAre(1));
  store_.Apply(0, Go(0), /*skip_nonfinite=*/true);
  EXPECT_EQ(Value(1), v0);
}

TEST_F(ChunkStoreTest, OnlyEmptyContributionsAreAZeroGradient) {
  const std::vector<float> v0 = Value(0);
  store_.Add(0, 0, 2, Payload());
  store_.Add(0, 1, 2, Payload());
  const SumResult sum = store_.Finish(0, 2);
  EXPECT_TRUE(sum.finite);
  double total = 0;
  for (const auto& [block, s] : sum.blocks) total += s;
  EXPECT_EQ(total, 0);
  store_.Apply(0, Go(0), false);
  EXPECT_EQ(Value(1), v0);
}

TEST_F(ChunkStoreTest, DiscardForgetsWhatIsHeld) {
  const std::vector<float> v0 = Value(0);
  Push(1, 100);
  store_.DiscardSum(0);
  Push(1, 1);
  Push(0, 1);
  store_.Apply(0, Go(0), false);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(Value(1)[i], v0[i] - 0.5 * 0.25 * 2, 1e-6);
}

TEST_F(ChunkStoreTest, MemoryStaysWhatItIs) {
  size_t mapped = 0;
  for (uint64_t round = 0; round < 200; ++round) {
    Push(0, 1);
    Push(1, 1);
    store_.Finish(0, 2);
    store_.Apply(0, Go(round), false);
    if (round == 3) mapped = store_.mapped_bytes();
  }
  EXPECT_EQ(store_.mapped_bytes(), mapped);
}

// Made once a commit, shared by all who receive it, gone with the value; checkpoints and Get stay float32.
TEST(ChunkStoreWire, TheEncodingOfACommitIsSharedAndGoesWithIt) {
  ServerTestPlan plan{.chunk_elements = 8};
  v1::Plan message = plan.Make()->plan();
  message.mutable_spec()->mutable_transfer()->mutable_pull()->mutable_bf16();
  message.set_hash(PlanHash(message));
  const auto layout = *Layout::Make(message);
  ChunkStore store(layout);
  ASSERT_TRUE(store.Load(**ChunkSource::Open(*layout, "", ""), 0, 0).ok());
  const auto check = [&](uint64_t version) {
    const ChunkValue value = *store.Get(0, version);
    const WireValue wire = *store.GetWire(0, version);
    EXPECT_EQ(wire.encoding, v1::BF16);
    EXPECT_EQ(wire.elements, value.elements);
    EXPECT_EQ(wire.bytes.size, 2 * value.elements);
    for (uint64_t i = 0; i < value.elements; ++i) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const char*>(wire.bytes.data) + 2 * i, sizeof(bits));
      EXPECT_EQ(bits, NarrowBf16(value.data[i])) << version << " " << i;
    }
    return wire;
  };
  const WireValue first = check(0);
  EXPECT_EQ(check(0).bytes.data, first.bytes.data);
  for (uint64_t round = 0; round < 20; ++round) {
    store.Add(0, 0, 1, Bytes(std::vector<float>(8, 0.3f)));
    store.Finish(0, 1);
    const WireValue before = check(round);
    v1::Verdict verdict = Go(round);
    verdict.set_skip(round % 5 == 4);
    store.Apply(0, verdict, false);
    EXPECT_EQ(check(round).bytes.data, before.bytes.data);
    EXPECT_EQ(check(round + 1).bytes.data == before.bytes.data, verdict.skip());
  }
}

TEST(ChunkStoreMemory, BytesPerElement) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(1);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 8u);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_ROUND);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 12u);
  spec.mutable_optimizer()->mutable_sgd()->set_momentum(0.5);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 16u);
  spec.mutable_optimizer()->mutable_adam()->set_learning_rate(1);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 20u);
  spec.mutable_transfer()->mutable_pull()->mutable_bf16();
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 24u);
}

// ---------------------------------------------------------------------------------- checkpoints, init folders, paths

class ChunkSourceTest : public ::testing::Test {
 protected:
  ChunkSourceTest() {
    std::string pattern = testing::TempDir() + "/chunk_source_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  ~ChunkSourceTest() override { std::filesystem::remove_all(root_); }

  // Trains two rounds with chunks of 3 and publishes version 2 as <root>/job/t1-v2.
  std::string Publish(Whole* at_two) {
    const auto layout = ServerTestPlan{.shards = 2, .chunk_elements = 3}.Make();
    ChunkStore store(layout);
    auto source = ChunkSource::Open(*layout, "", "");
    v1::CheckpointManifest manifest;
    manifest.set_job_id("job");
    manifest.set_timeline(1);
    manifest.set_version(2);
    *manifest.mutable_spec() = layout->plan().spec();
    manifest.set_parameters(8);
    manifest.set_chunk_elements(3);
    manifest.set_shards(2);
    manifest.add_slots("value");
    manifest.add_slots("momentum");
    at_two->value.resize(8);
    for (uint32_t s = 0; s < 2; ++s) {
      std::vector<ShardFileWriter::Piece> pieces;
      for (const char* slot : {"value", "momentum"}) {
        for (uint64_t c = s; c < 3; c += 2) {
          pieces.push_back({slot, layout->table().range(c).begin, layout->table().range(c).size()});
        }
      }
      auto writer =
          ShardFileWriter::Create(root_ + "/job/" + StagingFolderName(1, 2) + "/" + ShardFileName(s, 2), pieces);
      EXPECT_TRUE(writer.ok()) << writer.status();
      for (uint64_t c = s; c < 3; c += 2) {
        EXPECT_TRUE(store.Load(**source, c, 0).ok());
        const Range range = layout->table().range(c);
        for (uint64_t round = 0; round < 2; ++round) {
          const std::vector<float> g = Gradient(8, round, 0);
          store.Add(c, 0, 1, Bytes({g.begin() + range.begin, g.begin() + range.end}));
          store.Apply(c, Go(round), false);
        }
        EXPECT_TRUE(store.Save(c, writer->get()).ok());
        std::copy_n((*store.Get(c, 2)).data.get(), range.size(), at_two->value.begin() + range.begin);
      }
      absl::StatusOr<v1::CheckpointFile> file = (*writer)->Finish();
      EXPECT_TRUE(file.ok()) << file.status();
      *manifest.add_files() = *file;
      manifest.mutable_files(s)->set_shard(s);
    }
    absl::StatusOr<std::string> folder = PublishCheckpoint(root_ + "/job", manifest);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return folder.ok() ? *folder : "";
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
  const auto make = [](const Mesh& mesh, uint64_t chunk_elements, uint32_t shards, uint64_t start,
                       const std::string& from) {
    ServerTestPlan base{.replicas = mesh.data, .shards = shards, .chunk_elements = chunk_elements, .start = start};
    if (!from.empty()) {
      base.checkpoint.emplace().set_directory(from);
      base.checkpoint->set_version(start);
    }
    v1::Plan plan = base.Proto();
    *plan.mutable_spec()->mutable_model() = GptSpec(3, 4, 8, 5, 13);
    v1::ParallelSpec* parallel = plan.mutable_spec()->mutable_parallel();
    parallel->set_pipeline(mesh.pipeline);
    parallel->set_tensor(mesh.tensor);
    plan.clear_ranks();
    for (uint32_t r = 0; r < mesh.ranks(); ++r) {
      v1::Rank* rank = plan.add_ranks();
      rank->set_data(mesh.place(r).data);
      rank->set_pipeline(mesh.place(r).stage);
      rank->set_tensor(mesh.place(r).tensor);
      *rank->mutable_node() = ServerTestNode("worker", r);
    }
    plan.set_hash(PlanHash(plan));
    auto layout = Layout::Make(plan);
    EXPECT_TRUE(layout.ok()) << layout.status();
    return *layout;
  };
  // Writes what a store holds of every slot; updates it once before, by a gradient of its own, where it is the first.
  const auto write = [&](const std::shared_ptr<const Layout>& layout, bool update) {
    ChunkStore store(layout);
    const auto source = ChunkSource::Open(*layout, "", "");
    EXPECT_TRUE(source.ok()) << source.status();
    const uint64_t parameters = layout->space().size();
    v1::CheckpointManifest manifest;
    manifest.set_job_id("job");
    manifest.set_timeline(1);
    manifest.set_version(update ? 1 : 2);
    *manifest.mutable_spec() = layout->plan().spec();
    manifest.set_parameters(parameters);
    manifest.set_chunk_elements(layout->plan().chunk_elements());
    manifest.set_shards(layout->plan().shards());
    manifest.add_slots("value");
    manifest.add_slots("momentum");
    const std::string base = root_ + "/" + std::to_string(layout->mesh().ranks()) + (update ? "a" : "b");
    for (uint32_t s = 0; s < layout->plan().shards(); ++s) {
      std::vector<ShardFileWriter::Piece> pieces;
      for (const char* slot : {"value", "momentum"}) {
        for (const uint64_t c : layout->table().chunks_of(s)) {
          pieces.push_back({slot, layout->table().range(c).begin, layout->table().range(c).size()});
        }
      }
      auto writer = ShardFileWriter::Create(
          base + "/" + StagingFolderName(1, manifest.version()) + "/" + ShardFileName(s, layout->plan().shards()),
          pieces);
      EXPECT_TRUE(writer.ok()) << writer.status();
      for (const uint64_t c : layout->table().chunks_of(s)) {
        EXPECT_TRUE(store.Load(**source, c, update ? 0 : 1).ok());
        if (update) {
          const Range range = layout->table().range(c);
          const std::vector<float> g = Gradient(parameters, 0, 0);
          store.Add(c, 0, 1, Bytes({g.begin() + range.begin, g.begin() + range.end}));
          store.Apply(c, Go(0), false);
        }
        EXPECT_TRUE(store.Save(c, writer->get()).ok());
      }
      *manifest.add_files() = *(*writer)->Finish();
      manifest.mutable_files(static_cast<int>(s))->set_shard(s);
    }
    const auto folder = PublishCheckpoint(base, manifest);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return *folder;
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
    // And back.
    const std::string back = write(make({}, 300, 3, 2, again), false);
    EXPECT_TRUE(SameBits(read(back, "momentum", parameters), momentum));
    std::filesystem::remove_all(std::filesystem::path(back).parent_path());
    std::filesystem::remove_all(std::filesystem::path(again).parent_path());
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
