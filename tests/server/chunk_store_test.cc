#include "server/chunk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "common/float_formats.h"
#include "common/job_spec.h"
#include "common/philox.h"
#include "tests/server/chunk_store_fixture.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Whole Train(const ServerTestPlan& plan, uint64_t rounds) {
  const auto layout = plan.Make();
  const uint64_t parameters = layout->space().size();
  ChunkStore store(layout);
  auto source = ChunkSource::Open(*layout, "", "");
  EXPECT_TRUE(source.ok()) << source.status();
  Whole whole;
  for (uint64_t c = 0; c < layout->table().chunks(); ++c) {
    EXPECT_TRUE(store.Load(**source, c, 0).ok());
    const Range range = layout->table().range(c);
    for (uint64_t round = 0; round < rounds; ++round) {
      for (uint32_t who : {1u, 0u, 2u}) {
        const std::vector<float> g = Gradient(parameters, round, who);
        store.Add(c, who, 3, Bytes({g.begin() + range.begin, g.begin() + range.end}));
      }
      EXPECT_TRUE(store.Finish(c, 3).finite);
      store.Apply(c, Go(round), false);
    }
    absl::StatusOr<ChunkValue> value = store.Get(c, rounds);
    EXPECT_TRUE(value.ok());
    whole.value.insert(whole.value.end(), value->data.get(), value->data.get() + value->elements);
  }
  return whole;
}

// Workers of the host map each of the two places once (worker/model/parameter_memory.h).
TEST(ChunkStore, EvenAndOddVersionsOfAChunkLieInTwoPlaces) {
  ServerTestPlan plan;
  plan.hidden = 50;
  plan.chunk_elements = 100;
  const auto layout = plan.Make();
  ChunkStore store(layout, /*share=*/true);
  auto source = ChunkSource::Open(*layout, "", "");
  ASSERT_TRUE(source.ok()) << source.status();
  const uint64_t chunks = layout->table().chunks();
  ASSERT_GT(chunks, 2u);
  for (uint64_t c = 0; c < chunks; ++c) ASSERT_TRUE(store.Load(**source, c, 0).ok());
  std::vector<std::vector<const float*>> places(chunks);
  std::mt19937 random(1);
  for (uint64_t round = 0; round < 8; ++round) {
    std::vector<uint64_t> order(chunks);
    for (uint64_t c = 0; c < chunks; ++c) order[c] = c;
    std::shuffle(order.begin(), order.end(), random);
    for (const uint64_t c : order) {
      const Range range = layout->table().range(c);
      store.Add(c, 0, 1, Bytes(std::vector<float>(range.size(), 1)));
      store.Finish(c, 1);
      store.Apply(c, Go(round), false);
      places[c].push_back(store.Get(c, round + 1)->data.get());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(places[c].back()) % 4096, 0u);
    }
  }
  for (uint64_t c = 0; c < chunks; ++c) {
    EXPECT_NE(places[c][0], places[c][1]);
    for (uint64_t round = 2; round < 8; ++round) EXPECT_EQ(places[c][round], places[c][round - 2]) << c;
  }
}

TEST(ChunkStore, TheChunkSizeChangesNoBit) {
  ServerTestPlan plan;
  plan.hidden = 50;
  plan.chunk_elements = 1000;
  const Whole whole = Train(plan, 3);
  for (const uint64_t chunk : {1, 3, 16, 37, 100, 255}) {
    plan.chunk_elements = chunk;
    EXPECT_TRUE(SameBits(Train(plan, 3).value, whole.value)) << chunk;
  }
  // It did move: and by the rule of SGD with momentum, of the first round at least.
  const Whole first = Train(plan, 1), initial = Train(plan, 0);
  const auto layout = plan.Make();
  for (size_t i = 0; i < first.value.size(); ++i) {
    const float sum = Gradient(first.value.size(), 0, 0)[i] + Gradient(first.value.size(), 0, 1)[i] +
                      Gradient(first.value.size(), 0, 2)[i];
    EXPECT_NEAR(first.value[i], initial.value[i] - 0.5f * 0.25f * sum, 1e-6);
  }
}

