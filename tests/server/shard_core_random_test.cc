// Disturbed runs of several servers' cores: pushes in any order, repeated, of old generations; sums, norms and verdicts
// late or lost; transitions at any moment. Every run ends with the values of the undisturbed one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "common/log.h"
#include "tests/server/core_rig.h"

namespace sluice {
namespace {

class Run {
 public:
  Run(uint64_t seed, const ServerTestPlan& plan, uint64_t hold_bytes, bool disturbed)
      : rng_(seed),
        plan_(plan),
        disturbed_(disturbed),
        poison_(seed % 3 == 0),
        rig_(plan.servers, ProtocolRules(), hold_bytes) {}

  // Whether the job came to its end.
  bool Go() {
    Begin();
    for (int step = 0; step < 200000; ++step) {
      Advance();
      if (Done()) return true;
      const uint64_t dice = rng_() % 1000;
      if (disturbed_ && dice < 10) {
        Transition();
      } else if (disturbed_ && dice < 30 && !sent_.empty()) {
        Send(sent_[rng_() % sent_.size()]);  // again, maybe of a generation that is over
      } else if (disturbed_ && dice < 40) {
        rig_.DropMessages();  // a link broke
        for (uint32_t s = 0; s < plan_.servers; ++s) rig_.core(s).OnHolderConnected();
      } else if (!due_.empty() && (dice % 2 == 0 || rig_.queued() == 0)) {
        const size_t at = disturbed_ ? rng_() % due_.size() : 0;
        const Message m = due_[at];
        due_.erase(due_.begin() + static_cast<std::ptrdiff_t>(at));
        Send(m);
        sent_.push_back(m);
      } else {
        rig_.RunOne(disturbed_ ? rng_() : 0);
      }
      Heed();
      CheckVersions();
    }
    return false;
  }

  std::vector<double> Values() const {
    std::vector<double> out;
    for (uint64_t c = 0; c < layout_->table().chunks(); ++c) out.push_back(rig_.value(c));
    return out;
  }
  std::map<uint64_t, v1::RoundRecord> Records() const { return rig_.records(); }
  int transitions() const { return transitions_; }
  bool declined() const { return !rig_.declined.empty(); }

 private:
  struct Message {
    uint64_t generation, round;
    uint32_t contributor;
    int64_t chunk;  // -1: the report
  };

  uint32_t ServerOf(uint64_t chunk) const { return layout_->table().shard(chunk) % plan_.servers; }
  uint64_t Version(uint64_t chunk) { return rig_.core(ServerOf(chunk)).version(chunk); }
  bool Done() {
    for (uint64_t c = 0; c < layout_->table().chunks(); ++c) {
      if (Version(c) < plan_.rounds) return false;
    }
    return !plan_.stream || rig_.records().contains(plan_.rounds - 1) || transitions_ > 0;
  }

  // A function of what it is for, so that every recomputation gives the same.
  double Value(uint64_t round, uint32_t contributor, uint64_t chunk) const {
    if (poison_ && (round * 31 + contributor * 7 + chunk) % 23 == 0) return std::numeric_limits<double>::quiet_NaN();
    return std::ldexp(static_cast<double>((round * 1009 + contributor * 131 + chunk * 17) % 1021 + 1),
                      static_cast<int>((round + 3 * contributor + 5 * chunk) % 13) - 6);
  }

  void Send(const Message& m) {
    absl::Status status;
    if (m.chunk < 0) {
      status = rig_.Report(0, m.generation, m.round, m.contributor, m.contributor + 1.0);
    } else {
      status = rig_.Push(ServerOf(m.chunk), m.generation, m.round, m.contributor, m.chunk,
                         Value(m.round, m.contributor, m.chunk));
    }
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
  }

  // Declined contributions that are asked for again.
  void Heed() {
    for (const CoreRig::Name& name : rig_.again) {
      const uint32_t contributor = name.stream % 100;
      if (name.stream != CoreRig::Stream(plan_.generation, contributor)) continue;
      due_.push_back({plan_.generation, name.round, contributor, static_cast<int64_t>(name.chunk)});
    }
    rig_.again.clear();
  }

  void Begin() {
    layout_ = plan_.Make();
    rig_.Plan(layout_);
    due_.clear();
    round_.assign(plan_.replicas, plan_.start);
    for (uint32_t c = 0; c < plan_.replicas; ++c) Compute(c);
  }

  void Compute(uint32_t contributor) {
    if (round_[contributor] == plan_.rounds) return;
    due_.push_back({plan_.generation, round_[contributor], contributor, -1});
    for (uint64_t c = 0; c < layout_->table().chunks(); ++c) {
      due_.push_back({plan_.generation, round_[contributor], contributor, static_cast<int64_t>(c)});
    }
  }

