// Bias, GELU and ReLU with their gradients.
#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/elementwise.cc"
#include "hwy/foreach_target.h"
// Highway wants its header after foreach_target.
#include "hwy/highway.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// With u = sqrt(2/pi) (x + 0.044715 x^3) and e = e^-2u: (1 + tanh u) / 2 = 1 / (1 + e) = s, so gelu = x s and
// gelu' = s + x e s^2 2u'.
HWY_INLINE V ExpMinus2u(D d, V x, V x2) {
  const V slope =
      hn::MulAdd(x2, hn::Set(d, -2 * 0.7978845608028654f * 0.044715f), hn::Set(d, -2 * 0.7978845608028654f));
  return Exp(d, hn::Mul(x, slope));
}

HWY_INLINE V Gelu(D d, V x) { return hn::Div(x, hn::Add(hn::Set(d, 1.0f), ExpMinus2u(d, x, hn::Mul(x, x)))); }

HWY_INLINE V GeluSlope(D d, V x) {
  const V x2 = hn::Mul(x, x), one = hn::Set(d, 1.0f);
  const V e = ExpMinus2u(d, x, x2);
  const V s = hn::Div(one, hn::Add(one, e));
  const V slope =
      hn::MulAdd(x2, hn::Set(d, 2 * 3 * 0.7978845608028654f * 0.044715f), hn::Set(d, 2 * 0.7978845608028654f));
  // Beyond 10 the second term is below 1e-35, and e may be infinite.
  const V rest = hn::Mul(hn::Mul(x, slope), hn::Mul(hn::Mul(e, s), s));
  return hn::Add(s, hn::IfThenZeroElse(hn::Gt(hn::Abs(x), hn::Set(d, 10.0f)), rest));
}

void AddBiasBlock(Block b, float* x, const float* bias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    float* row = x + i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      io.Store(d, hn::Add(io.Load(d, row + j), io.Load(d, bias + j)), row + j);
    });
  }
}

void BiasGradientBlock(Block b, const float* dy, float* dbias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const float* row = dy + i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      io.Store(d, hn::Add(io.Load(d, dbias + j), io.Load(d, row + j)), dbias + j);
    });
  }
}

void AddBiasResidualBlock(Block b, const float* residual, const float* x, const float* bias, float* y) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t at = i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V sum = hn::Add(io.Load(d, x + at + j), io.Load(d, bias + j));
      io.Store(d, hn::Add(io.Load(d, residual + at + j), sum), y + at + j);
    });
  }
}

void BiasGeluBlock(Block b, float* x, const float* bias, float* y) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t at = i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V v = hn::Add(io.Load(d, x + at + j), io.Load(d, bias + j));
      io.Store(d, v, x + at + j);
      io.Store(d, Gelu(d, v), y + at + j);
    });
  }
}

void BiasGeluGradientBlock(Block b, const float* x, float* dy, float* dbias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t at = i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V dx = hn::Mul(io.Load(d, dy + at + j), GeluSlope(d, io.Load(d, x + at + j)));
      io.Store(d, dx, dy + at + j);
      io.Store(d, hn::Add(io.Load(d, dbias + j), dx), dbias + j);
    });
  }
}

void BiasReluBlock(Block b, float* x, const float* bias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    float* row = x + i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V v = hn::Add(io.Load(d, row + j), io.Load(d, bias + j));
      io.Store(d, hn::IfThenZeroElse(hn::Le(v, hn::Zero(d)), v), row + j);
    });
  }
}

void BiasReluGradientBlock(Block b, const float* x, float* dy, float* dbias) {
  const D d;
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t at = i * b.cols;
    ForVectors(d, b.col_begin, b.col_end, [&](auto io, int64_t j) HWY_ATTR {
      const V dx = hn::IfThenZeroElse(hn::Le(io.Load(d, x + at + j), hn::Zero(d)), io.Load(d, dy + at + j));
      io.Store(d, dx, dy + at + j);
      io.Store(d, hn::Add(io.Load(d, dbias + j), dx), dbias + j);
    });
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(AddBiasBlock);
HWY_EXPORT(BiasGradientBlock);
HWY_EXPORT(AddBiasResidualBlock);
HWY_EXPORT(BiasGeluBlock);
HWY_EXPORT(BiasGeluGradientBlock);
HWY_EXPORT(BiasReluBlock);
HWY_EXPORT(BiasReluGradientBlock);

std::string VectorTarget() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;  // the lowest bit is the best
  return hwy::TargetName(targets & -targets);
}

void AddBias(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias) {
  ByRows(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(AddBiasBlock)(block, x, bias); });
}

void BiasGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* dy, float* dbias) {
  ByColumns(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(BiasGradientBlock)(block, dy, dbias); });
}

void AddBiasResidual(TaskPool& pool, int64_t rows, int64_t cols, const float* residual, const float* x,
                     const float* bias, float* y) {
  ByRows(pool, rows, cols, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(AddBiasResidualBlock)(block, residual, x, bias, y);
  });
}

void BiasGelu(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias, float* y) {
  ByRows(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(BiasGeluBlock)(block, x, bias, y); });
}

void BiasGeluGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, float* dy, float* dbias) {
  ByColumns(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(BiasGeluGradientBlock)(block, x, dy, dbias); });
}

void BiasRelu(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias) {
  ByRows(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(BiasReluBlock)(block, x, bias); });
}

void BiasReluGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, float* dy, float* dbias) {
  ByColumns(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(BiasReluGradientBlock)(block, x, dy, dbias); });
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
