// Whether the comparison with the model on one rank would see a fault between ranks: each collective and each message
// of a round is made worthless once, and loss or gradient must then differ.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "tests/common/model_specs.h"
#include "tests/worker/replica.h"

namespace sluice {
namespace {

// What comes with message `lost`, counted by `per`, is zeros: a sum keeps the rank's own share, a gathered array its
// own part.
class Losing : public PeerGroup {
 public:
  Losing(std::unique_ptr<PeerGroup> base, size_t per, size_t lost, std::atomic<size_t>* received)
      : base_(std::move(base)), per_(per), lost_(lost), received_(received) {}
  uint32_t rank() const override { return base_->rank(); }
  uint32_t size() const override { return base_->size(); }
  absl::Status Send(uint32_t to, absl::Span<const float> values) override { return base_->Send(to, values); }
  absl::Status Receive(uint32_t from, absl::Span<float> values) override {
    RETURN_IF_ERROR(base_->Receive(from, values));
    if (count_++ / per_ == lost_) std::fill(values.begin(), values.end(), 0.0f);
    ++*received_;
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<PeerGroup> base_;
  const size_t per_, lost_;
  std::atomic<size_t>* const received_;
  size_t count_ = 0;
};

// Hands out the next two messages of a rank in the wrong order, once. Both must be on their way.
class Swapping : public PeerGroup {
 public:
  Swapping(std::unique_ptr<PeerGroup> base, uint32_t from) : base_(std::move(base)), from_(from) {}
  uint32_t rank() const override { return base_->rank(); }
  uint32_t size() const override { return base_->size(); }
  absl::Status Send(uint32_t to, absl::Span<const float> values) override { return base_->Send(to, values); }
  absl::Status Receive(uint32_t from, absl::Span<float> values) override {
    if (from != from_ || count_++ > 1) return base_->Receive(from, values);
    if (count_ == 1) {
      early_.resize(values.size());
      RETURN_IF_ERROR(base_->Receive(from, absl::MakeSpan(early_)));
      return base_->Receive(from, values);
    }
    std::copy(early_.begin(), early_.end(), values.begin());
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<PeerGroup> base_;
  const uint32_t from_;
  size_t count_ = 0;
  std::vector<float> early_;
};

constexpr size_t kNone = SIZE_MAX;

class ModelMutationTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kLayers = 4;

  ModelMutationTest() : spec_(GptSpec(kLayers, 4, 16, 8, 27)), one_(spec_), expected_(one_.Train(batches_)) {}

  // Whether the comparisons of model_parallel_test.cc would fail, and by far.
  bool Differs(const Mesh& mesh, const ReplicaOptions& options) {
    const Trained found = Replica(spec_, mesh, one_.model().parameters(), options).Train(batches_);
    const double loss = std::abs(found.loss.loss - expected_.loss.loss) / expected_.loss.loss;
    const double gradient = GradientError(one_.model().space(), found.gradients, expected_.gradients);
    if (!(loss < kLossTolerance)) return true;
    EXPECT_TRUE(gradient < kGradientTolerance || gradient > 100 * kGradientTolerance) << "hardly seen: " << gradient;
    return !(gradient < kGradientTolerance);
  }

  // Collectives of one tensor group in the pass under test.
  void LoseEachCollective(const Mesh& mesh, bool recompute, size_t collectives) {
    for (uint32_t stage = 0; stage < mesh.pipeline; ++stage) {
      size_t all = 0;
      for (size_t lost = kNone; lost == kNone || lost < all; ++lost) {
        std::atomic<size_t> received = 0;
        ReplicaOptions options{.recompute = recompute, .faulty = lost != kNone};
        options.wrap_tensor = [&](std::unique_ptr<PeerGroup> base, Mesh::Place place) -> std::unique_ptr<PeerGroup> {
          if (place.stage != stage) return base;
          return std::make_unique<Losing>(std::move(base), mesh.tensor - 1, lost, &received);
        };
        const bool differs = Differs(mesh, options);
        if (lost == kNone) {
          EXPECT_FALSE(differs);
          all = received / mesh.tensor / (mesh.tensor - 1);
          EXPECT_TRUE(mesh.pipeline > 1 || all == collectives) << all << " collectives, not " << collectives;
          ASSERT_GT(all, 0u);
        } else {
          EXPECT_TRUE(differs) << "stage " << stage << ": nobody sees that collective " << lost << " of " << all
                               << " is missing";
        }
      }
    }
  }

