// Dropout of rows, alone and with the addition to the residual stream.
#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/dropout.cc"
#include "hwy/foreach_target.h"
// Highway wants its header after foreach_target.
#include "hwy/highway.h"
#include "worker/backend/dropout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// body(io, index of the vector's first element, its column, factor) for all vectors of the block's rows.
template <class Body>
HWY_INLINE void ForRowsDropped(Block b, const DropoutMask& mask, Body body) {
  for (int64_t i = b.row_begin; i < b.row_end; ++i) {
    const int64_t row = mask.first_row + i;
    ForDropped(mask, mask.first_sample + static_cast<uint64_t>(row / mask.length), row % mask.length, 0, b.cols,
               [&](auto io, int64_t j, V factor) HWY_ATTR { body(io, i * b.cols + j, j, factor); });
  }
}

void DropoutBlock(Block b, const float* x, const DropoutMask& mask, float* y) {
  const D d;
  ForRowsDropped(b, mask, [&](auto io, int64_t at, int64_t, V factor) HWY_ATTR {
    io.Store(d, hn::Mul(io.Load(d, x + at), factor), y + at);
  });
}

void AddBiasDropoutResidualBlock(Block b, const float* residual, const float* x, const float* bias,
                                 const DropoutMask& mask, float* y) {
  const D d;
  ForRowsDropped(b, mask, [&](auto io, int64_t at, int64_t j, V factor) HWY_ATTR {
    const V sum = hn::Mul(hn::Add(io.Load(d, x + at), io.Load(d, bias + j)), factor);
    io.Store(d, hn::Add(io.Load(d, residual + at), sum), y + at);
  });
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(DropoutBlock);
HWY_EXPORT(AddBiasDropoutResidualBlock);

void Dropout(TaskPool& pool, int64_t rows, int64_t cols, const float* x, const DropoutMask& mask, float* y) {
  if (mask.probability == 0) {
    if (x != y) std::copy_n(x, rows * cols, y);
    return;
  }
  ByRows(pool, rows, cols, [&](Block block) { HWY_DYNAMIC_DISPATCH(DropoutBlock)(block, x, mask, y); });
}

void AddBiasDropoutResidual(TaskPool& pool, int64_t rows, int64_t cols, const float* residual, const float* x,
                            const float* bias, const DropoutMask& mask, float* y) {
  ByRows(pool, rows, cols, [&](Block block) {
    HWY_DYNAMIC_DISPATCH(AddBiasDropoutResidualBlock)(block, residual, x, bias, mask, y);
  });
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
