#include "common/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "common/job_spec.h"
#include "tests/common/model_specs.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kTwo31 = uint64_t{1} << 31;

v1::Plan MakePlan(uint32_t replicas = 2, uint32_t shards = 3) {
  v1::Plan plan;
  plan.set_job_id("job-1");
  plan.set_generation(4);
  plan.set_timeline(2);
  plan.set_start(7);
  plan.set_chunk_elements(997);
  plan.set_norm_block(16384);
  plan.set_shards(shards);
  for (uint32_t k = 0; k < shards; ++k) {
    v1::Member* member = plan.add_chains()->add_members();
    member->mutable_node()->set_name("server-" + std::to_string(k % 2));
    member->mutable_node()->set_incarnation(100 + k % 2);
    member->set_since(1);
  }
  for (uint32_t d = 0; d < replicas; ++d) {
    v1::Rank* rank = plan.add_ranks();
    rank->set_data(d);
    rank->mutable_node()->set_name("worker-" + std::to_string(d));
    rank->mutable_node()->set_incarnation(200 + d);
  }
  plan.set_discipline(v1::Plan::VERDICT);
  v1::JobSpec* spec = plan.mutable_spec();
  spec->mutable_model()->mutable_mlp()->set_inputs(50);
  spec->mutable_model()->mutable_mlp()->add_hidden(40);
  spec->mutable_model()->mutable_mlp()->set_classes(10);
  spec->mutable_data()->mutable_idx()->set_images("images");
  spec->mutable_data()->mutable_idx()->set_labels("labels");
  spec->mutable_train()->set_rounds(25);
  spec->mutable_train()->set_batch(8);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1);
  spec->mutable_parallel()->set_data(replicas);
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  return plan;
}

TEST(LayoutTest, DefaultChunkIsAFunctionOfTheSpaceAlone) {
  EXPECT_EQ(DefaultChunkElements(0), 16384u);
  EXPECT_EQ(DefaultChunkElements(1), 16384u);
  EXPECT_EQ(DefaultChunkElements(32 * 16384), 16384u);
  EXPECT_EQ(DefaultChunkElements(32 * 16384 + 32), 20480u);
  EXPECT_EQ(DefaultChunkElements(32 * 20480), 20480u);
  EXPECT_EQ(DefaultChunkElements(32 * 262144), 262144u);
  EXPECT_EQ(DefaultChunkElements(kTwo31 + 1), 262144u);
  EXPECT_EQ(DefaultChunkElements(UINT64_MAX / 4), 262144u);
  EXPECT_EQ(NormBlockElements(32 * 16384 + 32), 20480u);
}

TEST(LayoutTest, ShardCount) {
  EXPECT_EQ(ShardCount(0, 997, 4), 1u);
  EXPECT_EQ(ShardCount(1, 997, 4), 1u);  // one scalar on four servers
  EXPECT_EQ(ShardCount(997 * 5, 997, 2), 5u);
  EXPECT_EQ(ShardCount(997 * 5 + 1, 997, 2), 6u);
  EXPECT_EQ(ShardCount(997 * 500, 997, 1), 16u);
  EXPECT_EQ(ShardCount(997 * 500, 997, 0), 16u);
  EXPECT_EQ(ShardCount(997 * 500, 997, 3), 24u);
  EXPECT_EQ(ShardCount(997 * 500, 997, 1000000000), 500u);  // 8 x servers passes 32 bits
}

TEST(LayoutTest, EveryElementIsOwnedExactlyOnce) {
  const uint64_t sizes[] = {0, 1, 2, 996, 997, 998, 16384, 100003, 3 * 997 * 997, kTwo31 + 12345};
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const uint64_t size = random() % 3 != 0 ? sizes[random() % std::size(sizes)] : random() % 5000000;
    uint64_t chunk = random() % 2 == 0 ? DefaultChunkElements(size) : 997;
    if (size < 20000 && random() % 2 == 0) chunk = random() % 50 + 1;
    const uint32_t servers = static_cast<uint32_t>(random() % 9 + 1);
    const uint32_t shards = random() % 4 == 0 ? 16 : ShardCount(size, chunk, servers);
    SCOPED_TRACE("seed " + std::to_string(seed) + " size " + std::to_string(size) + " chunk " + std::to_string(chunk) +
                 " shards " + std::to_string(shards));
    const ChunkTable table(size, chunk, shards);
    std::vector<uint64_t> count(shards, 0);
    uint64_t next = 0;
    for (uint64_t i = 0; i < table.chunks(); ++i) {
      const Range range = table.range(i);
      ASSERT_EQ(range.begin, next);
      ASSERT_GT(range.end, range.begin);
      ASSERT_LE(range.size(), chunk);
      ASSERT_EQ(table.chunk_at(range.begin), i);
      ASSERT_EQ(table.chunk_at(range.end - 1), i);
      ASSERT_LT(table.shard(i), shards);
      ++count[table.shard(i)];
      next = range.end;
    }
    ASSERT_EQ(next, size);
    for (uint32_t k = 0; k < shards; ++k) ASSERT_EQ(count[k], table.chunks_of(k).size()) << "shard " << k;
  }
}

