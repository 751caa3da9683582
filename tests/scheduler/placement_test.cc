// Placement: exact small cases, and properties over thousands of random ones (seeds are printed).
#include "scheduler/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

namespace sluice {
namespace {

v1::NodeId Id(const std::string& name) {
  v1::NodeId id;
  id.set_name(name);
  id.set_incarnation(1);
  return id;
}

WorkerSlot Worker(const std::string& name, const std::string& host = "a", const std::string& profile = "p") {
  return {Id(name), name + ":1", host, profile};
}

ServerSlot Server(const std::string& name, uint64_t limit = 0, uint64_t used = 0) {
  return {Id(name), name + ":1", limit, used};
}

v1::ParallelSpec Mesh(uint32_t data, uint32_t pipeline = 1, uint32_t tensor = 1) {
  v1::ParallelSpec mesh;
  mesh.set_data(data);
  mesh.set_pipeline(pipeline);
  mesh.set_tensor(tensor);
  return mesh;
}

TEST(PlaceRanks, RefusesTooFewWorkers) {
  const auto ranks = PlaceRanks(Mesh(3), {Worker("a"), Worker("b")});
  ASSERT_EQ(ranks.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(ranks.status().message().find("3"), absl::string_view::npos);
}

TEST(PlaceRanks, PrefersAGangOfOneProfile) {
  const auto ranks =
      PlaceRanks(Mesh(2), {Worker("a", "h", "x"), Worker("b", "h", "y"), Worker("c", "h", "z"), Worker("d", "h", "y")});
  ASSERT_TRUE(ranks.ok());
  EXPECT_EQ((*ranks)[0].numeric_profile(), "y");
  EXPECT_EQ((*ranks)[1].numeric_profile(), "y");
}

TEST(PlaceRanks, MixesProfilesRatherThanWait) {
  const auto ranks = PlaceRanks(Mesh(2), {Worker("a", "h", "x"), Worker("b", "h", "y")});
  ASSERT_TRUE(ranks.ok());
}

std::string HostsOf(const std::vector<std::string>& hosts) {
  std::vector<WorkerSlot> idle;
  for (size_t i = 0; i < hosts.size(); ++i) {
    idle.push_back(Worker("w" + std::to_string(i), hosts[i]));
    idle.back().sums_on_host = true;
  }
  const auto ranks = PlaceRanks(Mesh(static_cast<uint32_t>(hosts.size())), idle);
  std::string placed;
  for (const v1::Rank& rank : *ranks) placed += rank.host_id();
  return placed;
}

TEST(PlaceRanks, NeighboursOnOneHostInLargeAlignedGroups) {
  EXPECT_EQ(HostsOf({"a", "b", "a", "b"}), "aabb");
  EXPECT_EQ(HostsOf({"a", "b", "b"}), "bba");
  EXPECT_EQ(HostsOf({"a", "a", "a", "b", "b"}), "bbaaa");
  EXPECT_EQ(HostsOf({"a", "a", "a", "a", "a", "a", "b", "b", "b", "b"}), "bbbbaaaaaa");
  EXPECT_EQ(HostsOf({"a", "a", "a", "b", "c"}), "aaabc");
}

TEST(PlaceRanks, AWorkerThatSharesNothingHasNoHost) {
  std::vector<WorkerSlot> idle = {Worker("w0"), Worker("w1")};
  idle[1].sums_on_host = true;
  const auto ranks = PlaceRanks(Mesh(2), idle);
  ASSERT_TRUE(ranks.ok());
  EXPECT_EQ((*ranks)[0].host_id(), "");
  EXPECT_EQ((*ranks)[1].host_id(), "a");
}

TEST(PlaceRanks, RandomMeshes) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    const auto draw = [&](uint64_t n) { return rng() % n; };
    const v1::ParallelSpec mesh = Mesh(1 + draw(5), 1 + draw(3), 1 + draw(3));
    std::vector<WorkerSlot> idle;
    const uint64_t n = draw(50);
    for (uint64_t i = 0; i < n; ++i) {
      idle.push_back(Worker("w" + std::to_string(i), "h" + std::to_string(draw(3)), "p" + std::to_string(draw(3))));
    }
    const uint64_t gang = GangSize(mesh);
    const auto ranks = PlaceRanks(mesh, idle);
    ASSERT_EQ(ranks.ok(), n >= gang);
    if (!ranks.ok()) continue;
    std::set<std::string> names, profiles;
    std::map<std::string, uint64_t> by_profile;
    for (const WorkerSlot& worker : idle) ++by_profile[worker.numeric_profile];
    ASSERT_EQ(ranks->size(), gang);
    for (uint64_t i = 0; i < gang; ++i) {
      const v1::Rank& rank = (*ranks)[i];
      names.insert(rank.node().name());
      profiles.insert(rank.numeric_profile());
      EXPECT_EQ((rank.data() * mesh.pipeline() + rank.pipeline()) * mesh.tensor() + rank.tensor(), i);
      EXPECT_LT(rank.data(), mesh.data());
    }
    EXPECT_EQ(names.size(), gang) << "a worker with two ranks";
    const bool one = std::any_of(by_profile.begin(), by_profile.end(), [&](const auto& p) { return p.second >= gang; });
    if (one) {
      EXPECT_EQ(profiles.size(), 1u);
    }
  }
}

// "a0a1|b0b1": hosts by replica.
std::string Placed(const v1::ParallelSpec& mesh, const std::string& hosts, const std::vector<uint64_t>& bytes = {}) {
  std::vector<WorkerSlot> idle;
  for (size_t i = 0; i < hosts.size(); ++i) {
    idle.push_back(Worker("w" + std::string(i < 10 ? "0" : "") + std::to_string(i), std::string(1, hosts[i])));
    idle.back().sums_on_host = true;
  }
  std::mt19937 rng(hosts.size());
  std::shuffle(idle.begin(), idle.end(), rng);
  const auto ranks = PlaceRanks(mesh, idle, bytes);
  EXPECT_TRUE(ranks.ok()) << ranks.status();
  if (!ranks.ok()) return "";
  std::string placed;
  for (size_t i = 0; i < ranks->size(); ++i) {
    const v1::Rank& rank = (*ranks)[i];
    if (i > 0 && rank.tensor() == 0) placed += rank.pipeline() == 0 ? "|" : " ";
    placed += rank.host_id();
  }
  return placed;
}

TEST(PlaceRanks, ReplicasOnOneHostThenStagesThenTensorRanks) {
  EXPECT_EQ(Placed(Mesh(2, 1, 2), "abab"), "aa|bb");
  EXPECT_EQ(Placed(Mesh(2, 2, 2), "abababab"), "aa aa|bb bb");
  EXPECT_EQ(Placed(Mesh(1, 2, 2), "aaabbb"), "aa bb") << "no host has room for both stages";
  EXPECT_EQ(Placed(Mesh(1, 2, 2), "abbbb"), "bb bb") << "though b has more workers than a and comes later";
  EXPECT_EQ(Placed(Mesh(1, 1, 2), "abbccc"), "bb") << "the host that it leaves the least room on";
  EXPECT_EQ(Placed(Mesh(1, 4, 1), "aabbc"), "a a b b");
  EXPECT_EQ(Placed(Mesh(2, 2, 1), "abcbca"), "a a|b b") << "six workers, two are left over";
  EXPECT_EQ(Placed(Mesh(1, 2, 4), "aaabbbcc"), "aaab bbcc") << "no host holds a stage";
  EXPECT_EQ(Placed(Mesh(2, 2, 2), "aaaaabbb"), "aa aa|bb ab") << "what does not fit comes last";
}

TEST(PlaceRanks, MemoryDecidesWhoMayHoldARank) {
  const auto limited = [](const std::string& name, uint64_t limit, const std::string& host = "a") {
    WorkerSlot worker = Worker(name, host);
    worker.memory_limit = limit;
    return worker;
  };
  const auto names = [](const absl::StatusOr<std::vector<v1::Rank>>& ranks) {
    std::string text(ranks.status().message());
    if (ranks.ok()) {
      for (const v1::Rank& rank : *ranks) text += rank.node().name();
    }
    return text;
  };
  const std::vector<WorkerSlot> idle = {limited("a", 50), limited("b", 100), limited("c", 0), limited("d", 99)};
  EXPECT_EQ(names(PlaceRanks(Mesh(2), idle, {100})), "bc") << "0: as much as there is";
  EXPECT_EQ(names(PlaceRanks(Mesh(1, 2), idle, {100, 40})), "bc") << "workers that hold any rank, where they suffice";
  EXPECT_EQ(names(PlaceRanks(Mesh(1, 3), idle, {50, 100, 100})), "dcb") << "else the ranks that they hold";
  EXPECT_EQ(names(PlaceRanks(Mesh(3), idle, {100})),
            "of 3 ranks, the largest of 100 bytes, 2 find an idle worker whose --memory_limit holds them");
  EXPECT_EQ(RanksHeld(Mesh(3), {100}, idle), 2u);
  EXPECT_EQ(RanksHeld(Mesh(1, 4), {100, 50, 99, 100}, idle), 4u);
  EXPECT_EQ(RanksHeld(Mesh(1, 4), {100, 51, 99, 100}, idle), 3u);
  EXPECT_EQ(RanksHeld(Mesh(9), {}, idle), 4u);
}

// What can be placed is, and nobody gets a rank that is too large.
TEST(PlaceRanks, RandomMemory) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    const auto draw = [&](uint64_t n) { return rng() % n; };
    const v1::ParallelSpec mesh = Mesh(1 + draw(3), 1 + draw(2), 1 + draw(2));
    std::vector<uint64_t> bytes;
    for (uint32_t i = 0; i < mesh.pipeline() * mesh.tensor(); ++i) bytes.push_back(1 + draw(5));
    std::vector<WorkerSlot> idle;
    for (uint64_t i = 0; i < GangSize(mesh) + draw(3); ++i) {
      idle.push_back(Worker("w" + std::to_string(i), "h" + std::to_string(draw(3)), "p" + std::to_string(draw(2))));
      idle.back().memory_limit = draw(7);
    }
    const auto ranks = PlaceRanks(mesh, idle, bytes);
    ASSERT_EQ(ranks.ok(), RanksHeld(mesh, bytes, idle) == GangSize(mesh)) << ranks.status();
    if (!ranks.ok()) continue;
    std::set<std::string> names;
    for (size_t i = 0; i < ranks->size(); ++i) {
      const std::string& name = (*ranks)[i].node().name();
      EXPECT_TRUE(names.insert(name).second);
      const auto worker = std::find_if(idle.begin(), idle.end(), [&](const auto& w) { return w.node.name() == name; });
      ASSERT_NE(worker, idle.end());
      EXPECT_TRUE(Holds(*worker, bytes[i % bytes.size()]));
    }
  }
}

