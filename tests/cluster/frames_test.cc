// How many frames a round takes: a matter of bytes, not of tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/layout.h"
#include "common/model_layout.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/model_specs.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

constexpr uint64_t kRounds = 20;
constexpr uint64_t kClasses = 16, kSamples = 32;
constexpr int kNodes = 2;  // workers, and servers

struct Count {
  uint64_t elements = 0;
  size_t tensors = 0;
  double frames = 0;  // a round, of all workers and servers, acknowledgements and reports included
};

std::string BigEndian(const std::vector<uint32_t>& words) {
  std::string bytes;
  for (const uint32_t word : words) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(word >> shift));
  }
  return bytes;
}

class FramesTest : public testing::Test {
 protected:
  // Images of side x side pixels through so many hidden layers.
  Count Train(uint32_t side, uint64_t width, int hidden) {
    v1::JobSpec spec;
    spec.set_name("frames");
    v1::MlpSpec* mlp = spec.mutable_model()->mutable_mlp();
    mlp->set_inputs(uint64_t{side} * side);
    for (int i = 0; i < hidden; ++i) mlp->add_hidden(width);
    mlp->set_classes(kClasses);
    const std::string images = folder_ / absl::StrCat("images-", side), labels = folder_ / "labels";
    std::string pixels, classes;
    for (uint64_t i = 0; i < kSamples * side * side; ++i) pixels.push_back(static_cast<char>(i * i % 251));
    for (uint64_t i = 0; i < kSamples; ++i) classes.push_back(static_cast<char>(i % kClasses));
    Spill(images, BigEndian({0x803, kSamples, side, side}) + pixels);
    Spill(labels, BigEndian({0x801, kSamples}) + classes);
    spec.mutable_data()->mutable_idx()->set_images(images);
    spec.mutable_data()->mutable_idx()->set_labels(labels);
    spec.mutable_data()->set_validation_fraction(0);
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(8);
    spec.mutable_train()->set_eval_every(0);
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(1e-6);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(kNodes);

    const double frames = Run(spec, kNodes);
    const auto space = MakeParameterSpace(spec.model());
    EXPECT_TRUE(space.ok()) << space.status();
    return {.elements = space->size(), .tensors = space->tensors().size(), .frames = frames};
  }

  // 3.3 M parameters, 8 rows of 128 tokens a round.
  double TrainSmallGpt(uint32_t tensor) {
    const std::string rows = folder_ / "rows.jsonl";
    std::string text;
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j <= 128; ++j) absl::StrAppend(&text, j == 0 ? "[" : ",", (i * 7 + j * j) % 256);
      text += "]\n";
    }
    Spill(rows, text);
    v1::JobSpec spec;
    spec.set_name("frames");
    *spec.mutable_model() = GptSpec(4, 8, 256, 128, 256);
    spec.mutable_data()->mutable_rows()->set_path(rows);
    spec.mutable_data()->set_validation_fraction(0);
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(8);
    spec.mutable_train()->set_eval_every(0);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-4);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_tensor(tensor);
    return Run(spec, static_cast<int>(tensor));
  }

  // Frames a round.
  double Run(const v1::JobSpec& spec, int workers) {
    InProcessCluster cluster({.servers = kNodes, .workers = workers});
    const auto job = cluster.Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return 0;
    const auto end = cluster.AwaitEnd(*job);
    EXPECT_TRUE(end.ok() && end->state() == v1::SUCCEEDED) << end.status() << end->message();
    return static_cast<double>(cluster.network().messages_written(Plane::kParameter)) / kRounds;
  }

  const TemporaryFolder folder_;
};

// Chunks leave as their gradients are ready and share frames where several are: so a model whose gradient is there all
// at once takes fewer frames than one of the same size in layers, however small those are.
TEST_F(FramesTest, AThousandTensorsOf1KibTakeAsManyAsSixteenOf64Kib) {
  const Count one = Train(/*side=*/128, /*width=*/0, /*hidden=*/0);
  const Count large = Train(/*side=*/11, /*width=*/128, /*hidden=*/16);
  const Count small = Train(/*side=*/4, /*width=*/16, /*hidden=*/962);
  std::printf("frames a round of 1 MiB: in 1 layer %.1f, in 17 layers %.1f, in 963 layers %.1f\n", one.frames,
              large.frames, small.frames);
  const auto elements = static_cast<double>(one.elements);
  EXPECT_NEAR(static_cast<double>(large.elements), elements, .02 * elements);
  EXPECT_NEAR(static_cast<double>(small.elements), elements, .02 * elements);
  EXPECT_EQ(small.tensors, 2 * 963u) << "963 of 1 KiB, and as many biases";
  EXPECT_LE(small.frames, 1.25 * large.frames);
  // Each chunk in a frame of its own, everywhere: up, acknowledged, down, acknowledged by nobody; a report and a
  // verdict.
  const double chunks = std::ceil(elements / static_cast<double>(DefaultChunkElements(one.elements)));
  EXPECT_LE(small.frames, kNodes * (3 * chunks + 4));
}

// Cut into many more chunks, which travel together.
TEST_F(FramesTest, TensorRanksTakeHardlyMoreThanOneRank) {
  const double one = TrainSmallGpt(1), four = TrainSmallGpt(4);
  std::printf("frames a round of the small GPT: on 1 rank %.1f, on 4 tensor ranks %.1f\n", one, four);
  EXPECT_LE(four, 1.3 * one);
}

}  // namespace
}  // namespace sluice
