// The conformance suite of backends: every operation against a plain reference in double, gradients against finite
// differences of the reference, over awkward sizes, threads, positions in memory, and values that are not finite.
#include "worker/backend/backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "common/philox.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/backend/host_backend.h"

namespace sluice {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using Doubles = std::vector<double>;
using Numbers = std::vector<float>;

Numbers RandomNumbers(int64_t n, uint32_t stream, float scale = 1.0f) {
  Numbers values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = Philox4x32({static_cast<uint32_t>(i), stream, 0, 0}, {3, 9})[0];
    values[i] = scale * (static_cast<float>(bits) / 2147483648.0f - 1.0f);
  }
  return values;
}

Doubles ToDouble(const Numbers& values) { return Doubles(values.begin(), values.end()); }

// `tolerance` is relative to the largest expected value (and at least to 1). Not a number must meet its like.
void ExpectNear(const Numbers& found, const Doubles& expected, double tolerance, const std::string& what) {
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
Doubles Differences(const std::function<double(const Doubles&)>& f, Doubles x) {
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

double Dot(const Doubles& a, const Numbers& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
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

INSTANTIATE_TEST_SUITE_P(All, BackendTest,
                         ::testing::Values(std::make_tuple("cpu", 1, 0), std::make_tuple("cpu", 3, 0),
                                           std::make_tuple("fake_device", 1, 0), std::make_tuple("fake_device", 2, 7)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_threads_" + std::to_string(std::get<1>(info.param)) +
                                  "_delays_" + std::to_string(std::get<2>(info.param));
                         });

// --- products ---

struct Product {
  int64_t m, n, k;
  bool a_transposed, b_transposed;
  float alpha, beta;
};

Doubles Reference(const Product& p, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                  const Numbers& c) {
  Doubles result(c.size());
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (int64_t q = 0; q < p.k; ++q) {
        sum += double{p.a_transposed ? a[q * a_stride + i] : a[i * a_stride + q]} *
               (p.b_transposed ? b[j * b_stride + q] : b[q * b_stride + j]);
      }
      result[i * p.n + j] = p.alpha * sum + (p.beta == 0 ? 0.0 : p.beta * double{c[i * p.n + j]});
    }
  }
  return result;
}

TEST_P(BackendTest, Gemm) {
  const std::tuple<int64_t, int64_t, int64_t> sizes[] = {
      {0, 3, 2}, {3, 0, 2}, {3, 2, 0}, {1, 1, 1}, {1, 65, 33}, {7, 5, 3}, {17, 1, 129}, {130, 70, 31}, {300, 200, 257}};
  for (const auto& [m, n, k] : sizes) {
    for (int variant = 0; variant < 8; ++variant) {
      const Product p = {m,
                         n,
                         k,
                         variant % 2 == 1,
                         variant / 2 % 2 == 1,
                         variant % 3 == 0 ? 1.0f : -0.5f,
                         variant < 4    ? 0.0f
                         : variant == 4 ? 1.0f
                                        : 0.25f};
      const int64_t a_stride = (p.a_transposed ? m : k) + 3, b_stride = (p.b_transposed ? k : n) + 1;
      const Numbers a = RandomNumbers((p.a_transposed ? k : m) * a_stride, 1);
      const Numbers b = RandomNumbers((p.b_transposed ? n : k) * b_stride, 2);
      // beta 0 must not read what lies there.
      const Numbers c = p.beta == 0 ? Numbers(m * n, kNan) : RandomNumbers(m * n, 3);
      const Floats out = Put(c);
      backend_->Gemm(*stream_, m, n, k, p.alpha, {Put(a), a_stride, p.a_transposed}, {Put(b), b_stride, p.b_transposed},
                     p.beta, {out, n});
      ExpectNear(Get(out, m * n), Reference(p, a.data(), a_stride, b.data(), b_stride, c), 2e-6,
                 "gemm " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " variant " +
                     std::to_string(variant));
    }
  }
}

TEST_P(BackendTest, GemmOfWeightGradients) {
  // Rows a multiple of 512 bytes apart, read by columns; the second has a rest in every direction.
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{384, 64, 64}, {600, 70, 250}}) {
    const int64_t a_stride = (m + 127) / 128 * 128;
    const Numbers a = RandomNumbers(k * a_stride, 7), b = RandomNumbers(k * n, 8), c = RandomNumbers(m * n, 9);
    for (const float beta : {0.0f, 1.0f}) {
      const Floats out = Put(c);
      backend_->Gemm(*stream_, m, n, k, 1, {Put(a), a_stride, true}, {Put(b), n}, beta, {out, n});
      ExpectNear(Get(out, m * n), Reference({m, n, k, true, false, 1, beta}, a.data(), a_stride, b.data(), n, c), 2e-6,
                 "weight gradient");
    }
  }
}