TEST(ChunkStore, InitialValuesComeFromTheSeedAndTheTensor) {
  ServerTestPlan plan;
  const auto layout = plan.Make();
  const Whole initial = Train(plan, 0);
  for (const Tensor& t : layout->space().tensors()) {
    std::vector<float> want(t.elements);
    FillInitial(t, layout->plan().spec().train().seed(), 0, t.elements, want.data());
    EXPECT_TRUE(SameBits({initial.value.begin() + t.offset, initial.value.begin() + t.offset + t.elements}, want));
  }
}

class ChunkStoreTest : public ::testing::Test {
 protected:
  ChunkStoreTest() : layout_(ServerTestPlan{.chunk_elements = 8}.Make()), store_(layout_) {
    source_ = *ChunkSource::Open(*layout_, "", "");
    EXPECT_TRUE(store_.Load(*source_, 0, 0).ok());
  }
  void Push(uint32_t who, float x) { store_.Add(0, who, 2, Bytes(std::vector<float>(8, x))); }
  std::vector<float> Value(uint64_t version) {
    absl::StatusOr<ChunkValue> value = store_.Get(0, version);
    if (!value.ok()) return {};
    return {value->data.get(), value->data.get() + value->elements};
  }

  const std::shared_ptr<const Layout> layout_;
  ChunkStore store_;
  std::shared_ptr<const ChunkSource> source_;
};