TEST(RankBytes, FollowsTheViewAndThePushFormat) {
  v1::JobSpec spec;
  v1::Gpt2Spec& gpt2 = *spec.mutable_model()->mutable_gpt2();
  gpt2.set_layers(2);
  gpt2.set_heads(2);
  gpt2.set_width(4);
  gpt2.set_context(3);
  gpt2.set_vocabulary(5);
  const uint64_t parameters = MakeParameterSpace(spec.model())->size();
  EXPECT_EQ(RankBytes(spec), std::vector<uint64_t>{8 * parameters});
  EXPECT_EQ(RankBytesText(spec), "parameter 4 + gradient 4");
  spec.mutable_transfer()->mutable_push()->mutable_int8();
  EXPECT_EQ(RankBytes(spec), std::vector<uint64_t>{12 * parameters});
  EXPECT_EQ(RankBytesText(spec), "parameter 4 + gradient 4 + error feedback 4");
  spec.mutable_transfer()->clear_push();
  spec.mutable_parallel()->set_tensor(2);
  const std::vector<uint64_t> halves = RankBytes(spec);
  ASSERT_EQ(halves.size(), 2u);
  EXPECT_GT(halves[0], halves[1]) << "3 and 2 of the 5 rows of the embedding";
  EXPECT_LT(halves[0], 8 * parameters);
}