// Shards dealt to servers in turn: bytes per server balanced, whatever the size of a single layer.
TEST(LayoutTest, ServersAreBalanced) {
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    std::mt19937_64 random(seed);
    const uint64_t size = 9000000 + random() % (seed % 5 == 0 ? 4 * kTwo31 : 200000000);
    const uint32_t servers = static_cast<uint32_t>(random() % 5 + 1);
    const uint64_t chunk = DefaultChunkElements(size);
    const ChunkTable table(size, chunk, ShardCount(size, chunk, servers));
    std::vector<uint64_t> load(servers, 0);
    for (uint64_t i = 0; i < table.chunks(); ++i) load[table.shard(i) % servers] += table.range(i).size();
    const double most = static_cast<double>(*std::max_element(load.begin(), load.end()));
    EXPECT_LT(most * servers / static_cast<double>(size), 1.2)
        << "seed " << seed << " size " << size << " servers " << servers;
  }
}

TEST(LayoutTest, SlotsAreDealtOnceAndInOrder) {
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const uint64_t batches[] = {0, 1, 4, 7, 997, kTwo31 + 3, UINT64_MAX};
    const uint64_t batch = batches[random() % std::size(batches)];
    const uint32_t replicas = static_cast<uint32_t>(random() % 9 + 1);
    const uint32_t microbatches = static_cast<uint32_t>(random() % 9 + 1);
    uint64_t next = 0, smallest = UINT64_MAX, largest = 0;
    for (uint32_t d = 0; d < replicas; ++d) {
      const Range replica = ReplicaSlots(batch, d, replicas);
      ASSERT_EQ(replica.begin, next);
      ASSERT_GE(replica.end, replica.begin);
      smallest = std::min(smallest, replica.size());
      largest = std::max(largest, replica.size());
      uint64_t inner = replica.begin;
      for (uint32_t m = 0; m < microbatches; ++m) {
        const Range part = MicrobatchSlots(replica, m, microbatches);
        ASSERT_EQ(part.begin, inner);
        ASSERT_GE(part.end, part.begin);
        inner = part.end;
      }
      ASSERT_EQ(inner, replica.end);
      next = replica.end;
    }
    ASSERT_EQ(next, batch);
    ASSERT_LE(largest - smallest, 1u);
  }
  EXPECT_EQ(ReplicaSlots(4, 0, 3), (Range{0, 2}));
  EXPECT_EQ(ReplicaSlots(4, 2, 3), (Range{3, 4}));
  EXPECT_EQ(ReplicaSlots(2, 3, 4), (Range{2, 2}));  // a worker without a sample
}

TEST(LayoutTest, ThePlanSaysWhoHoldsWhat) {
  const auto layout = Layout::Make(MakePlan());
  ASSERT_TRUE(layout.ok()) << layout.status();
  const Layout& l = **layout;
  EXPECT_EQ(l.space().size(), 50u * 40 + 40 + 40 * 10 + 10);
  EXPECT_EQ(l.table().chunks(), 3u);
  EXPECT_EQ(l.generation(), 4u);
  EXPECT_EQ(l.rounds(), 25u);
  EXPECT_EQ(l.ranks(), 2u);
  EXPECT_EQ(l.replicas(), 2u);
  v1::NodeId node;
  node.set_name("worker-1");
  node.set_incarnation(201);
  EXPECT_EQ(l.RankOf(node), 1);
  node.set_incarnation(202);  // another life
  EXPECT_EQ(l.RankOf(node), -1);
  node.set_name("server-1");
  node.set_incarnation(101);
  EXPECT_TRUE(l.IsMember(1, node));
  EXPECT_FALSE(l.IsMember(0, node));
  EXPECT_FALSE(l.IsMember(99, node));
  EXPECT_TRUE(SameNode(l.primary(1).node(), node));
  EXPECT_TRUE(SameNode(l.tail(1).node(), node));
}

