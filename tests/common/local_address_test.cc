#include "common/local_address.h"

#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

// Every IPv4 address of this machine that is not on loopback, from a source other than the code under test.
std::set<std::string> InterfaceAddresses() {
  std::set<std::string> result;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return result;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    char text[NI_MAXHOST];
    if (getnameinfo(i->ifa_addr, sizeof(sockaddr_in), text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    if (!IsLoopback(text)) result.insert(text);
  }
  freeifaddrs(all);
  return result;
}

TEST(LocalAddressTest, Wildcards) {
  for (const char* host : {"0.0.0.0", "::", "0:0:0:0:0:0:0:0", "::0"}) EXPECT_TRUE(IsWildcard(host)) << host;
  for (const char* host : {"127.0.0.1", "::1", "localhost", "", "10.0.0.0", "node-0.0.0.0", "fe80::"}) {
    EXPECT_FALSE(IsWildcard(host)) << host;
  }
}

TEST(LocalAddressTest, WhatIsGivenIsTaken) {
  const auto given = ChooseAdvertised({"0.0.0.0", 7701}, {"trainer-7.example", 9}, {"127.0.0.1", 7700});
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->ToString(), "trainer-7.example:9");
  const auto one_address = ChooseAdvertised({"127.0.0.1", 7701}, {"", 0}, {"scheduler.invalid", 7700});
  ASSERT_TRUE(one_address.ok()) << one_address.status();
  EXPECT_EQ(one_address->ToString(), "127.0.0.1:0");
}

TEST(LocalAddressTest, WildcardsAreNotAdvertised) {
  for (const char* host : {"0.0.0.0", "::"}) {
    const auto chosen = ChooseAdvertised({"0.0.0.0", 0}, {host, 0}, {"127.0.0.1", 7700});
    EXPECT_EQ(chosen.status().code(), absl::StatusCode::kInvalidArgument) << chosen.status();
    EXPECT_NE(std::string(chosen.status().message()).find(host), std::string::npos);
  }
}

// To an address of this machine the kernel's own choice is that very address: an answer that is known beforehand.
TEST(LocalAddressTest, AddressOfTheRoute) {
  const std::set<std::string> addresses = InterfaceAddresses();
  if (addresses.empty()) GTEST_SKIP() << "this machine has no network but loopback";
  for (const std::string& address : addresses) {
    const auto chosen = ChooseAdvertised({"0.0.0.0", 7701}, {"", 0}, {address, 7700});
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->ToString(), absl::StrCat(address, ":0"));
    // At all addresses of both families; the port that was asked for stays.
    const auto v6 = ChooseAdvertised({"::", 7701}, {"", 0}, {address, 7700});
    ASSERT_TRUE(v6.ok()) << v6.status();
    EXPECT_EQ(v6->host, address);
  }
}

TEST(LocalAddressTest, LoopbackSchedulerIsRefused) {
  for (const char* host : {"127.0.0.1", "localhost", "127.1.2.3"}) {
    const auto chosen = ChooseAdvertised({"0.0.0.0", 0}, {"", 0}, {host, 7700});
    EXPECT_EQ(chosen.status().code(), absl::StatusCode::kInvalidArgument) << host << ": " << chosen.status();
    EXPECT_NE(std::string(chosen.status().message()).find("--advertise"), std::string::npos) << chosen.status();
  }
}

TEST(LocalAddressTest, UnknownNameIsUnavailable) {
  // Such names never exist (RFC 6761).
  const auto chosen = ChooseAdvertised({"0.0.0.0", 0}, {"", 0}, {"scheduler.invalid", 7700});
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kUnavailable) << chosen.status();
  EXPECT_NE(std::string(chosen.status().message()).find("scheduler.invalid"), std::string::npos);
}

}  // namespace
}  // namespace sluice
