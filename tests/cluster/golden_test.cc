// Training against the float64 reference of the shared data: 12 rounds of a small GPT-2 under four optimizers, on every
// number of servers and workers and every chunk size, with equal bits wherever bits must not depend on the layout.
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
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kLossTolerance = 5e-6;
constexpr double kParameterTolerance = 2e-5;  // norm of the difference / norm, each tensor
constexpr double kGradientTolerance = 1e-5;
constexpr uint32_t kBatch = 4;

fs::path SharedFolder() {
  if (const char* path = std::getenv("SLUICE_SHARED"); path != nullptr) return path;
  return fs::path(SLUICE_SOURCE_DIR) / ".." / "shared";
}

using Tensors = std::map<std::string, std::vector<float>>;

absl::StatusOr<Tensors> ReadTensors(const fs::path& path) {
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
double RelativeDistance(const std::vector<float>& a, const std::vector<float>& b) {
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
    const fs::path golden = SharedFolder() / "data" / "golden" / "gpt2_training.json";
    if (!fs::exists(golden)) {
      GTEST_SKIP() << "SKIPPED: no reference at " << golden << "; set SLUICE_SHARED to the shared folder";
    }
    reference_ = json::parse(std::ifstream(golden));
    std::string name = (fs::temp_directory_path() / "sluice-golden-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    fs::create_directory(folder_ / "init");
    const fs::path data = SharedFolder() / "data";
    fs::copy(data / std::string(reference_["config"]), folder_ / "init" / "config.json");
    fs::copy(data / std::string(reference_["model"]), folder_ / "init" / "model.safetensors");
    std::ofstream rows(folder_ / "rows.jsonl");
    for (const json& round : reference_["rounds"]) {
      for (uint32_t i = 0; i < kBatch; ++i) rows << (i < round.size() ? round[i] : json::array()).dump() << "\n";
    }
  }
  void TearDown() override {
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
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
    const json& rule = reference_["cases"][optimizer]["optimizer"];
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
    const json& expected = reference_["cases"][optimizer];
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
      for (const json& row : reference_["rounds"][round]) targets += static_cast<double>(row.size()) - 1;
      EXPECT_EQ(record.count(), targets) << "round " << round;
      EXPECT_FALSE(record.skipped());
    }
  }

  // Hugging Face names of `values` against a file of the reference.
  void CheckTensors(const v1::JobSpec& spec, const std::vector<float>& values, const std::string& file,
                    double tolerance, bool adam) {
    const fs::path exported = folder_ / "exported";
    fs::remove_all(exported);
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

  json reference_;
  fs::path folder_;
  double worst_loss_ = 0, worst_tensor_ = 0;
};

struct GoldenCase {
  std::string optimizer;
  int workers;
};

class GoldenLayoutTest : public GoldenTest, public ::testing::WithParamInterface<GoldenCase> {};

TEST_P(GoldenLayoutTest, EqualsTheReferenceWithEqualBitsInEveryLayout) {
  const auto& [optimizer, workers] = GetParam();
  std::optional<uint64_t> hash;
  for (const int servers : {1, 2, 3, 5}) {
    InProcessCluster cluster({.servers = servers, .workers = workers});
    for (const uint32_t chunk_elements : {262144u, 4096u, 997u}) {
      SCOPED_TRACE(absl::StrCat(servers, " servers, chunks of ", chunk_elements));
      const v1::JobSpec spec = Spec(optimizer, workers, chunk_elements);
      const std::optional<std::vector<float>> values = Train(&cluster, spec, optimizer);
      ASSERT_TRUE(values.has_value());
      if (!hash.has_value()) {
        hash = HashOf(*values);
        CheckTensors(spec, *values, absl::StrCat("gpt2_", optimizer, "_after_12.safetensors"), kParameterTolerance,
                     absl::StartsWith(optimizer, "adam"));
        // For acceptance runs: what real processes must equal.
        if (const char* keep = std::getenv("SLUICE_GOLDEN_EXPORT"); keep != nullptr) {
          const fs::path folder = fs::path(keep) / absl::StrCat(optimizer, "_", workers);
          ASSERT_TRUE(ExportGpt2(spec.model().gpt2(), *values, folder.string()).ok());
        }
      }
      EXPECT_EQ(HashOf(*values), *hash);
    }
  }
  std::printf("ROW golden %s, %d workers, 12 layouts: loss error | <= %g | %.3g | %s\n", optimizer.c_str(), workers,
              kLossTolerance, worst_loss_, worst_loss_ <= kLossTolerance ? "ok" : "SHORT");
  std::printf("ROW golden %s, %d workers: parameters, relative norm | <= %g | %.3g | %s\n", optimizer.c_str(), workers,
              kParameterTolerance, worst_tensor_, worst_tensor_ <= kParameterTolerance ? "ok" : "SHORT");
  std::printf("ROW golden %s, %d workers: 1, 2, 3, 5 servers x 3 chunk sizes | equal hashes | %s | %s\n",
              optimizer.c_str(), workers, HasFailure() ? "DIFFERENT" : "equal", HasFailure() ? "SHORT" : "ok");
}

std::vector<GoldenCase> Cases() {
  std::vector<GoldenCase> cases;
  for (const char* optimizer : {"sgd", "momentum", "adamw", "adamw_clip"}) {
    for (const int workers : {1, 2, 4}) cases.push_back({optimizer, workers});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, GoldenLayoutTest, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return absl::StrCat(info.param.optimizer, "_", info.param.workers, "_workers");
});

TEST_F(GoldenTest, EqualBitsOnEveryDeviceAndUnderDelays) {
  for (const int workers : {1, 2, 4}) {
    std::optional<uint64_t> hash;
    for (const uint64_t seed : {0, 1, 2, 3}) {
      for (const char* device : {"cpu", "fake_device"}) {
        SCOPED_TRACE(absl::StrCat(workers, " workers, ", device, ", delays of seed ", seed));
        ClusterOptions options{.servers = 2, .workers = workers};
        if (seed > 0) options.network = {.delay_seed = seed, .max_delay = absl::Milliseconds(2)};
        options.backend.kind = device;
        options.backend.delay_seed = std::string(device) == "fake_device" ? seed : 0;
        InProcessCluster cluster(options);
        const std::optional<std::vector<float>> values =
            Train(&cluster, Spec("adamw_clip", workers, 997), "adamw_clip");
        ASSERT_TRUE(values.has_value());
        if (!hash.has_value()) hash = HashOf(*values);
        EXPECT_EQ(HashOf(*values), *hash);
      }
    }
  }
}

TEST_F(GoldenTest, FirstGradientEqualsTheReference) {
  constexpr double kRate = 64;  // large, so that the difference of the parameters holds the gradient's digits
  v1::JobSpec spec = Spec("sgd", 2, 4096);
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(kRate);
  spec.mutable_train()->set_rounds(1);
  spec.mutable_train()->set_eval_every(1);
  spec.mutable_checkpoint()->set_every_rounds(1);
  InProcessCluster cluster({.servers = 2, .workers = 2});
  const absl::StatusOr<std::string> job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const absl::StatusOr<v1::JobStatus> end = cluster.AwaitEnd(*job);
  ASSERT_TRUE(end.ok()) << end.status();
  ASSERT_EQ(end->state(), v1::SUCCEEDED) << end->message();
  absl::StatusOr<std::vector<float>> values = cluster.Parameters(*end);
  ASSERT_TRUE(values.ok()) << values.status();
  const auto initial = Gpt2FolderReader::Open((folder_ / "init").string(), spec.model().gpt2());
  ASSERT_TRUE(initial.ok()) << initial.status();
  std::vector<float> before(values->size());
  ASSERT_TRUE((*initial)->Read(0, absl::MakeSpan(before)).ok());
  for (size_t i = 0; i < before.size(); ++i) {
    (*values)[i] = static_cast<float>((double{before[i]} - (*values)[i]) / kRate);
  }
  CheckTensors(spec, *values, "gpt2_round0_gradient.safetensors", kGradientTolerance, /*adam=*/false);
  std::printf("ROW golden first-round gradient, relative norm | <= %g | %.3g | %s\n", kGradientTolerance, worst_tensor_,
              worst_tensor_ <= kGradientTolerance ? "ok" : "SHORT");
}

}  // namespace
}  // namespace sluice
