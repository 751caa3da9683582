// Layer norm and its gradient.
#include <cmath>

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

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(LayerNormBlock);
HWY_EXPORT(LayerNormInputBlock);
HWY_EXPORT(LayerNormWeightBlock);

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

}  // namespace sluice::kernels
#endif  // HWY_ONCE
