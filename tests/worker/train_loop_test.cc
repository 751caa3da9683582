// The train loop by itself, then whole worker jobs (loop, round core, streams) against fake servers.
#include "worker/train_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/inprocess_transport.h"
#include "common/status_macros.h"
#include "tests/worker/fake_servers.h"
#include "tests/worker/test_plan.h"
#include "worker/worker_job.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(30);

// Samples are their positions (as tokens); one target each, none at positions of `silent` rounds.
class PositionData : public Dataset {
 public:
  PositionData(uint64_t batch, std::vector<uint64_t> silent) : batch_(batch), silent_(std::move(silent)) {}
  uint64_t train_samples() const override { return 100; }
  uint64_t eval_samples() const override { return 11; }
  Batch Train(Range positions) const override {
    Batch batch;
    batch.rows = static_cast<int64_t>(positions.size());
    for (uint64_t p = positions.begin; p < positions.end; ++p) {
      batch.tokens.push_back(static_cast<int32_t>(p));
      batch.count += std::count(silent_.begin(), silent_.end(), p / batch_) == 0;
    }
    return batch;
  }
  Batch Evaluation(Range samples) const override { return Train(samples); }
  uint32_t vocabulary() const override { return 0; }
  uint64_t inputs() const override { return 0; }
  uint32_t classes() const override { return 0; }

 private:
  const uint64_t batch_;
  const std::vector<uint64_t> silent_;
};

// Takes no computing: checks that all parameters are of one version before, and those not given away yet during the
// backward.
class CheckingModel : public Model {
 public:
  CheckingModel(ParameterSpace space, uint64_t seed)
      : space_(std::move(space)),
        parameters_(space_.size()),
        gradients_(std::make_shared<std::vector<float>>(space_.size())),
        random_(seed) {}

  const ParameterSpace& space() const override { return space_; }
  float* parameters() override { return parameters_.data(); }
  const float* gradients() const override { return gradients_->data(); }
  std::shared_ptr<const void> gradient_owner() const override { return gradients_; }
  void ParametersChanged(Range range) override { changed_ += range.size(); }

  absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                          const GradientSink& ready, const std::atomic<bool>* cancel) override {
    if (changed_ == 0) return absl::InternalError("the parameters were not announced");
    changed_ = 0;
    // Layers of random sizes, each read as soon as it may be.
    uint64_t version = 0;
    for (uint64_t begin = 0; begin < space_.size();) {
      const uint64_t end = begin + std::uniform_int_distribution<uint64_t>(1, space_.size() - begin)(random_);
      RETURN_IF_ERROR(needed({begin, end}));
      if (begin == 0) version = static_cast<uint64_t>(parameters_[0]) / 1000;
      for (; begin < end; ++begin) {
        if (parameters_[begin] != CheckedValue(version, begin)) {
          return absl::InternalError(
              absl::StrCat("element ", begin, " is ", parameters_[begin], " in the forward of ", version));
        }
      }
    }
    LossSum sum;
    for (const Batch& batch : microbatches) {
      if (batch.count == 0) return absl::InternalError("a microbatch without targets");
      if (static_cast<int32_t>(batch.first_position) != batch.tokens[0]) {
        return absl::InternalError(absl::StrCat("a microbatch of ", batch.tokens[0], " has ", batch.first_position));
      }
      for (int32_t position : batch.tokens) sum.loss += position;
      sum.count += static_cast<double>(batch.count);
    }
    for (uint64_t end = space_.size(); end > 0;) {
      if (*cancel) return absl::CancelledError("cancelled");
      if (fail_at == version) return absl::DataLossError("the device fell off the bus");
      for (uint64_t i = 0; i < end; ++i) {
        if (parameters_[i] != CheckedValue(version, i)) {
          return absl::InternalError(absl::StrCat("element ", i, " is ", parameters_[i], " at version ", version));
        }
      }
      const uint64_t begin = end - std::uniform_int_distribution<uint64_t>(1, end)(random_);
      for (uint64_t i = begin; i < end; ++i) (*gradients_)[i] = CheckedGradient(version, i);
      ready({begin, end});
      end = begin;
    }
    return sum;
  }
  absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>* cancel) override {
    LossSum sum;
    const uint64_t version = static_cast<uint64_t>(parameters_[0]) / 1000;
    for (uint64_t i = 0; i < space_.size(); ++i) {
      if (parameters_[i] != CheckedValue(version, i)) return absl::InternalError("an evaluation of two versions");
    }
    for (int32_t sample : batch.tokens) sum.loss += sample;
    sum.count = static_cast<double>(batch.count);
    return sum;
  }
  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>&) override {
    return absl::UnimplementedError("no tokens");
  }

  uint64_t fail_at = UINT64_MAX;

 private:
  const ParameterSpace space_;
  std::vector<float> parameters_;
  std::shared_ptr<std::vector<float>> gradients_;
  std::mt19937_64 random_;
  uint64_t changed_ = 0;
};

