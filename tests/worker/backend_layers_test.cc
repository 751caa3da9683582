// Conformance of backends: the operations of layers (layer norm, attention, embedding, cross-entropy), gradients
// against finite differences of a reference in double.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/backend_fixture.h"

namespace sluice {
namespace {

using BackendLayersTest = BackendTest;
BACKENDS_UNDER_TEST(BackendLayersTest);

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

TEST_P(BackendLayersTest, LayerNorm) {
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

TEST_P(BackendLayersTest, LayerNormGradient) {
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

TEST_P(BackendLayersTest, Attention) {
  const AttentionShape shapes[] = {{0, 4, 2, 3}, {2, 0, 2, 3},   {1, 1, 1, 1},
                                   {2, 5, 3, 7}, {1, 24, 1, 16}, {2, 67, 2, 33}};
  for (const AttentionShape& s : shapes) {
    const int64_t c = s.heads * s.head_width, n = s.batch * s.length;
    const Numbers qkv = RandomNumbers(n * 3 * c, 30, 3);
    const Floats y = Put(Numbers(n * c, kNan));
    backend_->Attention(*stream_, s, {}, Put(qkv), y, Zeros(n * s.heads));
    ExpectNear(Get(y, n * c), AttentionOf(s, {}, ToDouble(qkv)), 4e-6,
               "attention of length " + std::to_string(s.length));
  }
}

TEST_P(BackendLayersTest, AttentionGradient) {
  const AttentionShape shapes[] = {{0, 4, 2, 3}, {1, 1, 1, 1}, {2, 5, 3, 7}, {1, 30, 2, 4}};
  for (const AttentionShape& s : shapes) {
    const int64_t c = s.heads * s.head_width, n = s.batch * s.length;
    const Numbers qkv = RandomNumbers(n * 3 * c, 31, 2), dy = RandomNumbers(n * c, 32);
    const Floats at = Put(qkv), y = Zeros(n * c), log_sum = Zeros(n * s.heads), d = Put(Numbers(n * 3 * c, kNan));
    backend_->Attention(*stream_, s, {}, at, y, log_sum);
    backend_->AttentionGradient(*stream_, s, {}, at, y, log_sum, Put(dy), d);
    ExpectNear(Get(d, n * 3 * c),
               Differences([&](const Doubles& v) { return Dot(AttentionOf(s, {}, v), dy); }, ToDouble(qkv)), 1e-5,
               "attention gradient of length " + std::to_string(s.length));
  }
}

TEST_P(BackendLayersTest, AttentionDoesNotSeeTheFuture) {
  const AttentionShape s = {1, 60, 2, 8};
  Numbers qkv = RandomNumbers(60 * 48, 33);
  const Floats y = Zeros(60 * 16), log_sum = Zeros(120);
  backend_->Attention(*stream_, s, {}, Put(qkv), y, log_sum);
  const Numbers before = Get(y, 60 * 16);
  for (size_t i = 50 * 48; i < qkv.size(); ++i) qkv[i] = 1e3f;
  qkv[20 * 48 + 3] = kNan;  // a query: reaches its own row of its head only
  backend_->Attention(*stream_, s, {}, Put(qkv), y, log_sum);
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

TEST_P(BackendLayersTest, Embedding) {
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
    backend_->Embedding(*stream_, batch, length, width, at, {0, vocabulary}, token, position, out);
    ExpectNear(Get(out, n * width), x, 1e-6, "Embedding");
    backend_->EmbeddingGradient(*stream_, batch, length, width, at, {0, vocabulary}, Put(dx), token, position);
    ExpectNear(Get(token, vocabulary * width), dwte, 2e-6, "dwte");
    ExpectNear(Get(position, length * width), dwpe, 2e-6, "dwpe");
  }
}

// Two ranks with two and four rows of the table, the first one with the positions: the sum is the whole.
TEST_P(BackendLayersTest, EmbeddingOfSomeRows) {
  const int64_t batch = 3, length = 5, width = 7, n = batch * length, vocabulary = 6;
  const Numbers wte = RandomNumbers(vocabulary * width, 43), wpe = RandomNumbers(length * width, 44);
  const Numbers dx = RandomNumbers(n * width, 45);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>(i * i % 6));
  const Ints at = Put(tokens);
  const Floats token = Put(wte), position = Put(wpe), whole = Zeros(n * width), one = Zeros(n * width),
               two = Zeros(n * width);
  backend_->Embedding(*stream_, batch, length, width, at, {0, vocabulary}, token, position, whole);
  backend_->Embedding(*stream_, batch, length, width, at, {0, 2}, token, position, one);
  backend_->Embedding(*stream_, batch, length, width, at, {2, 4}, token + 2 * width, {}, two);
  Numbers sum = Get(one, n * width);
  const Numbers second = Get(two, n * width);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += second[i];
  EXPECT_EQ(sum, Get(whole, n * width));

  const Floats dwte = Zeros(vocabulary * width), dwpe = Zeros(length * width), parts = Zeros(vocabulary * width),
               positions = Zeros(length * width), d = Put(dx);
  backend_->EmbeddingGradient(*stream_, batch, length, width, at, {0, vocabulary}, d, dwte, dwpe);
  backend_->EmbeddingGradient(*stream_, batch, length, width, at, {0, 2}, d, parts, positions);
  backend_->EmbeddingGradient(*stream_, batch, length, width, at, {2, 4}, d, parts + 2 * width, {});
  EXPECT_EQ(Get(parts, vocabulary * width), Get(dwte, vocabulary * width));
  EXPECT_EQ(Get(positions, length * width), Get(dwpe, length * width));
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

TEST_P(BackendLayersTest, CrossEntropy) {
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

// Ranks hold columns of the logits: the sums of all and each one's part of the gradient.
TEST_P(BackendLayersTest, CrossEntropyOfSomeClasses) {
  for (const auto& [n, classes, ranks] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 4, 2}, {1, 2, 2}, {9, 7, 3}, {5, 65, 2}, {50, 33, 4}, {4, 6, 1}}) {
    Numbers logits = RandomNumbers(n * classes, 52, 8);
    if (n == 9) logits[3 * classes + 5] = logits[3 * classes + 1] = 100;  // a tie between two ranks
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < n; ++i) targets.push_back(static_cast<int32_t>(i * 5 % (classes + 1)) - 1);
    const View<double> expected = Put(Doubles{1, 2, 3});
    const Floats whole = Put(logits);
    const Ints target = Put(targets);
    backend_->CrossEntropy(*stream_, n, classes, whole, target, true, expected);
    const Numbers gradient = Get(whole, n * classes);
    const Floats parts = Zeros(ranks * n * 4);
    std::vector<TableRows> rows;
    std::vector<Floats> own;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t first = classes * r / ranks;
      rows.push_back({first, classes * (r + 1) / ranks - first});
      Numbers columns;
      for (int64_t i = 0; i < n; ++i) {
        columns.insert(columns.end(), logits.begin() + i * classes + first,
                       logits.begin() + i * classes + first + rows[r].count);
      }
      own.push_back(Put(columns));
      backend_->CrossEntropyPart(*stream_, n, rows[r], own[r], target, parts + r * n * 4);
    }
    for (int64_t r = 0; r < ranks; ++r) {
      const View<double> sums = Put(Doubles{1, 2, 3});
      backend_->CrossEntropyJoin(*stream_, n, rows[r], ranks, own[r], target, parts, true, sums);
      const Doubles found = Get(sums, 3), wanted = Get(expected, 3);
      EXPECT_NEAR(found[0], wanted[0], 1e-5 * std::abs(wanted[0]));
      EXPECT_EQ(found[1], wanted[1]);
      EXPECT_EQ(found[2], wanted[2]);
      const Numbers part = Get(own[r], n * rows[r].count);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < rows[r].count; ++j) {
          EXPECT_NEAR(part[i * rows[r].count + j], gradient[i * classes + rows[r].first + j], 1e-6)
              << "rank " << r << " row " << i << " column " << j;
        }
      }
    }
  }
}