TEST(ChooseReplacement, SameProfileFirstAnotherOnlyWhereAllowed) {
  const std::vector<WorkerSlot> idle = {Worker("a", "h", "x"), Worker("b", "h", "y")};
  EXPECT_EQ(ChooseReplacement({"y", true}, idle), 1);
  EXPECT_EQ(ChooseReplacement({"z", true}, idle), 0);
  EXPECT_EQ(ChooseReplacement({"z", false}, idle), -1);
  EXPECT_EQ(ChooseReplacement({"x", true}, {}), -1);
}

TEST(ChooseReplacement, NearTheLostOneAndLargeEnough) {
  std::vector<WorkerSlot> idle = {Worker("a", "h1"), Worker("b", "h2"), Worker("c", "h2"), Worker("d", "h3", "q"),
                                  Worker("e", "")};
  EXPECT_EQ(ChooseReplacement({"p", true, 0, {"h2", "h1"}}, idle), 1);
  EXPECT_EQ(ChooseReplacement({"p", true, 0, {"h9", "h1", "h2"}}, idle), 0);
  EXPECT_EQ(ChooseReplacement({"p", true, 0, {"h3"}}, idle), 0) << "the profile comes before the host";
  EXPECT_EQ(ChooseReplacement({"q", true, 0, {"h1"}}, idle), 3);
  idle[1].memory_limit = 9;
  EXPECT_EQ(ChooseReplacement({"p", true, 10, {"h2"}}, idle), 2);
  EXPECT_EQ(ChooseReplacement({"p", true, 9, {"h2"}}, idle), 1);
  for (WorkerSlot& worker : idle) worker.memory_limit = 9;
  EXPECT_EQ(ChooseReplacement({"p", true, 10, {}}, idle), -1);
}