// ---------------------------------------------------------------- the loop alone
class Script : public Rounds {
 public:
  Work Next() override {
    if (works_.empty()) return Work();
    const Work work = works_.front();
    works_.pop_front();
    return work;
  }
  absl::Status ParametersNeeded(const Work& work, Range range) override {
    needed_ += range.size();
    return *work.cancel ? absl::CancelledError("cancelled") : absl::OkStatus();
  }
  void Begin(const Work& work, double count) override { Say("begin ", work.round, " count ", count); }
  void GradientReady(const Work& work, Range range) override { ready_ += range.size(); }
  void Done(const Work& work, const LossSum& sum, double) override {
    Say("done ", work.round, " loss ", sum.loss, " count ", sum.count);
  }
  void Stopped(const Work& work) override { Say("stopped ", work.round); }

  template <typename... Args>
  void Say(const Args&... args) {
    said_.push_back(absl::StrCat(args...));
  }
  std::deque<Work> works_;
  std::vector<std::string> said_;
  uint64_t ready_ = 0, needed_ = 0;
};

class TrainLoopTest : public ::testing::Test {
 protected:
  TrainLoopTest() {
    TestPlan plan;
    plan.batch = 7;
    plan.microbatches = 2;
    layout_ = plan.Make();
    model_ = std::make_unique<CheckingModel>(layout_->space(), 1);
  }
  void Version(uint64_t version) {
    for (uint64_t i = 0; i < 8; ++i) model_->parameters()[i] = CheckedValue(version, i);
  }
  absl::Status Run(v1::JobSpec spec) {
    return TrainLoop("job-1", spec, &data_, model_.get(), &rounds_, &clock_, nullptr).Run();
  }
  void Add(Work::Kind kind, uint64_t round, uint32_t replica, uint32_t replicas) {
    rounds_.works_.push_back({.kind = kind,
                              .round = round,
                              .replica = replica,
                              .replicas = replicas,
                              .positions = TrainPositions(layout_->plan().spec().train(), round, replica, replicas),
                              .cancel = &cancel_});
  }

  std::shared_ptr<const Layout> layout_;
  std::unique_ptr<CheckingModel> model_;
  PositionData data_{7, {5}};
  Script rounds_;
  FakeClock clock_;
  std::atomic<bool> cancel_ = false;
};

TEST_F(TrainLoopTest, RoundOwnsItsPositions) {
  Version(2);
  Add(Work::kTrain, 2, 1, 2);  // slots 4, 5, 6 of 7; positions 18, 19, 20
  EXPECT_TRUE(Run(layout_->plan().spec()).ok());
  EXPECT_THAT(rounds_.said_, ElementsAre("begin 2 count 3", "done 2 loss 57 count 3"));
  EXPECT_EQ(rounds_.ready_, 8u);
}

