// Error feedback in a whole cluster: what an encoding leaves out goes into checkpoints and comes back out of them, so
// that a resumed or rewound job ends with the bits of one that nobody disturbed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// Holds up the first worker that comes to compute a round. Thread-safe.
class Gate : public WorkerHooks {
 public:
  void CloseAt(uint64_t round) {
    absl::MutexLock lock(&mutex_);
    round_ = round;
    reached_ = open_ = false;
  }
  bool AwaitReached() {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&reached_), kPatience);
  }
  void Open() {
    absl::MutexLock lock(&mutex_);
    open_ = true;
  }
  void BeforeCompute(const std::string&, uint64_t, uint64_t round) override {
    absl::MutexLock lock(&mutex_);
    if (reached_ || round < round_) return;
    reached_ = true;
    mutex_.Await(absl::Condition(&open_));
  }

 private:
  absl::Mutex mutex_;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = UINT64_MAX;
  bool reached_ ABSL_GUARDED_BY(mutex_) = false;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
};

class ResidualTest : public testing::TestWithParam<const char*> {
 protected:
  ResidualTest() : cluster_(Options()) {
    std::string rows;
    for (int i = 0; i < 40; ++i) {
      std::vector<int> row;
      for (int k = 0; k < kLength; ++k) row.push_back((i * 7 + k * k * 3 + k) % 32);
      absl::StrAppend(&rows, "[", absl::StrJoin(row, ","), "]\n");
    }
    Spill(folder_ / "rows.jsonl", rows);
  }
  ~ResidualTest() override { gate_.Open(); }

  ClusterOptions Options() {
    ClusterOptions options{.servers = 2, .workers = 2};
    options.network = {.delay_seed = 3, .max_delay = absl::Microseconds(300)};
    options.hooks = &gate_;
    options.gather = absl::Milliseconds(10);
    return options;
  }

  v1::JobSpec Spec(uint64_t rounds, const std::string& transfer = GetParam()) const {
    v1::JobSpec spec;
    v1::Gpt2Spec* gpt = spec.mutable_model()->mutable_gpt2();
    gpt->set_layers(1);
    gpt->set_heads(2);
    gpt->set_width(16);
    gpt->set_context(16);
    gpt->set_vocabulary(32);
    spec.mutable_data()->mutable_rows()->set_path(folder_ / "rows.jsonl");
    spec.mutable_train()->set_rounds(rounds);
    spec.mutable_train()->set_batch(kBatch);
    spec.mutable_train()->set_eval_every(0);
    spec.mutable_checkpoint()->set_every_rounds(4);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    spec.mutable_optimizer()->set_clip_norm(0.5);
    spec.mutable_parallel()->set_data(2);
    spec.mutable_parallel()->set_chunk_elements(768);
    EXPECT_TRUE(SetSpecField(&spec, absl::StrCat("transfer.push=", transfer)).ok());
    return spec;
  }

  v1::JobStatus Await(const absl::StatusOr<std::string>& job) {
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return {};
    const auto end = cluster_.AwaitEnd(*job, kPatience);
    EXPECT_TRUE(end.ok()) << end.status();
    if (!end.ok()) return {};
    EXPECT_EQ(end->state(), v1::SUCCEEDED) << end->message();
    return *end;
  }
  v1::JobStatus Run(const v1::JobSpec& spec, const std::string& resume = "") {
    return Await(cluster_.Submit(spec, resume));
  }
  uint64_t Bits(const v1::JobStatus& status) {
    const auto values = cluster_.Parameters(status);
    EXPECT_TRUE(values.ok()) << values.status();
    return values.ok() ? HashOf(*values) : 0;
  }
  std::vector<float> Slot(const v1::JobStatus& status, const std::string& slot) const {
    const auto reader = CheckpointReader::Open(status.last_checkpoint().directory(), /*verify=*/true);
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (!reader.ok()) return {};
    std::vector<float> values((*reader)->manifest().parameters());
    const absl::Status read = (*reader)->Read(slot, 0, absl::MakeSpan(values));
    EXPECT_TRUE(read.ok()) << read;
    return values;
  }

  static constexpr int kLength = 17, kBatch = 6;
  Gate gate_;  // outlives the cluster
  TemporaryFolder folder_;
  InProcessCluster cluster_;
};

TEST_P(ResidualTest, AResumedJobGoesOnAsIfNothingHadBeen) {
  const v1::JobStatus whole = Run(Spec(12));
  const v1::JobStatus half = Run(Spec(8));
  for (const char* slot : {"residual-0", "residual-1"}) {
    const std::vector<float> residual = Slot(half, slot);
    EXPECT_TRUE(std::any_of(residual.begin(), residual.end(), [](float x) { return x != 0; })) << slot;
  }
  const v1::JobStatus resumed = Run(Spec(12), half.job_id());
  EXPECT_EQ(Bits(resumed), Bits(whole));
  EXPECT_FALSE(resumed.has_exact_until_round()) << resumed.ShortDebugString();
  for (const char* slot : {"residual-0", "residual-1"}) EXPECT_EQ(Slot(resumed, slot), Slot(whole, slot));
}

