#include "bench/blaster.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kSendPiece = 256 << 10, kPlainPiece = 64 << 10, kLowWater = 128 << 10;
// A request.
constexpr char kPushHot = 'c', kPullHot = 'C', kPushPlain = 'p', kPullPlain = 'P', kPushPlace = 'k', kPullPlace = 'K';

absl::Status Broken(const char* what) {
  return absl::UnavailableError(absl::StrCat("TCP blaster: ", what, ": ", std::strerror(errno)));
}

// Out of `window` bytes at data, over and over: a window as large as all bytes sends each once.
bool SendAll(int fd, const char* data, size_t window, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const size_t from = at % window;
    const ssize_t n = send(fd, data + from, std::min({kSendPiece, window - from, bytes - at}), MSG_NOSIGNAL);
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

void SetLowWater(int fd, size_t bytes) {
  const int value = static_cast<int>(bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value));
}

// Into `window` bytes at data, over and over. `few_wakes`: sleeps until kLowWater bytes are there. What recv() has
// taken before it sleeps does not count for that, so near the end less may come than it waits for: there it is woken
// always.
bool ReceiveAll(int fd, char* data, size_t window, size_t bytes, size_t piece, bool few_wakes) {
  bool low_water = few_wakes && bytes > 4 * kLowWater;
  if (low_water) SetLowWater(fd, kLowWater);
  bool ok = true;
  for (size_t at = 0; ok && at < bytes;) {
    if (low_water && bytes - at <= 4 * kLowWater) {
      SetLowWater(fd, 1);
      low_water = false;
    }
    const size_t to = at % window;
    const ssize_t n = recv(fd, data + to, std::min({piece, window - to, bytes - at}), 0);
    ok = n > 0;
    if (ok) at += static_cast<size_t>(n);
  }
  return ok;
}

bool SendByte(int fd, char byte) { return SendAll(fd, &byte, 1, 1); }
bool ReceiveByte(int fd, char* byte) { return ReceiveAll(fd, byte, 1, 1, 1, false); }

void NoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

sockaddr_in Address(const std::string& host, int port) {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  inet_pton(AF_INET, host.c_str(), &at.sin_addr);
  at.sin_port = htons(static_cast<uint16_t>(port));
  return at;
}

absl::StatusOr<int> Listen(const std::string& host, int* port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Broken("socket");
  sockaddr_in at = Address(host, 0);
  socklen_t length = sizeof(at);
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) != 0 || listen(fd, 1) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0) {
    const absl::Status status = Broken("listen");
    close(fd);
    return status;
  }
  *port = ntohs(at.sin_port);
  return fd;
}