TEST_P(BackendTest, GemmCarriesNanAndInfinity) {
  Numbers a = RandomNumbers(20 * 30, 1), b = RandomNumbers(30 * 70, 2);
  a[5 * 30 + 7] = kNan;
  a[6 * 30 + 29] = kInf;
  b[3 * 70 + 69] = 0;
  b[29 * 70 + 1] = 0;  // infinity times zero
  b[3 * 70 + 2] = kNan;
  const Floats c = Zeros(20 * 70);
  backend_->Gemm(*stream_, 20, 70, 30, 1, {Put(a), 30}, {Put(b), 70}, 0, {c, 70});
  ExpectNear(Get(c, 20 * 70), Reference({20, 70, 30, false, false, 1, 0}, a.data(), 30, b.data(), 70, Numbers(20 * 70)),
             2e-6, "gemm");
}

TEST_P(BackendTest, BatchedGemm) {
  for (const int64_t batch : {0, 1, 5}) {
    for (const int64_t k : {0, 9}) {
      const Product p = {6, 11, k, false, true, 2, 0.5};
      const Numbers a = RandomNumbers(batch * (6 * k + 4), 4), b = RandomNumbers(batch * 11 * k, 5);
      const Numbers c = RandomNumbers(batch * 66, 6);
      const Floats out = Put(c);
      backend_->BatchedGemm(*stream_, batch, 6, 11, k, 2, {Put(a), k}, 6 * k + 4, {Put(b), k, true}, 11 * k, 0.5,
                            {out, 11}, 66);
      const Numbers found = Get(out, batch * 66);
      for (int64_t i = 0; i < batch; ++i) {
        const Numbers one(c.begin() + i * 66, c.begin() + (i + 1) * 66);
        ExpectNear(Numbers(found.begin() + i * 66, found.begin() + (i + 1) * 66),
                   Reference(p, a.data() + i * (6 * k + 4), k, b.data() + i * 11 * k, k, one), 2e-6, "batched");
      }
    }
  }
}

// --- element-wise ---