TEST(PlaceShards, NoServer) {
  EXPECT_EQ(PlaceShards(ChunkTable(10, 1, 10), 16, {}, 1).status().code(), absl::StatusCode::kUnavailable);
}

TEST(PlaceShards, RefusalShowsTheArithmetic) {
  const auto chains = PlaceShards(ChunkTable(1000, 10, 16), 16, {Server("a", 8000), Server("b", 1000, 400)}, 1);
  ASSERT_EQ(chains.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(chains.status().message());
  EXPECT_NE(text.find("1000 parameters x 16 bytes = 16000"), std::string::npos) << text;
  EXPECT_NE(text.find("b 600 of 1000"), std::string::npos) << text;
}

TEST(PlaceShards, LessLoadedServersComeFirst) {
  const auto chains = PlaceShards(ChunkTable(1, 1, 1), 16, {Server("a", 0, 100), Server("b", 0, 50)}, 7);
  ASSERT_TRUE(chains.ok());
  EXPECT_EQ((*chains)[0].members(0).node().name(), "b");
  EXPECT_EQ((*chains)[0].members(0).since(), 7u);
}

TEST(PlaceShards, RandomSpaces) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    const auto draw = [&](uint64_t n) { return rng() % n; };
    const uint64_t parameters = 1 + draw(seed % 2 == 0 ? 200 : 2000000);
    const uint64_t chunk = 1 + draw(parameters);
    const uint32_t count = 1 + static_cast<uint32_t>(draw(9));
    const uint32_t shards = ShardCount(parameters, chunk, count);
    const ChunkTable table(parameters, chunk, shards);
    std::vector<ServerSlot> servers;
    const bool limited = draw(2) == 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t used = draw(1000);
      servers.push_back(Server("s" + std::to_string(i), limited ? used + draw(64 * parameters / count + 1) : 0, used));
    }
    uint64_t elements = 0;
    for (uint32_t shard = 0; shard < shards; ++shard) {
      uint64_t sum = 0;
      for (uint64_t c = shard; c < table.chunks(); c += shards) sum += table.range(c).size();
      ASSERT_EQ(ShardElements(table, shard), sum);
      elements += sum;
    }
    ASSERT_EQ(elements, parameters) << "every element owned exactly once";
    const auto chains = PlaceShards(table, 16, servers, 1);
    if (!limited) {
      ASSERT_TRUE(chains.ok());
    }
    if (!chains.ok()) continue;
    ASSERT_EQ(chains->size(), shards);
    std::map<std::string, uint64_t> bytes;
    for (uint32_t shard = 0; shard < shards; ++shard) {
      ASSERT_EQ((*chains)[shard].members_size(), 1);
      bytes[(*chains)[shard].members(0).node().name()] += 16 * ShardElements(table, shard);
    }
    for (const ServerSlot& server : servers) {
      if (server.memory_limit > 0) {
        EXPECT_LE(bytes[server.node.name()] + server.memory_used, server.memory_limit);
      }
    }
    // With stripes enough for eight shards a server, the fullest has less than 1.2 times the mean.
    if (!limited && table.chunks() >= 32 * count) {
      uint64_t most = 0;
      for (const auto& [name, b] : bytes) most = std::max(most, b);
      EXPECT_LT(static_cast<double>(most), 1.2 * 16 * static_cast<double>(parameters) / count);
    }
  }
}

TEST(BytesPerParameter, FollowsOptimizerAndDiscipline) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(1);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  EXPECT_EQ(BytesPerParameter(spec), 8u);
  spec.mutable_optimizer()->set_clip_norm(1);
  EXPECT_EQ(BytesPerParameter(spec), 12u);
  spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1);
  EXPECT_EQ(BytesPerParameter(spec), 20u);
  EXPECT_EQ(BytesPerParameterText(spec), "value 4 + previous value 4 + m 4 + v 4 + sums 4");
}

}  // namespace
}  // namespace sluice
