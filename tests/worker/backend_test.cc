// Conformance of backends: products, element-wise operations, memory, order and bits. Every operation against a plain
// reference in double, over awkward sizes, threads, positions in memory, and values that are not finite.
#include "worker/backend/backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/backend_fixture.h"
#include "worker/backend/host_backend.h"

namespace sluice {
namespace {

BACKENDS_UNDER_TEST(BackendTest);

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
    backend_->AddBiasResidual(*stream_, rows, cols, Put(residual), at, b, {}, at);
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

// --- memory, order, bits ---

TEST_P(BackendTest, BitsDoNotDependOnAlignmentOrOnWhatRanBefore) {
  const int64_t m = 70, n = 45, k = 130;
  const Numbers a = RandomNumbers(m * k, 60), b = RandomNumbers(k * n, 61);
  const Numbers qkv = RandomNumbers(2 * 30 * 3 * 16, 62);
  Numbers product, attention, norm;
  for (const int64_t shift : {0, 1, 3, 8, 15, 0}) {
    const Floats c = Put(Numbers(m * n), shift), y = Put(Numbers(60 * 16), shift);
    backend_->Gemm(*stream_, m, n, k, 1, {Put(a, shift), k}, {Put(b, shift), n}, 0, {c, n});
    backend_->Attention(*stream_, {2, 30, 2, 8}, {}, Put(qkv, shift), y, Put(Numbers(120), shift));
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