double GeluOf(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double GeluSlopeOf(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), t = std::tanh(u);
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

const std::pair<int64_t, int64_t> kShapes[] = {{0, 5}, {5, 0}, {1, 1}, {3, 7}, {1, 64}, {37, 33}, {130, 515}};

TEST_P(BackendTest, ElementWise) {
  for (const auto& [rows, cols] : kShapes) {
    const int64_t n = rows * cols;
    const std::string what = std::to_string(rows) + "x" + std::to_string(cols);
    Numbers x = RandomNumbers(n, 10, 6), residual = RandomNumbers(n, 11), dy = RandomNumbers(n, 12);
    const Numbers bias = RandomNumbers(cols, 13), sums = RandomNumbers(cols, 14);
    if (n > 20) {
      x[3] = kNan;
      x[11] = kInf;
      x[12] = 80;
      x[13] = -80;
      x[14] = -1000;
      x[15] = 0;
    }
    Doubles plus(n), add(n), gelu(n), relu(n), column(sums.begin(), sums.end());
    Doubles gelu_dx(n), gelu_bias = column, relu_dx(n), relu_bias = column;
    for (int64_t i = 0; i < n; ++i) {
      plus[i] = x[i] + bias[i % cols];  // in float, as the kernels have it
      add[i] = double{residual[i]} + x[i] + bias[i % cols];
      gelu[i] = GeluOf(plus[i]);
      relu[i] = std::isnan(plus[i]) ? plus[i] : std::max(plus[i], 0.0);
      gelu_dx[i] = std::isinf(plus[i]) ? dy[i] : dy[i] * GeluSlopeOf(plus[i]);
      relu_dx[i] = relu[i] <= 0 ? 0 : dy[i];
      column[i % cols] += dy[i];
      gelu_bias[i % cols] += gelu_dx[i];
      relu_bias[i % cols] += relu_dx[i];
    }
    const Floats b = Put(bias);
    Floats at = Put(x);
    backend_->AddBias(*stream_, rows, cols, at, b);
    ExpectNear(Get(at, n), plus, 1e-7, "AddBias " + what);
    at = Put(x);
    backend_->AddBiasResidual(*stream_, rows, cols, Put(residual), at, b, at);
    ExpectNear(Get(at, n), add, 1e-6, "AddBiasResidual " + what);
    Floats into = Put(sums);
    backend_->BiasGradient(*stream_, rows, cols, Put(dy), into);
    ExpectNear(Get(into, cols), column, 2e-6, "BiasGradient " + what);

    at = Put(x);
    const Floats y = Zeros(n);
    backend_->BiasGelu(*stream_, rows, cols, at, b, y);
    ExpectNear(Get(at, n), plus, 1e-7, "BiasGelu, x " + what);
    ExpectNear(Get(y, n), gelu, 1e-6, "BiasGelu " + what);
    into = Put(sums);
    Floats d = Put(dy);
    backend_->BiasGeluGradient(*stream_, rows, cols, at, d, into);
    ExpectNear(Get(d, n), gelu_dx, 2e-6, "BiasGeluGradient " + what);
    ExpectNear(Get(into, cols), gelu_bias, 4e-6, "BiasGeluGradient, bias " + what);

    at = Put(x);
    backend_->BiasRelu(*stream_, rows, cols, at, b);
    ExpectNear(Get(at, n), relu, 1e-7, "BiasRelu " + what);
    into = Put(sums);
    d = Put(dy);
    backend_->BiasReluGradient(*stream_, rows, cols, at, d, into);
    ExpectNear(Get(d, n), relu_dx, 1e-7, "BiasReluGradient " + what);
    ExpectNear(Get(into, cols), relu_bias, 2e-6, "BiasReluGradient, bias " + what);
  }
}

TEST_P(BackendTest, GeluSlopeIsThatOfFiniteDifferences) {
  const Numbers x = RandomNumbers(100, 15, 5);
  const Floats dy = Put(Numbers(100, 1.0f)), bias = Zeros(100);
  backend_->BiasGeluGradient(*stream_, 1, 100, Put(x), dy, bias);
  Doubles expected;
  for (const float v : x) expected.push_back((GeluOf(v + 1e-5) - GeluOf(v - 1e-5)) / 2e-5);
  ExpectNear(Get(dy, 100), expected, 1e-6, "gelu'");
}

TEST_P(BackendTest, Fill) {
  const Floats x = Put(Numbers(1001, 2.0f));
  backend_->Fill(*stream_, x + 1, 999, -3.5f);
  const Numbers found = Get(x, 1001);
  EXPECT_EQ(found.front(), 2.0f);
  EXPECT_EQ(found.back(), 2.0f);
  EXPECT_THAT(Numbers(found.begin() + 1, found.end() - 1), ::testing::Each(-3.5f));
}

// --- layer norm ---

Doubles LayerNormOf(int64_t rows, int64_t cols, const Doubles& x, const Doubles& weight, const Doubles& bias) {
  Doubles y(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    double mean = 0, variance = 0;
    for (int64_t j = 0; j < cols; ++j) mean += x[i * cols + j] / cols;
    for (int64_t j = 0; j < cols; ++j) variance += std::pow(x[i * cols + j] - mean, 2) / cols;
    for (int64_t j = 0; j < cols; ++j) {
      y[i * cols + j] = (x[i * cols + j] - mean) / std::sqrt(variance + 1e-5) * weight[j] + bias[j];
    }
  }
  return y;
}

TEST_P(BackendTest, LayerNorm) {
  for (const auto& [rows, cols] : kShapes) {
    Numbers x = RandomNumbers(rows * cols, 20, 3);
    if (rows > 30) x[40] = kNan;  // its row only
    const Numbers weight = RandomNumbers(cols, 21), bias = RandomNumbers(cols, 22);
    const Floats y = Zeros(rows * cols), mean = Zeros(rows), rstd = Zeros(rows);
    backend_->LayerNorm(*stream_, rows, cols, 1e-5f, Put(x), Put(weight), Put(bias), y, mean, rstd);
    ExpectNear(Get(y, rows * cols), LayerNormOf(rows, cols, ToDouble(x), ToDouble(weight), ToDouble(bias)), 2e-6,
               "LayerNorm " + std::to_string(rows) + "x" + std::to_string(cols));
  }
}

TEST_P(BackendTest, LayerNormGradient) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {3, 7}, {5, 32}, {4, 45}}) {
    const int64_t n = rows * cols;
    const Numbers x = RandomNumbers(n, 23, 2), weight = RandomNumbers(cols, 24), bias = RandomNumbers(cols, 25);
    const Numbers dy = RandomNumbers(n, 26), dx0 = RandomNumbers(n, 27), dw0 = RandomNumbers(cols, 28);
    const Floats at = Put(x), w = Put(weight), y = Zeros(n), mean = Zeros(rows), rstd = Zeros(rows);
    backend_->LayerNorm(*stream_, rows, cols, 1e-5f, at, w, Put(bias), y, mean, rstd);
    const Floats dx = Put(dx0), dw = Put(dw0), db = Put(dw0);
    backend_->LayerNormGradient(*stream_, rows, cols, at, w, mean, rstd, Put(dy), dx, dw, db);
    const auto loss = [&, rows = rows, cols = cols](const Doubles& a, const Doubles& b, const Doubles& c) {
      return Dot(LayerNormOf(rows, cols, a, b, c), dy);
    };
    const auto plus = [](Doubles a, const Numbers& b) {
      for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
      return a;
    };
    const Doubles dX =
        Differences([&](const Doubles& v) { return loss(v, ToDouble(weight), ToDouble(bias)); }, ToDouble(x));
    const Doubles dW =
        Differences([&](const Doubles& v) { return loss(ToDouble(x), v, ToDouble(bias)); }, ToDouble(weight));
    const Doubles dB =
        Differences([&](const Doubles& v) { return loss(ToDouble(x), ToDouble(weight), v); }, ToDouble(bias));
    ExpectNear(Get(dx, n), plus(dX, dx0), 1e-5, "dx");
    ExpectNear(Get(dw, cols), plus(dW, dw0), 1e-5, "dweight");
    ExpectNear(Get(db, cols), plus(dB, dw0), 1e-5, "dbias");
  }
}

