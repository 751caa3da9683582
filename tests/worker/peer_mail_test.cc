// Mail between ranks over the in-process network and over gRPC: what arrives, how it waits, how it ends.
#include "worker/peer_mail.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/worker/mail_fixture.h"
#include "tests/worker/mailroom.h"
#include "worker/parallel/collectives.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// ---------------------------------------------------------------- on both kinds of network
class PeerMailTest : public ::testing::TestWithParam<std::string> {
 protected:
  PeerMailTest() {
    if (GetParam() == "grpc") {
      net_ = std::make_unique<GrpcMailNet>();
    } else {
      net_ = std::make_unique<InProcessMailNet>(InProcessOptions{.delay_seed = 3, .max_delay = absl::Milliseconds(1)});
    }
  }
  std::unique_ptr<MailNet> net_;
};

INSTANTIATE_TEST_SUITE_P(Networks, PeerMailTest, ::testing::Values("inprocess", "grpc"),
                         [](const auto& info) { return info.param; });

TEST_P(PeerMailTest, MessagesOfAllSizesArriveInOrder) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.BeginAll(1, 7);
  const std::vector<size_t> sizes = {1, 0, 1000, kLetterFloats, 0, kLetterFloats + 1, 3 * kLetterFloats + 5, 0, 0, 2};
  ranks.OnAll([&](uint32_t r) {
    for (int turn = 0; turn < 2; ++turn) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        Floats values = Numbers(sizes[i], static_cast<float>(r + i));
        ASSERT_TRUE(ranks.tensor(r).Send(1 - r, values).ok());
        std::fill(values.begin(), values.end(), -2);  // may be changed
      }
      for (size_t i = 0; i < sizes.size(); ++i) {
        ExpectMessage(ranks.tensor(r), 1 - r, Numbers(sizes[i], static_cast<float>(1 - r + i)));
      }
    }
  });
}

TEST_P(PeerMailTest, CollectivesGiveTheBitsOfTheInProcessTwin) {
  for (uint32_t n = 2; n <= 4; ++n) {
    MailRanks ranks(net_.get(), {.tensor = n});
    ranks.BeginAll(1);
    for (const size_t floats : {size_t{1}, size_t{1000}, 3 * kRingPiece + 11, 9 * kRingPiece}) {
      std::mt19937 random(static_cast<uint32_t>(n * floats));
      std::normal_distribution<float> normal;
      std::vector<Floats> x(n, Floats(floats));
      for (Floats& array : x) {
        for (float& value : array) value = normal(random);
      }
      std::vector<Floats> expected = x;
      Mailroom mailroom(n, 1);
      ranks.OnAll([&](uint32_t r) {
        Mailroom::Rank twin(&mailroom, r);
        Collectives with_twin(&twin), with_mail(&ranks.tensor(r));
        for (Collectives* c : {&with_twin, &with_mail}) {
          const absl::Span<float> values = absl::MakeSpan(c == &with_mail ? x[r] : expected[r]);
          absl::Status status = c->AllReduce(values);
          if (status.ok()) status = c->Barrier();
          if (status.ok()) status = c->ReduceScatter(values);
          if (status.ok()) status = c->AllGather(values);
          if (status.ok()) status = c->Broadcast(n - 1, values.first(values.size() / 2));
          EXPECT_TRUE(status.ok()) << status;
        }
      });
      for (uint32_t r = 0; r < n; ++r) {
        EXPECT_EQ(std::memcmp(x[r].data(), expected[r].data(), floats * sizeof(float)), 0)
            << n << " ranks, " << floats << " floats, rank " << r;
      }
    }
  }
}

