// Training against the float64 reference of the shared data on meshes of data, tensor and pipeline ranks: the losses,
// gradients and parameters of one device, with equal bits wherever the layout is the same.
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/cluster/golden_fixture.h"

namespace sluice {
namespace {

struct Degrees {
  uint32_t data, tensor, pipeline;
};

std::string Text(const Degrees& d) { return absl::StrCat("(", d.data, ",", d.tensor, ",", d.pipeline, ")"); }

class GoldenMeshTest : public GoldenTest, public ::testing::WithParamInterface<Degrees> {
 protected:
  v1::JobSpec MeshSpec(const std::string& optimizer, const Degrees& degrees, uint32_t chunk_elements) const {
    v1::JobSpec spec = Spec(optimizer, static_cast<int>(degrees.data), chunk_elements);
    spec.mutable_parallel()->set_tensor(degrees.tensor);
    spec.mutable_parallel()->set_pipeline(degrees.pipeline);
    return spec;
  }
  static int Workers(const Degrees& d) { return static_cast<int>(d.data * d.tensor * d.pipeline); }
};

// Rounds of the reference are ragged; with more replicas or microbatches than rows some are empty.
TEST_P(GoldenMeshTest, EqualsTheReferenceWithEqualBitsOnAnyServersChunksAndSchedule) {
  const Degrees degrees = GetParam();
  std::map<uint32_t, uint64_t> hashes;  // by microbatches
  for (const int servers : {1, 2, 3}) {
    InProcessCluster cluster({.servers = servers, .workers = Workers(degrees)});
    for (const uint32_t microbatches : {1u, 3u}) {
      v1::JobSpec spec = MeshSpec("adamw_clip", degrees, servers == 1 ? 262144 : servers == 2 ? 4096 : 997);
      spec.mutable_parallel()->set_microbatches(microbatches);
      spec.mutable_parallel()->set_schedule(servers == 1   ? v1::ParallelSpec::SEQUENTIAL
                                            : servers == 2 ? v1::ParallelSpec::ONE_F_ONE_B
                                                           : v1::ParallelSpec::GPIPE);
      spec.mutable_train()->set_recompute(servers == 2);
      SCOPED_TRACE(absl::StrCat(Text(degrees), ", ", servers, " servers, ", microbatches, " microbatches"));
      const std::optional<std::vector<float>> values = Train(&cluster, spec, "adamw_clip");
      ASSERT_TRUE(values.has_value());
      CheckTensors(spec, *values, "gpt2_adamw_clip_after_12.safetensors", kParameterTolerance, /*adam=*/true);
      const uint64_t hash = HashOf(*values);
      EXPECT_EQ(hashes.try_emplace(microbatches, hash).first->second, hash) << "bits differ in one layout";
    }
  }
  std::printf("ROW golden %s: loss error | <= %g | %.3g | %s\n", Text(degrees).c_str(), kLossTolerance, worst_loss_,
              worst_loss_ <= kLossTolerance ? "ok" : "SHORT");
  std::printf("ROW golden %s: parameters, relative norm | <= %g | %.3g | %s\n", Text(degrees).c_str(),
              kParameterTolerance, worst_tensor_, worst_tensor_ <= kParameterTolerance ? "ok" : "SHORT");
  std::printf("ROW golden %s: 1-3 servers, 3 chunk sizes, 3 schedules | equal hashes | %s | %s\n",
              Text(degrees).c_str(), HasFailure() ? "DIFFERENT" : "equal", HasFailure() ? "SHORT" : "ok");
}

TEST_P(GoldenMeshTest, FirstGradientEqualsTheReference) {
  const Degrees degrees = GetParam();
  InProcessCluster cluster({.servers = 2, .workers = Workers(degrees)});
  CheckFirstGradient(&cluster, MeshSpec("sgd", degrees, 4096));
  std::printf("ROW golden %s: first-round gradient, relative norm | <= %g | %.3g | %s\n", Text(degrees).c_str(),
              kGradientTolerance, worst_tensor_, worst_tensor_ <= kGradientTolerance ? "ok" : "SHORT");
}

TEST_P(GoldenMeshTest, EqualBitsOnEveryDeviceAndUnderDelays) {
  const Degrees degrees = GetParam();
  std::optional<uint64_t> hash;
  for (const uint64_t seed : {0, 1, 2}) {
    for (const char* device : {"cpu", "fake_device"}) {
      SCOPED_TRACE(absl::StrCat(Text(degrees), ", ", device, ", delays of seed ", seed));
      ClusterOptions options{.servers = 2, .workers = Workers(degrees)};
      if (seed > 0) options.network = {.delay_seed = seed, .max_delay = absl::Milliseconds(1)};
      options.backend.kind = device;
      options.backend.delay_seed = std::string(device) == "fake_device" ? seed : 0;
      InProcessCluster cluster(options);
      v1::JobSpec spec = MeshSpec("adamw_clip", degrees, 997);
      spec.mutable_parallel()->set_microbatches(2);
      const std::optional<std::vector<float>> values = Train(&cluster, spec, "adamw_clip");
      ASSERT_TRUE(values.has_value());
      if (!hash.has_value()) hash = HashOf(*values);
      EXPECT_EQ(HashOf(*values), *hash);
    }
  }
}

// (data, tensor, pipeline)
INSTANTIATE_TEST_SUITE_P(All, GoldenMeshTest,
                         ::testing::Values(Degrees{1, 2, 1}, Degrees{1, 1, 2}, Degrees{1, 2, 2}, Degrees{2, 2, 1},
                                           Degrees{2, 1, 2}, Degrees{2, 2, 2}, Degrees{1, 4, 1}, Degrees{4, 1, 2}),
                         [](const auto& info) {
                           return absl::StrCat("D", info.param.data, "_T", info.param.tensor, "_P",
                                               info.param.pipeline);
                         });

}  // namespace
}  // namespace sluice