absl::StatusOr<int> ConnectTo(const std::string& host, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Broken("socket");
  const sockaddr_in to = Address(host, port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
    const absl::Status status = Broken("connect");
    close(fd);
    return status;
  }
  NoDelay(fd);
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlasterServer>> BlasterServer::Start(size_t bytes, const std::string& host) {
  int port = 0;
  ASSIGN_OR_RETURN(const int fd, Listen(host, &port));
  return std::unique_ptr<BlasterServer>(new BlasterServer(fd, port, bytes));
}

BlasterServer::BlasterServer(int listening, int port, size_t bytes)
    : listening_(listening), port_(port), bytes_(bytes), kept_(bytes), thread_([this] { Serve(); }) {}

BlasterServer::~BlasterServer() {
  shutdown(listening_, SHUT_RDWR);  // wakes accept(); an open connection ends with its peer
  thread_.join();
  close(listening_);
}

void BlasterServer::Serve() {
  const int fd = accept(listening_, nullptr, nullptr);
  if (fd < 0) return;
  NoDelay(fd);
  std::vector<char> hot(kSendPiece, 2);
  char request;
  bool ok = true;
  while (ok && ReceiveByte(fd, &request)) {
    switch (request) {
      case kPushHot:
        ok = ReceiveAll(fd, hot.data(), kLowWater, bytes_, kLowWater, true) && SendByte(fd, request);
        break;
      case kPushPlain:
        ok = ReceiveAll(fd, hot.data(), kPlainPiece, bytes_, kPlainPiece, false) && SendByte(fd, request);
        break;
      case kPushPlace:
        ok = ReceiveAll(fd, kept_.data(), bytes_, bytes_, kLowWater, true) && SendByte(fd, request);
        break;
      case kPullHot:
      case kPullPlain:
        ok = SendAll(fd, hot.data(), kSendPiece, bytes_);
        break;
      case kPullPlace:
        ok = SendAll(fd, kept_.data(), bytes_, bytes_);
        break;
      default:
        ok = false;
    }
  }
  close(fd);
}

absl::StatusOr<std::unique_ptr<Blaster>> Blaster::Connect(int port, size_t bytes, const std::string& host) {
  ASSIGN_OR_RETURN(const int fd, ConnectTo(host, port));
  return std::unique_ptr<Blaster>(new Blaster(fd, bytes));
}

Blaster::Blaster(int fd, size_t bytes) : fd_(fd), bytes_(bytes), hot_(kSendPiece, 1) {}

Blaster::~Blaster() { close(fd_); }

absl::Status Blaster::Push(char request, const char* data, size_t window) {
  char done;
  if (!SendByte(fd_, request) || !SendAll(fd_, data, window, bytes_) || !ReceiveByte(fd_, &done)) return Broken("push");
  return absl::OkStatus();
}

absl::Status Blaster::Pull(char request, char* data, size_t window, size_t piece, bool few_wakes) {
  if (!SendByte(fd_, request) || !ReceiveAll(fd_, data, window, bytes_, piece, few_wakes)) return Broken("pull");
  return absl::OkStatus();
}

absl::Status Blaster::PushHot() { return Push(kPushHot, hot_.data(), hot_.size()); }
absl::Status Blaster::PullHot() { return Pull(kPullHot, hot_.data(), kLowWater, kLowWater, true); }
absl::Status Blaster::PushPlain() { return Push(kPushPlain, hot_.data(), hot_.size()); }
absl::Status Blaster::PullPlain() { return Pull(kPullPlain, hot_.data(), kPlainPiece, kPlainPiece, false); }
absl::Status Blaster::PushFrom(const void* data) { return Push(kPushPlace, static_cast<const char*>(data), bytes_); }
absl::Status Blaster::PullInto(void* data) {
  return Pull(kPullPlace, static_cast<char*>(data), bytes_, kLowWater, true);
}

// ---------------------------------------------------------------- ping-pong
absl::StatusOr<std::unique_ptr<EchoServer>> EchoServer::Start(size_t message_bytes) {
  int port = 0;
  ASSIGN_OR_RETURN(const int fd, Listen("127.0.0.1", &port));
  return std::unique_ptr<EchoServer>(new EchoServer(fd, port, message_bytes));
}

EchoServer::EchoServer(int listening, int port, size_t message_bytes)
    : listening_(listening), port_(port), message_(message_bytes), thread_([this] { Serve(); }) {}

EchoServer::~EchoServer() {
  shutdown(listening_, SHUT_RDWR);
  thread_.join();
  close(listening_);
}

void EchoServer::Serve() {
  const int fd = accept(listening_, nullptr, nullptr);
  if (fd < 0) return;
  NoDelay(fd);
  const size_t n = message_.size();
  while (ReceiveAll(fd, message_.data(), n, n, n, false) && SendAll(fd, message_.data(), n, n)) {
  }
  close(fd);
}

absl::StatusOr<std::unique_ptr<Echo>> Echo::Connect(int port, size_t message_bytes) {
  ASSIGN_OR_RETURN(const int fd, ConnectTo("127.0.0.1", port));
  return std::unique_ptr<Echo>(new Echo(fd, message_bytes));
}

Echo::~Echo() { close(fd_); }

absl::Status Echo::Trips(int count) {
  const size_t n = sent_.size();
  const uint64_t first = number_;
  for (int i = 0; i < count; ++i) {
    std::memcpy(sent_.data(), &number_, sizeof(number_));
    ++number_;
    if (!SendAll(fd_, sent_.data(), n, n)) return Broken("ping");
  }
  for (uint64_t number = first; number < number_; ++number) {
    if (!ReceiveAll(fd_, came_.data(), n, n, n, false)) return Broken("pong");
    std::memcpy(sent_.data(), &number, sizeof(number));
    if (came_ != sent_) return absl::DataLossError(absl::StrCat("message ", number, " came back as another one"));
  }
  return absl::OkStatus();
}

}  // namespace sluice
