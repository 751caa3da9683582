#include "common/optimizer.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>

#include "common/job_spec.h"
#include "common/portable_math.h"

namespace sluice {
namespace {

constexpr size_t kSizes[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 997, 4096, 16411};

class OptimizerTest : public testing::Test {
 protected:
  ~OptimizerTest() override { ForceDispatchTarget(""); }
};

std::vector<float> Random(size_t n, uint32_t seed, float scale = 1) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(n);
  for (float& x : values) x = normal(bits);
  return values;
}

uint64_t Hash(uint64_t hash, const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  return hash;
}

uint64_t Hash(uint64_t hash, const std::vector<float>& x) { return Hash(hash, x.data(), x.size() * sizeof(float)); }

v1::OptimizerSpec Spec(UpdateRule::Kind kind) {
  v1::OptimizerSpec spec;
  switch (kind) {
    case UpdateRule::kSgd:
      spec.mutable_sgd()->set_learning_rate(0.1);
      break;
    case UpdateRule::kMomentum:
      spec.mutable_sgd()->set_learning_rate(0.1);
      spec.mutable_sgd()->set_momentum(0.9);
      break;
    case UpdateRule::kAdam:
      spec.mutable_adam()->set_learning_rate(0.01);
      spec.mutable_adam()->set_weight_decay(0.3);
      break;
    case UpdateRule::kAdamW:
      spec.mutable_adamw()->set_learning_rate(0.01);
      spec.mutable_adamw()->set_weight_decay(0.3);
      spec.mutable_adamw()->set_beta2(0.99);
      break;
  }
  return spec;
}

constexpr UpdateRule::Kind kKinds[] = {UpdateRule::kSgd, UpdateRule::kMomentum, UpdateRule::kAdam, UpdateRule::kAdamW};

// torch.optim's rules for one element, in double, written as their documentation states them.
struct Reference {
  double p = 0, buffer = 0, m = 0, v = 0;
  uint64_t t = 0;

  void Step(const v1::OptimizerSpec& spec, bool decay, double g) {
    ++t;
    if (spec.has_sgd()) {
      buffer = t == 1 ? g : spec.sgd().momentum() * buffer + g;
      p -= spec.sgd().learning_rate() * (spec.sgd().momentum() > 0 ? buffer : g);
      return;
    }
    const bool decoupled = spec.has_adamw();
    const v1::AdamSpec& a = decoupled ? spec.adamw() : spec.adam();
    const double b1 = a.has_beta1() ? a.beta1() : 0.9, b2 = a.has_beta2() ? a.beta2() : 0.999, eps = 1e-8;
    const double wd = decay ? a.weight_decay() : 0;
    if (decoupled) {
      p -= a.learning_rate() * wd * p;
    } else {
      g += wd * p;
    }
    m = b1 * m + (1 - b1) * g;
    v = b2 * v + (1 - b2) * g * g;
    const double m_hat = m / (1 - std::pow(b1, t)), v_hat = v / (1 - std::pow(b2, t));
    p -= a.learning_rate() * m_hat / (std::sqrt(v_hat) + eps);
  }
};

TEST_F(OptimizerTest, FollowsTheReferenceRules) {
  constexpr size_t kN = 257;
  constexpr uint64_t kRounds = 60;
  for (const UpdateRule::Kind kind : kKinds) {
    for (const bool decay : {false, true}) {
      const v1::OptimizerSpec spec = Spec(kind);
      std::vector<float> value = Random(kN, 1), slot0(kN), slot1(kN);
      std::vector<Reference> reference(kN);
      for (size_t i = 0; i < kN; ++i) reference[i].p = value[i];
      for (uint64_t round = 0; round < kRounds; ++round) {
        const std::vector<float> sum = Random(kN, 100 + round, 3);
        const UpdateRule rule = MakeUpdateRule(spec, round, kRounds);
        ASSERT_EQ(rule.kind, kind);
        ApplyUpdate(rule, decay, 0.25f, sum.data(), value.data(), value.data(), slot0.data(), slot1.data(), kN);
        for (size_t i = 0; i < kN; ++i) reference[i].Step(spec, decay, 0.25 * sum[i]);
      }
      double error = 0, norm = 0;
      for (size_t i = 0; i < kN; ++i) {
        ASSERT_TRUE(std::isfinite(value[i]));
        error += std::pow(value[i] - reference[i].p, 2);
        norm += std::pow(reference[i].p, 2);
      }
      EXPECT_LT(std::sqrt(error / norm), 2e-6) << "kind " << kind << " decay " << decay;
    }
  }
}

TEST_F(OptimizerTest, DecayChangesOnlyRulesThatHaveIt) {
  constexpr size_t kN = 33;
  for (const UpdateRule::Kind kind : kKinds) {
    std::vector<float> result[2];
    for (const bool decay : {false, true}) {
      const std::vector<float> value = Random(kN, 1), sum = Random(kN, 2);
      std::vector<float> slot0(kN), slot1(kN);
      result[decay].resize(kN);
      ApplyUpdate(MakeUpdateRule(Spec(kind), 0, 10), decay, 1, sum.data(), value.data(), result[decay].data(),
                  slot0.data(), slot1.data(), kN);
    }
    EXPECT_EQ(result[0] == result[1], SlotCount(kind) < 2) << kind;
  }
}

TEST_F(OptimizerTest, InPlaceAndApartGiveTheSameBits) {
  for (const UpdateRule::Kind kind : kKinds) {
    for (const size_t n : kSizes) {
      const UpdateRule rule = MakeUpdateRule(Spec(kind), 3, 10);
      const std::vector<float> sum = Random(n, 2);
      std::vector<float> in_place = Random(n, 1), apart(n), a0 = Random(n, 3), b0 = a0, a1(n, 0.5f), b1 = a1;
      const std::vector<float> value = in_place;
      ApplyUpdate(rule, true, 0.5f, sum.data(), in_place.data(), in_place.data(), a0.data(), a1.data(), n);
      ApplyUpdate(rule, true, 0.5f, sum.data(), value.data(), apart.data(), b0.data(), b1.data(), n);
      EXPECT_EQ(in_place, apart);
      EXPECT_EQ(a0, b0);
      EXPECT_EQ(a1, b1);
    }
  }
}

// What every kernel gives for odd sizes, alignments, denormal and huge values.
uint64_t HashOfEverything() {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const size_t n : kSizes) {
    for (const size_t shift : {0, 1, 3}) {
      std::vector<float> value = Random(n + shift, 1), sum = Random(n + shift, 2, 10), next(n + shift, -1.0f);
      for (size_t i = 0; i < n; i += 7) sum[shift + i] *= 1e-38f;
      for (size_t i = 3; i < n; i += 11) sum[shift + i] *= 1e15f;
      for (const UpdateRule::Kind kind : kKinds) {
        for (const bool decay : {false, true}) {
          std::vector<float> slot0(n + shift), slot1(n + shift);
          for (uint64_t round = 0; round < 4; ++round) {
            ApplyUpdate(MakeUpdateRule(Spec(kind), round, 4), decay, 1 / 3.0f, sum.data() + shift, value.data() + shift,
                        next.data() + shift, slot0.data() + shift, slot1.data() + shift, n);
            std::swap(value, next);
          }
          hash = Hash(Hash(Hash(hash, value), slot0), slot1);
        }
      }
      const double squares = SumOfSquares(sum.data() + shift, n);
      hash = Hash(hash, &squares, sizeof(squares));
      const int finite = AddAndCheck(value.data() + shift, sum.data() + shift, next.data() + shift, n);
      hash = Hash(Hash(hash, &finite, sizeof(finite)), next);
    }
  }
  return hash;
}

