// A GPT or MLP on several ranks of one process, and comparisons with the same model on one.
#ifndef SLUICE_TESTS_WORKER_REPLICA_H_
#define SLUICE_TESTS_WORKER_REPLICA_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/mesh.h"
#include "tests/worker/mailroom.h"
#include "tests/worker/model_fixture.h"

namespace sluice {

struct ReplicaOptions {
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  std::string device = "cpu";
  bool recompute = false;
  uint64_t seed = 0, round = 0;  // of dropout
  // What the messages of a rank go through, by stage and tensor rank.
  using Wrap = std::function<std::unique_ptr<PeerGroup>(std::unique_ptr<PeerGroup>, Mesh::Place)>;
  Wrap wrap_tensor = {}, wrap_stages = {};
  int silent = -1;                     // the rank whose gradients do not count
  std::vector<Segment> segments = {};  // who pushes for what; empty: as the mesh has it
  bool faulty = false;                 // tensor ranks may disagree about the loss
};

// A replica: one model a rank, each with a backend of its own and NaN wherever it holds nothing.
class Replica {
 public:
  Replica(const v1::ModelSpec& spec, const Mesh& mesh, const float* parameters, const ReplicaOptions& with = {})
      : mesh_(mesh), silent_(with.silent), faulty_(with.faulty) {
    for (uint32_t i = 0; i < mesh.pipeline; ++i) tensor_rooms_.push_back(std::make_unique<Mailroom>(mesh.tensor, 2));
    for (uint32_t i = 0; i < mesh.tensor; ++i) stage_rooms_.push_back(std::make_unique<Mailroom>(mesh.pipeline, 64));
    for (uint32_t r = 0; r < mesh.ranks_of_replica(); ++r) {
      auto rank = std::make_unique<Rank>();
      const Mesh::Place place = mesh.place(r);
      BackendOptions options;
      options.kind = with.device;
      options.delay_seed = with.device == "cpu" ? 0 : 1 + r;
      rank->backend = MakeBackend(options).value();
      rank->tensor = std::make_unique<Mailroom::Rank>(tensor_rooms_[place.stage].get(), place.tensor);
      rank->stages = std::make_unique<Mailroom::Rank>(stage_rooms_[place.tensor].get(), place.stage);
      if (with.wrap_tensor) rank->tensor = with.wrap_tensor(std::move(rank->tensor), place);
      if (with.wrap_stages) rank->stages = with.wrap_stages(std::move(rank->stages), place);
      ModelPart part{
          .mesh = mesh, .place = place, .schedule = with.schedule, .recompute = with.recompute, .seed = with.seed};
      if (mesh.tensor > 1) part.tensor = rank->tensor.get();
      if (mesh.pipeline > 1) part.stages = rank->stages.get();
      auto model = MakeModel(spec, rank->backend.get(), part);
      EXPECT_TRUE(model.ok()) << model.status();
      rank->model = *std::move(model);
      Model& m = *rank->model;
      rank->view = ViewOf(spec, m.space(), mesh, place.stage, place.tensor);
      std::fill(m.parameters(), m.parameters() + m.space().size(), std::numeric_limits<float>::quiet_NaN());
      for (const Range& range : rank->view) {
        std::copy(parameters + range.begin, parameters + range.end, m.parameters() + range.begin);
      }
      m.UseVersion(with.round);
      m.ParametersChanged({0, m.space().size()});
      ranks_.push_back(std::move(rank));
    }
    segments_ = with.segments.empty() ? SegmentsOf(spec, ranks_[0]->model->space(), mesh) : with.segments;
  }

  // As servers would add it up: for each segment what its contributors have.
  Trained Train(const std::vector<Batch>& microbatches) {
    std::vector<LossSum> sums(ranks_.size());
    OnAll([&](uint32_t r) {
      Rank& rank = *ranks_[r];
      rank.ready.clear();
      const auto sum = rank.model->ForwardBackward(
          microbatches, [&](Range range) { return Held(rank, range); },
          [&](Range range) {
            EXPECT_TRUE(Held(rank, range).ok());
            rank.ready.push_back(range);
          },
          nullptr);
      EXPECT_TRUE(sum.ok()) << "rank " << r << ": " << sum.status();
      if (sum.ok()) sums[r] = *sum;
    });
    for (const auto& rank : ranks_) {
      uint64_t held = 0, ready = 0;
      for (const Range& range : rank->view) held += range.size();
      for (const Range& range : rank->ready) ready += range.size();
      EXPECT_EQ(ready, held) << "all that a rank holds becomes ready, once";
    }
    Trained result;
    result.loss = Sums(sums);
    result.gradients.resize(ranks_[0]->model->space().size());
    for (const Segment& segment : segments_) {
      for (const uint32_t r : segment.contributors) {
        if (static_cast<int>(r) == silent_) continue;
        for (uint64_t i = segment.range.begin; i < segment.range.end; ++i) {
          result.gradients[i] += ranks_[r]->model->gradients()[i];
        }
      }
    }
    return result;
  }