// Chunks lie within a stripe and a segment; ranks hold and push for whole chunks; slots and ranks are one to one; each
// replica's samples count once.
TEST(LayoutTest, RanksOfAMeshHoldAndPushForWholeChunks) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t tensor = 1u << random() % 3, pipeline = random() % 3 + 1;
    v1::Plan plan = MakePlan();
    v1::JobSpec* spec = plan.mutable_spec();
    *spec->mutable_model() = GptSpec(pipeline + random() % 2, 4, 8, 5, 13 + random() % 5);
    v1::ParallelSpec* parallel = spec->mutable_parallel();
    parallel->set_data(random() % 3 + 1);
    parallel->set_tensor(tensor);
    parallel->set_pipeline(pipeline);
    parallel->set_sequence_parallel(tensor > 1 && random() % 2 == 0);
    plan.set_chunk_elements(random() % 4 == 0 ? 1u << 20 : random() % 300 + 1);
    plan.set_norm_block(random() % 2 == 0 ? plan.chunk_elements() : random() % 300 + 1);
    const Mesh mesh = MeshOf(*parallel);
    plan.clear_ranks();
    for (uint32_t i = 0; i < mesh.ranks(); ++i) {
      v1::Rank* rank = plan.add_ranks();
      rank->set_data(mesh.place(i).data);
      rank->set_pipeline(mesh.place(i).stage);
      rank->set_tensor(mesh.place(i).tensor);
      rank->mutable_node()->set_name("worker-" + std::to_string(i));
    }
    plan.set_hash(PlanHash(plan));
    const auto made = Layout::Make(plan);
    ASSERT_TRUE(made.ok()) << made.status();
    const Layout& layout = **made;
    const auto segments = SegmentsOf(spec->model(), layout.space(), mesh);
    uint64_t next = 0;
    for (uint64_t c = 0; c < layout.table().chunks(); ++c) {
      const Range range = layout.table().range(c);
      ASSERT_EQ(range.begin, next);
      ASSERT_GT(range.end, range.begin);
      ASSERT_EQ(range.begin / plan.chunk_elements(), (range.end - 1) / plan.chunk_elements());
      ASSERT_EQ(layout.table().shard(c), range.begin / plan.chunk_elements() % plan.shards());
      next = range.end;
      const auto segment =
          std::find_if(segments.begin(), segments.end(), [&](const Segment& s) { return range.begin < s.range.end; });
      ASSERT_LE(range.end, segment->range.end);
      ASSERT_EQ(layout.contributors(c), mesh.data * segment->contributors.size());
      uint32_t counted = 0;
      for (uint32_t slot = 0; slot < layout.contributors(c); ++slot) {
        const uint32_t rank = layout.rank_of_slot(c, slot);
        ASSERT_EQ(layout.slot(c, rank), slot);
        const auto& view = layout.view(rank);
        ASSERT_TRUE(std::binary_search(view.begin(), view.end(), c)) << "rank " << rank << " pushes what it lacks";
        counted += layout.counts(c, slot);
      }
      ASSERT_EQ(counted, mesh.data);
    }
    ASSERT_EQ(next, layout.space().size());
    uint32_t telling = 0;
    for (uint32_t i = 0; i < mesh.ranks(); ++i) {
      const Mesh::Place place = mesh.place(i);
      telling += layout.tells_loss(i);
      uint64_t held = 0, pushed = 0;
      for (const uint64_t c : layout.view(i)) {
        held += layout.table().range(c).size();
        pushed += layout.slot(c, i).has_value();
      }
      for (const Range& range : ViewOf(spec->model(), layout.space(), mesh, place.stage, place.tensor)) {
        held -= range.size();
      }
      ASSERT_EQ(held, 0u) << "rank " << i;
      ASSERT_GT(pushed, 0u);
    }
    ASSERT_EQ(telling, mesh.data);
  }
}

TEST(LayoutTest, WhichVersionsAreWrittenAndEvaluated) {
  v1::Plan plan = MakePlan();
  plan.mutable_spec()->mutable_checkpoint()->set_every_rounds(10);
  plan.mutable_spec()->mutable_train()->set_eval_every(0);
  plan.set_hash(PlanHash(plan));
  const auto layout = Layout::Make(plan);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<uint64_t> written, evaluated;
  for (uint64_t v = 0; v <= 25; ++v) {
    if ((*layout)->CheckpointAt(v)) written.push_back(v);
    if ((*layout)->EvaluateAt(v)) evaluated.push_back(v);
  }
  EXPECT_EQ(written, (std::vector<uint64_t>{10, 20, 25}));
  EXPECT_EQ(evaluated, (std::vector<uint64_t>{25}));
}

