#include "common/rpc.h"

#include <arpa/inet.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

absl::string_view View(std::string_view s) { return absl::string_view(s.data(), s.size()); }

absl::Status BadAddress(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("address '", View(text), "': ", View(why), "; expected HOST[:PORT], for example 127.0.0.1:7700"));
}

}  // namespace

void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
}

std::string HostPort::ToString() const {
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text, int default_port) {
  HostPort result;
  std::string_view port;
  bool has_port = false;
  if (!text.empty() && text.front() == '[') {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return BadAddress(text, "'[' without ']'");
    result.host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    if (!rest.empty() && rest.front() != ':') return BadAddress(text, "after ']' only :PORT may follow");
    has_port = !rest.empty();
    if (has_port) port = rest.substr(1);
  } else {
    const size_t colon = text.rfind(':');
    has_port = colon != std::string_view::npos;
    result.host = text.substr(0, colon);
    if (result.host.find(':') != std::string::npos) return BadAddress(text, "an IPv6 address is written in brackets");
    if (has_port) port = text.substr(colon + 1);
  }
  if (result.host.empty()) return BadAddress(text, "no host");
  if (std::any_of(result.host.begin(), result.host.end(),
                  [](unsigned char c) { return c <= ' ' || c == '/' || c > '~'; })) {
    return BadAddress(text, "a host has no spaces and no slashes");
  }
  if (!has_port &&
      std::all_of(result.host.begin(), result.host.end(), [](unsigned char c) { return std::isdigit(c); })) {
    return BadAddress(text, "a port without a host");
  }
  result.port = default_port;
  if (has_port) {
    const bool digits =
        !port.empty() && std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c); });
    if (!digits || !absl::SimpleAtoi(View(port), &result.port) || result.port > 65535) {
      return BadAddress(text, absl::StrCat("port '", View(port), "' is not a number from 0 to 65535"));
    }
  }
  return result;
}

bool IsLoopback(std::string_view host) {
  const std::string text(host);
  if (text == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::Status CheckListenAllowed(const HostPort& at, bool insecure) {
  if (insecure || IsLoopback(at.host)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "refusing to listen at ", at.ToString(), ": it can be reached from other machines and the port has no ",
      "TLS; listen at 127.0.0.1, or give --insecure if everybody on that network is trusted"));
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

grpc::ChannelArguments ClientArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);  // despite its name: how long one attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return arguments;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), ClientArguments());
}

absl::Status WritePortFile(const std::string& path, int port) {
  const std::string staged = absl::StrCat(path, ".", getpid(), ".tmp");
  const auto fail = [&](const char* what) {
    const int error = errno;
    unlink(staged.c_str());
    return absl::UnavailableError(absl::StrCat("port file ", path, ": ", what, ": ", std::strerror(error)));
  };
  std::FILE* file = std::fopen(staged.c_str(), "w");
  if (file == nullptr) return fail("cannot create it");
  const bool written = std::fprintf(file, "%d\n", port) > 0;
  if (std::fclose(file) != 0 || !written) return fail("cannot write it");
  if (std::rename(staged.c_str(), path.c_str()) != 0) return fail("cannot put it in place");
  return absl::OkStatus();
}

}  // namespace sluice
