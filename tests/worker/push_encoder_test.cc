#include "worker/push_encoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/wire_format.h"
#include "tests/worker/test_plan.h"

namespace sluice {
namespace {

class PushEncoderTest : public testing::TestWithParam<const char*> {
 protected:
  PushEncoderTest() : seed_(std::random_device()()), rng_(seed_) {}

  std::shared_ptr<const Layout> MakeLayout(uint64_t generation, uint64_t timeline, const std::string& transfer) const {
    v1::Plan plan =
        TestPlan{.chunk_elements = 100, .generation = generation, .timeline = timeline, .hidden = 40}.Make()->plan();
    v1::JobSpec* spec = plan.mutable_spec();
    EXPECT_TRUE(SetSpecField(spec, absl::StrCat("transfer.push=", transfer)).ok());
    FillDefaults(spec);
    plan.set_hash(PlanHash(plan));
    return *Layout::Make(plan);
  }
  std::vector<float> Gradient(size_t n) {
    std::vector<float> g(n);
    for (float& x : g) x = std::ldexp(static_cast<float>(rng_() % 20001) / 10000 - 1, static_cast<int>(rng_() % 9) - 4);
    return g;
  }

  const uint32_t seed_;
  std::mt19937 rng_;
};

std::string Text(const BorrowedBytes& bytes) { return {static_cast<const char*>(bytes.data), bytes.size}; }

// What was pushed and what is left add up to the gradients: over many rounds with pushes said again, rounds computed
// again in new generations, and rounds without samples.
TEST_P(PushEncoderTest, NothingIsLostAndNothingCountsTwice) {
  SCOPED_TRACE(seed_);
  uint64_t generation = 1;
  auto layout = MakeLayout(generation, 1, GetParam());
  const ChunkTable table = layout->table();  // layouts come and go
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  std::vector<double> sent(table.parameters()), wanted(table.parameters()), size(table.parameters());
  for (uint64_t round = 0; round < 100; ++round) {
    if (rng_() % 10 == 0) continue;  // no samples: empty contributions, nothing is encoded
    const std::vector<float> gradient = Gradient(table.parameters());
    std::vector<std::string> first(table.chunks());
    const bool restarted = rng_() % 3 == 0;
    // Some chunks only; then the generation ends and the round is computed again.
    for (uint64_t c = 0; restarted && c < table.chunks(); ++c) {
      if (rng_() % 2 == 0) continue;
      first[c] = Text(encoder.Encode(*layout, c, round, gradient.data() + table.range(c).begin));
    }
    if (restarted) {
      layout = MakeLayout(++generation, 1, GetParam());
      EXPECT_FALSE(encoder.Begin(*layout, 0));
    }
    for (uint64_t c = 0; c < table.chunks(); ++c) {
      const Range range = table.range(c);
      const float* g = gradient.data() + range.begin;
      const std::string bytes = Text(encoder.Encode(*layout, c, round, g));
      if (!first[c].empty()) {
        ASSERT_EQ(bytes, first[c]);
      }
      // A push that is said again must not look at the gradient, which may be of the next round by then.
      if (rng_() % 3 == 0) {
        ASSERT_EQ(Text(encoder.Encode(*layout, c, round, nullptr)), bytes);
      }
      std::vector<float> values(range.size());
      DecodePayload(encoder.encoding(), Payload({grpc::Slice(bytes)}), range.size(), values.data());
      for (uint64_t i = 0; i < range.size(); ++i) sent[range.begin + i] += values[i];
    }
    for (uint64_t i = 0; i < table.parameters(); ++i) {
      wanted[i] += gradient[i];
      size[i] += std::abs(gradient[i]);
    }
  }
  double left = 0;
  for (uint64_t i = 0; i < table.parameters(); ++i) {
    ASSERT_NEAR(sent[i] + encoder.residual()[i], wanted[i], 1e-6 * size[i]) << i;
    left += std::abs(encoder.residual()[i]);
  }
  EXPECT_GT(left, 0) << "it is lossy, else this shows nothing";
}

TEST_P(PushEncoderTest, ARewindDropsWhatWasLeftOut) {
  auto layout = MakeLayout(1, 1, GetParam());
  const size_t n = layout->table().range(0).size();
  PushEncoder encoder(*layout);
  EXPECT_FALSE(encoder.Begin(*layout, 0));
  const std::vector<float> gradient = Gradient(n), next = Gradient(n);
  const std::string first = Text(encoder.Encode(*layout, 0, 7, gradient.data()));
  EXPECT_TRUE(std::any_of(encoder.residual().begin(), encoder.residual().end(), [](float r) { return r != 0; }));
  // Round 3 comes after round 7 in another timeline only, and is then encoded as if nothing had been before.
  layout = MakeLayout(2, 2, GetParam());
  EXPECT_TRUE(encoder.Begin(*layout, 0));
  EXPECT_TRUE(std::all_of(encoder.residual().begin(), encoder.residual().end(), [](float r) { return r == 0; }));
  const std::string again = Text(encoder.Encode(*layout, 0, 3, next.data()));
  PushEncoder fresh(*layout);
  fresh.Begin(*layout, 0);
  EXPECT_EQ(Text(fresh.Encode(*layout, 0, 3, next.data())), again);
  // Another replica's samples: the same.
  EXPECT_TRUE(encoder.Begin(*layout, 1));
  EXPECT_EQ(Text(encoder.Encode(*layout, 0, 3, next.data())), again);
}

TEST_P(PushEncoderTest, MemoryThatATransportHoldsIsNotWritten) {
  auto layout = MakeLayout(1, 1, GetParam());
  const size_t n = layout->table().range(0).size();
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  const BorrowedBytes held = encoder.Encode(*layout, 0, 0, Gradient(n).data());
  const std::string before = Text(held);
  for (uint64_t round = 1; round < 4; ++round) encoder.Encode(*layout, 0, round, Gradient(n).data());
  EXPECT_EQ(Text(held), before);
}

INSTANTIATE_TEST_SUITE_P(Formats, PushEncoderTest,
                         testing::Values("{bf16: {}}", "{f16: {}}", "{int8: {}}",
                                         "{top_k: {density: 0.1, warmup_rounds: 20}}"));

}  // namespace
}  // namespace sluice