  const v1::ModelSpec spec_;
  const std::vector<Batch> batches_ = {Tokens(2, 8, 27, 10), Tokens(2, 8, 27, 20)};
  ModelFixture one_;
  const Trained expected_;
};

TEST_F(ModelMutationTest, EachAllReduceAndGather) {
  const size_t each = 2 * (2 * kLayers + 1) + 1;
  LoseEachCollective({.tensor = 2}, false, batches_.size() * each);
  LoseEachCollective({.tensor = 4}, false, batches_.size() * each);
  // The last layer of the only microbatch in flight is not filled again.
  LoseEachCollective({.tensor = 2}, true, batches_.size() * (each + kLayers - 1));
  LoseEachCollective({.pipeline = 2, .tensor = 2}, false, 0);
}

TEST_F(ModelMutationTest, EachHalfWithSequenceParallelism) {
  const size_t each = 4 * (2 * kLayers + 1) + 1;
  LoseEachCollective({.tensor = 2, .sequence_parallel = true}, false, batches_.size() * each);
  LoseEachCollective({.tensor = 4, .sequence_parallel = true}, false, batches_.size() * each);
  LoseEachCollective({.tensor = 2, .sequence_parallel = true}, true, batches_.size() * (each + 3 * (kLayers - 1)));
  LoseEachCollective({.pipeline = 2, .tensor = 2, .sequence_parallel = true}, false, 0);
}

TEST_F(ModelMutationTest, EachMessageBetweenStages) {
  for (const Mesh& mesh : {Mesh{.pipeline = 3}, Mesh{.pipeline = 2, .tensor = 2},
                           Mesh{.pipeline = 2, .tensor = 2, .sequence_parallel = true}}) {
    for (uint32_t rank = 0; rank < mesh.ranks_of_replica(); ++rank) {
      size_t all = 0;
      for (size_t lost = kNone; lost == kNone || lost < all; ++lost) {
        std::atomic<size_t> received = 0;
        ReplicaOptions options{.faulty = lost != kNone};
        options.wrap_stages = [&](std::unique_ptr<PeerGroup> base, Mesh::Place place) -> std::unique_ptr<PeerGroup> {
          if (mesh.rank(place) != rank) return base;
          return std::make_unique<Losing>(std::move(base), 1, lost, &received);
        };
        const bool differs = Differs(mesh, options);
        if (lost == kNone) {
          EXPECT_FALSE(differs);
          all = received;
          const uint32_t stage = mesh.place(rank).stage;
          EXPECT_EQ(all, batches_.size() * ((stage > 0) + (stage + 1 < mesh.pipeline)));
        } else {
          EXPECT_TRUE(differs) << "rank " << rank << " of " << mesh.ranks() << ", message " << lost;
        }
      }
    }
  }
}

TEST_F(ModelMutationTest, TheOrderOfMicrobatchesBetweenStages) {
  const Mesh mesh{.pipeline = 2};
  for (const uint32_t stage : {0u, 1u}) {
    ReplicaOptions options{.schedule = PipelineSchedule::kGPipe, .faulty = true};
    options.wrap_stages = [&](std::unique_ptr<PeerGroup> base, Mesh::Place place) -> std::unique_ptr<PeerGroup> {
      if (place.stage != stage) return base;
      return std::make_unique<Swapping>(std::move(base), 1 - stage);
    };
    EXPECT_TRUE(Differs(mesh, options)) << "stage " << stage;
  }
}

TEST_F(ModelMutationTest, EachRanksGradient) {
  for (const Mesh& mesh : {Mesh{.pipeline = 2, .tensor = 2}, Mesh{.tensor = 4, .sequence_parallel = true},
                           Mesh{.pipeline = 2, .tensor = 2, .sequence_parallel = true}}) {
    for (uint32_t rank = 0; rank < mesh.ranks_of_replica(); ++rank) {
      EXPECT_TRUE(Differs(mesh, {.silent = static_cast<int>(rank)})) << "rank " << rank;
    }
  }
}

// Gradients of what all tensor ranks hold are partial sums with sequence parallelism, and only then.
TEST_F(ModelMutationTest, WhoPushesWhat) {
  Mesh mesh{.tensor = 2};
  const auto segments = [&](bool sequence) {
    Mesh other = mesh;
    other.sequence_parallel = sequence;
    return SegmentsOf(spec_, one_.model().space(), other);
  };
  for (const bool sequence : {false, true}) {
    mesh.sequence_parallel = sequence;
    EXPECT_FALSE(Differs(mesh, {}));
    EXPECT_TRUE(Differs(mesh, {.segments = segments(!sequence)}));
  }
}

}  // namespace
}  // namespace sluice
