// The same bits whatever the number of servers, the chunks, the lanes, the order of arrival; checkpoints and rewinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/node_rig.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), bits.size() * sizeof(float));
  return bits;
}

std::vector<uint32_t> TrainAll(const ServerTestPlan& plan, NodeRigOptions options, uint64_t seed) {
  options.servers = plan.servers;
  NodeRig rig(options);
  rig.SendPlan(plan.Make());
  WorkersEnd workers(&rig, plan.Make(), seed);
  EXPECT_TRUE(workers.Train(0, plan.rounds));
  return Bits(workers.Values(plan.rounds));
}

TEST(ServerBits, EqualOverServersChunksLanesAndArrival) {
  for (const bool stream : {false, true}) {
    for (const uint32_t replicas : {1u, 3u}) {
      std::vector<uint32_t> want;
      uint64_t seed = 1;
      for (const uint32_t servers : {1u, 2u, 3u}) {
        for (const uint64_t chunk : {1000, 64, 61, 16}) {
          ServerTestPlan plan;
          plan.replicas = replicas;
          plan.servers = servers;
          plan.shards = 5;
          plan.chunk_elements = chunk;
          plan.norm_block = 64;
          plan.hidden = 40;
          plan.stream = stream;
          plan.clip_norm = stream ? 0 : 0.5;
          plan.rounds = 4;
          const std::vector<uint32_t> got = TrainAll(
              plan, {.lanes = static_cast<int>(1 + seed % 3), .delay_seed = seed, .max_delay = absl::Microseconds(200)},
              seed);
          ++seed;
          if (want.empty()) want = got;
          EXPECT_EQ(got, want) << servers << " servers, " << chunk << " elements a chunk, " << replicas << " replicas";
        }
      }
    }
  }
}

class CheckpointingTest : public ::testing::Test {
 protected:
  CheckpointingTest() {
    plan_.checkpoint_every = 2;
    plan_.rounds = 6;
    plan_.hidden = 9;
    plan_.chunk_elements = 16;
    plan_.norm_block = 16;
  }
  // Waits for the files of all shards and publishes.
  v1::CheckpointRef Publish(NodeRig* rig, uint64_t timeline, uint64_t version) {
    std::map<uint32_t, v1::SnapshotDone> done;
    EXPECT_TRUE(rig->Await([&](const std::vector<v1::NodeMessage>& all) {
      for (const v1::NodeMessage& m : all) {
        if (m.has_snapshot_done() && m.snapshot_done().timeline() == timeline &&
            m.snapshot_done().version() == version) {
          done[m.snapshot_done().shard()] = m.snapshot_done();
        }
      }
      return done.size() == plan_.shards;
    }));
    v1::CheckpointManifest manifest;
    manifest.set_job_id(plan_.job);
    manifest.set_timeline(timeline);
    manifest.set_version(version);
    manifest.set_parameters(plan_.Make()->space().size());
    manifest.set_chunk_elements(plan_.chunk_elements);
    manifest.set_shards(plan_.shards);
    *manifest.mutable_spec() = plan_.Make()->plan().spec();
    manifest.add_slots("value");
    for (const std::string& slot : OptimizerSlots(manifest.spec().optimizer())) manifest.add_slots(slot);
    for (auto& [shard, message] : done) {
      EXPECT_EQ(message.error(), "");
      *manifest.add_files() = message.file();
    }
    const std::string base = folder_ / plan_.job;
    const absl::StatusOr<std::string> published = PublishCheckpoint(base, manifest);
    EXPECT_TRUE(published.ok()) << published.status();
    v1::CheckpointRef ref;
    ref.set_directory(published.value_or(""));
    ref.set_timeline(timeline);
    ref.set_version(version);
    return ref;
  }

  TemporaryFolder folder_;
  ServerTestPlan plan_;
};

TEST_F(CheckpointingTest, HoldsWhatWasServedAndARewindOverFewerServersGoesOnWithTheSameBits) {
  for (const bool stream : {false, true}) {
    SCOPED_TRACE(stream ? "STREAM" : "VERDICT");
    plan_.stream = stream;
    const std::vector<uint32_t> want = TrainAll(plan_, {}, 9);
    NodeRig rig({.servers = 2, .lanes = 2, .checkpoint_root = folder_.path()});
    rig.SendPlan(plan_.Make());
    WorkersEnd first(&rig, plan_.Make(), 1);
    ASSERT_TRUE(first.Train(0, 3));
    const v1::CheckpointRef ref = Publish(&rig, 1, 2);
    auto reader = CheckpointReader::Open(ref.directory(), /*verify=*/true);
    ASSERT_TRUE(reader.ok()) << reader.status();
    std::vector<float> values(plan_.Make()->space().size());
    ASSERT_TRUE((*reader)->Read("value", 0, absl::MakeSpan(values)).ok());
    EXPECT_EQ(Bits(values), Bits(first.Values(2)));

    // server-1 is given up while contributions are under way on the lanes: everything moves to server-0.
    first.Push(3, [](uint32_t contributor, uint64_t chunk) { return contributor == 0 || chunk % 2 == 0; });
    ServerTestPlan rewound = plan_;
    rewound.generation = rewound.timeline = 3;
    rewound.start = 2;
    rewound.checkpoint = ref;
    rewound.servers = 1;
    rig.SendPlan(rewound.Make());
    WorkersEnd second(&rig, rewound.Make(), 2);
    EXPECT_EQ(Bits(second.Values(2)), Bits(values));
    ASSERT_TRUE(second.Train(2, 6));
    EXPECT_EQ(Bits(second.Values(6)), want);
    Publish(&rig, 3, 4);
    Publish(&rig, 3, 6);
    std::filesystem::remove_all(folder_ / plan_.job);
  }
}