TEST_P(ResidualTest, ARewindChangesNoBit) {
  const v1::JobStatus whole = Run(Spec(12));
  gate_.CloseAt(10);
  const auto job = cluster_.Submit(Spec(12));
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE(gate_.AwaitReached());
  // A published checkpoint to go back to.
  ASSERT_TRUE(cluster_.Await(*job, [](const v1::JobStatus& s) { return s.last_checkpoint().version() == 8; }).ok());
  cluster_.network().Kill("server-0");
  cluster_.KillServer(0);
  cluster_.StartServer(0);
  gate_.Open();
  const v1::JobStatus end = Await(job);
  EXPECT_EQ(end.rewinds(), 1u);
  EXPECT_EQ(Bits(end), Bits(whole));
  EXPECT_FALSE(end.has_exact_until_round()) << end.ShortDebugString();
}

TEST_P(ResidualTest, AnOrderedCheckpointHoldsItToo) {
  const v1::JobStatus whole = Run(Spec(12));
  gate_.CloseAt(5);
  const auto job = cluster_.Submit(Spec(12));
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE(gate_.AwaitReached());
  ASSERT_TRUE(cluster_.scheduler().Cancel(*job, /*checkpoint_first=*/true).ok());
  gate_.Open();
  const auto cancelled = cluster_.AwaitEnd(*job, kPatience);
  ASSERT_TRUE(cancelled.ok() && cancelled->state() == v1::CANCELLED) << cancelled.status();
  EXPECT_NE(cancelled->last_checkpoint().version() % 4, 0u) << "one that only the order asked for";
  const v1::JobStatus resumed = Run(Spec(12), *job);
  EXPECT_EQ(Bits(resumed), Bits(whole));
  EXPECT_FALSE(resumed.has_exact_until_round());
}

// With its residual a worker takes a piece of exactness with it, but no checkpoint waits for the dead.
TEST_P(ResidualTest, AWorkerThatDiesAtACheckpoint) {
  for (const uint64_t round : {4, 8}) {
    gate_.CloseAt(round);
    const auto job = cluster_.Submit(Spec(9));
    ASSERT_TRUE(job.ok()) << job.status();
    ASSERT_TRUE(gate_.AwaitReached());
    cluster_.network().Kill("worker-0");
    gate_.Open();  // it may be the one that stands there
    cluster_.KillWorker(0);
    cluster_.StartWorker(0);
    const v1::JobStatus end = Await(job);
    EXPECT_EQ(end.last_checkpoint().version(), 9u);
    ASSERT_TRUE(end.has_exact_until_round());
    EXPECT_LE(end.exact_until_round(), round);
    EXPECT_GE(end.exact_until_round() + 1, round) << "commits of the round may still be on the way";
    // Who goes on from its checkpoints hears of it.
    EXPECT_EQ(Run(Spec(10), *job).exact_until_round(), end.exact_until_round());
  }
}

// What was pushed, and what is left at the end, add up to the gradients, across a checkpoint and with another number of
// workers after it. The learning rate is so small that parameters stay what they are; then the momentum buffer, with
// the largest momentum below 1, is the sum of all mean gradients, but for 6e-8 to 1.2e-7 that each round takes away.
TEST_P(ResidualTest, NothingIsLost) {
  const auto spec = [&](uint64_t rounds, const std::string& transfer, uint32_t replicas) {
    v1::JobSpec s = Spec(rounds, transfer);
    s.mutable_optimizer()->Clear();
    s.mutable_optimizer()->mutable_sgd()->set_learning_rate(1e-38);
    s.mutable_optimizer()->mutable_sgd()->set_momentum(0.99999994);
    s.mutable_parallel()->set_data(replicas);
    return s;
  };
  const std::vector<float> gradients = Slot(Run(spec(6, "{f32: {}}", 2)), "momentum");
  cluster_.StartWorker(2);
  for (const uint32_t replicas : {3u, 1u}) {
    const v1::JobStatus half = Run(spec(3, GetParam(), 2));
    const v1::JobStatus end = Run(spec(6, GetParam(), replicas), half.job_id());
    const std::vector<float> pushed = Slot(end, "momentum");
    std::vector<double> left(pushed.size());
    for (uint32_t i = 0; i < replicas; ++i) {
      const std::vector<float> residual = Slot(end, ResidualSlot(i));
      for (size_t k = 0; k < left.size(); ++k) left[k] += residual[k];
    }
    double difference = 0, size = 0, held = 0;
    for (size_t k = 0; k < left.size(); ++k) {
      const double mean = left[k] / (kBatch * (kLength - 1));
      difference += std::pow(pushed[k] + mean - gradients[k], 2);
      size += std::pow(gradients[k], 2);
      held += std::pow(mean, 2);
    }
    EXPECT_LE(std::sqrt(difference / size), 1e-6) << replicas << " workers";
    EXPECT_GT(std::sqrt(held / size), 1e-5) << "so much is left that it would show";
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ResidualTest,
                         testing::Values("{bf16: {}}", "{int8: {}}", "{top_k: {density: 0.05, warmup_rounds: 3}}"));

}  // namespace
}  // namespace sluice
