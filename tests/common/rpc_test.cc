#include "common/rpc.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace sluice {
namespace {

TEST(RpcTest, ParsesAddresses) {
  const struct {
    const char* text;
    const char* host;
    int port;
    const char* printed;
  } good[] = {
      {"127.0.0.1:7700", "127.0.0.1", 7700, "127.0.0.1:7700"},
      {"127.0.0.1", "127.0.0.1", 42, "127.0.0.1:42"},
      {"localhost:0", "localhost", 0, "localhost:0"},
      {"node-7.example:65535", "node-7.example", 65535, "node-7.example:65535"},
      {"[::1]:80", "::1", 80, "[::1]:80"},
      {"[fe80::1]", "fe80::1", 42, "[fe80::1]:42"},
  };
  for (const auto& c : good) {
    const auto parsed = ParseHostPort(c.text, 42);
    ASSERT_TRUE(parsed.ok()) << c.text << ": " << parsed.status();
    EXPECT_EQ(parsed->host, c.host);
    EXPECT_EQ(parsed->port, c.port);
    EXPECT_EQ(parsed->ToString(), c.printed);
  }
  for (const char* text :
       {"", ":", ":80", "7700", "host:", "host:x", "host:-1", "host:+1", "host:65536", "host:99999999999", "host: 80",
        "ho st:80", "::1", "::1:80", "[::1", "[::1]80", "[]:80", "http://host:80"}) {
    const auto parsed = ParseHostPort(text, 42);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(parsed.status().message()).find(text), std::string::npos) << parsed.status();
  }
}

TEST(RpcTest, ListensBeyondLoopbackOnlyWhenTold) {
  for (const char* host : {"localhost", "127.0.0.1", "127.8.9.10", "::1"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
    EXPECT_TRUE(CheckListenAllowed({host, 1}, false).ok()) << host;
  }
  for (const char* host :
       {"0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "example.org", "127.0.0.1.example.org", "", "localhost2"}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
    EXPECT_EQ(CheckListenAllowed({host, 1}, false).code(), absl::StatusCode::kFailedPrecondition) << host;
    EXPECT_TRUE(CheckListenAllowed({host, 1}, true).ok()) << host;
  }
}

TEST(RpcTest, StatusesKeepCodeAndMessage) {
  for (int code = 0; code <= 16; ++code) {
    const grpc::Status status(static_cast<grpc::StatusCode>(code), code == 0 ? "" : "what and where");
    const absl::Status converted = FromGrpc(status);
    EXPECT_EQ(static_cast<int>(converted.code()), code);
    EXPECT_EQ(std::string(converted.message()), status.error_message());
    EXPECT_EQ(ToGrpc(converted).error_code(), status.error_code());
    EXPECT_EQ(ToGrpc(converted).error_message(), status.error_message());
  }
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "x")), absl::DeadlineExceededError("x"));
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "x")), absl::UnauthenticatedError("x"));
}

TEST(RpcTest, PortFileIsWholeOrAbsent) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("sluice_rpc_test_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string path = folder / "port";
  for (int port : {7700, 1}) {  // the second replaces the first
    ASSERT_TRUE(WritePortFile(path, port).ok());
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    EXPECT_EQ(text, std::to_string(port) + "\n");
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "a temporary file was left";
  const absl::Status bad = WritePortFile(folder / "none" / "port", 1);
  EXPECT_FALSE(bad.ok());
  EXPECT_NE(std::string(bad.message()).find((folder / "none" / "port").string()), std::string::npos) << bad;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace sluice
