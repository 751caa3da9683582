// SchedulerCore under random orders of events: deaths, breaks, silence, restarts at every point, late and repeated
// messages. The fixture checks every plan (Layout::Make), that generations only grow and that nothing is heard of
// before it is on disk; here: that every job ends once the faults stop. A failing seed replays with SLUICE_SEED=<seed>.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

class RandomLife {
 public:
  explicit RandomLife(uint64_t seed) : rng_(seed) {
    servers_ = 1 + Draw(3);
    workers_ = 1 + Draw(4);
    for (uint64_t i = 0; i < servers_; ++i) names_.push_back("s" + std::to_string(i));
    for (uint64_t i = 0; i < workers_; ++i) names_.push_back("w" + std::to_string(i));
    for (const std::string& name : names_) Start(name);
  }

  void Run() {
    for (int step = 0; step < 150 && !testing::Test::HasFatalFailure(); ++step) {
      Step();
      Check();
    }
    Calm();
  }

 private:
  uint64_t Draw(uint64_t n) { return rng_() % n; }
  const std::string& AnyNode() { return names_[Draw(names_.size())]; }
  std::string AnyJob() {
    const std::vector<std::string> ids = f_.core().JobIds();
    return ids.empty() ? "" : ids[Draw(ids.size())];
  }
  bool Active(const std::string& job) {
    return !job.empty() && f_.core().job(job)->started() && !f_.core().job(job)->ended();
  }
  void Start(const std::string& name) {
    f_.Start(name, name[0] == 's' ? v1::SERVER : v1::WORKER, Draw(4) == 0 ? "other" : "avx2", 0,
             Draw(2) == 0 ? "left" : "right");
  }

  void Step() {
    switch (Draw(14)) {
      case 0:
        if (f_.core().JobIds().size() < 4) {
          v1::JobSpec spec = SmallSpec(1 + static_cast<uint32_t>(Draw(workers_)), Draw(2) == 0 ? "a" : "b");
          if (workers_ >= 2 && Draw(3) == 0) {  // replicas of two ranks
            spec.mutable_parallel()->set_data(1 + static_cast<uint32_t>(Draw(workers_ / 2)));
            spec.mutable_parallel()->set_pipeline(2);
          }
          f_.Submit(spec);
        }
        return;
      case 1:
        if (f_.nodes().count(AnyNode()) > 0) f_.Kill(AnyNode());
        return;
      case 2:
        return Start(AnyNode());  // a new life, the old one dead or not
      case 3:
        return f_.Break(AnyNode());
      case 4:
        for (const std::string& name : names_) {
          if (f_.node(name).session == 0 && f_.node(name).incarnation != 0) f_.Connect(name);
        }
        return;
      case 5:
        f_.Restart();
        if (Draw(2) == 0) f_.ConnectAll();
        return;
      case 6:
        return f_.Advance(absl::Milliseconds(static_cast<int64_t>(Draw(3000))), {AnyNode()});
      case 7:
        return f_.Advance(absl::Milliseconds(static_cast<int64_t>(Draw(150))));
      case 8:
        if (const std::string job = AnyJob(); !job.empty() && Draw(4) == 0) {
          ASSERT_TRUE(f_.core().Cancel(job, Draw(2) == 0, f_.now()).ok());
        }
        return;
      case 9:
        if (const std::string job = AnyJob(); Active(job)) {
          ASSERT_TRUE(f_.core().OrderCheckpoint(job, f_.now()).ok());
        }
        return;
      case 10:
        if (const std::string job = AnyJob(); Active(job)) {
          const uint32_t shard = static_cast<uint32_t>(Draw(f_.plan(job).shards()));
          if (Draw(3) == 0) {
            f_.Snapshot(job, 1 + Draw(10), shard, Draw(2) == 0 ? "passed: too late" : "");
          } else {
            const uint64_t version = 1 + Draw(10);
            for (uint32_t s = 0; s < f_.plan(job).shards() && Active(job); ++s) f_.Snapshot(job, version, s);
            if (Draw(2) == 0) f_.FinishPublishing();
          }
        }
        return;
      case 11:
        if (const std::string job = AnyJob(); Active(job))
          f_.Final(job, static_cast<uint32_t>(Draw(f_.plan(job).shards())));
        return;
      case 12:
        if (const std::string job = AnyJob(); Active(job)) {
          f_.Record(job, Draw(10), Draw(4) == 0, Draw(6) == 0, {0, 7});
        }
        return;
      case 13:
        if (const std::string job = AnyJob(); Active(job)) {
          const std::set<std::string> servers = f_.PlanServers(job);
          for (const std::string& name : servers) {
            if (Active(job) && Draw(3) > 0)
              f_.Report(job, name, std::min<uint64_t>(10, f_.plan(job).start() + Draw(2)));
          }
        }
        return;
    }
  }

  // A worker serves one job; the ranks of a plan that is in force are different nodes (Layout::Make says so).
  void Check() {
    std::set<std::string> busy;
    for (const std::string& id : f_.core().JobIds()) {
      const JobEntry& job = *f_.core().job(id);
      ASSERT_GE(job.row.generation(), job.plan().generation());
      if (!Active(id)) continue;
      ASSERT_EQ(f_.disk.at(id).generation(), job.row.generation());
      for (const v1::Rank& rank : job.plan().ranks()) {
        if (job.lost.count(KeyOf(rank.node())) > 0) continue;
        ASSERT_TRUE(busy.insert(rank.node().name() + "/" + std::to_string(rank.node().incarnation())).second)
            << rank.node().name() << " has ranks of two jobs";
      }
    }
  }

  // No more faults: everybody lives and does its part; then every job ends.
  void Calm() {
    for (int turn = 0; turn < 60 && !testing::Test::HasFatalFailure(); ++turn) {
      for (const std::string& name : names_) {
        if (f_.node(name).incarnation == 0) Start(name);
        if (f_.node(name).session == 0) f_.Connect(name);
      }
      f_.Advance(absl::Milliseconds(500));
      bool all = true;
      for (const std::string& id : f_.core().JobIds()) {
        if (f_.core().job(id)->transition) f_.ReportAll(id, f_.plan(id).start());
        if (Active(id) && !f_.core().job(id)->transition) f_.RunToEnd(id, f_.plan(id).start());
        all &= f_.core().job(id)->ended();
      }
      Check();
      if (all) return;
    }
    for (const std::string& id : f_.core().JobIds()) {
      ADD_FAILURE() << id << ": " << v1::JobState_Name(f_.state(id)) << " " << f_.status(id).message();
    }
  }

  std::mt19937_64 rng_;
  CoreFixture f_;
  uint64_t servers_ = 0, workers_ = 0;
  std::vector<std::string> names_;
};

TEST(SchedulerCoreRandom, EveryJobEndsWhenTheFaultsStop) {
  const char* const one = std::getenv("SLUICE_SEED");
  const char* const many = std::getenv("SLUICE_SEEDS");  // how many; default 400
  const uint64_t first = one != nullptr ? std::strtoull(one, nullptr, 10) : 0;
  const uint64_t seeds = many != nullptr ? std::strtoull(many, nullptr, 10) : one != nullptr ? 1 : 400;
  for (uint64_t seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomLife(seed).Run();
    if (HasFailure()) std::printf("replay: SLUICE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  }
}

}  // namespace
}  // namespace sluice
