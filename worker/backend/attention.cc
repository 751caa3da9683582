// Causal self-attention, one head of one sample at a time, a few rows of queries against the keys they see. The
// probabilities are not kept: the gradient computes them again from the logarithms of their denominators (Dao and
// others, "FlashAttention", 2022), and dropout's masks from their counters.
#include <cmath>
#include <limits>

#include "hwy/aligned_allocator.h"
#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/attention.cc"
#include "hwy/foreach_target.h"
// Highway wants its header after foreach_target.
#include "hwy/highway.h"
#include "worker/backend/dropout-inl.h"
#include "worker/backend/tile_product-inl.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

constexpr int64_t kQueries = 24;  // rows of queries at a time; a multiple of the tile's 6

// Scratch matrices of one thread, each with rows padded to whole tiles; zero at first.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(hwy::AllocateAligned<float>(floats)) {
    std::fill(memory_.get(), memory_.get() + floats, 0.0f);
  }
  float* Take(int64_t floats) {
    float* at = memory_.get() + taken_;
    taken_ += floats;
    return at;
  }

 private:
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  int64_t taken_ = 0;
};

// to [rows, stride] = from [rows, cols] with rows from_stride apart. The padding of `to` is left alone.
void Pack(int64_t rows, int64_t cols, const float* from, int64_t from_stride, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * from_stride, cols, to + i * stride);
}

// to [cols, stride] = the transpose of from [rows, cols], times factor.
void PackTransposed(int64_t rows, int64_t cols, const float* from, int64_t from_stride, float factor, float* to,
                    int64_t stride) {
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = 0; i < rows; ++i) to[j * stride + i] = factor * from[i * from_stride + j];
  }
}

// Scores of one row become e^(score - shift) for the first `seen` keys and 0 up to `padded`; returns their sum.
HWY_INLINE float ExpRow(float* row, int64_t seen, int64_t padded, float shift) {
  const D d;
  const V s = hn::Set(d, shift);
  V sum = hn::Zero(d);
  std::fill(row + seen, row + padded, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < padded; j += hn::Lanes(d)) {
    const V p = Exp(d, hn::Sub(hn::LoadU(d, row + j), s));
    hn::StoreU(p, d, row + j);
    sum = hn::Add(sum, p);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE float MaxRow(const float* row, int64_t seen) {
  const D d;
  const float lowest = -std::numeric_limits<float>::infinity();
  V largest = hn::Set(d, lowest);
  ForVectors(d, 0, seen, [&](auto io, int64_t j) HWY_ATTR { largest = hn::Max(largest, io.Load(d, row + j, lowest)); });
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// body(j, factor) for the vectors of the first `padded` keys, whole ones, as query `time` of head `head` of B * H drops
// them.
template <class Body>
HWY_INLINE void ForKeysDropped(const DropoutMask& mask, int64_t heads, int64_t head, int64_t time, int64_t padded,
                               Body body) {
  ForDropped(mask, mask.first_sample + static_cast<uint64_t>(head / heads), time, mask.first_head + head % heads,
             padded, [&](auto, int64_t j, V factor) HWY_ATTR { body(j, factor); });
}

void DropRow(const DropoutMask& mask, int64_t heads, int64_t head, int64_t time, int64_t padded, float* p) {
  const D d;
  ForKeysDropped(mask, heads, head, time, padded,
                 [&](int64_t j, V factor) HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, p + j), factor), d, p + j); });
}

// ds = scale p (ds - own).
HWY_INLINE void ScoreGradient(int64_t padded, float scale, float own, const float* p, float* ds) {
  const D d;
  const V vo = hn::Set(d, own), vs = hn::Set(d, scale);
  for (int64_t j = 0; j < padded; j += hn::Lanes(d)) {
    const V v = hn::Sub(hn::LoadU(d, ds + j), vo);
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, p + j), vs), v), d, ds + j);
  }
}

// The same with dropout's mask m: ds = scale p (m ds - own), then p = m p.
void ScoreGradientDropped(const DropoutMask& mask, int64_t heads, int64_t head, int64_t time, int64_t padded,
                          float scale, float own, float* p, float* ds) {
  const D d;
  const V vo = hn::Set(d, own), vs = hn::Set(d, scale);
  ForKeysDropped(mask, heads, head, time, padded, [&](int64_t j, V factor) HWY_ATTR {
    const V weight = hn::LoadU(d, p + j), v = hn::Sub(hn::Mul(hn::LoadU(d, ds + j), factor), vo);
    hn::StoreU(hn::Mul(hn::Mul(weight, vs), v), d, ds + j);
    hn::StoreU(hn::Mul(weight, factor), d, p + j);
  });
}