// Two replicas of two stages of two tensor ranks: everybody's groups are those of its own replica.
TEST_P(PeerMailTest, GroupsAreTheRanksOfTheStageAndOfTheTensorIndex) {
  MailRanks ranks(net_.get(), {.replicas = 2, .pipeline = 2, .tensor = 2});
  ranks.BeginAll(1);
  const Mesh mesh = {.data = 2, .pipeline = 2, .tensor = 2};
  ranks.OnAll([&](uint32_t r) {
    const Mesh::Place place = mesh.place(r);
    ASSERT_EQ(ranks.tensor(r).size(), 2u);
    ASSERT_EQ(ranks.stages(r).size(), 2u);
    ASSERT_EQ(ranks.tensor(r).rank(), place.tensor);
    ASSERT_EQ(ranks.stages(r).rank(), place.stage);
    const Floats own = {static_cast<float>(r)};
    ASSERT_TRUE(ranks.tensor(r).Send(1 - place.tensor, own).ok());
    ASSERT_TRUE(ranks.stages(r).Send(1 - place.stage, own).ok());
    ExpectMessage(ranks.tensor(r), 1 - place.tensor,
                  {static_cast<float>(mesh.rank({place.data, place.stage, 1 - place.tensor}))});
    ExpectMessage(ranks.stages(r), 1 - place.stage,
                  {static_cast<float>(mesh.rank({place.data, 1 - place.stage, place.tensor}))});
  });
}

TEST_P(PeerMailTest, ANewGenerationWakesWhoReceives) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.BeginAll(1);
  absl::Status received;
  std::thread receiver([&] {
    Floats values(3);
    received = Get(ranks.tensor(0), 1, &values);
  });
  ranks.mail(0).Begin(ranks.Plan(2), 0);
  receiver.join();
  EXPECT_EQ(received.code(), absl::StatusCode::kCancelled) << received;
  Floats values(3);
  EXPECT_EQ(Get(ranks.tensor(0), 1, &values).code(), absl::StatusCode::kCancelled) << "until the next StartRound";
}

TEST_P(PeerMailTest, ANewGenerationWakesWhoSends) {
  MailRanks ranks(net_.get(), {.tensor = 2}, {.window = 8000});
  ranks.BeginAll(1);
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(1500)).ok());
  absl::Status sent;
  std::thread sender([&] { sent = ranks.tensor(0).Send(1, Numbers(1500)); });
  ranks.mail(0).Begin(ranks.Plan(2), 0);
  sender.join();
  EXPECT_EQ(sent.code(), absl::StatusCode::kCancelled) << sent;
}

TEST_P(PeerMailTest, EndAndCancelWakeToo) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.BeginAll(1);
  for (const bool end : {false, true}) {
    ranks.mail(0).StartRound(1, 0);
    absl::Status received;
    std::thread receiver([&] {
      Floats values(3);
      received = Get(ranks.tensor(0), 1, &values);
    });
    if (end) {
      ranks.mail(0).End();
    } else {
      ranks.mail(0).Cancel();
    }
    receiver.join();
    EXPECT_EQ(received.code(), absl::StatusCode::kCancelled) << received;
    EXPECT_EQ(ranks.tensor(0).Send(1, {}).code(), absl::StatusCode::kCancelled);
  }
}

TEST_P(PeerMailTest, MailOfANewerGenerationWaitsForThePlan) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.BeginAll(1);
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(5)).ok());
  ranks.Begin(0, 2);
  ranks.Begin(0, 3);
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(4, 30)).ok());
  ranks.Begin(1, 2);  // an older plan does not clear it
  ranks.Begin(1, 3);
  ExpectMessage(ranks.tensor(1), 0, Numbers(4, 30));
}

TEST_P(PeerMailTest, AJobThatIsNotThereYetIsTriedAgain) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.SetHere(1, false);
  ranks.Begin(0, 1);
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(4)).ok());
  ranks.SetHere(1, true);
  ranks.Begin(1, 1);
  ExpectMessage(ranks.tensor(1), 0, Numbers(4));
}