TEST_P(BackendLayersTest, CrossEntropyOfOddRows) {
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

double SigmoidCrossEntropyOf(const Doubles& logits, const std::vector<int32_t>& targets) {
  double loss = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] < 0) continue;
    const double z = targets[i] == 1 ? logits[i] : -logits[i];
    loss += z > 0 ? std::log1p(std::exp(-z)) : std::log1p(std::exp(z)) - z;
  }
  return loss;
}

TEST_P(BackendLayersTest, SigmoidCrossEntropy) {
  for (const int64_t rows : {0, 1, 9, 50}) {
    const Numbers logits = RandomNumbers(rows, 51, 8);
    std::vector<int32_t> targets;
    double count = 0, correct = 0;
    for (int64_t i = 0; i < rows; ++i) {
      targets.push_back(static_cast<int32_t>(i * 5 % 3) - 1);
      count += targets[i] >= 0;
      correct += targets[i] == (logits[i] > 0 ? 1 : 0);
    }
    const View<double> sums = Put(Doubles{10, 20, 30});
    const Floats at = Put(logits);
    const Ints target = Put(targets);
    backend_->SigmoidCrossEntropy(*stream_, rows, at, target, false, sums);
    EXPECT_EQ(Get(at, rows), logits);
    backend_->SigmoidCrossEntropy(*stream_, rows, at, target, true, sums);
    const Doubles found = Get(sums, 3);
    const double loss = SigmoidCrossEntropyOf(ToDouble(logits), targets);
    EXPECT_NEAR(found[0], 10 + 2 * loss, 1e-12 * (1 + loss));
    EXPECT_EQ(found[1], 20 + 2 * count);
    EXPECT_EQ(found[2], 30 + 2 * correct);
    ExpectNear(Get(at, rows),
               Differences([&](const Doubles& v) { return SigmoidCrossEntropyOf(v, targets); }, ToDouble(logits)), 1e-6,
               "gradient");
  }
}

TEST_P(BackendLayersTest, SigmoidCrossEntropyOfOddRows) {
  const auto sums_of = [&](float logit, int32_t target) {
    const View<double> sums = Put(Doubles(3, 0.0));
    backend_->SigmoidCrossEntropy(*stream_, 1, Put(Numbers{logit}), Put(std::vector<int32_t>{target}), false, sums);
    return Get(sums, 3);
  };
  EXPECT_NEAR(sums_of(0, 1)[0], std::log(2), 1e-15);
  EXPECT_EQ(sums_of(0, 1)[2], 0);  // a tie: the first class, as with two logits
  EXPECT_EQ(sums_of(0, 0)[2], 1);
  EXPECT_NEAR(sums_of(1e4f, 0)[0], 1e4, 1e-9);
  EXPECT_NEAR(sums_of(-1e4f, 1)[0], 1e4, 1e-9);
  EXPECT_EQ(sums_of(1e4f, 1)[0], 0);
  EXPECT_EQ(sums_of(3, -1)[1], 0);
  for (const int32_t target : {0, 1}) {
    EXPECT_TRUE(std::isnan(sums_of(kNan, target)[0]));
    EXPECT_EQ(sums_of(kNan, target)[2], 0);
  }
}

}  // namespace
}  // namespace sluice