TEST(LayoutTest, HashCoversEverythingButItself) {
  const v1::Plan plan = MakePlan();
  v1::Plan other = plan;
  other.set_hash(1);
  EXPECT_EQ(PlanHash(other), plan.hash());
  const std::vector<std::function<void(v1::Plan*)>> changes = {
      [](v1::Plan* p) { p->set_job_id("job-2"); },
      [](v1::Plan* p) { p->set_generation(5); },
      [](v1::Plan* p) { p->set_start(8); },
      [](v1::Plan* p) { p->mutable_verdict()->set_round(7); },
      [](v1::Plan* p) { p->mutable_chains(2)->mutable_members(0)->set_since(2); },
      [](v1::Plan* p) { p->mutable_ranks(1)->set_numeric_profile("avx2"); },
      [](v1::Plan* p) { p->mutable_spec()->mutable_train()->set_seed(2); },
      [](v1::Plan* p) { p->mutable_ranks()->SwapElements(0, 1); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    other = plan;
    changes[i](&other);
    EXPECT_NE(PlanHash(other), plan.hash()) << "change " << i;
  }
}

TEST(LayoutTest, WrongPlansAreRefusedWithTheReason) {
  const auto error = [](const std::function<void(v1::Plan*)>& change) {
    v1::Plan plan = MakePlan();
    change(&plan);
    plan.set_hash(PlanHash(plan));
    const auto layout = Layout::Make(plan);
    EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(layout.status().message());
  };
  EXPECT_THAT(error([](v1::Plan* p) { p->set_generation(0); }), HasSubstr("generation is 0"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_timeline(5); }), HasSubstr("timeline is 5"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_start(26); }), HasSubstr("start is version 26"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_verdict()->set_round(6); }), HasSubstr("verdict of round 6"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_space(1); }), HasSubstr("space is 1"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_chunk_elements(0); }), HasSubstr("chunk_elements is 0"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_norm_block(0); }), HasSubstr("norm_block is 0"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_discipline(v1::Plan::STREAM); }), HasSubstr("needs VERDICT"));
  EXPECT_THAT(error([](v1::Plan* p) { p->clear_discipline(); }), HasSubstr("discipline is 0"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_ranks()->RemoveLast(); }), HasSubstr("found 1"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_ranks(1)->set_data(0); }),
              HasSubstr("rank 1 has the coordinates (0, 0, 0), expected (1, 0, 0)"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_ranks(1)->set_data(2); }),
              HasSubstr("rank 1 has the coordinates (2, 0, 0)"));
  EXPECT_THAT(error([](v1::Plan* p) { *p->mutable_ranks(1)->mutable_node() = p->ranks(0).node(); }),
              HasSubstr("holds another rank"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_shards(4); }), HasSubstr("4 shards and 3 chains"));
  EXPECT_THAT(error([](v1::Plan* p) { p->set_shards(0), p->clear_chains(); }), HasSubstr("0 shards"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_chains(1)->clear_members(); }), HasSubstr("shard 1 has no member"));
  EXPECT_THAT(error([](v1::Plan* p) { *p->mutable_chains(1)->add_members() = p->chains(1).members(0); }),
              HasSubstr("twice in the chain of shard 1"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_chains(1)->mutable_members(0)->set_since(5); }),
              HasSubstr("since generation 5"));
  EXPECT_THAT(error([](v1::Plan* p) { p->mutable_spec()->mutable_model()->mutable_mlp()->set_inputs(0); }),
              HasSubstr("model.mlp.inputs is 0"));
  v1::Plan plan = MakePlan();
  plan.set_hash(plan.hash() ^ 1);
  EXPECT_THAT(std::string(Layout::Make(plan).status().message()), HasSubstr("hash"));
}

TEST(LayoutTest, MoreShardsThanChunksAreLegal) {
  const auto layout = Layout::Make(MakePlan(1, 16));
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ((*layout)->table().chunks_of(2).size(), 1u);
  EXPECT_EQ((*layout)->table().chunks_of(3).size(), 0u);
}

}  // namespace
}  // namespace sluice
