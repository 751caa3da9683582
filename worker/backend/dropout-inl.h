// Dropout's masks for Highway kernels; included once per instruction set, so with Highway's own kind of guard.
#if defined(SLUICE_WORKER_BACKEND_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_WORKER_BACKEND_DROPOUT_INL_H_
#undef SLUICE_WORKER_BACKEND_DROPOUT_INL_H_
#else
#define SLUICE_WORKER_BACKEND_DROPOUT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "worker/backend/backend.h"
#include "worker/backend/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;

// a * by in 64 bits, by halves.
HWY_INLINE void MultiplyWide(DU d, VU a, VU by, VU* low, VU* high) {
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = uint64_t{hn::GetLane(a)} * hn::GetLane(by);
  *low = hn::Set(d, static_cast<uint32_t>(product));
  *high = hn::Set(d, static_cast<uint32_t>(product >> 32));
#else
  const hn::RepartitionToWide<DU> wide;
  const auto even = hn::MulEven(a, by);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, a))), by);
  *low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  *high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
#endif
}

// Philox4x32-10 of as many counters as there are lanes (common/philox.h is the same of one).
HWY_INLINE void Philox(DU d, uint64_t key, VU (&words)[4]) {
  const VU first = hn::Set(d, 0xd2511f53u), second = hn::Set(d, 0xcd9e8d57u);
  uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    VU a_low, a_high, b_low, b_high;
    MultiplyWide(d, words[0], first, &a_low, &a_high);
    MultiplyWide(d, words[2], second, &b_low, &b_high);
    words[0] = hn::Xor(hn::Xor(b_high, words[1]), hn::Set(d, low_key));
    words[1] = b_low;
    words[2] = hn::Xor(hn::Xor(a_high, words[3]), hn::Set(d, high_key));
    words[3] = a_low;
    low_key += 0x9e3779b9u;
    high_key += 0xbb67ae85u;
  }
}

// body(io, j, factor) for each vector of the elements [0, n) of a row, j its first one; factor: 0 for elements that are
// left out. The row is the time step of the sample at this position, in attention of this head.
template <class Body>
HWY_INLINE void ForDropped(const DropoutMask& mask, uint64_t sample, int64_t time, int64_t head, int64_t n, Body body) {
  const D d;
  const DU du;
  const hn::RebindToSigned<D> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(di, static_cast<int32_t>(std::lround(mask.probability * 0x1p24)));
  const V kept = hn::Set(d, static_cast<float>(1 / (1 - mask.probability)));
  const VU high = hn::Set(du, static_cast<uint32_t>(sample >> 32) | static_cast<uint32_t>(head) << 16);
  HWY_ALIGN float factors[4 * hn::MaxLanes(D())];
  for (int64_t first = 0; first < n; first += 4 * lanes) {
    VU words[4] = {hn::Iota(du, static_cast<uint32_t>(first / 4)), hn::Set(du, static_cast<uint32_t>(time)),
                   hn::Set(du, static_cast<uint32_t>(sample)), high};
    Philox(du, mask.key, words);
    const auto factor = [&](VU word) HWY_ATTR {
      const auto out = hn::Lt(hn::BitCast(di, hn::ShiftRight<8>(word)), limit);
      return hn::IfThenZeroElse(hn::RebindMask(d, out), kept);
    };
    hn::StoreInterleaved4(factor(words[0]), factor(words[1]), factor(words[2]), factor(words[3]), d, factors);
    ForVectors(d, first, std::min(n, first + 4 * lanes),
               [&](auto io, int64_t j) HWY_ATTR { body(io, j, hn::Load(d, factors + (j - first))); });
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle guard
