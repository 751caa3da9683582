// One direction of mail without threads: windows, acknowledgements, what a broken stream may have swallowed.
#include "worker/mail_boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr size_t kWindow = 16 << 10;

v1::Letter Tensor(size_t floats) {
  v1::Letter letter;
  letter.set_purpose(v1::Letter::TENSOR);
  letter.set_floats(floats);
  return letter;
}

BorrowedBytes Bytes(size_t floats) {
  auto values = std::make_shared<std::vector<float>>(floats);
  return {values->data(), floats * sizeof(float), values};
}

Payload Copy(const BorrowedBytes& bytes) { return Payload({grpc::Slice(bytes.data, bytes.size)}); }

class OutboxTest : public ::testing::Test {
 protected:
  void Add(size_t floats) { box_.Add(Tensor(floats), Bytes(floats)); }
  // Numbers of the letters that go to the stream now; negative: without asking for an acknowledgement.
  std::vector<int> Next() {
    std::vector<int> numbers;
    while (const Outbox::Sent* sent = box_.Next()) {
      const int number = static_cast<int>(sent->letter.number());
      numbers.push_back(sent->letter.ack() ? number : -number);
    }
    return numbers;
  }
  Outbox box_{kWindow};
};

TEST_F(OutboxTest, AsksForAcknowledgementsAQuarterOfTheWindowApart) {
  for (int i = 0; i < 6; ++i) Add(256);  // 2 KiB each
  EXPECT_THAT(Next(), ElementsAre(-1, 2, -3, 4, -5, 6));
  EXPECT_THAT(Next(), IsEmpty());
  EXPECT_TRUE(box_.HasRoom(256));
  EXPECT_FALSE(box_.HasRoom(1024));
  ASSERT_TRUE(box_.Acknowledge(4).ok());
  EXPECT_TRUE(box_.HasRoom(1024));
  EXPECT_EQ(box_.kept(), 2u);
  EXPECT_EQ(box_.Acknowledge(7).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(OutboxTest, BeforeWaitingTheLastOneIsAskedFor) {
  Add(256);
  Add(2);
  box_.AskForAck();
  EXPECT_EQ(box_.NextAsk(), 0u) << "it has not been sent";
  EXPECT_THAT(Next(), ElementsAre(-1, 2));
  Add(1);
  EXPECT_THAT(Next(), ElementsAre(-3));
  box_.AskForAck();
  EXPECT_EQ(box_.NextAsk(), 3u);
  EXPECT_EQ(box_.NextAsk(), 0u);
  box_.AskForAck();
  EXPECT_EQ(box_.NextAsk(), 0u) << "asked before";
  // The stream breaks: was the question heard?
  ASSERT_TRUE(box_.Restart(3, 1).ok());
  EXPECT_EQ(box_.NextAsk(), 3u);
  ASSERT_TRUE(box_.Restart(2, 1).ok());
  EXPECT_THAT(Next(), ElementsAre(3)) << "now it says so itself";
}

TEST_F(OutboxTest, ANewStreamBeginsBehindWhatWasReceived) {
  for (int i = 0; i < 5; ++i) Add(1);
  EXPECT_THAT(Next(), ElementsAre(-1, -2, -3, 4, -5));
  ASSERT_TRUE(box_.Restart(3, 2).ok());
  EXPECT_EQ(box_.kept(), 3u);
  EXPECT_THAT(Next(), ElementsAre(4, -5));
  ASSERT_TRUE(box_.Restart(5, 5).ok());
  EXPECT_THAT(Next(), IsEmpty());
  EXPECT_EQ(box_.cost(), 0u);
  EXPECT_EQ(box_.Restart(6, 5).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(box_.Restart(4, 4).code(), absl::StatusCode::kOutOfRange) << "it had taken 5";
  EXPECT_EQ(box_.Restart(4, 5).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(OutboxTest, OneMessageFitsWhateverItsSize) {
  EXPECT_TRUE(box_.HasRoom(kMaxMessageFloats));
  Add(0);
  EXPECT_FALSE(box_.HasRoom(kMaxMessageFloats));
  EXPECT_TRUE(box_.HasRoom(kWindow / 4 - 512));
  EXPECT_FALSE(box_.HasRoom(kWindow / 4 - 511));
}

// A sender that keeps to its window never meets the receiver's, whatever is sent, taken, acknowledged or lost when; and
// it never waits for an acknowledgement that will not come.
TEST(MailBoxesTest, BothEndsAgree) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int run = 0; run < 300; ++run) {
    Outbox out(kWindow);
    Inbox in(kWindow);
    std::vector<v1::MailFrame> acks;  // under way
    uint64_t sent = 0, taken = 0;
    const auto deliver = [&](size_t most) {
      while (most-- > 0) {
        if (const Outbox::Sent* next = out.Next()) {
          const auto added = in.Add(next->letter, Copy(next->bytes));
          ASSERT_TRUE(added.ok() && *added) << added.status();
        } else if (const uint64_t ask = out.NextAsk()) {
          const auto due = in.AckWanted(ask);
          ASSERT_TRUE(due.ok()) << due.status();
          if (*due) acks.emplace_back().mutable_ack()->set_taken(in.taken());
        } else {
          return;
        }
      }
    };
    const auto take = [&] {
      if (in.empty()) return;
      const Inbox::Waiting letter = in.Pop();
      ++taken;
      ASSERT_EQ(letter.letter.number(), taken);
      if (in.Taken(letter)) acks.emplace_back().mutable_ack()->set_taken(in.taken());
    };
    const auto acknowledge = [&] {
      for (const v1::MailFrame& ack : acks) ASSERT_TRUE(out.Acknowledge(ack.ack().taken()).ok());
      acks.clear();
    };
    for (int step = 0; step < 200; ++step) {
      switch (random() % 5) {
        case 0: {
          const size_t floats = random() % 7 == 0 ? kLetterFloats + random() % 5000 : random() % 2000;
          if (!out.HasRoom(floats)) {
            out.AskForAck();
            if (random() % 2 == 0) break;
            while (!out.HasRoom(floats)) {  // everything that is under way arrives
              const size_t kept = out.kept();
              deliver(1000);
              while (!in.empty()) take();
              acknowledge();
              ASSERT_LT(out.kept(), kept) << "it would wait for ever";
            }
          }
          for (size_t at = 0; at < floats || at == 0; at += kLetterFloats) {
            v1::Letter letter = Tensor(floats);
            letter.set_first(at);
            out.Add(letter, Bytes(std::min(kLetterFloats, floats - at)));
            ++sent;
          }
          break;
        }
        case 1:
          deliver(random() % 4);
          break;
        case 2:
          take();
          break;
        case 3:
          acknowledge();
          break;
        default:
          if (random() % 4 > 0) break;
          acks.clear();  // the stream breaks
          ASSERT_TRUE(out.Restart(in.received(), in.taken()).ok());
      }
      ASSERT_LE(in.cost(), out.cost());
    }
    EXPECT_EQ(out.last(), sent);
    EXPECT_LE(taken, sent);
  }
}

}  // namespace
}  // namespace sluice