TEST_F(OptimizerTest, EveryDispatchTargetGivesTheSameBits) {
  const std::vector<std::string> targets = DispatchTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.front(), "x86-64-v2");
  ForceDispatchTarget(targets.front());
  const uint64_t expected = HashOfEverything();
  for (const std::string& target : targets) {
    ForceDispatchTarget(target);
    EXPECT_EQ(HashOfEverything(), expected) << target << " differs from " << targets.front();
    printf("%s: %016lx\n", target.c_str(), static_cast<unsigned long>(expected));
  }
}

TEST_F(OptimizerTest, AddAndCheckTakesUnalignedInputAndFindsNonFiniteValues) {
  const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()};
  for (const std::string& target : DispatchTargets()) {
    ForceDispatchTarget(target);
    for (const size_t n : kSizes) {
      std::vector<float> a = Random(n, 1), b = Random(n, 2), out(n);
      if (n > 0) a[n - 1] = std::numeric_limits<float>::max(), b[0] = std::numeric_limits<float>::denorm_min();
      std::vector<char> bytes_a(4 * n + 1), bytes_b(4 * n + 3);
      const auto check = [&] {
        if (n > 0) {
          std::memcpy(bytes_a.data() + 1, a.data(), 4 * n);
          std::memcpy(bytes_b.data() + 3, b.data(), 4 * n);
        }
        return AddAndCheck(bytes_a.data() + 1, bytes_b.data() + 3, out.data(), n);
      };
      EXPECT_EQ(check(), 0);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], a[i] + b[i]);
      EXPECT_TRUE(AllFinite(bytes_a.data() + 1, n));
      for (size_t i = 0; i < n; i += 1 + n / 5) {
        const float x = bad[i % 4], old_a = a[i], old_b = b[i];
        a[i] = x;
        EXPECT_EQ(check(), 1);
        EXPECT_FALSE(AllFinite(bytes_a.data() + 1, n));
        b[i] = x;
        EXPECT_EQ(check(), 3);
        a[i] = old_a;
        EXPECT_EQ(check(), 2);
        b[i] = old_b;
      }
    }
  }
}

