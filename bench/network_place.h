// Where a process of a measurement runs: in this network, or in a named network namespace (of `ip netns add`, root
// only) whose links somebody has slowed down.
#ifndef SLUICE_BENCH_NETWORK_PLACE_H_
#define SLUICE_BENCH_NETWORK_PLACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

struct NetworkPlace {
  std::string network;             // a name in /run/netns; empty: the network of the measuring process
  std::string host = "127.0.0.1";  // of this process, as the others reach it; servers listen there
};

// NAME@HOST each, as many as `processes`; an empty list: all here, on loopback. INVALID_ARGUMENT says what is wrong.
absl::StatusOr<std::vector<NetworkPlace>> ParsePlaces(const std::vector<std::string>& words, uint32_t processes);

// Moves the calling thread, and those that it starts later, there. NOT_FOUND, PERMISSION_DENIED.
absl::Status EnterNetwork(const NetworkPlace& place);

}  // namespace sluice

#endif  // SLUICE_BENCH_NETWORK_PLACE_H_
