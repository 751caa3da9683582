// Where a round's time went, from the workers' clocks to the history and the status: it adds up, and a slow replica
// shows in the others' waits.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

constexpr uint64_t kRounds = 30;
constexpr uint64_t kFirst = 3;  // that counts: the workers begin at different times, and wait for each other after that
constexpr absl::Duration kWork = absl::Milliseconds(20);

// The worker that computes first is a slow machine.
class OneIsSlow : public WorkerHooks {
 public:
  void BeforeCompute(const std::string&, uint64_t, uint64_t) override {
    {
      absl::MutexLock lock(&mutex_);
      if (slow_ == std::thread::id()) slow_ = std::this_thread::get_id();
      if (slow_ != std::this_thread::get_id()) return;
    }
    absl::SleepFor(kWork);
  }

 private:
  absl::Mutex mutex_;
  std::thread::id slow_ ABSL_GUARDED_BY(mutex_);
};

class JobTimesTest : public ::testing::TestWithParam<bool> {
 protected:
  v1::JobSpec Spec(int workers) const {
    const std::string path = folder_.path() + "/rows.jsonl";
    std::ofstream rows(path);
    for (int i = 0; i < 64; ++i) rows << "[1, 2, 3, 4, 5, 6, 7, 8]\n";
    v1::JobSpec spec;
    spec.set_name("times");
    v1::Gpt2Spec* gpt2 = spec.mutable_model()->mutable_gpt2();
    gpt2->set_layers(1);
    gpt2->set_heads(1);
    gpt2->set_width(16);
    gpt2->set_context(8);
    gpt2->set_vocabulary(16);
    spec.mutable_data()->mutable_rows()->set_path(path);
    spec.mutable_data()->set_validation_fraction(0);
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(4);
    spec.mutable_parallel()->set_data(static_cast<uint32_t>(workers));
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
    if (!GetParam()) spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
    spec.mutable_optimizer()->set_clip_norm(GetParam() ? 1 : 0);  // else the rounds are streamed
    return spec;
  }

  const TemporaryFolder folder_;
};

TEST_P(JobTimesTest, AddUpToTheRoundsAndNameTheSlowReplica) {
  OneIsSlow slow;
  InProcessCluster cluster({.servers = 2, .workers = 2, .hooks = &slow});
  const auto job = cluster.Submit(Spec(2));
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = cluster.AwaitEnd(*job);
  ASSERT_TRUE(end.ok()) << end.status();
  ASSERT_EQ(end->state(), v1::SUCCEEDED) << end->message();

  struct Sum {
    double compute = 0, exposed = 0, others = 0, verdict = 0;
    double total() const { return compute + exposed + others + verdict; }
  };
  std::map<uint32_t, Sum> sums;
  double wall = 0;
  uint64_t rounds = 0;
  const auto history = cluster.scheduler().History(*job);
  ASSERT_TRUE(history.ok()) << history.status();
  for (const v1::RoundRecord& record : history->records()) {
    if (record.evaluation()) {
      EXPECT_EQ(record.times_size(), 0);
      continue;
    }
    ASSERT_EQ(record.times_size(), 2) << "round " << record.round();
    if (record.round() < kFirst) continue;
    ++rounds;
    wall += record.seconds();
    for (const v1::RankTime& time : record.times()) {
      Sum& sum = sums[time.contributor()];
      sum.compute += time.compute();
      sum.exposed += time.exposed();
      sum.others += time.others();
      sum.verdict += time.verdict();
    }
  }
  EXPECT_EQ(rounds, kRounds - kFirst);
  ASSERT_EQ(sums.size(), 2u);
  for (const auto& [contributor, sum] : sums) {
    EXPECT_NEAR(sum.total(), wall, .05 * wall) << "replica " << contributor;
    if (!GetParam()) EXPECT_EQ(sum.verdict, 0);
  }
  const bool first = sums[0].compute > sums[1].compute;
  const Sum& one = sums[first ? 0 : 1];
  const Sum& other = sums[first ? 1 : 0];
  EXPECT_GE(one.compute, absl::ToDoubleSeconds(kWork) * (kRounds - kFirst));
  EXPECT_LT(one.others, .1 * wall);
  EXPECT_GT(other.others, .6 * wall);
  EXPECT_LT(other.compute, .4 * wall);

  const v1::RoundTime& mean = end->round_time();
  EXPECT_GT(mean.total(), absl::ToDoubleSeconds(kWork));
  EXPECT_NEAR(mean.total(), mean.compute() + mean.exposed() + mean.others() + mean.verdict(), 1e-6);
  EXPECT_GT(mean.others(), .2 * mean.total());
}

INSTANTIATE_TEST_SUITE_P(Disciplines, JobTimesTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Verdict" : "Stream"; });

}  // namespace
}  // namespace sluice
