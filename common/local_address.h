// Which of this machine's addresses others can reach it by, for daemons that listen at all of them.
#ifndef SLUICE_COMMON_LOCAL_ADDRESS_H_
#define SLUICE_COMMON_LOCAL_ADDRESS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/rpc.h"

namespace sluice {

// 0.0.0.0 and ::, by value: "every address of this machine". Nobody can connect to them, so they are never advertised.
bool IsWildcard(std::string_view host);

// The address of the interface that routes to `peer` (the source address of what would be sent to it); nothing is sent.
// With `listen` 0.0.0.0 only IPv4 is looked at. A link-local IPv6 address comes without its zone.
// Resolves peer.host: blocks as long as the resolver does.
//   UNAVAILABLE: the name cannot be resolved now, or there is no route to it
//   INVALID_ARGUMENT: `peer` is on loopback; an address from there would be wrong on every other machine
absl::StatusOr<std::string> LocalAddressTowards(const HostPort& peer, const HostPort& listen);

// What a daemon at `listen` tells others: `advertise` where it has a host, else the host of `listen`, and where that is
// a wildcard LocalAddressTowards(peer, listen). The port is that of `advertise` (0: the one listened at).
// INVALID_ARGUMENT where `advertise` itself is a wildcard.
absl::StatusOr<HostPort> ChooseAdvertised(const HostPort& listen, const HostPort& advertise, const HostPort& peer);

}  // namespace sluice

#endif  // SLUICE_COMMON_LOCAL_ADDRESS_H_