TEST_F(TrainLoopTest, ReplicaWithoutTargetsComputesNothing) {
  Version(5);
  Add(Work::kTrain, 5, 0, 1);   // a silent round
  Add(Work::kTrain, 4, 9, 10);  // no slot for the tenth of ten replicas
  EXPECT_TRUE(Run(layout_->plan().spec()).ok());
  EXPECT_THAT(rounds_.said_,
              ElementsAre("begin 5 count 0", "done 5 loss 0 count 0", "begin 4 count 0", "done 4 loss 0 count 0"));
  EXPECT_EQ(rounds_.ready_, 0u);
  EXPECT_EQ(rounds_.needed_, 16u) << "an empty contribution too waits for the whole version";
}

TEST_F(TrainLoopTest, EvaluatesItsPartOfTheHeldOutSamples) {
  Version(3);
  Add(Work::kEvaluate, 3, 0, 1);
  Add(Work::kEvaluate, 3, 0, 2);
  Add(Work::kEvaluate, 3, 1, 2);
  Add(Work::kEvaluate, 3, 12, 13);
  EXPECT_TRUE(Run(layout_->plan().spec()).ok());
  EXPECT_THAT(rounds_.said_, ElementsAre("done 3 loss 55 count 11", "done 3 loss 15 count 6", "done 3 loss 40 count 5",
                                         "done 3 loss 0 count 0"));
}

TEST_F(TrainLoopTest, EvaluatesNoMoreSamplesThanAskedFor) {
  Version(3);
  v1::JobSpec spec = layout_->plan().spec();
  spec.mutable_train()->set_eval_samples(4);
  Add(Work::kEvaluate, 3, 0, 1);
  EXPECT_TRUE(Run(spec).ok());
  EXPECT_THAT(rounds_.said_, ElementsAre("done 3 loss 6 count 4"));
}

TEST_F(TrainLoopTest, CancelledWorkIsNotAnError) {
  Version(2);
  cancel_ = true;
  Add(Work::kTrain, 2, 0, 1);
  Add(Work::kEvaluate, 2, 0, 1);
  EXPECT_TRUE(Run(layout_->plan().spec()).ok());
  EXPECT_THAT(rounds_.said_, ElementsAre("begin 2 count 7", "stopped 2", "stopped 2"));
}