// --- attention ---

Doubles AttentionOf(AttentionShape s, const Doubles& qkv) {
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
          for (int64_t d = 0; d < s.head_width; ++d)
            p[u] += at(t, 0, d) * at(u, 1, d) / std::sqrt(double(s.head_width));
          top = std::max(top, p[u]);
        }
        for (double& v : p) sum += v = std::exp(v - top);
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

TEST_P(BackendTest, Attention) {
  const AttentionShape shapes[] = {{0, 4, 2, 3}, {2, 0, 2, 3},   {1, 1, 1, 1},
                                   {2, 5, 3, 7}, {1, 24, 1, 16}, {2, 67, 2, 33}};
  for (const AttentionShape& s : shapes) {
    const int64_t c = s.heads * s.head_width, n = s.batch * s.length;
    const Numbers qkv = RandomNumbers(n * 3 * c, 30, 3);
    const Floats y = Put(Numbers(n * c, kNan));
    backend_->Attention(*stream_, s, Put(qkv), y, Zeros(n * s.heads));
    ExpectNear(Get(y, n * c), AttentionOf(s, ToDouble(qkv)), 4e-6, "attention of length " + std::to_string(s.length));
  }
}

TEST_P(BackendTest, AttentionGradient) {
  const AttentionShape shapes[] = {{0, 4, 2, 3}, {1, 1, 1, 1}, {2, 5, 3, 7}, {1, 30, 2, 4}};
  for (const AttentionShape& s : shapes) {
    const int64_t c = s.heads * s.head_width, n = s.batch * s.length;
    const Numbers qkv = RandomNumbers(n * 3 * c, 31, 2), dy = RandomNumbers(n * c, 32);
    const Floats at = Put(qkv), y = Zeros(n * c), log_sum = Zeros(n * s.heads), d = Put(Numbers(n * 3 * c, kNan));
    backend_->Attention(*stream_, s, at, y, log_sum);
    backend_->AttentionGradient(*stream_, s, at, y, log_sum, Put(dy), d);
    ExpectNear(Get(d, n * 3 * c),
               Differences([&](const Doubles& v) { return Dot(AttentionOf(s, v), dy); }, ToDouble(qkv)), 1e-5,
               "attention gradient of length " + std::to_string(s.length));
  }
}

