// Training against the float64 reference of the shared data: 12 rounds of a small GPT-2 under four optimizers, on every
// number of servers and workers and every chunk size, with equal bits wherever bits must not depend on the layout.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/cluster/golden_fixture.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

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
  InProcessCluster cluster({.servers = 2, .workers = 2});
  CheckFirstGradient(&cluster, Spec("sgd", 2, 4096));
  std::printf("ROW golden first-round gradient, relative norm | <= %g | %.3g | %s\n", kGradientTolerance, worst_tensor_,
              worst_tensor_ <= kGradientTolerance ? "ok" : "SHORT");
}

}  // namespace
}  // namespace sluice
