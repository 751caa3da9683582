// What the tests of chunk stores and of where their first values come from share.
#ifndef SLUICE_TESTS_SERVER_CHUNK_STORE_FIXTURE_H_
#define SLUICE_TESTS_SERVER_CHUNK_STORE_FIXTURE_H_

#include <cstring>
#include <random>
#include <vector>

#include "common/frame.h"
#include "server/chunk_store.h"
#include "tests/server/server_test_plan.h"

namespace sluice {

inline Payload Bytes(const std::vector<float>& values) {
  return Payload({grpc::Slice(values.data(), values.size() * sizeof(float))});
}

// The whole space as a server without any sharding holds it: filled, then `rounds` updates with pushed gradients.
struct Whole {
  std::vector<float> value, momentum;
};

inline std::vector<float> Gradient(uint64_t parameters, uint64_t round, uint32_t contributor) {
  std::mt19937 rng(static_cast<uint32_t>(round * 100 + contributor));
  std::vector<float> g(parameters);
  for (float& x : g) x = static_cast<float>(rng()) / 2147483648.0f - 1;
  return g;
}

inline v1::Verdict Go(uint64_t round, float scale = 0.25f) {
  v1::Verdict verdict;
  verdict.set_round(round);
  verdict.set_gradient_scale(scale);
  return verdict;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_SERVER_CHUNK_STORE_FIXTURE_H_
