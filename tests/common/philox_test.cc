#include "common/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace sluice {
namespace {

using Words = std::array<uint32_t, 4>;

// The published known-answer vectors of Random123 (philox4x32, 10 rounds).
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, StreamKeysDifferByNameAndSeed) {
  std::set<uint64_t> keys;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    for (const char* name :
         {"", "a", "b", "ab", "ba", "wte", "wpe", "shuffle", "h.0.attn.q.weight", "h.1.attn.q.weight"}) {
      keys.insert(StreamKey(seed, name));
    }
  }
  EXPECT_EQ(keys.size(), 500u);
  EXPECT_EQ(StreamKey(7, "wte"), StreamKey(7, std::string("wte")));
}

Tensor Named(const char* name, Initializer::Kind kind, float scale) {
  Tensor tensor;
  tensor.name = name;
  tensor.shape = {1000, 1000};
  tensor.elements = 1000000;
  tensor.init = {kind, scale};
  return tensor;
}

TEST(PhiloxTest, InitialValuesDoNotDependOnTheRange) {
  for (const Initializer::Kind kind :
       {Initializer::kZeros, Initializer::kOnes, Initializer::kNormal, Initializer::kUniform}) {
    const Tensor tensor = Named("wte", kind, 0.02f);
    std::vector<float> whole(1000);
    FillInitial(tensor, 5, 12345, whole.size(), whole.data());
    for (const uint64_t step : {1, 2, 3, 5, 7, 64, 999}) {
      std::vector<float> parts(whole.size());
      for (uint64_t first = 0; first < parts.size(); first += step) {
        FillInitial(tensor, 5, 12345 + first, std::min<uint64_t>(step, parts.size() - first), parts.data() + first);
      }
      EXPECT_EQ(parts, whole) << "kind " << kind << " step " << step;
    }
    FillInitial(tensor, 5, 0, 0, nullptr);
  }
}

TEST(PhiloxTest, NormalValuesHaveTheRightMoments) {
  constexpr uint64_t kN = 1000000;
  std::vector<float> x(kN);
  FillInitial(Named("wte", Initializer::kNormal, 0.02f), 1, 0, kN, x.data());
  double sum = 0, squares = 0, neighbours = 0, fourth = 0;
  for (uint64_t i = 0; i < kN; ++i) {
    ASSERT_TRUE(std::isfinite(x[i]));
    const double z = x[i] / 0.02;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    if (i > 0) neighbours += z * (x[i - 1] / 0.02);
  }
  EXPECT_NEAR(sum / kN, 0, 0.005);
  EXPECT_NEAR(squares / kN, 1, 0.01);
  EXPECT_NEAR(fourth / kN, 3, 0.05);
  EXPECT_NEAR(neighbours / kN, 0, 0.005);
}

TEST(PhiloxTest, UniformValuesFillTheirInterval) {
  constexpr uint64_t kN = 1000000;
  std::vector<float> x(kN);
  FillInitial(Named("layer.0.weight", Initializer::kUniform, 0.5f), 1, 0, kN, x.data());
  double sum = 0, squares = 0;
  for (const float value : x) {
    ASSERT_GE(value, -0.5f);
    ASSERT_LT(value, 0.5f);
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(sum / kN, 0, 0.002);
  EXPECT_NEAR(squares / kN, 1.0 / 12, 0.001);
}

TEST(PhiloxTest, SeedAndNameChangeTheValues) {
  float a[4], b[4], c[4];
  FillInitial(Named("wte", Initializer::kNormal, 1), 1, 0, 4, a);
  FillInitial(Named("wte", Initializer::kNormal, 1), 2, 0, 4, b);
  FillInitial(Named("wpe", Initializer::kNormal, 1), 1, 0, 4, c);
  for (int i = 0; i < 4; ++i) {
    EXPECT_NE(a[i], b[i]);
    EXPECT_NE(a[i], c[i]);
  }
}

// Pinned: parameters of old jobs must stay reproducible, and no machine or compiler may change them.
TEST(PhiloxTest, InitialValuesArePinned) {
  std::vector<float> x(100000);
  FillInitial(Named("wte", Initializer::kNormal, 0.02f), 1337, 1, x.size(), x.data());
  uint64_t hash = 0xcbf29ce484222325u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(x.data());
  for (size_t i = 0; i < 4 * x.size(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  EXPECT_EQ(hash, 0x479427d49aff0789u);
}

TEST(PhiloxTest, PermuteIsABijection) {
  for (const uint64_t n : {1, 2, 3, 4, 5, 16, 17, 997, 1000000}) {
    for (const uint64_t key : {0u, 1u, 12345u}) {
      std::vector<bool> seen(n);
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t image = Permute(i, n, key);
        ASSERT_LT(image, n);
        ASSERT_FALSE(seen[image]) << "n " << n << " index " << i;
        seen[image] = true;
      }
    }
  }
  EXPECT_LT(Permute(uint64_t{1} << 62, (uint64_t{1} << 62) + 1, 3), (uint64_t{1} << 62) + 1);
  EXPECT_LT(Permute(~uint64_t{1}, ~uint64_t{0}, 3), ~uint64_t{0});
}

TEST(PhiloxTest, PermutationsShuffle) {
  constexpr uint64_t kN = 10000;
  uint64_t fixed = 0, same = 0, ascending = 0;
  for (uint64_t i = 0; i < kN; ++i) {
    fixed += Permute(i, kN, 1) == i;
    same += Permute(i, kN, 1) == Permute(i, kN, 2);
    ascending += i > 0 && Permute(i, kN, 1) > Permute(i - 1, kN, 1);
  }
  EXPECT_LT(fixed, 12u);  // expected 1 each
  EXPECT_LT(same, 12u);
  EXPECT_NEAR(static_cast<double>(ascending) / kN, 0.5, 0.02);
  std::set<uint64_t> orders;  // of three elements: all six come up
  for (uint64_t key = 0; key < 200; ++key) orders.insert(Permute(0, 3, key) * 3 + Permute(1, 3, key));
  EXPECT_EQ(orders.size(), 6u);
}

}  // namespace
}  // namespace sluice