  LossSum Evaluate(const Batch& batch) {
    std::vector<LossSum> sums(ranks_.size());
    OnAll([&](uint32_t r) {
      const auto sum = ranks_[r]->model->Evaluate(batch, nullptr);
      EXPECT_TRUE(sum.ok()) << sum.status();
      if (sum.ok()) sums[r] = *sum;
    });
    return Sums(sums);
  }

  int64_t activation_bytes() const {  // of the rank that has the most
    int64_t most = 0;
    for (const auto& rank : ranks_) most = std::max(most, rank->model->activation_bytes());
    return most;
  }
  const Mailroom& tensor_room(uint32_t stage) const { return *tensor_rooms_[stage]; }
  const Mailroom& stage_room(uint32_t tensor) const { return *stage_rooms_[tensor]; }

 private:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<PeerGroup> tensor, stages;
    std::unique_ptr<Model> model;
    std::vector<Range> view, ready;
  };

  static absl::Status Held(const Rank& rank, Range range) {
    for (const Range& held : rank.view) {
      if (held.begin <= range.begin && range.end <= held.end) return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat("[", range.begin, ", ", range.end, ") is not this rank's"));
  }

  void OnAll(const std::function<void(uint32_t)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks_.size(); ++r) threads.emplace_back([&body, r] { body(r); });
    for (std::thread& thread : threads) thread.join();
  }

  // The last stage's, the same on all of its tensor ranks; the others' are zero.
  LossSum Sums(const std::vector<LossSum>& sums) const {
    const LossSum& last = sums.back();
    if (faulty_) return last;
    for (uint32_t r = 0; r < sums.size(); ++r) {
      const bool has = mesh_.place(r).stage + 1 == mesh_.pipeline;
      EXPECT_EQ(sums[r].loss, has ? last.loss : 0) << "rank " << r;
      EXPECT_EQ(sums[r].count, has ? last.count : 0) << "rank " << r;
      EXPECT_EQ(sums[r].correct, has ? last.correct : 0) << "rank " << r;
    }
    return last;
  }

  const Mesh mesh_;
  const int silent_;
  const bool faulty_;
  std::vector<std::unique_ptr<Mailroom>> tensor_rooms_, stage_rooms_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Segment> segments_;
};

inline std::vector<Batch> Microbatches(int64_t context, int32_t vocabulary) {
  std::vector<Batch> batches = {Tokens(3, context, vocabulary, 10), Tokens(2, context, vocabulary, 20),
                                Tokens(0, context, vocabulary, 30), Tokens(1, context - 2, vocabulary, 40),
                                Tokens(2, context, vocabulary, 50)};
  for (size_t i = 1; i < batches.size(); ++i) {
    batches[i].first_position = batches[i - 1].first_position + static_cast<uint64_t>(batches[i - 1].rows);
  }
  for (size_t i = 0; i < batches[1].targets.size(); i += 3) batches[1].targets[i] = -1;
  return batches;
}

// Largest difference of a tensor's gradient, relative to its size; infinite where one is not a number. A key's bias
// cannot change a softmax: its gradient is rounding errors around zero, and compared with 1.
inline double GradientError(const ParameterSpace& space, const std::vector<float>& found,
                            const std::vector<float>& expected, std::string* worst = nullptr) {
  double largest = 0;
  for (const Tensor& tensor : space.tensors()) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + static_cast<long>(tensor.offset),
                                all.begin() + static_cast<long>(tensor.offset + tensor.elements));
    };
    double error = RelativeError(part(found), part(expected));
    if (tensor.name.ends_with("attn.k.bias")) {
      error = 0;
      for (uint64_t i = tensor.offset; i < tensor.offset + tensor.elements; ++i) {
        if (!(std::abs(found[i] - expected[i]) < 1e-4)) error = 1;
      }
    }
    if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    if (error > largest && worst != nullptr) *worst = tensor.name;
    largest = std::max(largest, error);
  }
  return largest;
}

inline constexpr double kLossTolerance = 2e-6, kGradientTolerance = 5e-6;  // relative

inline void ExpectSameGradient(const ParameterSpace& space, const std::vector<float>& found,
                               const std::vector<float>& expected) {
  std::string worst;
  EXPECT_LT(GradientError(space, found, expected, &worst), kGradientTolerance) << worst;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_REPLICA_H_