TEST_P(BackendTest, AttentionDoesNotSeeTheFuture) {
  const AttentionShape s = {1, 60, 2, 8};
  Numbers qkv = RandomNumbers(60 * 48, 33);
  const Floats y = Zeros(60 * 16), log_sum = Zeros(120);
  backend_->Attention(*stream_, s, Put(qkv), y, log_sum);
  const Numbers before = Get(y, 60 * 16);
  for (size_t i = 50 * 48; i < qkv.size(); ++i) qkv[i] = 1e3f;
  qkv[20 * 48 + 3] = kNan;  // a query: reaches its own row of its head only
  backend_->Attention(*stream_, s, Put(qkv), y, log_sum);
  const Numbers after = Get(y, 60 * 16);
  for (int64_t t = 0; t < 50; ++t) {
    for (int64_t j = 0; j < 16; ++j) {
      if (t == 20 && j < 8) {
        EXPECT_TRUE(std::isnan(after[t * 16 + j]));
      } else {
        EXPECT_EQ(before[t * 16 + j], after[t * 16 + j]) << t;
      }
    }
  }
}

// --- embedding ---

TEST_P(BackendTest, Embedding) {
  for (const auto& [batch, length, width] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 3, 4}, {1, 1, 1}, {3, 5, 7}, {40, 9, 130}}) {
    const int64_t n = batch * length, vocabulary = 6;
    const Numbers wte = RandomNumbers(vocabulary * width, 40), wpe = RandomNumbers(length * width, 41);
    const Numbers dx = RandomNumbers(n * width, 42);
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>(i * i % 5));  // token 5 never occurs
    Doubles x, dwte = ToDouble(wte), dwpe = ToDouble(wpe);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        x.push_back(double{wte[tokens[i] * width + j]} + wpe[i % length * width + j]);
        dwte[tokens[i] * width + j] += dx[i * width + j];
        dwpe[i % length * width + j] += dx[i * width + j];
      }
    }
    const Ints at = Put(tokens);
    const Floats token = Put(wte), position = Put(wpe), out = Zeros(n * width);
    backend_->Embedding(*stream_, batch, length, width, at, token, position, out);
    ExpectNear(Get(out, n * width), x, 1e-6, "Embedding");
    backend_->EmbeddingGradient(*stream_, batch, length, width, at, Put(dx), token, position);
    ExpectNear(Get(token, vocabulary * width), dwte, 2e-6, "dwte");
    ExpectNear(Get(position, length * width), dwpe, 2e-6, "dwpe");
  }
}

// --- cross-entropy ---

double CrossEntropyOf(int64_t rows, int64_t classes, const Doubles& logits, const std::vector<int32_t>& targets) {
  double loss = 0;
  for (int64_t i = 0; i < rows; ++i) {
    if (targets[i] < 0) continue;
    double top = -kInf, sum = 0;
    for (int64_t j = 0; j < classes; ++j) top = std::max(top, logits[i * classes + j]);
    for (int64_t j = 0; j < classes; ++j) sum += std::exp(logits[i * classes + j] - top);
    loss += std::log(sum) + top - logits[i * classes + targets[i]];
  }
  return loss;
}

TEST_P(BackendTest, CrossEntropy) {
  for (const auto& [rows, classes] : {std::pair<int64_t, int64_t>{0, 4}, {1, 2}, {9, 7}, {5, 65}, {50, 33}}) {
    const Numbers logits = RandomNumbers(rows * classes, 50, 8);
    std::vector<int32_t> targets;
    double count = 0, correct = 0;
    for (int64_t i = 0; i < rows; ++i) {
      targets.push_back(static_cast<int32_t>(i * 5 % (classes + 1)) - 1);
      const auto row = logits.begin() + i * classes;
      if (i % 3 == 0) targets[i] = static_cast<int32_t>(std::max_element(row, row + classes) - row);
      count += targets[i] >= 0;
      correct += targets[i] == std::max_element(row, row + classes) - row;
    }
    const View<double> sums = Put(Doubles{10, 20, 30});
    const Floats at = Put(logits);
    const Ints target = Put(targets);
    backend_->CrossEntropy(*stream_, rows, classes, at, target, false, sums);
    EXPECT_EQ(Get(at, rows * classes), logits);
    backend_->CrossEntropy(*stream_, rows, classes, at, target, true, sums);
    const Doubles found = Get(sums, 3);
    const double loss = CrossEntropyOf(rows, classes, ToDouble(logits), targets);
    EXPECT_NEAR(found[0], 10 + 2 * loss, 1e-6 * (1 + loss));
    EXPECT_EQ(found[1], 20 + 2 * count);
    EXPECT_EQ(found[2], 30 + 2 * correct);
    ExpectNear(Get(at, rows * classes),
               Differences([&, rows = rows,
                            classes = classes](const Doubles& v) { return CrossEntropyOf(rows, classes, v, targets); },
                           ToDouble(logits)),
               1e-6, "gradient");
  }
}