TEST_F(ChunkStoreTest, TwoVersionsAreThere) {
  const std::vector<float> v0 = Value(0);
  for (uint64_t round = 0; round < 3; ++round) {
    Push(0, 1);
    Push(1, 2);
    store_.Apply(0, Go(round), false);
  }
  EXPECT_EQ(store_.Get(0, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Value(2).size(), 8u);
  EXPECT_EQ(Value(3).size(), 8u);
  EXPECT_EQ(store_.Get(0, 4).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_.Get(1, 0).status().code(), absl::StatusCode::kNotFound);
  store_.DropPrevious(0);
  EXPECT_EQ(store_.Get(0, 2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(Value(3), v0);
}

TEST_F(ChunkStoreTest, ValuesThatSomebodyHoldsDoNotChange) {
  absl::StatusOr<ChunkValue> held = store_.Get(0, 0);
  ASSERT_TRUE(held.ok());
  const std::vector<float> before = Value(0);
  for (uint64_t round = 0; round < 5; ++round) {
    Push(0, 1);
    Push(1, 1);
    store_.Apply(0, Go(round), false);
  }
  EXPECT_EQ(std::memcmp(held->data.get(), before.data(), 32), 0);
}

TEST_F(ChunkStoreTest, ASkipKeepsTheValueUnderTheNextVersion) {
  const std::vector<float> v0 = Value(0);
  v1::Verdict skip;
  skip.set_skip(true);
  Push(0, 1);
  Push(1, 1);
  store_.Apply(0, skip, false);
  EXPECT_EQ(Value(1), v0);
  EXPECT_EQ(Value(0), v0);
  // The optimizer's state did not move either: the next round is a first one.
  Push(0, 1);
  Push(1, 1);
  store_.Apply(0, Go(1), false);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(Value(2)[i], v0[i] - 0.5 * 0.25 * 2, 1e-6);
}

TEST_F(ChunkStoreTest, ANonFiniteSumKeepsTheValueWhereAsked) {
  const std::vector<float> v0 = Value(0);
  Push(0, 1);
  Push(1, std::numeric_limits<float>::infinity());
  const SumResult sum = store_.Finish(0, 2);
  EXPECT_FALSE(sum.finite);
  EXPECT_THAT(sum.nonfinite_contributors, ElementsAre(1));
  store_.Apply(0, Go(0), /*skip_nonfinite=*/true);
  EXPECT_EQ(Value(1), v0);
}

TEST_F(ChunkStoreTest, OnlyEmptyContributionsAreAZeroGradient) {
  const std::vector<float> v0 = Value(0);
  store_.Add(0, 0, 2, Payload());
  store_.Add(0, 1, 2, Payload());
  const SumResult sum = store_.Finish(0, 2);
  EXPECT_TRUE(sum.finite);
  double total = 0;
  for (const auto& [block, s] : sum.blocks) total += s;
  EXPECT_EQ(total, 0);
  store_.Apply(0, Go(0), false);
  EXPECT_EQ(Value(1), v0);
}

TEST_F(ChunkStoreTest, DiscardForgetsWhatIsHeld) {
  const std::vector<float> v0 = Value(0);
  Push(1, 100);
  store_.DiscardSum(0);
  Push(1, 1);
  Push(0, 1);
  store_.Apply(0, Go(0), false);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(Value(1)[i], v0[i] - 0.5 * 0.25 * 2, 1e-6);
}

TEST_F(ChunkStoreTest, MemoryStaysWhatItIs) {
  size_t mapped = 0;
  for (uint64_t round = 0; round < 200; ++round) {
    Push(0, 1);
    Push(1, 1);
    store_.Finish(0, 2);
    store_.Apply(0, Go(round), false);
    if (round == 3) mapped = store_.mapped_bytes();
  }
  EXPECT_EQ(store_.mapped_bytes(), mapped);
}

// Made once a commit, shared by all who receive it, gone with the value; checkpoints and Get stay float32.
TEST(ChunkStoreWire, TheEncodingOfACommitIsSharedAndGoesWithIt) {
  ServerTestPlan plan{.chunk_elements = 8};
  v1::Plan message = plan.Make()->plan();
  message.mutable_spec()->mutable_transfer()->mutable_pull()->mutable_bf16();
  message.set_hash(PlanHash(message));
  const auto layout = *Layout::Make(message);
  ChunkStore store(layout);
  ASSERT_TRUE(store.Load(**ChunkSource::Open(*layout, "", ""), 0, 0).ok());
  const auto check = [&](uint64_t version) {
    const ChunkValue value = *store.Get(0, version);
    const WireValue wire = *store.GetWire(0, version);
    EXPECT_EQ(wire.encoding, v1::BF16);
    EXPECT_EQ(wire.elements, value.elements);
    EXPECT_EQ(wire.bytes.size, 2 * value.elements);
    for (uint64_t i = 0; i < value.elements; ++i) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const char*>(wire.bytes.data) + 2 * i, sizeof(bits));
      EXPECT_EQ(bits, NarrowBf16(value.data[i])) << version << " " << i;
    }
    return wire;
  };
  const WireValue first = check(0);
  EXPECT_EQ(check(0).bytes.data, first.bytes.data);
  for (uint64_t round = 0; round < 20; ++round) {
    store.Add(0, 0, 1, Bytes(std::vector<float>(8, 0.3f)));
    store.Finish(0, 1);
    const WireValue before = check(round);
    v1::Verdict verdict = Go(round);
    verdict.set_skip(round % 5 == 4);
    store.Apply(0, verdict, false);
    EXPECT_EQ(check(round).bytes.data, before.bytes.data);
    EXPECT_EQ(check(round + 1).bytes.data == before.bytes.data, verdict.skip());
  }
}

TEST(ChunkStoreMemory, BytesPerElement) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(1);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 8u);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_ROUND);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 12u);
  spec.mutable_optimizer()->mutable_sgd()->set_momentum(0.5);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 16u);
  spec.mutable_optimizer()->mutable_adam()->set_learning_rate(1);
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 20u);
  spec.mutable_transfer()->mutable_pull()->mutable_bf16();
  EXPECT_EQ(ChunkStore::BytesPerElement(spec), 24u);
}

}  // namespace
}  // namespace sluice
