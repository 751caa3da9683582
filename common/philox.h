// Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// Equal keys and counters give equal values in every layout. Pure, thread-safe.
#ifndef SLUICE_COMMON_PHILOX_H_
#define SLUICE_COMMON_PHILOX_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "common/model_layout.h"

namespace sluice {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Key of a stream: mixes the seed with a name (a tensor's, "shuffle", "dropout") by FNV-1a and splitmix64.
uint64_t StreamKey(uint64_t seed, std::string_view name);

// values[i] = initial value of element first + i of the tensor (index within the tensor). The same bits whatever the
// range it is asked in. Normal values by Box-Muller in double, rounded once.
void FillInitial(const Tensor& tensor, uint64_t seed, uint64_t first, uint64_t n, float* values);

// Bijection of [0, n) keyed by `key`: Feistel network over the next even power of two with cycle walking. n >= 1.
uint64_t Permute(uint64_t index, uint64_t n, uint64_t key);

}  // namespace sluice

#endif  // SLUICE_COMMON_PHILOX_H_
