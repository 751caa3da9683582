// Dropout of every backend: masks against the scalar Philox, bit for bit, in every division; gradients by differences.
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "tests/worker/backend_fixture.h"
// Which instruction sets there is code for: before Highway's headers.
// clang-format off
#include "worker/backend/block.h"
#include "hwy/targets.h"
// clang-format on

namespace sluice {
namespace {

class BackendDropoutTest : public BackendTest {
 protected:
  // First samples on both sides of 2^32, rows from the middle of a sample on.
  static DropoutMask Mask(double probability = 0.25) {
    DropoutMask mask;
    mask.probability = probability;
    mask.key = 0x0123456789abcdefu;
    mask.first_sample = 0x2fffffffeu;
    mask.first_head = 3;
    mask.first_row = 2;
    mask.length = 3;
    return mask;
  }
  static float RowFactor(const DropoutMask& mask, int64_t row, int64_t column) {
    const int64_t at = mask.first_row + row;
    return DropoutFactor(mask, mask.first_sample + static_cast<uint64_t>(at / mask.length), at % mask.length, 0,
                         column);
  }
  static Numbers Dropped(const DropoutMask& mask, int64_t rows, int64_t cols, Numbers x) {
    for (int64_t i = 0; i < rows * cols; ++i) x[i] *= RowFactor(mask, i / cols, i % cols);
    return x;
  }
};

BACKENDS_UNDER_TEST(BackendDropoutTest);

TEST_P(BackendDropoutTest, LeavesOutWhatTheCountersSay) {
  for (const auto& [rows, cols] : kShapes) {
    const Numbers x = RandomNumbers(rows * cols, 70);
    for (const double probability : {0.25, 0.1, 0.999}) {
      const DropoutMask mask = Mask(probability);
      const Numbers expected = Dropped(mask, rows, cols, x);
      const Floats in = Put(x, 3), out = Put(Numbers(rows * cols, kNan), 1);
      backend_->Dropout(*stream_, rows, cols, in, mask, out);
      EXPECT_EQ(Get(out, rows * cols), expected) << rows << " x " << cols;
      backend_->Dropout(*stream_, rows, cols, in, mask, in);
      EXPECT_EQ(Get(in, rows * cols), expected) << "in place";
    }
    const Floats copy = Put(Numbers(rows * cols, kNan));
    backend_->Dropout(*stream_, rows, cols, Put(x), {}, copy);
    EXPECT_EQ(Get(copy, rows * cols), x) << "probability 0: a copy";
  }
}

TEST_P(BackendDropoutTest, AddBiasResidual) {
  for (const auto& [rows, cols] : kShapes) {
    const Numbers x = RandomNumbers(rows * cols, 71), residual = RandomNumbers(rows * cols, 72),
                  bias = RandomNumbers(cols, 73);
    Numbers expected(x.size());
    for (int64_t i = 0; i < rows * cols; ++i) {
      expected[i] = residual[i] + (x[i] + bias[i % cols]) * RowFactor(Mask(), i / cols, i % cols);
    }
    const Floats at = Put(x), onto = Put(residual), b = Put(bias);
    backend_->AddBiasResidual(*stream_, rows, cols, onto, at, b, Mask(), at);
    EXPECT_EQ(Get(at, rows * cols), expected) << rows << " x " << cols;
    backend_->AddBiasResidual(*stream_, rows, cols, onto, Put(x), b, Mask(), onto);
    EXPECT_EQ(Get(onto, rows * cols), expected) << "onto the residual";
  }
}

TEST_P(BackendDropoutTest, EveryInstructionSetHasTheSameMasks) {
  const absl::Cleanup restore = [] { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); };
  const int64_t rows = 7, cols = 201;
  const Numbers x = RandomNumbers(rows * cols, 74), expected = Dropped(Mask(), rows, cols, x);
  int targets = 0;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1, ++targets) {
    hwy::GetChosenTarget().Update(left & -left);
    const Floats at = Put(x);
    backend_->Dropout(*stream_, rows, cols, at, Mask(), at);
    EXPECT_EQ(Get(at, rows * cols), expected) << hwy::TargetName(left & -left);
  }
  EXPECT_GE(targets, 1);
}

