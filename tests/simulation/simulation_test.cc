#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>

#include "common/log.h"

namespace sluice {
namespace {

class Simulation : public testing::Test {
 protected:
  void SetUp() override { spdlog::set_level(spdlog::level::off); }
};

TEST_F(Simulation, SeedsPass) {
  int rewinds = 0, generations = 0, host_sums = 0, with_declines = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const SimResult r = RunSeed(seed, ProtocolRules(), false);
    EXPECT_EQ(r.failure, "") << "replay: simulate --seed " << seed << " --trace";
    rewinds += r.rewinds;
    generations += r.generations;
    host_sums += r.host_sums;
    with_declines += r.declines > 0;
  }
  EXPECT_GT(host_sums, 1000);
  EXPECT_GT(with_declines, 30) << "--hold_memory declines nothing";
  EXPECT_GT(rewinds, 5);
  EXPECT_GT(generations, 200);
}

TEST_F(Simulation, AsyncSeedsPass) {
  int rewinds = 0, generations = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const SimResult r = RunSeed(seed, ProtocolRules(), false, /*async=*/true);
    EXPECT_EQ(r.failure, "") << "replay: simulate --async --seed " << seed << " --trace";
    rewinds += r.rewinds;
    generations += r.generations;
  }
  EXPECT_GT(rewinds, 10);
  EXPECT_GT(generations, 400);
}

// What each rule is for: without it some seeds fail.
void ExpectSeedsFail(const ProtocolRules& rules, bool async = false) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    if (!RunSeed(seed, rules, false, async).failure.empty()) return;
  }
  ADD_FAILURE() << "no seed failed";
}

TEST_F(Simulation, Fencing) { ExpectSeedsFail({.fencing = false}); }
TEST_F(Simulation, Dedup) { ExpectSeedsFail({.dedup = false}); }
TEST_F(Simulation, AsyncDedup) { ExpectSeedsFail({.dedup = false}, /*async=*/true); }
TEST_F(Simulation, KeptVersion) { ExpectSeedsFail({.kept_version = false}); }
TEST_F(Simulation, PersistFirst) { ExpectSeedsFail({.persist_first = false}); }
TEST_F(Simulation, VerdictCarried) { ExpectSeedsFail({.verdict_carried = false}); }
// A full --hold_memory: what completes a pair must be taken, and where that is not enough (three contributors) the
// oldest chunk's.
TEST_F(Simulation, TakePairs) { ExpectSeedsFail({.take_pairs = false, .take_oldest = false}); }
TEST_F(Simulation, TakeOldest) { ExpectSeedsFail({.take_oldest = false}); }

TEST_F(Simulation, ASeedReplays) {
  const SimResult a = RunSeed(17, ProtocolRules(), false), b = RunSeed(17, ProtocolRules(), false);
  EXPECT_EQ(a.events, b.events);
  EXPECT_EQ(a.values, b.values);
}

}  // namespace
}  // namespace sluice
