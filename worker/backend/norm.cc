// Operations with sums along a row: layer norm and softmax cross-entropy.
#include <cmath>
#include <limits>
#include <vector>

#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/norm.cc"
#include "hwy/foreach_target.h"
// Highway wants its header after foreach_target.
#include "hwy/highway.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

HWY_INLINE float Sum(D d, V v) { return hn::GetLane(hn::SumOfLanes(d, v)); }

void LayerNormBlock(Block b, float epsilon, const float* x, const float* weight, const float* bias, float* y,
                    float* mean, float* rstd) {
  const D d;
  const float width = static_cast<float>(b.cols);
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const float* row = x + i * b.cols;
    V sum = hn::Zero(d);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR { sum = hn::Add(sum, io.Load(d, row + j)); });
    const float m = Sum(d, sum) / width;
    const V vm = hn::Set(d, m);
    V squares = hn::Zero(d);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      const V v = hn::Sub(io.Load(d, row + j, m), vm);
      squares = hn::MulAdd(v, v, squares);
    });
    const float r = 1.0f / std::sqrt(Sum(d, squares) / width + epsilon);
    const V vr = hn::Set(d, r);
    float* out = y + i * b.cols;
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      const V v = hn::Mul(hn::Sub(io.Load(d, row + j), vm), vr);
      io.Store(d, hn::MulAdd(v, io.Load(d, weight + j), io.Load(d, bias + j)), out + j);
    });
    mean[i] = m;
    rstd[i] = r;
  }
}

// With g = dy weight and h = (x - mean) rstd: dx = rstd (g - mean(g) - h mean(g h)).
void LayerNormInputBlock(Block b, const float* x, const float* weight, const float* mean, const float* rstd,
                         const float* dy, float* dx) {
  const D d;
  const float width = static_cast<float>(b.cols);
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const float* row = x + i * b.cols;
    const float* g_row = dy + i * b.cols;
    const V vm = hn::Set(d, mean[i]), vr = hn::Set(d, rstd[i]);
    V sum_g = hn::Zero(d), sum_gh = hn::Zero(d);
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      const V g = hn::Mul(io.Load(d, g_row + j), io.Load(d, weight + j));
      const V h = hn::Mul(hn::Sub(io.Load(d, row + j, mean[i]), vm), vr);
      sum_g = hn::Add(sum_g, g);
      sum_gh = hn::MulAdd(g, h, sum_gh);
    });
    const V mean_g = hn::Set(d, Sum(d, sum_g) / width), mean_gh = hn::Set(d, Sum(d, sum_gh) / width);
    float* out = dx + i * b.cols;
    ForVectors(d, 0, b.cols, [&](auto io, int64_t j) HWY_ATTR {
      const V g = hn::Mul(io.Load(d, g_row + j), io.Load(d, weight + j));
      const V h = hn::Mul(hn::Sub(io.Load(d, row + j), vm), vr);
      const V v = hn::NegMulAdd(h, mean_gh, hn::Sub(g, mean_g));
      io.Store(d, hn::MulAdd(vr, v, io.Load(d, out + j)), out + j);
    });
  }
}

void LayerNormWeightBlock(Block b, const float* x, const float* mean, const float* rstd, const float* dy,
                          float* dweight, float* dbias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t at = i * b.cols;
    const V vm = hn::Set(d, mean[i]), vr = hn::Set(d, rstd[i]);
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V g = io.Load(d, dy + at + j);
      const V h = hn::Mul(hn::Sub(io.Load(d, x + at + j), vm), vr);
      io.Store(d, hn::MulAdd(g, h, io.Load(d, dweight + j)), dweight + j);
      io.Store(d, hn::Add(io.Load(d, dbias + j), g), dbias + j);
    });
  }
}

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

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(LayerNormBlock);
HWY_EXPORT(LayerNormInputBlock);
HWY_EXPORT(LayerNormWeightBlock);
HWY_EXPORT(CrossEntropyBlock);

void LayerNorm(TaskPool& pool, int64_t rows, int64_t cols, float epsilon, const float* x, const float* weight,
               const float* bias, float* y, float* mean, float* rstd) {
  ByRows(pool, rows, cols, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(LayerNormBlock)(block, epsilon, x, weight, bias, y, mean, rstd);
  });
}

void LayerNormGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, const float* weight,
                       const float* mean, const float* rstd, const float* dy, float* dx, float* dweight, float* dbias) {
  ByRows(pool, rows, cols, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(LayerNormInputBlock)(block, x, weight, mean, rstd, dy, dx);
  });
  ByColumns(pool, rows, cols, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(LayerNormWeightBlock)(block, x, mean, rstd, dy, dweight, dbias);
  });
}

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