  void Advance() {
    uint64_t low = UINT64_MAX;
    for (uint64_t c = 0; c < layout_->table().chunks(); ++c) low = std::min(low, Version(c));
    for (uint32_t c = 0; c < plan_.replicas; ++c) {
      // Its own messages of the round are all sent, and every chunk is committed.
      const bool busy = std::any_of(due_.begin(), due_.end(), [&](const Message& m) { return m.contributor == c; });
      if (busy || low <= round_[c]) continue;
      ++round_[c];
      Compute(c);
    }
  }

  void Transition() {
    ++transitions_;
    const size_t before = rig_.fence_reports().size();
    plan_.generation += 1 + rng_() % 2;
    for (uint32_t s = 0; s < plan_.servers; ++s) rig_.core(s).OnFence(plan_.generation);
    for (int i = rng_() % 8; i > 0; --i) rig_.RunOne(rng_());  // what comes late
    plan_.start = UINT64_MAX;
    const std::vector<v1::FenceReport> reports = rig_.fence_reports();
    for (size_t i = before; i < reports.size(); ++i) {
      for (const v1::ShardReport& shard : reports[i].shards()) {
        plan_.start = std::min(plan_.start, shard.min_version());
      }
    }
    plan_.verdict.reset();
    for (size_t i = before; i < reports.size(); ++i) {
      for (const v1::ShardReport& shard : reports[i].shards()) {
        for (const v1::Verdict& verdict : shard.verdicts()) {
          if (verdict.round() == plan_.start) plan_.verdict = verdict;
        }
      }
    }
    Begin();
  }

  void CheckVersions() {
    uint64_t low = UINT64_MAX, high = 0;
    for (uint64_t c = 0; c < layout_->table().chunks(); ++c) {
      low = std::min(low, Version(c));
      high = std::max(high, Version(c));
    }
    ASSERT_LE(high - low, 1u);
  }

  std::mt19937_64 rng_;
  ServerTestPlan plan_;
  const bool disturbed_;
  const bool poison_;
  CoreRig rig_;
  std::shared_ptr<const Layout> layout_;
  std::vector<uint64_t> round_;  // by contributor
  std::vector<Message> due_, sent_;
  int transitions_ = 0;
};

void TrySeed(uint64_t seed, int* transitions, int* declined) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  ServerTestPlan plan;
  plan.servers = 1 + rng() % 3;
  plan.shards = plan.servers + rng() % 3;
  plan.replicas = 1 + rng() % 4;
  plan.chunk_elements = 1 + rng() % 3;
  plan.norm_block = rng() % 2 ? plan.chunk_elements : 5;
  plan.rounds = 4 + rng() % 4;
  plan.stream = rng() % 3 == 0;
  if (!plan.stream && rng() % 2) plan.clip_norm = 0.5;
  const uint64_t hold_bytes = rng() % 3 == 0 ? INT64_MAX : 4 * (rng() % 8);
  Run quiet(seed, plan, hold_bytes, false), disturbed(seed, plan, hold_bytes, true);
  ASSERT_TRUE(quiet.Go()) << "the undisturbed run did not end";
  ASSERT_TRUE(disturbed.Go()) << "the disturbed run did not end";
  EXPECT_EQ(disturbed.Values(), quiet.Values());
  const auto want = quiet.Records();
  for (const auto& [round, record] : disturbed.Records()) {
    EXPECT_EQ(record.loss(), want.at(round).loss());
    EXPECT_EQ(record.gradient_norm(), want.at(round).gradient_norm());
    if (!plan.stream) {
      EXPECT_EQ(record.skipped(), want.at(round).skipped()) << round;
    }
  }
  if (!plan.stream) {
    EXPECT_EQ(disturbed.Records().size(), plan.rounds);
  }
  *transitions += disturbed.transitions();
  *declined += disturbed.declined();
}

TEST(ShardCoreRandom, DisturbedRunsEndWithTheSameValues) {
  spdlog::set_level(spdlog::level::off);
  int transitions = 0, declined = 0;
  for (uint64_t seed = 0; seed < 600 && !testing::Test::HasFailure(); ++seed) TrySeed(seed, &transitions, &declined);
  for (int i = 0; i < 200 && !testing::Test::HasFailure(); ++i)
    TrySeed(std::random_device{}(), &transitions, &declined);
  EXPECT_GT(declined, 200);
  EXPECT_GT(transitions, 1000);
}

}  // namespace
}  // namespace sluice