TEST_F(CheckpointingTest, ASnapshotThatAGenerationInterruptedIsFinishedInTheNext) {
  plan_.shards = 2;
  plan_.stream = true;  // chunks of one shard commit one by one
  NodeRig rig({.servers = 2, .checkpoint_root = folder_.path()});
  rig.SendPlan(plan_.Make());
  WorkersEnd first(&rig, plan_.Make(), 1);
  ASSERT_TRUE(first.Train(0, 1));
  const auto even = [](uint32_t, uint64_t chunk) { return chunk % 4 < 2; };
  first.Push(1, even);  // half of each shard reaches version 2
  ASSERT_TRUE(first.stream(0, 0).AwaitValue(0, 2));
  ASSERT_TRUE(first.stream(0, 1).AwaitValue(1, 2));
  ServerTestPlan next = plan_;
  next.generation = 2;
  next.start = 1;
  rig.SendFence(plan_.job, 2);
  rig.SendPlan(next.Make());
  WorkersEnd second(&rig, next.Make(), 2);
  ASSERT_TRUE(second.Train(1, 3));
  const v1::CheckpointRef ref = Publish(&rig, 1, 2);
  auto reader = CheckpointReader::Open(ref.directory(), /*verify=*/true);
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<float> values(plan_.Make()->space().size());
  ASSERT_TRUE((*reader)->Read("value", 0, absl::MakeSpan(values)).ok());
  EXPECT_EQ(Bits(values), Bits(second.Values(2)));
}

TEST_F(CheckpointingTest, AFlippedByteAndAMissingFileAreNamed) {
  NodeRig rig({.servers = 2, .checkpoint_root = folder_.path()});
  rig.SendPlan(plan_.Make());
  WorkersEnd workers(&rig, plan_.Make(), 1);
  ASSERT_TRUE(workers.Train(0, 2));
  const v1::CheckpointRef ref = Publish(&rig, 1, 2);
  const std::string file = ref.directory() + "/" + ShardFileName(1, 3);
  std::string bytes = Slurp(file);
  bytes[bytes.size() - 3] ^= 4;
  Spill(file, bytes);
  const auto start = [&](NodeRig* other) {
    ServerTestPlan resumed = plan_;
    resumed.servers = 1;
    resumed.checkpoint = ref;
    resumed.start = 2;
    other->SendPlan(resumed.Make());
    return other->AwaitProblem();
  };
  NodeRig flipped({.servers = 1, .checkpoint_root = folder_.path()});
  v1::NodeProblem problem = start(&flipped);
  EXPECT_EQ(problem.code(), static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_THAT(problem.message(), HasSubstr(file));
  std::filesystem::remove(file);
  NodeRig missing({.servers = 1, .checkpoint_root = folder_.path()});
  problem = start(&missing);
  EXPECT_EQ(problem.code(), static_cast<int>(absl::StatusCode::kNotFound)) << problem.message();
  EXPECT_THAT(problem.message(), HasSubstr(file));
  // The server that met it still serves others.
  ServerTestPlan other = plan_;
  other.job = "job-2";
  other.servers = 1;
  missing.SendPlan(other.Make());
  WorkersEnd fine(&missing, other.Make(), 1);
  EXPECT_TRUE(fine.Train(0, 2));
}

TEST_F(CheckpointingTest, ADiskThatRefusesIsSaidAndTheRoundsGoOn) {
  Spill(folder_ / "file", "not a folder");
  NodeRig rig({.servers = 2, .checkpoint_root = folder_ / "file"});
  rig.SendPlan(plan_.Make());
  WorkersEnd workers(&rig, plan_.Make(), 1);
  EXPECT_TRUE(workers.Train(0, 6));
  std::set<uint32_t> shards;
  EXPECT_TRUE(rig.Await([&](const std::vector<v1::NodeMessage>& all) {
    for (const v1::NodeMessage& m : all) {
      if (m.has_snapshot_done() && m.snapshot_done().version() == 6 && !m.snapshot_done().error().empty()) {
        shards.insert(m.snapshot_done().shard());
      }
    }
    return shards.size() == 3;
  }));
}

}  // namespace
}  // namespace sluice
