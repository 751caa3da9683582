// Training against the float64 reference of the shared data: 12 rounds of a small GPT-2 under four optimizers. What the
// tests that do it share.
#ifndef SLUICE_TESTS_CLUSTER_GOLDEN_FIXTURE_H_
#define SLUICE_TESTS_CLUSTER_GOLDEN_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/gpt2_folder.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "tests/cluster/in_process_cluster.h"

namespace sluice {

inline constexpr double kLossTolerance = 5e-6;
inline constexpr double kParameterTolerance = 2e-5;  // norm of the difference / norm, each tensor
inline constexpr double kGradientTolerance = 1e-5;
inline constexpr uint32_t kBatch = 4;

inline std::filesystem::path SharedFolder() {
  if (const char* path = std::getenv("SLUICE_SHARED"); path != nullptr) return path;
  return std::filesystem::path(SLUICE_SOURCE_DIR) / ".." / "shared";
}

using Tensors = std::map<std::string, std::vector<float>>;

inline absl::StatusOr<Tensors> ReadTensors(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(path.string()));
  Tensors tensors;
  for (const SafetensorsTensor& tensor : file->tensors()) {
    std::vector<float> values(tensor.elements);
    RETURN_IF_ERROR(file->ReadFloats(tensor, 0, absl::MakeSpan(values)));
    tensors[tensor.name] = std::move(values);
  }
  return tensors;
}

// norm(a - b) / norm(b); NaN anywhere gives infinity.
inline double RelativeDistance(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  const double distance = std::sqrt(difference / norm);
  return std::isfinite(distance) ? distance : INFINITY;
}

