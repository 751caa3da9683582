// The faults and delays of the in-process network.
#include "common/inprocess_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/inprocess_connection.h"
#include "tests/common/transport_fixture.h"

namespace sluice {
namespace {

TEST(InProcessDelayTest, DelaysAreAPureFunctionOfTheirNames) {
  const absl::Duration max = absl::Milliseconds(10);
  std::set<absl::Duration> seen;
  int draws = 0;
  absl::Duration sum;
  for (uint64_t seed : {0, 1, 2}) {
    for (const char* opener : {"a", "b"}) {
      for (const char* address : {"a", "b", "ab"}) {
        for (const Plane plane : {Plane::kParameter, Plane::kShard}) {
          for (uint64_t count : {0, 1}) {
            const uint64_t key = inprocess::DelayKey(seed, opener, address, plane, count);
            EXPECT_EQ(key, inprocess::DelayKey(seed, opener, address, plane, count));
            for (int to : {0, 1}) {
              for (uint64_t number = 0; number < 10; ++number) {
                const absl::Duration delay = inprocess::MessageDelay(key, to, number, max);
                EXPECT_EQ(delay, inprocess::MessageDelay(key, to, number, max));
                EXPECT_GE(delay, absl::ZeroDuration());
                EXPECT_LE(delay, max);
                seen.insert(delay);
                sum += delay;
                ++draws;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(seen.size(), draws * 0.99) << "delays repeat";
  EXPECT_NEAR(absl::FDivDuration(sum / draws, max), 0.5, 0.05);
}

TEST(InProcessDelayTest, MessagesWaitTheirTime) {
  InProcessOptions options;
  options.delay_seed = 5;
  options.max_delay = absl::Milliseconds(100);
  InProcessNet net(options);
  net.Listen();
  auto transport = net.MakeTransport();
  auto client = std::make_shared<Recorder>();
  const absl::Time start = absl::Now();
  auto stream = transport->Open("server-0", Plane::kShard, client);
  absl::Duration longest;
  const uint64_t key = inprocess::DelayKey(5, "worker-0", "server-0", Plane::kShard, 0);
  for (int i = 0; i < 5; ++i) stream->Write(Message("x"));
  for (int i = 0; i <= 5; ++i) {  // the opening is the first message
    longest = std::max(longest, inprocess::MessageDelay(key, inprocess::kAccepter, i, options.max_delay));
  }
  net.shard.Await().recorder->AwaitTexts(5);
  EXPECT_GE(absl::Now() - start, longest);
  EXPECT_GT(longest, absl::Milliseconds(20)) << "choose a seed that shows something";
}

class InProcessFaultTest : public testing::Test {
 protected:
  void SetUp() override {
    net_.Listen();
    transport_ = net_.MakeTransport();
  }
  std::pair<std::shared_ptr<ByteStream>, std::shared_ptr<Recorder>> Open() {
    auto client = std::make_shared<Recorder>();
    auto stream = transport_->Open("server-0", Plane::kParameter, client);
    return {std::move(stream), std::move(client)};
  }

  InProcessNet net_{InProcessOptions()};
  std::unique_ptr<Transport> transport_;
};

TEST_F(InProcessFaultTest, BreakEndsBothEnds) {
  auto [stream, client] = Open();
  const auto accepted = net_.parameter.Await();
  net_.network().Break("somebody", "server-0");
  stream->Write(Message("still there"));
  accepted.recorder->AwaitTexts(1);
  net_.network().Break("server-0", "worker-0");
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  std::tie(stream, client) = Open();
  stream->Write(Message("again"));
  EXPECT_EQ(net_.parameter.Await(1).recorder->AwaitTexts(1), std::vector<std::string>{"again"});
}

TEST_F(InProcessFaultTest, PartitionHoldsMessagesUntilHealed) {
  auto [stream, client] = Open();
  const auto accepted = net_.parameter.Await();
  auto other_client = std::make_shared<Recorder>();
  auto other_transport = net_.network().MakeTransport("worker-1");
  auto other = other_transport->Open("server-0", Plane::kParameter, other_client);
  net_.network().Partition("worker-0", "server-0");
  stream->Write(Message("up"));
  accepted.stream->Write(Message("down"));
  auto [refused, refused_client] = Open();
  EXPECT_EQ(refused_client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  other->Write(Message("through"));  // others are not concerned, and by now the held ones would have come
  EXPECT_EQ(net_.parameter.Await(1).recorder->AwaitTexts(1), std::vector<std::string>{"through"});
  EXPECT_TRUE(accepted.recorder->texts().empty());
  EXPECT_TRUE(client->texts().empty());
  EXPECT_EQ(stream->queued_bytes(), 2u);
  net_.network().Heal("server-0", "worker-0");
  EXPECT_EQ(accepted.recorder->AwaitTexts(1), std::vector<std::string>{"up"});
  EXPECT_EQ(client->AwaitTexts(1), std::vector<std::string>{"down"});
}

TEST_F(InProcessFaultTest, CloseCrossesAPartitionOnlyAfterHealing) {
  auto [stream, client] = Open();
  const auto accepted = net_.parameter.Await();
  net_.network().Partition("worker-0", "server-0");
  stream->Write(Message("last"));
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_FALSE(accepted.recorder->closed());
  net_.network().Heal("worker-0", "server-0");
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(accepted.recorder->texts(), std::vector<std::string>{"last"});
}

TEST_F(InProcessFaultTest, KilledNodeIsGoneUntilRevived) {
  auto [stream, client] = Open();
  const auto accepted = net_.parameter.Await();
  net_.network().Kill("server-0");
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  std::tie(stream, client) = Open();
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  net_.network().Revive("server-0");
  std::tie(stream, client) = Open();
  stream->Write(Message("welcome back"));
  EXPECT_EQ(net_.parameter.Await(1).recorder->AwaitTexts(1), std::vector<std::string>{"welcome back"});
  net_.network().Kill("worker-0");
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

TEST_F(InProcessFaultTest, AnAddressHasOneListener) {
  EXPECT_EQ(net_.network().Listen("server-0", {}).status().code(), absl::StatusCode::kAlreadyExists);
  const auto empty = net_.network().Listen("server-1", {});
  ASSERT_TRUE(empty.ok());
  auto client = std::make_shared<Recorder>();
  auto stream = transport_->Open("server-1", Plane::kShard, client);
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace sluice