TEST_P(BackendTest, CrossEntropyOfOddRows) {
  const float far = 1e4f;
  // A tie (the first counts), huge logits, NaN, infinity.
  const Numbers logits = {1, 1, 0, /**/ 1, 1, 0, /**/ far, -far, 0, /**/ 0, kNan, 1, /**/ kInf, 0, 0};
  const auto sums_of = [&](std::vector<int32_t> targets) {
    const View<double> sums = Put(Doubles(3, 0.0));
    backend_->CrossEntropy(*stream_, 5, 3, Put(logits), Put(targets), false, sums);
    return Get(sums, 3);
  };
  Doubles sums = sums_of({0, 1, 0, -1, -1});
  EXPECT_NEAR(sums[0], 2 * std::log(2 + std::exp(-1)), 1e-6);
  EXPECT_EQ(sums[1], 3);
  EXPECT_EQ(sums[2], 2);
  EXPECT_NEAR(sums_of({-1, -1, 1, -1, -1})[0], 2e4, 1e-2);
  sums = sums_of({-1, -1, -1, 2, -1});
  EXPECT_TRUE(std::isnan(sums[0]));
  EXPECT_EQ(sums[2], 0);
  EXPECT_TRUE(std::isnan(sums_of({-1, -1, -1, -1, 1})[0]));
}

// --- memory, order, bits ---

TEST_P(BackendTest, BitsDoNotDependOnAlignmentOrOnWhatRanBefore) {
  const int64_t m = 70, n = 45, k = 130;
  const Numbers a = RandomNumbers(m * k, 60), b = RandomNumbers(k * n, 61);
  const Numbers qkv = RandomNumbers(2 * 30 * 3 * 16, 62);
  Numbers product, attention, norm;
  for (const int64_t shift : {0, 1, 3, 8, 15, 0}) {
    const Floats c = Put(Numbers(m * n), shift), y = Put(Numbers(60 * 16), shift);
    backend_->Gemm(*stream_, m, n, k, 1, {Put(a, shift), k}, {Put(b, shift), n}, 0, {c, n});
    backend_->Attention(*stream_, {2, 30, 2, 8}, Put(qkv, shift), y, Put(Numbers(120), shift));
    const Floats x = Put(a, shift), out = Put(a, shift);
    backend_->LayerNorm(*stream_, m, k, 1e-5f, x, Put(b, shift), Put(b, shift), out, Zeros(m), Zeros(m));
    if (product.empty()) {
      product = Get(c, m * n);
      attention = Get(y, 60 * 16);
      norm = Get(out, m * k);
    }
    EXPECT_EQ(Get(c, m * n), product) << shift;
    EXPECT_EQ(Get(y, 60 * 16), attention) << shift;
    EXPECT_EQ(Get(out, m * k), norm) << shift;
  }
}

TEST_P(BackendTest, EqualProfilesGiveEqualBits) {
  BackendOptions options;
  options.threads = std::get<1>(GetParam());
  const std::unique_ptr<Backend> cpu = MakeBackend(options).value();
  EXPECT_EQ(cpu->numeric_profile(), backend_->numeric_profile());
  EXPECT_THAT(cpu->numeric_profile(),
              ::testing::MatchesRegex("cpu/onednn-[0-9.]+/[a-z0-9_+-]+/threads-" + std::to_string(options.threads)));
  const Numbers x = RandomNumbers(333 * 65, 63);
  const Floats at = Put(x), y = Zeros(333 * 65), bias = Zeros(65);
  backend_->BiasGelu(*stream_, 333, 65, at, bias, y);
  const std::unique_ptr<Stream> stream = cpu->NewStream();
  const std::shared_ptr<Buffer> memory = cpu->Allocate(4 * (2 * 333 * 65 + 65)).value();
  const Floats other = {memory.get(), 0};
  cpu->Upload(*stream, x.data(), memory.get(), 0, x.size() * 4);
  cpu->BiasGelu(*stream, 333, 65, other, other + 2 * 333 * 65, other + 333 * 65);
  Numbers found(x.size());
  cpu->Download(*stream, memory.get(), x.size() * 4, x.size() * 4, found.data());
  ASSERT_TRUE(cpu->Synchronize(*stream).ok());
  EXPECT_EQ(Get(y, 333 * 65), found);
}

