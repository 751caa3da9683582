// What the conformance tests of backends share: numbers, comparisons with a reference in double, a backend under test.
#ifndef SLUICE_TESTS_WORKER_BACKEND_FIXTURE_H_
#define SLUICE_TESTS_WORKER_BACKEND_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/philox.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/backend/backend.h"

namespace sluice {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
// Rows and columns: empty, single, odd, wider than a vector.
inline constexpr std::pair<int64_t, int64_t> kShapes[] = {{0, 5},  {5, 0},   {1, 1},    {3, 7},
                                                          {1, 64}, {37, 33}, {130, 515}};

using Doubles = std::vector<double>;
using Numbers = std::vector<float>;

inline Numbers RandomNumbers(int64_t n, uint32_t stream, float scale = 1.0f) {
  Numbers values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = Philox4x32({static_cast<uint32_t>(i), stream, 0, 0}, {3, 9})[0];
    values[i] = scale * (static_cast<float>(bits) / 2147483648.0f - 1.0f);
  }
  return values;
}

inline Doubles ToDouble(const Numbers& values) { return Doubles(values.begin(), values.end()); }

// `tolerance` is relative to the largest expected value (and at least to 1). Not a number must meet its like.
inline void ExpectNear(const Numbers& found, const Doubles& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double largest = 1;
  for (const double value : expected) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::isfinite(expected[i])) {
      ASSERT_TRUE(std::isfinite(found[i])) << what << " [" << i << "]: " << found[i] << ", not " << expected[i];
      ASSERT_LE(std::abs(found[i] - expected[i]), tolerance * largest)
          << what << " [" << i << "]: " << found[i] << ", not " << expected[i];
    } else if (std::isnan(expected[i])) {
      ASSERT_TRUE(std::isnan(found[i])) << what << " [" << i << "]: " << found[i] << ", not NaN";
    } else {
      ASSERT_EQ(found[i], static_cast<float>(expected[i])) << what << " [" << i << "]";
    }
  }
}

// Gradient of f at x by central differences.
inline Doubles Differences(const std::function<double(const Doubles&)>& f, Doubles x) {
  Doubles gradient(x.size());
  const double h = 1e-5;
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + h;
    const double above = f(x);
    x[i] = at - h;
    gradient[i] = (above - f(x)) / (2 * h);
    x[i] = at;
  }
  return gradient;
}

inline double Dot(const Doubles& a, const Numbers& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// What dropout multiplies an element of one sample, time step and head with (DropoutMask in backend.h).
inline float DropoutFactor(const DropoutMask& mask, uint64_t sample, int64_t time, int64_t head, int64_t element) {
  if (mask.probability == 0) return 1;
  const auto words =
      Philox4x32({static_cast<uint32_t>(element / 4), static_cast<uint32_t>(time), static_cast<uint32_t>(sample),
                  static_cast<uint32_t>(sample >> 32) | static_cast<uint32_t>(head) << 16},
                 {static_cast<uint32_t>(mask.key), static_cast<uint32_t>(mask.key >> 32)});
  const bool out = words[element % 4] >> 8 < static_cast<uint32_t>(std::lround(mask.probability * 0x1p24));
  return out ? 0 : static_cast<float>(1 / (1 - mask.probability));
}

inline Doubles AttentionOf(AttentionShape s, const DropoutMask& mask, const Doubles& qkv) {
  const int64_t c = s.heads * s.head_width;
  Doubles y(s.batch * s.length * c);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const auto at = [&](int64_t t, int64_t part, int64_t d) {
        return qkv[((b * s.length + t) * 3 + part) * c + h * s.head_width + d];
      };
      for (int64_t t = 0; t < s.length; ++t) {
        Doubles p(t + 1, 0.0);
        double top = -kInf, sum = 0;
        for (int64_t u = 0; u <= t; ++u) {
          for (int64_t d = 0; d < s.head_width; ++d) {
            p[u] += at(t, 0, d) * at(u, 1, d) / std::sqrt(double(s.head_width));
          }
          top = std::max(top, p[u]);
        }
        for (double& v : p) sum += v = std::exp(v - top);
        for (int64_t u = 0; u <= t; ++u) p[u] *= DropoutFactor(mask, mask.first_sample + b, t, mask.first_head + h, u);
        for (int64_t d = 0; d < s.head_width; ++d) {
          double out = 0;
          for (int64_t u = 0; u <= t; ++u) out += p[u] / sum * at(u, 2, d);
          y[(b * s.length + t) * c + h * s.head_width + d] = out;
        }
      }
    }
  }
  return y;
}

// kind, threads, delay seed
class BackendTest : public ::testing::TestWithParam<std::tuple<std::string, int, uint64_t>> {
 protected:
  void SetUp() override {
    BackendOptions options;
    std::tie(options.kind, options.threads, options.delay_seed) = GetParam();
    backend_ = MakeBackend(options).value();
    stream_ = backend_->NewStream();
  }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_TRUE(backend_->Synchronize(*stream_).ok());
    }
  }

  // On the device, `shift` elements behind the buffer's begin.
  template <typename T>
  View<T> Put(const std::vector<T>& values, int64_t shift = 0) {
    const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T)), first = shift * sizeof(T);
    buffers_.push_back(backend_->Allocate(first + bytes).value());
    backend_->Upload(*stream_, values.data(), buffers_.back().get(), first, bytes);
    EXPECT_TRUE(backend_->Synchronize(*stream_).ok());
    return {buffers_.back().get(), shift};
  }
  Floats Zeros(int64_t n) { return Put(Numbers(static_cast<size_t>(n), 0.0f)); }

  template <typename T>
  std::vector<T> Get(View<T> view, int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    backend_->Download(*stream_, view.buffer, view.first * sizeof(T), n * sizeof(T), values.data());
    EXPECT_TRUE(backend_->Synchronize(*stream_).ok());
    return values;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
};

// In a test file: BACKENDS_UNDER_TEST(Suite) where Suite is BackendTest or derives from it.
#define BACKENDS_UNDER_TEST(Suite)                                                                            \
  INSTANTIATE_TEST_SUITE_P(                                                                                   \
      All, Suite,                                                                                             \
      ::testing::Values(std::make_tuple("cpu", 1, 0), std::make_tuple("cpu", 3, 0),                           \
                        std::make_tuple("fake_device", 1, 0), std::make_tuple("fake_device", 2, 7)),          \
      [](const auto& info) {                                                                                  \
        return std::get<0>(info.param) + "_threads_" + std::to_string(std::get<1>(info.param)) + "_delays_" + \
               std::to_string(std::get<2>(info.param));                                                       \
      })

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_BACKEND_FIXTURE_H_
