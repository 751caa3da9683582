#include "worker/push_encoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
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

  // `residuals` > 0: from a checkpoint of version `start` with those of so many ranks.
  std::shared_ptr<const Layout> MakeLayout(uint64_t generation, uint64_t timeline, const std::string& transfer,
                                           uint64_t start = 0, uint32_t residuals = 0) const {
    v1::Plan plan =
        TestPlan{.chunk_elements = 100, .rounds = 1000, .generation = generation, .timeline = timeline, .hidden = 40}
            .Make()
            ->plan();
    v1::JobSpec* spec = plan.mutable_spec();
    EXPECT_TRUE(SetSpecField(spec, absl::StrCat("transfer.push=", transfer)).ok());
    FillDefaults(spec);
    plan.set_start(start);
    if (residuals > 0) {
      plan.mutable_checkpoint()->set_version(start);
      plan.mutable_checkpoint()->set_residuals(residuals);
    }
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

std::string Encoded(PushEncoder& encoder, uint64_t chunk, uint64_t round, const float* gradient,
                    uint64_t generation = 1) {
  encoder.Encode(chunk, round, gradient);
  return Text(*encoder.Bytes(generation, chunk, round));
}

std::vector<float> ResidualOf(const PushEncoder& encoder, const ChunkTable& table) {
  std::vector<float> all(table.parameters());
  for (uint64_t c = 0; c < table.chunks(); ++c) {
    const BorrowedBytes bytes = encoder.Residual(c);
    if (bytes.size > 0) std::memcpy(all.data() + table.range(c).begin, bytes.data, bytes.size);
  }
  return all;
}

bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

using Start = PushEncoder::Start;

// What was pushed and what is left add up to the gradients: over many rounds with pushes said again, rounds computed
// again in new generations, rounds without samples, and checkpoints, after which another encoder goes on.
TEST_P(PushEncoderTest, NothingIsLostAndNothingCountsTwice) {
  SCOPED_TRACE(seed_);
  uint64_t generation = 1;
  auto layout = MakeLayout(generation, 1, GetParam());
  const ChunkTable table = layout->table();  // layouts come and go
  auto encoder = std::make_unique<PushEncoder>(*layout);
  EXPECT_EQ(encoder->Begin(*layout, 0), Start::kKept);
  std::vector<double> sent(table.parameters()), wanted(table.parameters()), size(table.parameters());
  for (uint64_t round = 0; round < 100; ++round) {
    if (rng_() % 10 == 0) continue;      // no samples: empty contributions, nothing is encoded
    if (round > 0 && rng_() % 7 == 0) {  // a checkpoint of version `round`; the job is resumed from it
      const std::vector<float> saved = ResidualOf(*encoder, table);
      layout = MakeLayout(generation = 1, 1, GetParam(), round, 1);
      encoder = std::make_unique<PushEncoder>(*layout);
      ASSERT_EQ(encoder->Begin(*layout, 0), Start::kRestore);
      for (uint64_t c = 0; c < table.chunks(); ++c) {
        const Range range = table.range(c);
        encoder->Restore(c, Payload({grpc::Slice(saved.data() + range.begin, range.size() * sizeof(float))}));
      }
    }
    const std::vector<float> gradient = Gradient(table.parameters());
    std::vector<std::string> first(table.chunks());
    const bool restarted = rng_() % 3 == 0;
    // Some chunks only; then the generation ends and the round is computed again.
    for (uint64_t c = 0; restarted && c < table.chunks(); ++c) {
      if (rng_() % 2 == 0) continue;
      encoder->Encode(c, round, gradient.data() + table.range(c).begin);
      first[c] = Text(*encoder->Bytes(generation, c, round));
    }
    if (restarted) {
      layout = MakeLayout(++generation, 1, GetParam());
      EXPECT_EQ(encoder->Begin(*layout, 0), Start::kKept);
      EXPECT_FALSE(encoder->Bytes(generation - 1, 0, round).has_value()) << "of a generation that is over";
    }
    for (uint64_t c = 0; c < table.chunks(); ++c) {
      const Range range = table.range(c);
      encoder->Encode(c, round, gradient.data() + range.begin);
      const std::string bytes = Text(*encoder->Bytes(generation, c, round));
      if (!first[c].empty()) {
        ASSERT_EQ(bytes, first[c]);
      }
      // What is there is not made again: the gradient may be of the next round by then.
      if (rng_() % 3 == 0) {
        encoder->Encode(c, round, nullptr);
        ASSERT_EQ(Text(*encoder->Bytes(generation, c, round)), bytes);
      }
      std::vector<float> values(range.size());
      DecodePayload(encoder->encoding(), Payload({grpc::Slice(bytes)}), range.size(), values.data());
      for (uint64_t i = 0; i < range.size(); ++i) sent[range.begin + i] += values[i];
    }
    for (uint64_t i = 0; i < table.parameters(); ++i) {
      wanted[i] += gradient[i];
      size[i] += std::abs(gradient[i]);
    }
  }
  const std::vector<float> residual = ResidualOf(*encoder, table);
  for (uint64_t i = 0; i < table.parameters(); ++i) {
    ASSERT_NEAR(sent[i] + residual[i], wanted[i], 1e-6 * size[i]) << i;
  }
  EXPECT_FALSE(AllZero(residual)) << "it is lossy, else this shows nothing";
}

TEST_P(PushEncoderTest, ARewindDropsWhatWasLeftOut) {
  auto layout = MakeLayout(1, 1, GetParam());
  const size_t n = layout->table().range(0).size();
  PushEncoder encoder(*layout);
  EXPECT_EQ(encoder.Begin(*layout, 0), Start::kKept);
  const std::vector<float> gradient = Gradient(n), next = Gradient(n);
  Encoded(encoder, 0, 7, gradient.data());
  EXPECT_FALSE(AllZero(ResidualOf(encoder, layout->table())));
  // Round 3 comes after round 7 in another timeline only, and is then encoded as if nothing had been before.
  auto rewound = MakeLayout(2, 2, GetParam());
  EXPECT_EQ(encoder.Begin(*rewound, 0), Start::kDropped);
  EXPECT_TRUE(AllZero(ResidualOf(encoder, layout->table())));
  const std::string again = Encoded(encoder, 0, 3, next.data(), 2);
  PushEncoder fresh(*layout);
  fresh.Begin(*layout, 0);
  EXPECT_EQ(Encoded(fresh, 0, 3, next.data()), again);
  // Another replica's samples: the same.
  EXPECT_EQ(encoder.Begin(*rewound, 1), Start::kDropped);
  EXPECT_EQ(Encoded(encoder, 0, 3, next.data(), 2), again);
}

// From a checkpoint the same bytes follow as without one, also where fetching it was interrupted by a new generation.
TEST_P(PushEncoderTest, ACheckpointGivesItBack) {
  auto layout = MakeLayout(1, 1, GetParam());
  const ChunkTable table = layout->table();
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  std::vector<BorrowedBytes> kept;
  std::vector<std::string> saved;
  std::vector<float> gradient;
  for (uint64_t round = 0; round < 3; ++round) {
    gradient = Gradient(table.parameters());
    for (uint64_t c = 0; c < table.chunks(); ++c) Encoded(encoder, c, round, gradient.data() + table.range(c).begin);
  }
  for (uint64_t c = 0; c < table.chunks(); ++c) {
    kept.push_back(encoder.Residual(c));
    saved.push_back(Text(kept.back()));
  }
  const std::vector<float> next = Gradient(table.parameters());
  std::vector<std::string> expected;
  for (uint64_t c = 0; c < table.chunks(); ++c) {
    expected.push_back(Encoded(encoder, c, 3, next.data() + table.range(c).begin));
    EXPECT_EQ(Text(kept[c]), saved[c]) << "what is kept for a checkpoint is not written any more";
  }
  const auto restore = [&](PushEncoder& into, uint64_t chunk) {
    into.Restore(chunk, Payload({grpc::Slice(saved[chunk])}));
  };
  PushEncoder other(*layout);
  ASSERT_EQ(other.Begin(*MakeLayout(1, 1, GetParam(), 3, 1), 0), Start::kRestore);
  restore(other, 0);
  ASSERT_EQ(other.Begin(*MakeLayout(2, 1, GetParam(), 3, 1), 0), Start::kRestore) << "not all of it was there";
  for (uint64_t c = 0; c < table.chunks(); ++c) restore(other, c);
  EXPECT_EQ(other.Begin(*MakeLayout(1, 1, GetParam(), 3, 1), 0), Start::kKept);
  for (uint64_t c = 0; c < table.chunks(); ++c) {
    EXPECT_EQ(Encoded(other, c, 3, next.data() + table.range(c).begin), expected[c]) << c;
  }
  // A worker that comes later in the timeline finds nothing to go on with.
  PushEncoder late(*layout);
  v1::Plan plan = MakeLayout(1, 1, GetParam(), 3, 1)->plan();
  plan.set_start(4);
  plan.set_hash(PlanHash(plan));
  EXPECT_EQ(late.Begin(**Layout::Make(plan), 0), Start::kKept);
  EXPECT_TRUE(AllZero(ResidualOf(late, table)));
}

TEST_P(PushEncoderTest, MemoryThatATransportHoldsIsNotWritten) {
  auto layout = MakeLayout(1, 1, GetParam());
  const size_t n = layout->table().range(0).size();
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  encoder.Encode(0, 0, Gradient(n).data());
  const BorrowedBytes held = *encoder.Bytes(1, 0, 0);
  const std::string before = Text(held);
  for (uint64_t round = 1; round < 4; ++round) encoder.Encode(0, round, Gradient(n).data());
  EXPECT_EQ(Text(held), before);
}

// Whoever pushes while the chunk is being encoded waits for it; a generation that ends lets him go.
TEST_P(PushEncoderTest, BytesAreWaitedFor) {
  auto layout = MakeLayout(1, 1, GetParam());
  const std::vector<float> gradient = Gradient(layout->table().range(0).size());
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  std::string early;
  bool over = false;
  std::thread first([&] { early = Text(*encoder.Bytes(1, 0, 0)); });
  encoder.Encode(0, 0, gradient.data());
  first.join();
  EXPECT_EQ(early, Text(*encoder.Bytes(1, 0, 0)));
  std::thread second([&] { over = !encoder.Bytes(1, 0, 1).has_value(); });
  encoder.Begin(*MakeLayout(2, 1, GetParam()), 0);
  second.join();
  EXPECT_TRUE(over);
}

INSTANTIATE_TEST_SUITE_P(Formats, PushEncoderTest,
                         testing::Values("{bf16: {}}", "{f16: {}}", "{int8: {}}",
                                         "{top_k: {density: 0.1, warmup_rounds: 20}}"));

// The number of values is the whole gradient's; chunks get them by what they have in the residual's largest.
TEST(TopKDealTest, ChunksGetTheirShareOfTheLargest) {
  v1::Plan plan = TestPlan{.chunk_elements = 1000, .rounds = 100, .hidden = 400}.Make()->plan();
  ASSERT_TRUE(SetSpecField(plan.mutable_spec(), "transfer.push={top_k: {density: 0.1}}").ok());
  FillDefaults(plan.mutable_spec());
  plan.set_hash(PlanHash(plan));
  const auto layout = *Layout::Make(plan);
  const ChunkTable& table = layout->table();
  ASSERT_GE(table.chunks(), 2u);
  const uint64_t all = TopKCount(0.1, table.parameters());
  PushEncoder encoder(*layout);
  encoder.Begin(*layout, 0);
  std::mt19937 rng(7);
  std::vector<float> gradient(table.parameters());
  for (uint64_t round = 0; round < 10; ++round) {
    // The last chunk's are larger.
    const Range last = table.range(table.chunks() - 1);
    for (uint64_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = (static_cast<float>(rng() % 2001) / 1000 - 1) * (i >= last.begin ? 20.0f : 1.0f);
    }
    uint64_t total = 0, of_last = 0;
    for (uint64_t c = 0; c < table.chunks(); ++c) {
      const Range range = table.range(c);
      const std::string bytes = Encoded(encoder, c, round, gradient.data() + range.begin);
      uint32_t count = 0;  // chunks are of one block
      std::memcpy(&count, bytes.data(), sizeof(count));
      if (round == 0) {
        EXPECT_NEAR(count, 0.1 * static_cast<double>(range.size()), 1) << "nothing is known yet: by length";
      }
      EXPECT_GE(count, 1u);
      total += count;
      if (c + 1 == table.chunks()) of_last = count;
    }
    EXPECT_GE(total, all);
    EXPECT_LE(total, all + table.chunks()) << "round " << round;
    if (round > 0) {
      EXPECT_GT(of_last, 2 * TopKCount(0.1, last.size())) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace sluice