TEST_P(BackendDropoutTest, LeavesOutTheShareThatIsAskedFor) {
  const int64_t rows = 500, cols = 403;
  const Floats ones = Put(Numbers(rows * cols, 1.0f)), out = Zeros(rows * cols);
  const auto kept_by = [&](const DropoutMask& mask) {
    backend_->Dropout(*stream_, rows, cols, ones, mask, out);
    return Get(out, rows * cols);
  };
  for (const double p : {0.1, 0.5, 0.9}) {
    const Numbers y = kept_by(Mask(p));
    double kept = 0;
    for (const float value : y) {
      if (value == 0) continue;
      ASSERT_EQ(value, static_cast<float>(1 / (1 - p))) << "the inverse of the share that is kept";
      ++kept;
    }
    const double n = static_cast<double>(y.size()), deviation = std::sqrt(n * p * (1 - p));
    EXPECT_NEAR(kept, n * (1 - p), 5 * deviation) << p;
    // Of another key, sample or time step: as often both as independent ones.
    DropoutMask key = Mask(p), sample = Mask(p), time = Mask(p);
    key.key += uint64_t{1} << 32;
    sample.first_sample += 1000;
    time.first_row += 1;
    for (const DropoutMask& other : {key, sample, time}) {
      const Numbers z = kept_by(other);
      double both = 0;
      for (size_t i = 0; i < y.size(); ++i) both += y[i] != 0 && z[i] != 0;
      const double q = (1 - p) * (1 - p);
      EXPECT_NEAR(both, n * q, 5 * std::sqrt(n * q * (1 - q))) << p;
    }
  }
}

TEST_P(BackendDropoutTest, RowsOfAPartAreThoseOfTheWhole) {
  const int64_t rows = 17, cols = 33;
  const Numbers x = RandomNumbers(rows * cols, 75), whole = Dropped(Mask(), rows, cols, x);
  for (const int64_t first : {0, 1, 5, 16, 17}) {
    DropoutMask mask = Mask();
    mask.first_row += first;
    const Floats part = Put(Numbers(x.begin() + first * cols, x.end()));
    backend_->Dropout(*stream_, rows - first, cols, part, mask, part);
    EXPECT_EQ(Get(part, (rows - first) * cols), Numbers(whole.begin() + first * cols, whole.end())) << first;
  }
}

constexpr AttentionShape kAttentionShapes[] = {{0, 4, 2, 3}, {1, 1, 1, 1}, {2, 5, 3, 7}, {1, 30, 2, 4}};

TEST_P(BackendDropoutTest, AttentionAndItsGradient) {
  for (const AttentionShape& s : kAttentionShapes) {
    const int64_t c = s.heads * s.head_width, n = s.batch * s.length;
    const Numbers qkv = RandomNumbers(n * 3 * c, 76, 2), dy = RandomNumbers(n * c, 77);
    const Floats at = Put(qkv), y = Put(Numbers(n * c, kNan)), log_sum = Zeros(n * s.heads),
                 d = Put(Numbers(n * 3 * c, kNan));
    backend_->Attention(*stream_, s, Mask(), at, y, log_sum);
    ExpectNear(Get(y, n * c), AttentionOf(s, Mask(), ToDouble(qkv)), 4e-6, "attention");
    backend_->AttentionGradient(*stream_, s, Mask(), at, y, log_sum, Put(dy), d);
    ExpectNear(Get(d, n * 3 * c),
               Differences([&](const Doubles& v) { return Dot(AttentionOf(s, Mask(), v), dy); }, ToDouble(qkv)), 1e-5,
               "attention gradient of length " + std::to_string(s.length));
  }
  const AttentionShape long_one = {2, 130, 2, 33};
  const Numbers qkv = RandomNumbers(2 * 130 * 3 * 66, 78, 3);
  const Floats y = Zeros(2 * 130 * 66);
  backend_->Attention(*stream_, long_one, Mask(), Put(qkv), y, Zeros(2 * 130 * 2));
  ExpectNear(Get(y, 2 * 130 * 66), AttentionOf(long_one, Mask(), ToDouble(qkv)), 4e-6, "a long one");
}

// Heads [first, first + count) of all samples, as one rank has them; and back.
Numbers HeadsOf(const Numbers& all, int64_t rows, int64_t heads, int64_t width, int64_t first, int64_t count) {
  Numbers some;
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = all.begin() + i * heads * width;
    some.insert(some.end(), row + first * width, row + (first + count) * width);
  }
  return some;
}