// The reference and the input files made from it.
class GoldenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path golden = SharedFolder() / "data" / "golden" / "gpt2_training.json";
    if (!std::filesystem::exists(golden)) {
      GTEST_SKIP() << "SKIPPED: no reference at " << golden << "; set SLUICE_SHARED to the shared folder";
    }
    reference_ = nlohmann::json::parse(std::ifstream(golden));
    std::string name = (std::filesystem::temp_directory_path() / "sluice-golden-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    std::filesystem::create_directory(folder_ / "init");
    const std::filesystem::path data = SharedFolder() / "data";
    std::filesystem::copy(data / std::string(reference_["config"]), folder_ / "init" / "config.json");
    std::filesystem::copy(data / std::string(reference_["model"]), folder_ / "init" / "model.safetensors");
    std::ofstream rows(folder_ / "rows.jsonl");
    for (const nlohmann::json& round : reference_["rounds"]) {
      for (uint32_t i = 0; i < kBatch; ++i)
        rows << (i < round.size() ? round[i] : nlohmann::json::array()).dump() << "\n";
    }
  }
  void TearDown() override {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }

  uint64_t rounds() const { return reference_["rounds"].size(); }

  v1::JobSpec Spec(const std::string& optimizer, int workers, uint32_t chunk_elements) const {
    v1::JobSpec spec;
    spec.set_name("golden");
    *spec.mutable_model()->mutable_gpt2() = *ReadGpt2Config((folder_ / "init").string());
    spec.mutable_data()->mutable_rows()->set_path((folder_ / "rows.jsonl").string());
    spec.mutable_data()->set_shuffle(false);
    spec.mutable_data()->set_validation_fraction(0);
    spec.mutable_train()->set_rounds(rounds());
    spec.mutable_train()->set_batch(kBatch);
    spec.mutable_train()->set_eval_every(rounds());
    spec.mutable_checkpoint()->set_every_rounds(rounds());
    spec.mutable_parallel()->set_data(static_cast<uint32_t>(workers));
    spec.mutable_parallel()->set_chunk_elements(chunk_elements);
    spec.mutable_init()->set_path((folder_ / "init").string());
    const nlohmann::json& rule = reference_["cases"][optimizer]["optimizer"];
    if (rule["kind"] == "sgd") {
      spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(rule["lr"]);
      spec.mutable_optimizer()->mutable_sgd()->set_momentum(rule.value("momentum", 0.0));
    } else {
      v1::AdamSpec* adamw = spec.mutable_optimizer()->mutable_adamw();
      adamw->set_learning_rate(rule["lr"]);
      adamw->set_beta1(rule["beta1"]);
      adamw->set_beta2(rule["beta2"]);
      adamw->set_epsilon(rule["eps"]);
      adamw->set_weight_decay(rule["weight_decay"]);
    }
    spec.mutable_optimizer()->set_clip_norm(reference_["cases"][optimizer]["clip_norm"]);
    return spec;
  }

  // Runs the job and checks every loss and norm against the reference; the final parameters, or none after a failure.
  std::optional<std::vector<float>> Train(InProcessCluster* cluster, const v1::JobSpec& spec,
                                          const std::string& optimizer) {
    const absl::StatusOr<std::string> job = cluster->Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return std::nullopt;
    const absl::StatusOr<v1::JobStatus> end = cluster->AwaitEnd(*job);
    EXPECT_TRUE(end.ok()) << end.status();
    if (!end.ok()) return std::nullopt;
    EXPECT_EQ(end->state(), v1::SUCCEEDED) << end->message();
    CheckHistory(*cluster->scheduler().History(*job), optimizer);
    const absl::StatusOr<std::vector<float>> values = cluster->Parameters(*end);
    EXPECT_TRUE(values.ok()) << values.status();
    if (!values.ok()) return std::nullopt;
    return *values;
  }

  void CheckHistory(const v1::GetHistoryResponse& history, const std::string& optimizer) {
    const nlohmann::json& expected = reference_["cases"][optimizer];
    std::map<uint64_t, v1::RoundRecord> records;
    for (const v1::RoundRecord& record : history.records()) {
      if (!record.evaluation()) records[record.round()] = record;
    }
    ASSERT_EQ(records.size(), rounds());
    for (const auto& [round, record] : records) {
      ASSERT_TRUE(std::isfinite(record.loss())) << "round " << round;
      EXPECT_NEAR(record.loss(), double{expected["losses"][round]}, kLossTolerance) << "round " << round;
      worst_loss_ = std::max(worst_loss_, std::abs(record.loss() - double{expected["losses"][round]}));
      EXPECT_NEAR(record.gradient_norm(), double{expected["gradient_norms"][round]}, 1e-4) << "round " << round;
      double targets = 0;
      for (const nlohmann::json& row : reference_["rounds"][round]) targets += static_cast<double>(row.size()) - 1;
      EXPECT_EQ(record.count(), targets) << "round " << round;
      EXPECT_FALSE(record.skipped());
    }
  }

  // Hugging Face names of `values` against a file of the reference.
  void CheckTensors(const v1::JobSpec& spec, const std::vector<float>& values, const std::string& file,
                    double tolerance, bool adam) {
    const std::filesystem::path exported = folder_ / "exported";
    std::filesystem::remove_all(exported);
    const absl::Status status = ExportGpt2(spec.model().gpt2(), values, exported.string());
    ASSERT_TRUE(status.ok()) << status;
    const absl::StatusOr<Tensors> found = ReadTensors(exported / "model.safetensors");
    const absl::StatusOr<Tensors> expected = ReadTensors(SharedFolder() / "data" / "golden" / file);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_GE(expected->size(), 28u);
    for (const auto& [name, reference] : *expected) {
      const auto it = found->find(name);
      ASSERT_NE(it, found->end()) << name << " is missing";
      std::vector<float> a = it->second, b = reference;
      if (adam && absl::EndsWith(name, "c_attn.bias")) {
        // The key's bias: its true gradient is zero, so noise decides Adam's steps.
        const auto third = static_cast<std::ptrdiff_t>(b.size() / 3);
        ASSERT_EQ(a.size(), b.size());
        a.erase(a.begin() + third, a.begin() + 2 * third);
        b.erase(b.begin() + third, b.begin() + 2 * third);
      }
      EXPECT_LE(RelativeDistance(a, b), tolerance) << name;
      worst_tensor_ = std::max(worst_tensor_, RelativeDistance(a, b));
    }
  }

  // Of `spec`, which uses SGD: its first round alone.
  void CheckFirstGradient(InProcessCluster* cluster, v1::JobSpec spec) {
    constexpr double kRate = 64;  // large, so that the difference of the parameters holds the gradient's digits
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(kRate);
    spec.mutable_train()->set_rounds(1);
    spec.mutable_train()->set_eval_every(1);
    spec.mutable_checkpoint()->set_every_rounds(1);
    const absl::StatusOr<std::string> job = cluster->Submit(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    const absl::StatusOr<v1::JobStatus> end = cluster->AwaitEnd(*job);
    ASSERT_TRUE(end.ok()) << end.status();
    ASSERT_EQ(end->state(), v1::SUCCEEDED) << end->message();
    absl::StatusOr<std::vector<float>> values = cluster->Parameters(*end);
    ASSERT_TRUE(values.ok()) << values.status();
    const auto initial = Gpt2FolderReader::Open((folder_ / "init").string(), spec.model().gpt2());
    ASSERT_TRUE(initial.ok()) << initial.status();
    std::vector<float> before(values->size());
    ASSERT_TRUE((*initial)->Read(0, absl::MakeSpan(before)).ok());
    for (size_t i = 0; i < before.size(); ++i) {
      (*values)[i] = static_cast<float>((double{before[i]} - (*values)[i]) / kRate);
    }
    CheckTensors(spec, *values, "gpt2_round0_gradient.safetensors", kGradientTolerance, /*adam=*/false);
  }

  nlohmann::json reference_;
  std::filesystem::path folder_;
  double worst_loss_ = 0, worst_tensor_ = 0;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_CLUSTER_GOLDEN_FIXTURE_H_