TEST_F(OptimizerTest, AddAndCheckWorksInPlace) {
  const std::vector<float> a = Random(1003, 1), b = Random(1003, 2);
  std::vector<float> expected(a.size()), into_a = a, into_b = b;
  AddAndCheck(a.data(), b.data(), expected.data(), a.size());
  AddAndCheck(into_a.data(), b.data(), into_a.data(), a.size());
  AddAndCheck(a.data(), into_b.data(), into_b.data(), a.size());
  EXPECT_EQ(into_a, expected);
  EXPECT_EQ(into_b, expected);
}

TEST_F(OptimizerTest, SumOfSquaresHasSixteenLanes) {
  for (const size_t n : kSizes) {
    const std::vector<float> x = Random(n, 9);
    double lane[16] = {};
    for (size_t i = 0; i < n; ++i) lane[i % 16] += static_cast<double>(x[i]) * x[i];
    for (size_t w = 8; w > 0; w /= 2) {
      for (size_t l = 0; l < w; ++l) lane[l] += lane[l + w];
    }
    EXPECT_EQ(SumOfSquares(x.data(), n), lane[0]);
  }
}

TEST_F(OptimizerTest, Schedules) {
  v1::OptimizerSpec spec = Spec(UpdateRule::kAdamW);
  spec.mutable_adamw()->set_learning_rate(1e-3);
  EXPECT_EQ(LearningRate(spec, 12345, 10), 1e-3);
  auto* cosine = spec.mutable_schedule()->mutable_cosine();
  cosine->set_warmup_rounds(4);
  cosine->set_final(1e-4);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 0, 104), 1e-3 / 5);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 3, 104), 1e-3 * 4 / 5);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 4, 104), 1e-3);
  EXPECT_NEAR(LearningRate(spec, 54, 104), 5.5e-4, 1e-18);
  EXPECT_NEAR(LearningRate(spec, 29, 104), 1e-4 + 9e-4 * 0.5 * (1 + std::cos(std::numbers::pi / 4)), 1e-18);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 104, 104), 1e-4);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 500, 104), 1e-4);
  auto* linear = spec.mutable_schedule()->mutable_linear();
  linear->set_warmup_rounds(0);
  linear->set_final(0);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 0, 10), 1e-3);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 5, 10), 5e-4);
  linear->set_warmup_rounds(20);  // longer than the job: it ends within the warm-up
  EXPECT_DOUBLE_EQ(LearningRate(spec, 9, 10), 1e-3 * 10 / 21);
}

TEST_F(OptimizerTest, PortableMathAgreesWithTheLibrary) {
  std::mt19937_64 bits(3);
  for (int i = 0; i < 100000; ++i) {
    const double u = static_cast<double>((bits() >> 11) + 1) * 0x1p-53;
    EXPECT_NEAR(PortableLog(u), std::log(u), 4e-16 * std::max(1.0, std::abs(std::log(u))));
    const SinCos angle = PortableSinCos(u);
    // The library's argument 2 pi u is itself rounded.
    EXPECT_NEAR(angle.sin, std::sin(2 * std::numbers::pi * u), 1e-15);
    EXPECT_NEAR(angle.cos, std::cos(2 * std::numbers::pi * u), 1e-15);
  }
  for (const double x : {1e-300, 0x1p-53, 0.5, 1.0, 2.0, 3.0, 1e300}) {
    EXPECT_NEAR(PortableLog(x), std::log(x), 4e-16 * std::max(1.0, std::abs(std::log(x))));
  }
  EXPECT_EQ(PortableLog(1), 0);
  for (const uint64_t t : {0, 1, 2, 3, 10, 1000, 1000000}) {
    EXPECT_NEAR(PortablePower(0.999, t), std::pow(0.999, t), 1e-13);
  }
}

TEST_F(OptimizerTest, PrintsSpeed) {
  constexpr size_t kN = 1 << 16;  // stays in the second-level cache: the arithmetic is what is measured
  const std::vector<float> sum = Random(kN, 1);
  std::vector<float> value = Random(kN, 2), slot0(kN), slot1(kN), out(kN);
  const auto measure = [&](const char* what, double bytes, const auto& body) {
    double best = 1e9;
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      body();
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    printf("%12s %6.1f GB/s\n", what, bytes * kN / best / 1e9);
  };
  for (const std::string& target : DispatchTargets()) {
    ForceDispatchTarget(target);
    printf("%s\n", target.c_str());
    for (const UpdateRule::Kind kind : kKinds) {
      const UpdateRule rule = MakeUpdateRule(Spec(kind), 0, 1);
      const char* names[] = {"sgd", "momentum", "adam", "adamw"};
      measure(names[kind], 12 + 8 * SlotCount(kind), [&] {
        ApplyUpdate(rule, true, 1, sum.data(), value.data(), value.data(), slot0.data(), slot1.data(), kN);
      });
    }
    int bad = 0;
    double squares = 0;
    measure("add", 12, [&] { bad |= AddAndCheck(sum.data(), value.data(), out.data(), kN); });
    measure("norm", 4, [&] { squares += SumOfSquares(sum.data(), kN); });
    EXPECT_EQ(bad, 0);
    EXPECT_GT(squares, 0);
  }
}

}  // namespace
}  // namespace sluice
