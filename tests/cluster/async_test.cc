// Async jobs in a whole cluster in one process: as good as sync, every contribution applied exactly once whatever dies,
// checkpoints that go on, faults named.
//
// The counting model: black images and a first job that learns, at an enormous rate, that all are of class 0; then a
// second one, from those parameters, in which all are of class 1. Its gradients are 1 and -1 in the two biases,
// exactly, however far they move, so SGD moves each by the learning rate for every contribution: the biases count.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

constexpr double kRate = 1.0 / 1024;

void WriteBig(std::ofstream& out, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out.put(static_cast<char>(value >> shift));
}

class AsyncTest : public ::testing::Test {
 protected:
  // Images of 4 pixels, all `pixel(i)`, and labels.
  template <typename Pixel, typename Label>
  v1::IdxSource Write(uint32_t images, Pixel pixel, Label label) {
    v1::IdxSource source;
    source.set_images((folder_ / "images").string());
    source.set_labels((folder_ / "labels").string());
    std::ofstream out(source.images(), std::ios::binary), labels(source.labels(), std::ios::binary);
    WriteBig(out, 0x803);
    WriteBig(labels, 0x801);
    WriteBig(out, images);
    WriteBig(labels, images);
    WriteBig(out, 2);
    WriteBig(out, 2);
    for (uint32_t i = 0; i < images; ++i) {
      for (uint32_t p = 0; p < 4; ++p) out.put(static_cast<char>(pixel(i, p)));
      labels.put(static_cast<char>(label(i)));
    }
    return source;
  }