// Each message is larger than the window: there is room for one, all the same, between any two ranks.
TEST_P(PeerMailTest, ThereIsRoomForOneMessageWhateverOthersDo) {
  MailRanks ranks(net_.get(), {.tensor = 3}, {.window = 4096});
  ranks.BeginAll(1);
  const size_t floats = 2 * kLetterFloats + 1;
  for (uint32_t r = 0; r < 3; ++r) {
    for (uint32_t to = 0; to < 3; ++to) {
      if (to == r) continue;
      ASSERT_TRUE(ranks.tensor(r).Send(to, Numbers(floats, static_cast<float>(r))).ok());
    }
  }
  for (uint32_t r = 0; r < 3; ++r) {
    for (uint32_t from = 0; from < 3; ++from) {
      if (from != r) ExpectMessage(ranks.tensor(r), from, Numbers(floats, static_cast<float>(from)));
    }
  }
}

// A sender far ahead of its receiver waits; what both hold of it stays within the window.
TEST_P(PeerMailTest, MemoryIsBounded) {
  constexpr size_t kWindow = 256 << 10;
  constexpr int kMessages = 400;
  MailRanks ranks(net_.get(), {.tensor = 2}, {.window = kWindow});
  ranks.BeginAll(1);
  std::atomic<int> sent = 0;
  std::thread sender([&] {
    for (; sent < kMessages; ++sent) {
      const absl::Status status = ranks.tensor(0).Send(1, Numbers(sent % 3 == 0 ? 0 : 2000, static_cast<float>(sent)));
      ASSERT_TRUE(status.ok()) << status;
    }
  });
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_LE(ranks.mail(0).waiting_bytes(), kWindow);
    EXPECT_LE(ranks.mail(1).waiting_bytes(), kWindow);
    EXPECT_LE(sent - i, static_cast<int>(kWindow / kLetterCost) + 1);
    ExpectMessage(ranks.tensor(1), 0, Numbers(i % 3 == 0 ? 0 : 2000, static_cast<float>(i)));
  }
  sender.join();
  EXPECT_EQ(ranks.mail(1).waiting_bytes(), 0u);
  // Acknowledgements come without being waited for.
  const absl::Time until = absl::Now() + kMailPatience;
  while (ranks.mail(0).waiting_bytes() > kWindow / 4 && absl::Now() < until) std::this_thread::yield();
  EXPECT_LE(ranks.mail(0).waiting_bytes(), kWindow / 4);
}

TEST_P(PeerMailTest, ADeadlineNamesWhoIsMissing) {
  MailRanks ranks(net_.get(), {.pipeline = 2, .tensor = 2}, {.window = 3000, .deadline = absl::Milliseconds(30)});
  ranks.Begin(0, 4, 9);
  Floats values(3);
  const absl::Status received = Get(ranks.stages(0), 1, &values);
  EXPECT_EQ(received.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(received.message()),
              AllOf(HasSubstr("job job-1 generation 4 round 9: rank 0 waits for a message of rank 2 (data 0, stage 1, "
                              "tensor 0), worker worker-2 at "),
                    HasSubstr(ranks.address(2)), HasSubstr("stream from it: none yet")));
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(500)).ok());
  const absl::Status sent = ranks.tensor(0).Send(1, Numbers(500));
  EXPECT_EQ(sent.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(sent.message()),
              AllOf(HasSubstr("room for a message to rank 1 (data 0, stage 0, tensor 1), worker worker-1"),
                    HasSubstr("1 of 1 letters not taken")));
}

TEST_P(PeerMailTest, OtherCallsThanExpectedAreAnErrorThatNamesBoth) {
  MailRanks ranks(net_.get(), {.tensor = 2});
  ranks.BeginAll(1, 3);
  ASSERT_TRUE(ranks.tensor(0).Send(1, Numbers(5)).ok());
  Floats values(6);
  absl::Status status = Get(ranks.tensor(1), 0, &values);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 1 expected 6 floats of round 3"),
                                                   HasSubstr("rank 0 (worker-0) sent 5 of round 3")));
  ranks.mail(1).StartRound(1, 4);
  values.resize(5);
  status = Get(ranks.tensor(1), 0, &values);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("of round 4"), HasSubstr("of round 3")));
}

