// What every gRPC end of Sluice needs: malloc set-up, addresses, channels, status conversion, the port file.
#ifndef SLUICE_COMMON_RPC_H_
#define SLUICE_COMMON_RPC_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// Largest message either end sends or accepts; set explicitly on every channel and server.
inline constexpr int kMaxMessageBytes = 64 << 20;

// Where a scheduler listens and is looked for unless told otherwise.
inline constexpr int kSchedulerPort = 7700;

// Keeps freed buffers in the process instead of paying their page faults again (DESIGN section 7). Call first in main,
// before any other thread exists.
void TuneMalloc();

// An address as users write it: HOST:PORT, [IPV6]:PORT, or without the port. `host` carries no brackets.
struct HostPort {
  std::string host;
  int port = 0;
  std::string ToString() const;  // HOST:PORT or [IPV6]:PORT
};

// Port 0 is legal. Without a port `default_port` is taken. INVALID_ARGUMENT says what is wrong with `text`.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text, int default_port);

// localhost, 127.0.0.0/8 and ::1, by their spelling: nothing is resolved.
bool IsLoopback(std::string_view host);

// FAILED_PRECONDITION where `at` is not loopback and `insecure` was not given: there is no TLS on this port.
absl::Status CheckListenAllowed(const HostPort& at, bool insecure);

// The same code and message; codes are numbered alike.
absl::Status FromGrpc(const grpc::Status& status);
grpc::Status ToGrpc(const absl::Status& status);

// Arguments of every client channel: keepalive (a peer that is stopped or cut off is noticed within about 20 s while a
// call is open), message limits, no proxy, a connection of its own (never shared with another channel to the same
// address), connection attempts given up after 5 s and repeated after 0.1 s.
grpc::ChannelArguments ClientArguments();

// A channel without TLS to HOST:PORT, with ClientArguments(). Never blocks; connects at the first call.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

// Writes "PORT\n" so that a reader sees all of it or nothing (temporary file and rename).
absl::Status WritePortFile(const std::string& path, int port);

}  // namespace sluice

#endif  // SLUICE_COMMON_RPC_H_
