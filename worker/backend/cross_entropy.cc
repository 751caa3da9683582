// Softmax cross-entropy with its gradient, over all classes or over those that one rank holds; the same of one logit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/cross_entropy.cc"
#include "hwy/foreach_target.h"
// Highway wants its header after foreach_target.
#include "hwy/highway.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// loss[i] in nats and correct[i] of each row; rows without a target leave theirs alone.
void CrossEntropyBlock(Block b, float* logits, const int32_t* targets, bool gradient, double* loss, uint8_t* correct) {
  const D d;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    float* row = logits + i * b.cols;
    const int32_t target = targets[i];
    if (target < 0) {
      if (gradient) std::fill(row, row + b.cols, 0.0f);
      continue;
    }
    V largest = lowest;
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      largest = hn::Max(largest, io.Load(d, row + j, -std::numeric_limits<float>::infinity()));
    });
    const float top = hn::GetLane(hn::MaxOfLanes(d, largest));
    const V shift = hn::Set(d, top);
    V sum = hn::Zero(d);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      sum = hn::Add(sum, Exp(d, hn::Sub(io.Load(d, row + j, -std::numeric_limits<float>::infinity()), shift)));
    });
    const float total = Sum(d, sum);
    const float own = row[target];
    loss[i] = std::log(static_cast<double>(total)) - (static_cast<double>(own) - top);
    // The target is the answer where no earlier logit is as large; a NaN anywhere makes the loss NaN and no answer
    // right.
    correct[i] = own == top && !std::isnan(total) && std::find(row, row + target, top) == row + target;
    if (!gradient) continue;
    const V scale = hn::Set(d, 1.0f / total);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      io.Store(d, hn::Mul(Exp(d, hn::Sub(io.Load(d, row + j), shift)), scale), row + j);
    });
    row[target] -= 1.0f;
  }
}

void CrossEntropyPartBlock(Block b, int64_t first, const float* logits, const int32_t* targets, float* parts) {
  const D d;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const float* row = logits + i * b.cols;
    float* part = parts + 4 * i;
    V largest = hn::Set(d, kLowest);
    ForVectors(d, 0, b.cols,
               [&](auto io, int64_t j) HWY_ATTR { largest = hn::Max(largest, io.Load(d, row + j, kLowest)); });
    const float top = hn::GetLane(hn::MaxOfLanes(d, largest));
    const V shift = hn::Set(d, top);
    V sum = hn::Zero(d);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      sum = hn::Add(sum, Exp(d, hn::Sub(io.Load(d, row + j, kLowest), shift)));
    });
    const int64_t target = targets[i] - first;
    part[0] = top;
    part[1] = Sum(d, sum);
    part[2] = targets[i] >= 0 && target >= 0 && target < b.cols ? row[target] : 0.0f;
    part[3] = static_cast<float>(first + (std::find(row, row + b.cols, top) - row));
  }
}

// A row's logits become the gradient: exp(logit - top) scale, less 1 at the target.
void SoftmaxGradientBlock(Block b, int64_t first, const int32_t* targets, const float* top, const float* scale,
                          float* logits) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    float* row = logits + i * b.cols;
    if (targets[i] < 0) {
      std::fill(row, row + b.cols, 0.0f);
      continue;
    }
    const V shift = hn::Set(d, top[i]), factor = hn::Set(d, scale[i]);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      io.Store(d, hn::Mul(Exp(d, hn::Sub(io.Load(d, row + j), shift)), factor), row + j);
    });
    const int64_t target = targets[i] - first;
    if (target >= 0 && target < b.cols) row[target] -= 1.0f;
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(CrossEntropyBlock);
HWY_EXPORT(CrossEntropyPartBlock);
HWY_EXPORT(SoftmaxGradientBlock);

void CrossEntropy(TaskPool& pool, int64_t rows, int64_t classes, float* logits, const int32_t* targets, bool gradient,
                  double* sums) {
  std::vector<double> loss(rows, 0.0);
  std::vector<uint8_t> correct(rows, 0);
  ByRows(pool, rows, classes, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyBlock)(block, logits, targets, gradient, loss.data(), correct.data());
  });
  // Row by row, in one order.
  for (int64_t i = 0; i < rows; ++i) {
    if (targets[i] < 0) continue;
    sums[0] += loss[i];
    sums[1] += 1;
    sums[2] += correct[i];
  }
}

void CrossEntropyPart(TaskPool& pool, int64_t n, TableRows rows, const float* logits, const int32_t* targets,
                      float* parts) {
  ByRows(pool, n, rows.count, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyPartBlock)(block, rows.first, logits, targets, parts);
  });
}

void CrossEntropyJoin(TaskPool& pool, int64_t n, TableRows rows, int64_t ranks, float* logits, const int32_t* targets,
                      const float* parts, bool gradient, double* sums) {
  std::vector<float> top(n), scale(n);
  for (int64_t i = 0; i < n; ++i) {
    if (targets[i] < 0) continue;
    const auto part = [&](int64_t rank) { return parts + 4 * (rank * n + i); };
    int64_t best = 0;  // of equals the first
    for (int64_t r = 1; r < ranks; ++r) {
      if (part(r)[0] > part(best)[0]) best = r;
    }
    top[i] = part(best)[0];
    double total = 0, own = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      total += part(r)[1] * std::exp(static_cast<double>(part(r)[0]) - top[i]);
      own += part(r)[2];
    }
    scale[i] = static_cast<float>(1 / total);
    sums[0] += std::log(total) - (own - top[i]);
    sums[1] += 1;
    sums[2] += !std::isnan(total) && part(best)[3] == static_cast<float>(targets[i]);
  }
  if (!gradient) return;
  ByRows(pool, n, rows.count, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(SoftmaxGradientBlock)(block, rows.first, targets, top.data(), scale.data(), logits);
  });
}

// One number a row: too little for threads or vectors to gain.
void SigmoidCrossEntropy(int64_t rows, float* logits, const int32_t* targets, bool gradient, double* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t target = targets[i];
    if (target < 0) {
      if (gradient) logits[i] = 0;
      continue;
    }
    const double z = logits[i], small = std::exp(-std::abs(z));  // never overflows
    // log(1 + exp(z)) - target z
    sums[0] += std::max(z, 0.0) - target * z + std::log1p(small);
    sums[1] += 1;
    sums[2] += std::isnan(z) ? 0 : (z > 0) == (target == 1);
    if (gradient) logits[i] = static_cast<float>((z >= 0 ? 1 / (1 + small) : small / (1 + small)) - target);
  }
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