TEST_P(PeerMailTest, APeerThatCannotBeReachedIsToldOf) {
  absl::Notification told;
  MailPeer peer;
  PeerMailOptions options{.accuse_after = absl::Milliseconds(50)};
  options.on_unreachable = [&](uint64_t generation, const MailPeer& who, const absl::Status& status) {
    EXPECT_EQ(generation, 1u);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    if (told.HasBeenNotified()) return;
    peer = who;
    told.Notify();
  };
  MailRanks ranks(net_.get(), {.tensor = 2}, options);
  net_->StopListening(1);
  ranks.Begin(0, 1);
  ASSERT_TRUE(told.WaitForNotificationWithTimeout(kMailPatience));
  EXPECT_EQ(peer.rank, 1u);
  EXPECT_EQ(peer.node.name(), "worker-1");
  ranks.mail(0).Stop();
}

// ---------------------------------------------------------------- one host
// Two hosts of two ranks: within a host only descriptions travel.
TEST(PeerMailMemoryTest, RanksOfAHostExchangeLettersInSharedMemory) {
  const auto run = [](bool shared_memory, std::vector<std::string> hosts) {
    InProcessMailNet net;
    MailRanks ranks(&net, {.tensor = 4, .hosts = std::move(hosts)}, {.shared_memory = shared_memory});
    ranks.BeginAll(1);
    constexpr size_t kFloats = 200000;
    ranks.OnAll([&](uint32_t r) {
      Collectives collectives(&ranks.tensor(r));
      for (int i = 0; i < 10; ++i) {
        Floats x = Numbers(kFloats, static_cast<float>(r));
        const absl::Status status = collectives.AllReduce(absl::MakeSpan(x));
        ASSERT_TRUE(status.ok()) << status;
        for (size_t k = 0; k < x.size(); ++k) ASSERT_EQ(x[k], 4 * static_cast<float>(k) + 6) << i << " " << k;
        ASSERT_TRUE(collectives.Barrier().ok());
      }
    });
    return static_cast<double>(net.network().bytes_written());
  };
  const double all = run(false, {"a", "a", "a", "a"});
  EXPECT_GT(all, 10 * 6 * 200000 * 4.0);
  EXPECT_LT(run(true, {"a", "a", "a", "a"}), all / 50);
  const double half = run(true, {"a", "a", "b", "b"});  // two of the ring's four links
  EXPECT_GT(half, 0.45 * all);
  EXPECT_LT(half, 0.55 * all);
  EXPECT_GT(run(true, {"", "", "", ""}), 0.99 * all) << "hosts are not known";
}

// Far more than the region holds: what does not fit goes in the stream.
TEST(PeerMailMemoryTest, AMessageLargerThanTheRegion) {
  InProcessMailNet net;
  MailRanks ranks(&net, {.pipeline = 2, .hosts = {"a", "a"}}, {.window = 100000, .shared_memory = true});
  ranks.BeginAll(1);
  const size_t floats = 24 * kLetterFloats;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(ranks.stages(0).Send(1, Numbers(floats)).ok());
    ExpectMessage(ranks.stages(1), 0, Numbers(floats));
  }
  EXPECT_GT(net.network().bytes_written(), floats);
  EXPECT_LT(net.network().bytes_written(), floats * 4);
}

// ---------------------------------------------------------------- streams that break
// Of both directions, again and again, under collectives: no letter is lost, doubled or out of order.
class PeerMailBreakTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Memory, PeerMailBreakTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "shared" : "stream"; });

