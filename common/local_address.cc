#include "common/local_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// The kernel's choice of a source address for `to`: a UDP socket is connected, which sends nothing.
absl::StatusOr<std::string> SourceAddress(const addrinfo& to) {
  const int fd = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::UnavailableError(std::strerror(errno));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  if (connect(fd, to.ai_addr, to.ai_addrlen) != 0 || getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    return absl::UnavailableError(std::strerror(errno));
  }
  char text[NI_MAXHOST];
  const int error = getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0,
                                NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  const std::string host = text;
  return host.substr(0, host.find('%'));
}

}  // namespace

bool IsWildcard(std::string_view host) {
  const std::string text(host);
  in_addr v4;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return v4.s_addr == INADDR_ANY;
  in6_addr v6;
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

absl::StatusOr<std::string> LocalAddressTowards(const HostPort& peer, const HostPort& listen) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  if (listen.host.find(':') == std::string::npos) hints.ai_family = AF_INET;
  addrinfo* found = nullptr;
  const int lookup = getaddrinfo(peer.host.c_str(), std::to_string(peer.port).c_str(), &hints, &found);
  const std::string where = absl::StrCat("no address to advertise for --listen=", listen.ToString(), ": ");
  if (lookup != 0) {
    return absl::UnavailableError(absl::StrCat(where, "cannot resolve ", peer.host, ": ", gai_strerror(lookup),
                                               "; give --advertise HOST, or start again when the name is known"));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  absl::Status last = absl::UnavailableError("no address");
  for (const addrinfo* to = found; to != nullptr; to = to->ai_next) {
    const auto own = SourceAddress(*to);
    if (!own.ok()) {
      last = own.status();
    } else if (IsLoopback(*own)) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, peer.host, " is this machine's loopback, which others cannot reach; give --advertise HOST, ",
          "or name the scheduler by the address that other machines use"));
    } else {
      return *own;
    }
  }
  return absl::UnavailableError(
      absl::StrCat(where, "no route to ", peer.host, ": ", last.message(), "; give --advertise HOST"));
}

absl::StatusOr<HostPort> ChooseAdvertised(const HostPort& listen, const HostPort& advertise, const HostPort& peer) {
  if (IsWildcard(advertise.host)) {
    return absl::InvalidArgumentError(absl::StrCat("--advertise=", advertise.ToString(), ": nobody can connect to ",
                                                   advertise.host, "; give the address that others reach this by"));
  }
  HostPort result = advertise;
  if (result.host.empty()) result.host = listen.host;
  if (IsWildcard(result.host)) {
    ASSIGN_OR_RETURN(result.host, LocalAddressTowards(peer, listen));
  }
  return result;
}

}  // namespace sluice