TEST_F(TrainLoopTest, FailureEndsIt) {
  Version(2);
  model_->fail_at = 2;
  Add(Work::kTrain, 2, 0, 1);
  Add(Work::kTrain, 3, 0, 1);
  EXPECT_EQ(Run(layout_->plan().spec()).code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(rounds_.said_, ElementsAre("begin 2 count 7", "stopped 2"));
}

TEST(TrainPositionsTest, EveryPositionOfARoundIsComputedOnce) {
  for (uint32_t batch : {1u, 4u, 7u}) {
    for (uint32_t replicas : {1u, 2u, 3u, 5u}) {
      for (uint32_t microbatches : {1u, 2u, 4u}) {
        v1::TrainSpec train;
        train.set_batch(batch);
        uint64_t next = 3 * batch;
        for (uint32_t d = 0; d < replicas; ++d) {
          for (uint32_t m = 0; m < microbatches; ++m) {
            const Range positions = MicrobatchSlots(TrainPositions(train, 3, d, replicas), m, microbatches);
            EXPECT_EQ(positions.begin, next);
            next = positions.end;
          }
        }
        EXPECT_EQ(next, 4 * batch);
      }
    }
  }
}

// ---------------------------------------------------------------- whole jobs
class WorkerJobTest : public ::testing::Test {
 protected:
  void TearDown() override { End(); }
  void Start(const TestPlan& plan, std::vector<uint64_t> silent = {}, WorkerHooks* hooks = nullptr) {
    plan_ = plan;
    layout_ = plan.Make();
    servers_ = std::make_unique<FakeServers>(&network_, layout_);
    for (uint32_t d = 0; d < plan.replicas; ++d) {
      transports_.push_back(network_.MakeTransport(TestNode("worker", d).name()));
      WorkerJobOptions options;
      options.node = TestNode("worker", d);
      options.transport = transports_.back().get();
      options.clock = &clock_;
      options.hooks = hooks;
      options.send = [this](const v1::NodeMessage& message) {
        absl::MutexLock lock(&mutex_);
        messages_.push_back(message);
      };
      options.open_dataset = [plan, silent](const v1::JobSpec&) -> absl::StatusOr<std::shared_ptr<const Dataset>> {
        return std::make_shared<PositionData>(plan.batch, silent);
      };
      options.make_model = [this, d](const v1::JobSpec&, const ModelPart&) -> absl::StatusOr<std::unique_ptr<Model>> {
        auto model = std::make_unique<CheckingModel>(layout_->space(), d + 1);
        model->fail_at = fail_at_;
        return model;
      };
      jobs_.push_back(std::make_unique<WorkerJob>(options, layout_, d));
      threads_.emplace_back([job = jobs_.back().get()] { job->Run(); });
    }
  }
  void NewGeneration() {
    plan_.start = servers_->Fence();
    ++plan_.generation;
    layout_ = plan_.Make();
    servers_->SetLayout(layout_);
    for (uint32_t d = 0; d < jobs_.size(); ++d) jobs_[d]->OnPlan(layout_, d);
  }
  void End() {
    for (auto& job : jobs_) job->End();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    EXPECT_EQ(servers_->wrong(), "");
  }
  std::string Problem() {
    absl::MutexLock lock(&mutex_);
    for (const v1::NodeMessage& message : messages_) {
      if (message.has_problem()) return message.problem().message();
    }
    return "";
  }
  bool AwaitMessage(v1::NodeMessage::KindCase kind) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::any_of(messages_.begin(), messages_.end(), [&](const auto& m) { return m.kind_case() == kind; });
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&ready), kPatience);
  }

  InProcessNetwork network_{{.delay_seed = 3, .max_delay = absl::Microseconds(300)}};
  RealClock clock_;
  TestPlan plan_;
  std::shared_ptr<const Layout> layout_;
  uint64_t fail_at_ = UINT64_MAX;
  absl::Mutex mutex_;
  std::vector<v1::NodeMessage> messages_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FakeServers> servers_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<WorkerJob>> jobs_;
  std::vector<std::thread> threads_;
};

TEST_F(WorkerJobTest, TrainsToTheEndAndReports) {
  Start({.replicas = 2,
         .servers = 3,
         .shards = 5,
         .chunk_elements = 100,
         .rounds = 6,
         .eval_every = 2,
         .batch = 5,
         .hidden = 400},
        {3});
  ASSERT_TRUE(servers_->AwaitVersion(6, kPatience)) << Problem();
  double loss = 0, count = 0;
  for (uint64_t round = 0; round < 6; ++round) {
    ASSERT_TRUE(servers_->AwaitReports(v1::RoundReport::TRAIN, round, kPatience, &loss, &count));
    EXPECT_EQ(count, round == 3 ? 0 : 5);
    EXPECT_EQ(loss, round == 3 ? 0 : static_cast<double>(25 * round + 10)) << "positions 5r .. 5r+4";
  }
  for (uint64_t version : {2, 4, 6}) {
    ASSERT_TRUE(servers_->AwaitReports(v1::RoundReport::EVALUATION, version, kPatience, &loss, &count));
    EXPECT_EQ(loss, 55);
    EXPECT_EQ(count, 11);
  }
  EXPECT_EQ(servers_->empty_contributions(), 2 * layout_->table().chunks());
  End();
}

TEST_F(WorkerJobTest, StreamsThatBreakLoseNothing) {
  Start({.replicas = 2, .servers = 2, .shards = 4, .chunk_elements = 50, .rounds = 40, .batch = 4, .hidden = 200});
  for (uint64_t version = 2; version < 40; version += 2) {
    ASSERT_TRUE(servers_->AwaitVersion(version, kPatience)) << Problem();
    network_.Break(absl::StrCat("worker-", version / 2 % 2), absl::StrCat("server-", version / 4 % 2));
  }
  ASSERT_TRUE(servers_->AwaitVersion(40, kPatience)) << Problem();
  End();
}