// Heads [begin, end) of B * H, sample by sample.
void AttentionHeads(AttentionShape shape, const DropoutMask& mask, int64_t begin, int64_t end, const float* qkv,
                    float* y, float* log_sum) {
  const int64_t T = shape.length, H = shape.heads, W = shape.head_width, C = H * W;
  const int64_t keys = PaddedColumns(T), width = PaddedColumns(W);
  const float scale = 1.0f / std::sqrt(static_cast<float>(W));
  Scratch scratch(W * keys + T * width + kQueries * (keys + width));
  float* kt = scratch.Take(W * keys);           // [W, keys]
  float* v = scratch.Take(T * width);           // [T, width]
  float* p = scratch.Take(kQueries * keys);     // [kQueries, keys]
  float* out = scratch.Take(kQueries * width);  // [kQueries, width]
  for (int64_t head = begin; head < end; ++head) {
    const float* q = qkv + head / H * T * 3 * C + head % H * W;
    PackTransposed(T, W, q + C, 3 * C, scale, kt, keys);
    Pack(T, W, q + 2 * C, 3 * C, v, width);
    float* y_head = y + head / H * T * C + head % H * W;
    for (int64_t first = 0; first < T; first += kQueries) {
      const int64_t rows = std::min(kQueries, T - first), seen = first + rows, padded = PaddedColumns(seen);
      TileProduct(rows, padded, W, q + first * 3 * C, 3 * C, 1, kt, keys, p, keys, false);
      float sums[kQueries];
      for (int64_t i = 0; i < rows; ++i) {
        const float top = MaxRow(p + i * keys, first + i + 1);
        sums[i] = ExpRow(p + i * keys, first + i + 1, padded, top);
        log_sum[head * T + first + i] = top + std::log(sums[i]);
        if (mask.probability > 0) DropRow(mask, H, head, first + i, padded, p + i * keys);
      }
      TileProduct(rows, width, seen, p, keys, 1, v, width, out, width, false);
      for (int64_t i = 0; i < rows; ++i) {
        float* to = y_head + (first + i) * C;
        for (int64_t j = 0; j < W; ++j) to[j] = out[i * width + j] / sums[i];
      }
    }
  }
}

// With s the scaled scores, p = e^(s - log_sum): dv = p^T dy, dp = dy v^T, ds = p (dp - sum_j dy_j y_j),
// dq = scale ds k, dk = scale ds^T q. With dropout's mask m: dv = (m p)^T dy, dp = m (dy v^T), and the rest is the
// same, for y = (m p) v.
void AttentionGradientHeads(AttentionShape shape, const DropoutMask& mask, int64_t begin, int64_t end, const float* qkv,
                            const float* y, const float* log_sum, const float* dy, float* dqkv) {
  const int64_t T = shape.length, H = shape.heads, W = shape.head_width, C = H * W;
  const int64_t keys = PaddedColumns(T), width = PaddedColumns(W);
  const float scale = 1.0f / std::sqrt(static_cast<float>(W));
  Scratch scratch(2 * W * keys + 5 * T * width + kQueries * (2 * keys + width));
  float* kt = scratch.Take(W * keys);          // [W, keys]
  float* vt = scratch.Take(W * keys);          // [W, keys]
  float* q = scratch.Take(T * width);          // [T, width]
  float* k = scratch.Take(T * width);          // [T, width]
  float* g = scratch.Take(T * width);          // dy, [T, width]
  float* dk = scratch.Take(T * width);         // [T, width]
  float* dv = scratch.Take(T * width);         // [T, width]
  float* p = scratch.Take(kQueries * keys);    // [kQueries, keys]
  float* ds = scratch.Take(kQueries * keys);   // [kQueries, keys]
  float* dq = scratch.Take(kQueries * width);  // [kQueries, width]
  for (int64_t head = begin; head < end; ++head) {
    const float* in = qkv + head / H * T * 3 * C + head % H * W;
    float* out = dqkv + head / H * T * 3 * C + head % H * W;
    const float* y_head = y + head / H * T * C + head % H * W;
    PackTransposed(T, W, in + C, 3 * C, scale, kt, keys);
    PackTransposed(T, W, in + 2 * C, 3 * C, 1.0f, vt, keys);
    Pack(T, W, in, 3 * C, q, width);
    Pack(T, W, in + C, 3 * C, k, width);
    Pack(T, W, dy + head / H * T * C + head % H * W, C, g, width);
    std::fill(dk, dk + T * width, 0.0f);
    std::fill(dv, dv + T * width, 0.0f);
    for (int64_t first = 0; first < T; first += kQueries) {
      const int64_t rows = std::min(kQueries, T - first), seen = first + rows, padded = PaddedColumns(seen);
      TileProduct(rows, padded, W, q + first * width, width, 1, kt, keys, p, keys, false);
      TileProduct(rows, padded, W, g + first * width, width, 1, vt, keys, ds, keys, false);
      for (int64_t i = 0; i < rows; ++i) {
        ExpRow(p + i * keys, first + i + 1, padded, log_sum[head * T + first + i]);
        float own = 0;
        for (int64_t j = 0; j < W; ++j) own += g[(first + i) * width + j] * y_head[(first + i) * C + j];
        if (mask.probability > 0) {
          ScoreGradientDropped(mask, H, head, first + i, padded, scale, own, p + i * keys, ds + i * keys);
        } else {
          ScoreGradient(padded, scale, own, p + i * keys, ds + i * keys);
        }
      }
      TileProduct(seen, width, rows, p, 1, keys, g + first * width, width, dv, width, true);
      TileProduct(seen, width, rows, ds, 1, keys, q + first * width, width, dk, width, true);
      TileProduct(rows, width, seen, ds, keys, 1, k, width, dq, width, false);
      Pack(rows, W, dq, width, out + first * 3 * C, 3 * C);
    }
    Pack(T, W, dk, width, out + C, 3 * C);
    Pack(T, W, dv, width, out + 2 * C, 3 * C);
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(AttentionHeads);
HWY_EXPORT(AttentionGradientHeads);

void Attention(TaskPool& pool, AttentionShape shape, const DropoutMask& mask, const float* qkv, float* y,
               float* log_sum) {
  if (shape.length == 0 || shape.head_width == 0) return;
  pool.For(shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AttentionHeads)(shape, mask, begin, end, qkv, y, log_sum);
  });
}

void AttentionGradient(TaskPool& pool, AttentionShape shape, const DropoutMask& mask, const float* qkv, const float* y,
                       const float* log_sum, const float* dy, float* dqkv) {
  if (shape.length == 0 || shape.head_width == 0) return;
  pool.For(shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AttentionGradientHeads)(shape, mask, begin, end, qkv, y, log_sum, dy, dqkv);
  });
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