TEST_P(BackendTest, AStreamWaitsForAnEventOfAnother) {
  const std::unique_ptr<Stream> second = backend_->NewStream();
  const Floats x = Zeros(1000);
  Numbers found(1000);
  for (int round = 1; round <= 50; ++round) {
    backend_->Fill(*stream_, x, 1000, static_cast<float>(round));
    backend_->Wait(*second, backend_->Record(*stream_));
    backend_->Download(*second, x.buffer, 0, 4000, found.data());
    const std::shared_ptr<Event> event = backend_->Record(*second);
    backend_->Wait(*stream_, event);
    ASSERT_TRUE(event->Wait().ok());
    EXPECT_TRUE(event->done());
    ASSERT_THAT(found, ::testing::Each(static_cast<float>(round)));
  }
  EXPECT_TRUE(backend_->Synchronize(*second).ok());
}

TEST_P(BackendTest, MemoryIsZeroedAndHostMemoryAligned) {
  const std::shared_ptr<Buffer> buffer = backend_->Allocate(4 * 5000).value();
  EXPECT_EQ(buffer->bytes(), 20000);
  EXPECT_THAT(Get(Floats{buffer.get(), 0}, 5000), ::testing::Each(0.0f));
  const std::shared_ptr<void> host = backend_->AllocateHost(100).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(host.get()) % 64, 0u);
  EXPECT_EQ(static_cast<const char*>(host.get())[99], 0);
  EXPECT_TRUE(backend_->Allocate(0).ok());
  EXPECT_FALSE(backend_->Allocate(-1).ok());
  EXPECT_EQ(backend_->Allocate(int64_t{1} << 60).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_P(BackendTest, StreamsOfSeveralThreadsShareABackend) {
  const Numbers a = RandomNumbers(90 * 90, 64);
  const Doubles expected = Reference({90, 90, 90, false, false, 1, 0}, a.data(), 90, a.data(), 90, Numbers(8100));
  const Floats at = Put(a);
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<Buffer>> outs;
  std::atomic<int> good = 0;
  for (int i = 0; i < 4; ++i) outs.push_back(backend_->Allocate(8100 * 4).value());
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::unique_ptr<Stream> stream = backend_->NewStream();
      Numbers found(8100);
      for (int round = 0; round < 10; ++round) {
        backend_->Gemm(*stream, 90, 90, 90, 1, {at, 90}, {at, 90}, 0, {{outs[i].get(), 0}, 90});
        backend_->Download(*stream, outs[i].get(), 0, 8100 * 4, found.data());
        good += backend_->Synchronize(*stream).ok();
      }
      ExpectNear(found, expected, 2e-6, "product");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 40);
}

TEST(FakeDeviceDeathTest, HostCodeCannotTouchDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BackendOptions options;
  options.kind = "fake_device";
  const std::unique_ptr<Backend> backend = MakeBackend(options).value();
  EXPECT_EQ(backend->WrapHost(backend->AllocateHost(64).value(), 64), nullptr);
  const std::shared_ptr<Buffer> device = backend->Allocate(4096).value();
  volatile char* memory = static_cast<char*>(static_cast<HostBuffer*>(device.get())->memory());
  EXPECT_DEATH(memory[0] = 1, "");
  // After an operation it is closed again.
  const std::unique_ptr<Stream> stream = backend->NewStream();
  backend->Fill(*stream, {device.get(), 0}, 1024, 1.0f);
  ASSERT_TRUE(backend->Synchronize(*stream).ok());
  EXPECT_DEATH(memory[4095] = 1, "");
}

TEST(MakeBackendTest, RefusesWhatItDoesNotKnow) {
  BackendOptions options;
  options.kind = "tpu";
  EXPECT_EQ(MakeBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(MakeBackend(options).status().message()), ::testing::HasSubstr("'tpu'"));
  options.kind = "cpu";
  for (const int threads : {0, -1, 1025}) {
    options.threads = threads;
    EXPECT_EQ(MakeBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace sluice