  v1::JobSpec Spec(uint32_t workers, uint64_t rounds) {
    v1::JobSpec spec;
    spec.set_name("async");
    spec.mutable_model()->mutable_mlp()->set_inputs(4);
    spec.mutable_model()->mutable_mlp()->set_classes(2);
    spec.mutable_train()->set_mode(v1::TrainSpec::ASYNC);
    spec.mutable_train()->set_rounds(rounds);
    spec.mutable_train()->set_batch(8);
    spec.mutable_parallel()->set_data(workers);
    spec.mutable_parallel()->set_chunk_elements(1);
    return spec;
  }
  v1::JobSpec CountingSpec(uint32_t workers, uint64_t rounds) {
    v1::JobSpec spec = Spec(workers, rounds);
    *spec.mutable_data()->mutable_idx() = Write(
        64, [](uint32_t, uint32_t) { return 0; }, [](uint32_t) { return 1; });
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(kRate);
    spec.mutable_init()->set_path(begin_.empty() ? "" : begin_);
    return spec;
  }
  // The first job; the second begins from it.
  void Learn(InProcessCluster* cluster, uint32_t workers) {
    v1::JobSpec spec = CountingSpec(workers, 3);
    spec.clear_init();
    spec.set_name("first");
    spec.mutable_train()->set_mode(v1::TrainSpec::SYNC);
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(200);
    *spec.mutable_data()->mutable_idx() = Write(
        64, [](uint32_t, uint32_t) { return 0; }, [](uint32_t) { return 0; });
    const auto job = cluster->Submit(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    const auto end = cluster->AwaitEnd(*job);
    ASSERT_TRUE(end.ok()) << end.status();
    const auto parameters = cluster->Parameters(*end);
    ASSERT_TRUE(parameters.ok()) << parameters.status();
    first_ = *parameters;
    ASSERT_GT(first_[0] - first_[1], 60);  // e^-60 is nothing beside 1 in float32
    begin_ = end->last_checkpoint().directory();
  }
  // Contributions that each of the two biases has had (the first elements of the space: bias [2]).
  std::vector<double> Counts(const std::vector<float>& parameters) {
    return {(double{first_[0]} - parameters[0]) / kRate, (double{parameters[1]} - first_[1]) / kRate};
  }
  void ExpectCounts(InProcessCluster* cluster, const v1::JobStatus& end, double contributions) {
    ASSERT_EQ(end.state(), v1::SUCCEEDED) << end.message();
    const auto parameters = cluster->Parameters(end);
    ASSERT_TRUE(parameters.ok()) << parameters.status();
    EXPECT_THAT(Counts(*parameters), ::testing::ElementsAre(contributions, contributions));
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
  std::vector<float> first_;  // parameters that the second job begins from
  std::string begin_;
};

// Chunks are of one element, whose contributions bf16 and top_k send whole.
TEST_F(AsyncTest, EveryContributionIsAppliedOnce) {
  for (const auto& [workers, push] : {std::pair{1u, "{f32: {}}"}, std::pair{2u, "{f32: {}}"},
                                      std::pair{4u, "{bf16: {}}"}, std::pair{2u, "{top_k: {density: 0.5}}"}}) {
    SCOPED_TRACE(push);
    InProcessCluster cluster({.servers = 2, .workers = static_cast<int>(workers)});
    ASSERT_NO_FATAL_FAILURE(Learn(&cluster, workers));
    v1::JobSpec counting = CountingSpec(workers, 50);
    ASSERT_TRUE(SetSpecField(&counting, absl::StrCat("transfer.push=", push)).ok());
    const auto job = cluster.Submit(counting);
    ASSERT_TRUE(job.ok()) << job.status();
    const auto end = cluster.AwaitEnd(*job);
    ASSERT_TRUE(end.ok()) << end.status();
    ExpectCounts(&cluster, *end, 50.0 * workers);
    EXPECT_EQ(end->rounds_done(), 50u);
    EXPECT_EQ(end->last_evaluation().round(), 50u);
    uint64_t rounds = 0;
    double targets = 0;
    const auto history = cluster.scheduler().History(*job);
    for (const v1::RoundRecord& record : history->records()) {
      if (record.evaluation()) continue;
      ++rounds;
      targets += record.count();
      EXPECT_LE(record.staleness_mean(), static_cast<double>(record.staleness_max()));
      if (workers == 1) EXPECT_EQ(record.staleness_max(), 0u);
    }
    EXPECT_EQ(rounds, 50u);
    EXPECT_EQ(targets, 400);
  }
}

// Nobody begins a lease of round `limit` or later of an async job before the limit is raised or the gate opened.
class Gate : public WorkerHooks {
 public:
  void BeforeCompute(const std::string& job, uint64_t, uint64_t round) override {
    if (!absl::StartsWith(job, "async")) return;
    absl::MutexLock lock(&mutex_);
    const auto passes = [this, round]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_ || round < limit_; };
    mutex_.Await(absl::Condition(&passes));
  }
  void Set(uint64_t limit, bool open = false) {
    absl::MutexLock lock(&mutex_);
    limit_ = limit;
    open_ = open;
  }

 private:
  absl::Mutex mutex_;
  uint64_t limit_ ABSL_GUARDED_BY(mutex_) = 0;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

// Workers die with leases half applied, the scheduler too: no contribution is lost or doubled.
TEST_F(AsyncTest, NothingIsLostOrDoubledWhenWorkersAndTheSchedulerDie) {
  Gate gate;
  InProcessCluster cluster({.servers = 2, .workers = 3, .lease = absl::Milliseconds(400), .hooks = &gate});
  absl::Cleanup open = [&gate] { gate.Set(0, /*open=*/true); };  // a killed worker's thread must come through
  ASSERT_NO_FATAL_FAILURE(Learn(&cluster, 2));
  v1::JobSpec spec = CountingSpec(2, 1000);
  spec.mutable_transfer()->mutable_push()->mutable_bf16();  // leaves nothing out here: what is applied shows all
  const auto job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  uint32_t killed = 0;
  for (uint64_t i = 1; i <= 6; ++i) {
    gate.Set(50 * i);
    ASSERT_TRUE(cluster.AwaitRounds(*job, 50 * i).ok());
    if (i % 3 == 0) {
      cluster.KillScheduler();
      cluster.StartScheduler();
      continue;
    }
    int victim = 0;
    while (cluster.worker(victim).job() != *job) ++victim;  // two of the three hold ranks
    gate.Set(0, /*open=*/true);
    cluster.KillWorker(victim);
    gate.Set(50 * i);
    ++killed;
    const auto recovered = cluster.Await(*job, [&](const v1::JobStatus& s) { return s.recoveries() >= killed; });
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    cluster.StartWorker(victim);
  }
  gate.Set(0, /*open=*/true);
  const auto end = cluster.AwaitEnd(*job);
  ASSERT_TRUE(end.ok()) << end.status();
  ExpectCounts(&cluster, *end, 2000);
  EXPECT_GE(end->recoveries(), killed);
  EXPECT_EQ(end->rewinds(), 0u);
}

// With one copy a dead server rewinds the job: what the checkpoint has not seen is trained again, once.
TEST_F(AsyncTest, ARewindGoesOnFromTheCut) {
  Gate gate;
  InProcessCluster cluster({.servers = 2, .workers = 2, .lease = absl::Milliseconds(400), .hooks = &gate});
  absl::Cleanup open = [&gate] { gate.Set(0, /*open=*/true); };
  ASSERT_NO_FATAL_FAILURE(Learn(&cluster, 2));
  v1::JobSpec spec = CountingSpec(2, 300);
  spec.mutable_checkpoint()->set_every_rounds(7);
  const auto job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  for (int i = 0; i < 2; ++i) {
    const uint64_t limit = 60 * (static_cast<uint64_t>(i) + 1);
    gate.Set(limit);
    ASSERT_TRUE(cluster.AwaitRounds(*job, limit).ok());
    cluster.KillServer(i);
    cluster.StartServer(i);
    const auto rewound =
        cluster.Await(*job, [&](const v1::JobStatus& s) { return s.rewinds() > static_cast<uint32_t>(i); });
    ASSERT_TRUE(rewound.ok()) << rewound.status();
  }
  gate.Set(0, /*open=*/true);
  const auto end = cluster.AwaitEnd(*job);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->rewinds(), 2u);
  ExpectCounts(&cluster, *end, 600);
}

TEST_F(AsyncTest, AResumedJobGoesOnFromTheLedgerWithAnyNumberOfWorkers) {
  InProcessCluster cluster({.servers = 2, .workers = 3});
  ASSERT_NO_FATAL_FAILURE(Learn(&cluster, 2));
  v1::JobSpec spec = CountingSpec(2, 40);
  spec.mutable_checkpoint()->set_every_rounds(10);
  spec.mutable_checkpoint()->set_keep(10);
  const auto job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE(cluster.AwaitEnd(*job).ok());
  spec.mutable_parallel()->set_data(3);
  spec.mutable_init()->set_path(absl::StrCat(cluster.checkpoint_root(), "/", *job, "/t1-v10"));
  spec.mutable_init()->set_resume(true);
  const auto resumed = cluster.Submit(spec);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  const auto end = cluster.AwaitEnd(*resumed);
  ASSERT_TRUE(end.ok()) << end.status();
  ASSERT_EQ(end->state(), v1::SUCCEEDED) << end->message();
  const std::vector<double> counts = Counts(*cluster.Parameters(*end));
  // 10 rounds of 2, then 30 of 3; a lease that the cut had not everywhere may have been cut smaller.
  for (const double count : counts) {
    EXPECT_GE(count, 20 + 90 - 2);
    EXPECT_LE(count, 20 + 90 + 2);
  }
  const auto reader = CheckpointReader::Open(end->last_checkpoint().directory(), true);
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const v1::CheckpointFile& file : (*reader)->manifest().files()) {
    for (const v1::ChunkCut& cut : file.cuts()) {
      ASSERT_EQ(cut.applied_size(), 1);
      EXPECT_EQ(cut.applied(0).begin(), 0u);
      EXPECT_EQ(cut.applied(0).end(), 320u);
    }
  }
}