TEST_P(PeerMailBreakTest, WhatBrokenStreamsSwallowIsSentAgain) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  InProcessMailNet net({.delay_seed = seed, .max_delay = absl::Microseconds(300)});
  constexpr uint32_t kRanks = 3;
  MailRanks ranks(&net, {.tensor = kRanks, .hosts = {"a", "a", "a"}},
                  {.window = 64 << 10,
                   .shared_memory = GetParam(),
                   .first_delay = absl::Milliseconds(1),
                   .last_delay = absl::Milliseconds(5)});
  ranks.BeginAll(1);
  std::atomic<bool> done = false;
  std::thread breaker([&] {
    std::mt19937 random(seed);
    absl::Notification never;
    while (!done) {
      const uint32_t a = random() % kRanks, b = (a + 1) % kRanks;
      net.network().Break(net.Name(a), net.Name(b));
      never.WaitForNotificationWithTimeout(absl::Microseconds(random() % 4000));
    }
  });
  ranks.OnAll([&](uint32_t r) {
    Collectives collectives(&ranks.tensor(r), 100, 700);
    for (int i = 0; i < 60; ++i) {
      Floats x = Numbers(static_cast<size_t>(i * 97), static_cast<float>(r));
      const absl::Status status = collectives.AllReduce(absl::MakeSpan(x));
      ASSERT_TRUE(status.ok()) << status;
      for (size_t k = 0; k < x.size(); ++k) ASSERT_EQ(x[k], 3.0F * static_cast<float>(k) + 3) << i << " " << k;
    }
  });
  done = true;
  breaker.join();
}

// Generations come at any time for any rank, streams break: whatever a collective returns without an error is right.
TEST_P(PeerMailBreakTest, GenerationsAndBreaksInAnyOrder) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  InProcessMailNet net({.delay_seed = seed, .max_delay = absl::Microseconds(300)});
  constexpr uint32_t kRanks = 4;
  constexpr uint64_t kGenerations = 25;
  MailRanks ranks(&net, {.pipeline = 2, .tensor = 2, .hosts = {"a", "a", "a", "a"}},
                  {.window = 16 << 10,
                   .shared_memory = GetParam(),
                   .first_delay = absl::Milliseconds(1),
                   .last_delay = absl::Milliseconds(5)});
  std::atomic<uint64_t> rounds = 0;
  std::thread disturber([&] {
    std::mt19937 random(seed);
    absl::Notification never;
    for (uint64_t generation = 1; generation <= kGenerations; ++generation) {
      const uint32_t first = random() % kRanks;
      for (uint32_t i = 0; i < kRanks; ++i) {
        const uint32_t r = (first + i) % kRanks;
        ranks.mail(r).Begin(ranks.Plan(generation), r);
        if (random() % 2 == 0) net.network().Break(net.Name(r), net.Name(random() % kRanks));
      }
      if (generation < kGenerations) never.WaitForNotificationWithTimeout(absl::Microseconds(random() % 20000));
    }
  });
  ranks.OnAll([&](uint32_t r) {
    Collectives tensor(&ranks.tensor(r), 100, 700);
    PeerGroup& stages = ranks.stages(r);
    for (bool last = false; !last;) {
      const uint64_t generation = ranks.mail(r).generation();
      absl::Status status;
      for (uint64_t round = 0; status.ok() && round < 20; ++round) {
        ranks.mail(r).StartRound(generation, round);
        const float mark = static_cast<float>(generation * 100 + round);
        Floats x = Numbers(static_cast<size_t>(round * 150), mark);
        status = tensor.AllReduce(absl::MakeSpan(x));
        for (size_t k = 0; status.ok() && k < x.size(); ++k) ASSERT_EQ(x[k], 2 * (mark + static_cast<float>(k)));
        if (status.ok()) status = stages.Send(1 - stages.rank(), Floats{mark, static_cast<float>(r)});
        Floats other(2);
        if (status.ok()) status = Get(stages, 1 - stages.rank(), &other);
        if (status.ok()) {
          ASSERT_EQ(other[0], mark);
          ++rounds;
        } else {
          ASSERT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
        }
      }
      // A generation that was finished ends with the next one.
      last = status.ok() && generation == kGenerations;
    }
  });
  disturber.join();
  EXPECT_GE(rounds, 20 * kRanks);
}

}  // namespace
}  // namespace sluice
