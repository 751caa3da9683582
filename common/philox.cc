#include "common/philox.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/portable_math.h"

namespace sluice {
namespace {

// Finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::array<uint32_t, 4> Block(uint64_t index, uint64_t key) {
  return Philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0},
                    {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
}

// Two independent standard normal values for the elements 2 * pair and 2 * pair + 1.
std::array<double, 2> NormalPair(uint64_t pair, uint64_t key) {
  const std::array<uint32_t, 4> r = Block(pair, key);
  const uint64_t a = (uint64_t{r[1]} << 32) | r[0], b = (uint64_t{r[3]} << 32) | r[2];
  const double u = static_cast<double>((a >> 11) + 1) * 0x1p-53;  // (0, 1]
  const double turns = static_cast<double>(b >> 11) * 0x1p-53;    // [0, 1)
  const double radius = std::sqrt(-2 * PortableLog(u));
  const SinCos angle = PortableSinCos(turns);
  return {radius * angle.cos, radius * angle.sin};
}

void FillNormal(double deviation, uint64_t key, uint64_t first, uint64_t n, float* values) {
  for (uint64_t i = 0; i < n;) {
    const std::array<double, 2> pair = NormalPair((first + i) / 2, key);
    for (uint64_t half = (first + i) % 2; half < 2 && i < n; ++half, ++i) {
      values[i] = static_cast<float>(deviation * pair[half]);
    }
  }
}

void FillUniform(double scale, uint64_t key, uint64_t first, uint64_t n, float* values) {
  for (uint64_t i = 0; i < n;) {
    const std::array<uint32_t, 4> block = Block((first + i) / 4, key);
    for (uint64_t word = (first + i) % 4; word < 4 && i < n; ++word, ++i) {
      values[i] = static_cast<float>(scale * (static_cast<double>(block[word] >> 8) * 0x1p-23 - 1));
    }
  }
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * counter[0], b = uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

uint64_t StreamKey(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return Mix(Mix(seed) ^ hash);
}

void FillInitial(const Tensor& tensor, uint64_t seed, uint64_t first, uint64_t n, float* values) {
  const uint64_t key = StreamKey(seed, tensor.name);
  switch (tensor.init.kind) {
    case Initializer::kZeros:
      std::fill_n(values, n, 0.0f);
      return;
    case Initializer::kOnes:
      std::fill_n(values, n, 1.0f);
      return;
    case Initializer::kNormal:
      return FillNormal(tensor.init.scale, key, first, n, values);
    case Initializer::kUniform:
      return FillUniform(tensor.init.scale, key, first, n, values);
  }
}

uint64_t Permute(uint64_t index, uint64_t n, uint64_t key) {
  if (n <= 1) return 0;
  const int half = std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);  // bits of each half
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {  // an image outside [0, n) is mapped again: at most 4 times on average, and still a bijection
    uint64_t left = index >> half, right = index & mask;
    for (uint64_t round = 0; round < 8; ++round) {
      const uint64_t next = left ^ (Mix(right ^ Mix(key + round)) & mask);
      left = right;
      right = next;
    }
    index = (left << half) | right;
  } while (index >= n);
  return index;
}

}  // namespace sluice