TEST_F(AsyncTest, AnAsyncCheckpointThatIsNotEvenDoesNotResumeWhatCannotUseIt) {
  InProcessCluster cluster({.servers = 1, .workers = 2});
  ASSERT_NO_FATAL_FAILURE(Learn(&cluster, 2));
  v1::JobSpec spec = CountingSpec(2, 10);
  const auto job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE(cluster.AwaitEnd(*job).ok());
  spec.clear_init();
  spec.mutable_train()->set_rounds(20);
  spec.mutable_train()->set_batch(6);
  EXPECT_THAT(std::string(cluster.Submit(spec, *job).status().message()), HasSubstr("train.batch"));
  // The last version has seen every position before it: sync can go on from it.
  spec.mutable_train()->set_batch(8);
  spec.mutable_train()->set_mode(v1::TrainSpec::SYNC);
  const auto resumed = cluster.Submit(spec, *job);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  const auto end = cluster.AwaitEnd(*resumed);
  ASSERT_TRUE(end.ok()) << end.status();
  ExpectCounts(&cluster, *end, 20 + 10);
}

// A model that has something to learn: two classes by brightness.
TEST_F(AsyncTest, ReachesALossCloseToSync) {
  const v1::IdxSource source = Write(
      400, [](uint32_t i, uint32_t p) { return (i * 37 + p * 11) % 100 + (i % 2) * 120; },
      [](uint32_t i) { return i % 2; });
  const auto loss = [&](uint32_t workers, v1::TrainSpec::Mode mode, v1::TrainSpec::StalenessScale scale, double clip,
                        const std::string& push = "{f32: {}}") {
    InProcessCluster cluster({.servers = 2, .workers = static_cast<int>(workers)});
    v1::JobSpec spec = Spec(workers, 150);
    *spec.mutable_data()->mutable_idx() = source;
    spec.mutable_train()->set_mode(mode);
    spec.mutable_train()->set_staleness_scale(scale);
    spec.mutable_model()->mutable_mlp()->add_hidden(8);
    spec.mutable_optimizer()->mutable_adam()->set_learning_rate(.02);
    spec.mutable_optimizer()->set_clip_norm(clip);
    spec.mutable_optimizer()->mutable_schedule()->mutable_linear()->set_warmup_rounds(5);
    spec.mutable_parallel()->set_chunk_elements(13);
    EXPECT_TRUE(SetSpecField(&spec, absl::StrCat("transfer.push=", push)).ok());
    const auto job = cluster.Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    const auto end = cluster.AwaitEnd(*job);
    EXPECT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(end->state(), v1::SUCCEEDED) << end->message();
    return end->last_evaluation().loss();
  };
  const auto none = v1::TrainSpec::STALENESS_SCALE_UNSPECIFIED;
  const double sync = loss(2, v1::TrainSpec::SYNC, none, 0);
  EXPECT_LT(sync, .25);
  for (const uint32_t workers : {2u, 4u}) EXPECT_LT(loss(workers, v1::TrainSpec::ASYNC, none, 0), sync + .05);
  EXPECT_LT(loss(4, v1::TrainSpec::ASYNC, v1::TrainSpec::INVERSE, 1), sync + .1);
  for (const char* push : {"{bf16: {}}", "{f16: {}}", "{int8: {}}", "{top_k: {density: 0.3, warmup_rounds: 30}}"}) {
    for (const double clip : {0, 1}) EXPECT_LT(loss(2, v1::TrainSpec::ASYNC, none, clip, push), sync + .1) << push;
  }
}

// Gradients that overflow: refused, counted, the job ends and names who sent them.
TEST_F(AsyncTest, NonFiniteContributionsAreRefusedAndNamed) {
  InProcessCluster cluster({.servers = 1, .workers = 2});
  v1::JobSpec spec = Spec(2, 100);
  *spec.mutable_data()->mutable_idx() = Write(
      64, [](uint32_t, uint32_t) { return 255; }, [](uint32_t i) { return i % 2; });
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(3e38);
  spec.mutable_train()->set_max_skipped_rounds(3);
  const auto job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = cluster.AwaitEnd(*job);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state(), v1::FAILED);
  EXPECT_THAT(end->message(), HasSubstr("non-finite gradients from worker-"));
  EXPECT_TRUE(end->last_train().skipped());
}

}  // namespace
}  // namespace sluice
