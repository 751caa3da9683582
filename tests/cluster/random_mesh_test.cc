// Drawn meshes (data, tensor, pipeline, microbatches, schedule, servers, heads, uneven vocabulary, chunk size, dropout)
// against the same job on one device. SLUICE_SEED is the first one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/mesh.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/model_specs.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

constexpr uint64_t kRounds = 8;
constexpr int kMeshes = 10;

struct Outcome {
  std::vector<float> parameters;
  std::map<uint64_t, v1::RoundRecord> rounds, evaluations;
};

class RandomMeshTest : public ::testing::Test {
 protected:
  // Rows of 0 to 7 tokens: some rounds and microbatches have nothing to predict.
  void SpillRows(std::mt19937* random, uint32_t vocabulary) {
    std::string rows;
    for (int row = 0; row < 30; ++row) {
      rows += "[";
      const uint32_t length = (*random)() % 8;
      for (uint32_t i = 0; i < length; ++i) absl::StrAppend(&rows, i > 0 ? "," : "", (*random)() % vocabulary);
      rows += "]\n";
    }
    Spill(folder_ / "rows.jsonl", rows);
  }

  std::optional<Outcome> Train(const v1::JobSpec& spec, int servers, uint64_t delay_seed) {
    ClusterOptions options{.servers = servers, .workers = static_cast<int>(MeshOf(spec.parallel()).ranks())};
    options.network = {.delay_seed = delay_seed, .max_delay = absl::Microseconds(200)};
    InProcessCluster cluster(options);
    const auto job = cluster.Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return std::nullopt;
    const auto end = cluster.AwaitEnd(*job);
    EXPECT_TRUE(end.ok()) << end.status();
    if (!end.ok()) return std::nullopt;
    EXPECT_EQ(end->state(), v1::SUCCEEDED) << end->message();
    Outcome outcome;
    const auto values = cluster.Parameters(*end);
    EXPECT_TRUE(values.ok()) << values.status();
    if (!values.ok()) return std::nullopt;
    outcome.parameters = *values;
    const v1::GetHistoryResponse history = *cluster.scheduler().History(*job);
    for (const v1::RoundRecord& record : history.records()) {
      (record.evaluation() ? outcome.evaluations : outcome.rounds)[record.round()] = record;
    }
    return outcome;
  }

  TemporaryFolder folder_;
};

TEST_F(RandomMeshTest, EqualsOneDevice) {
  uint64_t first = std::random_device()() % 1000000;
  if (const char* given = std::getenv("SLUICE_SEED"); given != nullptr) ASSERT_TRUE(absl::SimpleAtoi(given, &first));
  for (uint64_t seed = first; seed < first + kMeshes; ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    v1::JobSpec spec;
    spec.set_name("random-mesh");
    const uint32_t tensor = random() % 3 + 1, pipeline = random() % 3 + 1, data = random() % 2 + 1;
    const uint32_t heads = tensor * (random() % 2 + 1), vocabulary = 11 + random() % 12;
    *spec.mutable_model() = GptSpec(pipeline + random() % 2, heads, 4 * heads, 8, vocabulary);
    if (random() % 2 == 0) spec.mutable_model()->mutable_gpt2()->set_dropout(0.2);
    SpillRows(&random, vocabulary);
    spec.mutable_data()->mutable_rows()->set_path(folder_ / "rows.jsonl");
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(random() % 6 + 1);
    spec.mutable_train()->set_eval_every(3);
    spec.mutable_train()->set_seed(seed);
    // SGD: what is different grows no faster than it is.
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.05);
    spec.mutable_optimizer()->mutable_sgd()->set_momentum(0.5);
    if (random() % 3 > 0) {
      spec.mutable_optimizer()->set_clip_norm(1);
    } else {
      spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
    }
    const std::optional<Outcome> expected = Train(spec, 1, seed);
    ASSERT_TRUE(expected.has_value());

    v1::ParallelSpec* parallel = spec.mutable_parallel();
    parallel->set_data(data);
    parallel->set_tensor(tensor);
    parallel->set_pipeline(pipeline);
    parallel->set_microbatches(random() % spec.train().batch() + 1);
    parallel->set_schedule(static_cast<v1::ParallelSpec::Schedule>(random() % 3 + 1));
    parallel->set_sequence_parallel(tensor > 1 && random() % 2 == 0);
    parallel->set_chunk_elements(random() % 2 == 0 ? 0 : random() % 2000 + 50);
    spec.mutable_train()->set_recompute(random() % 2 == 0);
    const int servers = static_cast<int>(random() % 3 + 1);
    SCOPED_TRACE(absl::StrCat("SLUICE_SEED=", seed, " servers ", servers, " ", spec.ShortDebugString()));
    const std::optional<Outcome> found = Train(spec, servers, seed + 1);
    ASSERT_TRUE(found.has_value());
    ASSERT_EQ(found->rounds.size(), expected->rounds.size());
    for (const auto& [round, record] : expected->rounds) {
      const v1::RoundRecord& other = found->rounds.at(round);
      EXPECT_EQ(other.count(), record.count()) << "round " << round;
      EXPECT_NEAR(other.loss(), record.loss(), 5e-6) << "round " << round;
      EXPECT_NEAR(other.gradient_norm(), record.gradient_norm(), 1e-5 * std::max(1.0, record.gradient_norm()))
          << "round " << round;
    }
    ASSERT_EQ(found->evaluations.size(), expected->evaluations.size());
    for (const auto& [version, record] : expected->evaluations) {
      EXPECT_EQ(found->evaluations.at(version).count(), record.count()) << "version " << version;
      EXPECT_NEAR(found->evaluations.at(version).loss(), record.loss(), 5e-6) << "version " << version;
    }
    double difference = 0, norm = 0;
    ASSERT_EQ(found->parameters.size(), expected->parameters.size());
    for (size_t i = 0; i < found->parameters.size(); ++i) {
      difference += std::pow(double{found->parameters[i]} - expected->parameters[i], 2);
      norm += std::pow(double{expected->parameters[i]}, 2);
    }
    EXPECT_LE(std::sqrt(difference / norm), 2e-5);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace sluice
