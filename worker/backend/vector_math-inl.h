// Vector functions for Highway kernels; included once per instruction set, so with Highway's own kind of guard.
#if defined(SLUICE_WORKER_BACKEND_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_WORKER_BACKEND_VECTOR_MATH_INL_H_
#undef SLUICE_WORKER_BACKEND_VECTOR_MATH_INL_H_
#else
#define SLUICE_WORKER_BACKEND_VECTOR_MATH_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// The first n < Lanes elements, the rest `fill`.
HWY_INLINE V LoadPart(D d, const float* p, int64_t n, float fill = 0.0f) {
  HWY_ALIGN float lanes[hn::MaxLanes(D())];
  hn::Store(hn::Set(d, fill), d, lanes);
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return hn::Load(d, lanes);
}

HWY_INLINE void StorePart(D d, V v, float* p, int64_t n) {
  HWY_ALIGN float lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}

// Ways to reach the elements of one vector: a whole one, and the first n lanes at a row's end.
struct Whole {
  V Load(D d, const float* p, float = 0.0f) const { return hn::LoadU(d, p); }
  void Store(D d, V v, float* p) const { hn::StoreU(v, d, p); }
};
struct Rest {
  int64_t n;
  V Load(D d, const float* p, float fill = 0.0f) const { return LoadPart(d, p, n, fill); }
  void Store(D d, V v, float* p) const { StorePart(d, v, p, n); }
};

// body(io, j) for each vector of [begin, end), j its first index.
template <class Body>
HWY_INLINE void ForVectors(D d, int64_t begin, int64_t end, Body body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = begin;
  for (; j + lanes <= end; j += lanes) body(Whole(), j);
  if (j < end) body(Rest{end - j}, j);
}

// e^x to 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays. Range reduction by multiples of ln 2
// and the polynomial of Cephes' expf.
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V low = hn::Set(d, -87.33654f), high = hn::Set(d, 88.72284f);
  const V bounded = hn::Min(hn::Max(x, low), high);
  const V n = hn::Round(hn::Mul(bounded, hn::Set(d, 1.44269504088896341f)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), bounded);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  V y = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  // 2^n in two factors: n reaches 128.
  const auto whole = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(whole);
  const auto bias = hn::Set(di, 127);
  y = hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias))));
  y = hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(whole, half), bias))));
  y = hn::IfThenZeroElse(hn::Lt(x, low), y);
  y = hn::IfThenElse(hn::Gt(x, high), hn::Set(d, std::numeric_limits<float>::infinity()), y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

HWY_INLINE float Sum(D d, V v) { return hn::GetLane(hn::SumOfLanes(d, v)); }

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle guard
