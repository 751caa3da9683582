#include "bench/tcp_group.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sluice {
namespace {

constexpr size_t kPiece = 256 << 10;

absl::Status Broken(const char* what) { return absl::ErrnoToStatus(errno, what); }

}  // namespace

absl::StatusOr<std::vector<std::vector<int>>> ConnectAll(uint32_t n) {
  std::vector<std::vector<int>> ends(n, std::vector<int>(n, -1));
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  if (listening < 0 || bind(listening, address, sizeof(at)) != 0 || listen(listening, 1) != 0 ||
      getsockname(listening, address, &length) != 0) {
    return Broken("listen on loopback");
  }
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = i + 1; j < n; ++j) {
      ends[i][j] = socket(AF_INET, SOCK_STREAM, 0);
      if (ends[i][j] < 0 || connect(ends[i][j], address, sizeof(at)) != 0) return Broken("connect on loopback");
      ends[j][i] = accept(listening, nullptr, nullptr);
      if (ends[j][i] < 0) return Broken("accept on loopback");
      for (const int fd : {ends[i][j], ends[j][i]}) {
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      }
    }
  }
  close(listening);
  return ends;
}

TcpGroup::TcpGroup(uint32_t rank, std::vector<int> sockets)
    : rank_(rank), sockets_(std::move(sockets)), aside_(sockets_.size()) {}

absl::Status TcpGroup::Send(uint32_t to, absl::Span<const float> values) {
  const char* at = reinterpret_cast<const char*>(values.data());
  for (size_t left = values.size() * sizeof(float); left > 0;) {
    const ssize_t n = send(sockets_[to], at, std::min(left, kPiece), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      at += n;
      left -= static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Broken("send");
    std::vector<pollfd> ready;
    for (uint32_t r = 0; r < size(); ++r) {
      if (r != rank_) ready.push_back({sockets_[r], static_cast<int16_t>(POLLIN | (r == to ? POLLOUT : 0)), 0});
    }
    if (poll(ready.data(), ready.size(), -1) < 0 && errno != EINTR) return Broken("poll");
    if (absl::Status status = PutAside(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status TcpGroup::PutAside() {
  for (uint32_t r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    std::vector<char>& bytes = aside_[r].bytes;
    const size_t before = bytes.size();
    bytes.resize(before + kPiece);
    const ssize_t n = recv(sockets_[r], bytes.data() + before, kPiece, MSG_DONTWAIT);
    bytes.resize(before + (n > 0 ? static_cast<size_t>(n) : 0));
    if (n == 0) return absl::UnavailableError("a rank is gone");
  }
  return absl::OkStatus();
}

absl::Status TcpGroup::Receive(uint32_t from, absl::Span<float> values) {
  char* at = reinterpret_cast<char*>(values.data());
  size_t left = values.size() * sizeof(float);
  Aside& aside = aside_[from];
  if (const size_t here = std::min(left, aside.bytes.size() - aside.begin); here > 0) {
    std::memcpy(at, aside.bytes.data() + aside.begin, here);
    aside.begin += here;
    at += here;
    left -= here;
    if (aside.begin == aside.bytes.size()) {
      aside.bytes.clear();
      aside.begin = 0;
    }
  }
  while (left > 0) {
    const ssize_t n = recv(sockets_[from], at, left, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Broken("recv");
    if (n == 0) return absl::UnavailableError("a rank is gone");
    at += n;
    left -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

}  // namespace sluice