TEST_F(WorkerJobTest, NewGenerationsRestartTheOpenRound) {
  Start({.replicas = 3,
         .servers = 2,
         .shards = 4,
         .chunk_elements = 50,
         .rounds = 60,
         .eval_every = 7,
         .batch = 2,
         .hidden = 200});
  for (uint64_t version = 1; version < 60; version += 2) {
    ASSERT_TRUE(servers_->AwaitVersion(version, kPatience)) << Problem();
    NewGeneration();
    if (version % 3 == 0) NewGeneration();
  }
  ASSERT_TRUE(servers_->AwaitVersion(60, kPatience)) << Problem();
  double loss = 0, count = 0;
  ASSERT_TRUE(servers_->AwaitReports(v1::RoundReport::EVALUATION, 60, kPatience, &loss, &count));
  EXPECT_EQ(count, 11);
  End();
}

// Holds worker computations of one round until released.
class HoldRound : public WorkerHooks {
 public:
  void BeforeCompute(const std::string&, uint64_t generation, uint64_t round) override {
    if (generation != 1 || round != 2) return;
    held.Notify();
    release.WaitForNotification();
  }
  void AfterPush(const std::string&, uint64_t, uint64_t, uint64_t) override { ++pushes; }
  absl::Notification held, release;
  std::atomic<uint64_t> pushes = 0;
};

TEST_F(WorkerJobTest, SlowComputationOfAnOldGenerationIsOutwaited) {
  HoldRound hold;
  Start({.servers = 1, .shards = 1, .chunk_elements = 100, .rounds = 5, .hidden = 100}, {}, &hold);
  hold.held.WaitForNotification();
  ASSERT_TRUE(servers_->AwaitVersion(2, kPatience)) << "its samples may be prepared while commits are on the way";
  NewGeneration();
  NewGeneration();
  EXPECT_EQ(servers_->MinVersion(), 2u);
  hold.release.Notify();
  ASSERT_TRUE(servers_->AwaitVersion(5, kPatience)) << Problem();
  End();
  EXPECT_GE(hold.pushes, 5 * layout_->table().chunks());
}

TEST_F(WorkerJobTest, EndInTheMiddleOfAComputation) {
  HoldRound hold;
  Start({.servers = 1, .shards = 1, .chunk_elements = 100, .rounds = 5, .hidden = 100}, {}, &hold);
  hold.held.WaitForNotification();
  ASSERT_TRUE(servers_->AwaitVersion(2, kPatience));
  jobs_[0]->End();
  hold.release.Notify();
  End();
  EXPECT_EQ(servers_->MinVersion(), 2u);
}

TEST_F(WorkerJobTest, FailureOfTheModelGoesToTheScheduler) {
  fail_at_ = 1;
  Start({.rounds = 5});
  ASSERT_TRUE(AwaitMessage(v1::NodeMessage::kProblem));
  EXPECT_THAT(Problem(), HasSubstr("fell off the bus"));
  {
    absl::MutexLock lock(&mutex_);
    messages_.clear();
  }
  jobs_[0]->Repeat();
  EXPECT_THAT(Problem(), HasSubstr("fell off the bus")) << "said again to a scheduler that may not have heard it";
  End();
}

TEST_F(WorkerJobTest, ServerThatIsCutOffIsAccused) {
  HoldRound hold;
  Start({.rounds = 5}, {}, &hold);
  hold.held.WaitForNotification();
  network_.Kill("server-1");
  hold.release.Notify();
  ASSERT_TRUE(AwaitMessage(v1::NodeMessage::kAccusation));
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_EQ(messages_[0].accusation().peer().name(), "server-1");
    EXPECT_EQ(messages_[0].accusation().generation(), 1u);
  }
  network_.Revive("server-1");
  ASSERT_TRUE(servers_->AwaitVersion(5, kPatience)) << "and nothing is lost when it comes back";
  End();
}

}  // namespace
}  // namespace sluice
