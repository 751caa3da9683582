// A small matrix product for Highway kernels; included once per instruction set, so with Highway's own kind of guard.
#if defined(SLUICE_WORKER_BACKEND_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_WORKER_BACKEND_TILE_PRODUCT_INL_H_
#undef SLUICE_WORKER_BACKEND_TILE_PRODUCT_INL_H_
#else
#define SLUICE_WORKER_BACKEND_TILE_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Columns are padded to two vectors, the width of a tile.
HWY_INLINE int64_t PaddedColumns(int64_t n) {
  const int64_t tile = 2 * static_cast<int64_t>(hn::Lanes(D()));
  return (n + tile - 1) / tile * tile;
}

// c [kRows, two vectors] = or += a b; element (i, p) of a lies at a[i * row_step + p * col_step].
template <int kRows>
HWY_INLINE void Tile(int64_t k, const float* HWY_RESTRICT a, int64_t row_step, int64_t col_step,
                     const float* HWY_RESTRICT b, int64_t b_stride, float* HWY_RESTRICT c, int64_t c_stride, bool add) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  V left[kRows], right[kRows];
  for (int i = 0; i < kRows; ++i) {
    left[i] = add ? hn::LoadU(d, c + i * c_stride) : hn::Zero(d);
    right[i] = add ? hn::LoadU(d, c + i * c_stride + lanes) : hn::Zero(d);
  }
  for (int64_t p = 0; p < k; ++p) {
    const V b_left = hn::LoadU(d, b + p * b_stride), b_right = hn::LoadU(d, b + p * b_stride + lanes);
    for (int i = 0; i < kRows; ++i) {
      const V a_ip = hn::Set(d, a[i * row_step + p * col_step]);
      left[i] = hn::MulAdd(a_ip, b_left, left[i]);
      right[i] = hn::MulAdd(a_ip, b_right, right[i]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    hn::StoreU(left[i], d, c + i * c_stride);
    hn::StoreU(right[i], d, c + i * c_stride + lanes);
  }
}

// c [m, n] = or += a [m, k] b [k, n]; n a multiple of two vectors, rows of b and c readable up to it.
HWY_INLINE void TileProduct(int64_t m, int64_t n, int64_t k, const float* a, int64_t row_step, int64_t col_step,
                            const float* b, int64_t b_stride, float* c, int64_t c_stride, bool add) {
  const int64_t tile = 2 * static_cast<int64_t>(hn::Lanes(D()));
  for (int64_t j = 0; j < n; j += tile) {
    int64_t i = 0;
    for (; i + 6 <= m; i += 6) {
      Tile<6>(k, a + i * row_step, row_step, col_step, b + j, b_stride, c + i * c_stride + j, c_stride, add);
    }
    for (; i + 2 <= m; i += 2) {
      Tile<2>(k, a + i * row_step, row_step, col_step, b + j, b_stride, c + i * c_stride + j, c_stride, add);
    }
    if (i < m) Tile<1>(k, a + i * row_step, row_step, col_step, b + j, b_stride, c + i * c_stride + j, c_stride, add);
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle guard