TEST_P(BackendDropoutTest, HeadsAndSamplesOfAPartAreThoseOfTheWhole) {
  const AttentionShape s = {3, 29, 4, 5};
  const int64_t c = 20, n = s.batch * s.length;
  const Numbers qkv = RandomNumbers(n * 3 * c, 79), dy = RandomNumbers(n * c, 80);
  const auto run = [&](AttentionShape shape, const DropoutMask& mask, const Numbers& in, const Numbers& gradient) {
    const int64_t rows = shape.batch * shape.length, width = shape.heads * shape.head_width;
    const Floats at = Put(in), y = Zeros(rows * width), log_sum = Zeros(rows * shape.heads),
                 d = Zeros(rows * 3 * width);
    backend_->Attention(*stream_, shape, mask, at, y, log_sum);
    backend_->AttentionGradient(*stream_, shape, mask, at, y, log_sum, Put(gradient), d);
    return std::pair(Get(y, rows * width), Get(d, rows * 3 * width));
  };
  const auto [y, d] = run(s, Mask(), qkv, dy);
  for (const int64_t first : {0, 2, 3}) {
    DropoutMask mask = Mask();
    mask.first_head += first;
    const int64_t heads = first == 0 ? 2 : 1;
    const auto [some_y, some_d] =
        run({3, 29, heads, 5}, mask, HeadsOf(qkv, n * 3, 4, 5, first, heads), HeadsOf(dy, n, 4, 5, first, heads));
    EXPECT_EQ(some_y, HeadsOf(y, n, 4, 5, first, heads)) << first;
    EXPECT_EQ(some_d, HeadsOf(d, n * 3, 4, 5, first, heads)) << first;
  }
  DropoutMask mask = Mask();
  mask.first_sample += 1;
  const auto [later_y, later_d] =
      run({2, 29, 4, 5}, mask, Numbers(qkv.begin() + 29 * 3 * c, qkv.end()), Numbers(dy.begin() + 29 * c, dy.end()));
  EXPECT_EQ(later_y, Numbers(y.begin() + 29 * c, y.end()));
  EXPECT_EQ(later_d, Numbers(d.begin() + 29 * 3 * c, d.end()));
}

TEST_P(BackendDropoutTest, ThreadsAndDevicesHaveTheSameBits) {
  const AttentionShape s = {5, 40, 3, 8};
  const int64_t c = 24, n = s.batch * s.length;
  const Numbers qkv = RandomNumbers(n * 3 * c, 81), dy = RandomNumbers(n * c, 82);
  const auto run = [&](Backend& backend) {
    const std::unique_ptr<Stream> stream = backend.NewStream();
    const std::shared_ptr<Buffer> memory = backend.Allocate(4 * (n * 8 * c + n * s.heads)).value();
    const Floats at = {memory.get(), 0}, y = at + n * 3 * c, g = y + n * c, d = g + n * c, log_sum = d + n * 3 * c;
    backend.Upload(*stream, qkv.data(), memory.get(), 0, n * 3 * c * 4);
    backend.Upload(*stream, dy.data(), memory.get(), g.first * 4, n * c * 4);
    backend.Attention(*stream, s, Mask(), at, y, log_sum);
    backend.AttentionGradient(*stream, s, Mask(), at, y, log_sum, g, d);
    Numbers found(static_cast<size_t>(n * 8 * c));
    backend.Download(*stream, memory.get(), 0, n * 8 * c * 4, found.data());
    EXPECT_TRUE(backend.Synchronize(*stream).ok());
    return found;
  };
  const std::unique_ptr<Backend> one = MakeBackend({}).value();
  EXPECT_EQ(run(*backend_), run(*one));
}

TEST_P(BackendDropoutTest, WhatIsNotFiniteStaysSo) {
  const int64_t cols = 67;
  Numbers x(cols, 1.0f);
  const Numbers kept = Dropped(Mask(), 1, cols, x);
  const auto out = std::find(kept.begin(), kept.end(), 0.0f) - kept.begin();
  const auto in = std::find_if(kept.begin(), kept.end(), [](float v) { return v != 0; }) - kept.begin();
  ASSERT_LT(out, cols);
  for (const float value : {kNan, kInf}) {
    x[out] = x[in] = value;
    const Floats at = Put(x);
    backend_->Dropout(*stream_, 1, cols, at, Mask(), at);
    const Numbers y = Get(at, cols);
    EXPECT_TRUE(std::isnan(y[out])) << "0 times " << value;
    EXPECT_FALSE(std::isfinite(y[in]));
  }
  // A value of key 20 reaches every query that sees it, dropped or not, and no other channel.
  const AttentionShape s = {1, 60, 1, 8};
  Numbers qkv = RandomNumbers(60 * 24, 83);
  qkv[20 * 24 + 16] = kNan;
  const Floats y = Zeros(60 * 8);
  backend_->Attention(*stream_, s, Mask(0.5), Put(qkv), y, Zeros(60));
  const Numbers found = Get(y, 60 * 8);
  for (int64_t t = 20; t < 60; ++t) EXPECT_TRUE(std::isnan(found[t * 8])) << t;
  for (int64_t i = 0; i < 60 * 8; ++i) {
    EXPECT_TRUE(i % 8 == 0 || std::isfinite(found[i])) << i;
  }
}

}  // namespace
}  // namespace sluice
