// Streams of mail from peers that are not who they say, or send what they must not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/shared_memory.h"
#include "common/version.h"
#include "tests/worker/mail_fixture.h"
#include "worker/peer_mail.h"

namespace sluice {
namespace {

class HostilePeerTest : public ::testing::Test {
 protected:
  HostilePeerTest() { Begin(2); }

  void Begin(uint64_t generation) {
    for (uint32_t r = 0; r < 2; ++r) ranks_.Begin(r, generation);
  }

  // A stream of worker-2 that was welcomed by rank 1, or of others.
  std::unique_ptr<RawMail> Open(const v1::MailFrame& hello) {
    auto raw = std::make_unique<RawMail>(transport_.get(), ranks_.address(1));
    raw->Send(hello);
    return raw;
  }
  absl::StatusCode Refused(const v1::MailFrame& hello) { return Open(hello)->AwaitClosed().code(); }
  static v1::MailFrame Letter(uint64_t number, size_t floats, uint64_t first = 0) {
    v1::MailFrame frame;
    frame.mutable_letter()->set_number(number);
    frame.mutable_letter()->set_purpose(v1::Letter::TENSOR);
    frame.mutable_letter()->set_floats(floats);
    frame.mutable_letter()->set_first(first);
    return frame;
  }
  // Nobody else has noticed anything.
  void ExpectMailGoes() {
    ASSERT_TRUE(ranks_.tensor(0).Send(1, Numbers(5)).ok());
    ExpectMessage(ranks_.tensor(1), 0, Numbers(5));
    ASSERT_TRUE(ranks_.tensor(1).Send(0, Numbers(6)).ok());
    ExpectMessage(ranks_.tensor(0), 1, Numbers(6));
  }

  InProcessMailNet net_;
  // Rank 2 is played by the test, rank 0 is an honest peer.
  MailRanks ranks_{&net_, {.replicas = 2, .tensor = 3}, {.window = 10000}};
  std::unique_ptr<Transport> transport_ = net_.network().MakeTransport("stranger");
};

TEST_F(HostilePeerTest, StrangersAreRefused) {
  v1::MailFrame hello = RawMail::Hello(2, 1, 2);
  hello.mutable_hello()->mutable_node()->set_incarnation(7);
  EXPECT_EQ(Refused(hello), absl::StatusCode::kPermissionDenied) << "another life";
  hello = RawMail::Hello(2, 1, 2);
  hello.mutable_hello()->mutable_node()->set_name("stranger");
  EXPECT_EQ(Refused(hello), absl::StatusCode::kPermissionDenied) << "another node";
  EXPECT_EQ(Refused(RawMail::Hello(1, 1, 2)), absl::StatusCode::kPermissionDenied) << "itself";
  EXPECT_EQ(Refused(RawMail::Hello(4, 1, 2)), absl::StatusCode::kPermissionDenied) << "of another replica";
  EXPECT_EQ(Refused(RawMail::Hello(99, 1, 2)), absl::StatusCode::kPermissionDenied) << "no such rank";
  EXPECT_EQ(Refused(RawMail::Hello(2, 0, 2)), absl::StatusCode::kPermissionDenied) << "not to this rank";
  EXPECT_EQ(Refused(RawMail::Hello(2, 1, 1)), absl::StatusCode::kAborted) << "an older generation";
  hello = RawMail::Hello(2, 1, 2);
  hello.mutable_hello()->set_protocol_version(kProtocolVersion + 1);
  EXPECT_EQ(Refused(hello), absl::StatusCode::kFailedPrecondition);
  hello = RawMail::Hello(2, 1, 2);
  hello.mutable_hello()->set_job_id("job-2");
  EXPECT_EQ(Refused(hello), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Refused(Letter(1, 0)), absl::StatusCode::kInvalidArgument) << "no hello";
  ExpectMailGoes();
}

TEST_F(HostilePeerTest, StrangersOfANewerGenerationAreRefusedWhenItsPlanComes) {
  v1::MailFrame hello = RawMail::Hello(2, 1, 3);
  hello.mutable_hello()->mutable_node()->set_incarnation(7);
  const auto stranger = Open(hello);
  const auto peer = Open(RawMail::Hello(2, 1, 3));
  const auto early = Open(RawMail::Hello(2, 1, 3));
  early->Send(Letter(1, 0));
  EXPECT_EQ(early->AwaitClosed().code(), absl::StatusCode::kInvalidArgument) << "a letter before the welcome";
  EXPECT_FALSE(stranger->closed());
  Begin(3);
  EXPECT_EQ(stranger->AwaitClosed().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(peer->AwaitWelcome());
  ExpectMailGoes();
}

class NoStream : public ByteStream {
 public:
  void Write(grpc::ByteBuffer) override {}
  size_t queued_bytes() const override { return 0; }
  void Close(const absl::Status&) override { ++closed; }
  static inline std::atomic<int> closed = 0;
};

TEST_F(HostilePeerTest, OnlySoManyStreamsWaitForAPlan) {
  const v1::MailFrame hello = RawMail::Hello(2, 1, 5);
  for (int i = 0; i < 256; ++i) ASSERT_TRUE(ranks_.mail(1).Accept(hello, std::make_shared<NoStream>()).ok());
  EXPECT_EQ(ranks_.mail(1).Accept(hello, std::make_shared<NoStream>()).code(), absl::StatusCode::kResourceExhausted);
  ExpectMailGoes();
  NoStream::closed = 0;
  Begin(6);
  EXPECT_EQ(NoStream::closed, 256);
  EXPECT_TRUE(ranks_.mail(1).Accept(RawMail::Hello(2, 1, 7), std::make_shared<NoStream>()).ok());
  ExpectMailGoes();
}

TEST_F(HostilePeerTest, LettersThatCannotBeCostTheirStream) {
  using Say = std::function<void(RawMail&)>;
  const std::string four(4, 'x'), eight(8, 'x');
  const auto with = [](v1::MailFrame frame, const std::function<void(v1::Letter*)>& change) {
    change(frame.mutable_letter());
    return frame;
  };
  const std::vector<std::pair<const char*, Say>> cases = {
      {"number 0", [&](RawMail& raw) { raw.Send(Letter(0, 1), four); }},
      {"a gap", [&](RawMail& raw) { raw.Send(Letter(2, 1), four); }},
      {"no purpose",
       [&](RawMail& raw) { raw.Send(with(Letter(1, 1), [](v1::Letter* l) { l->clear_purpose(); }), four); }},
      {"a purpose to come",
       [&](RawMail& raw) {
         raw.Send(with(Letter(1, 1), [](v1::Letter* l) { l->set_purpose(static_cast<v1::Letter::Purpose>(9)); }), four);
       }},
      {"too many floats", [&](RawMail& raw) { raw.Send(Letter(1, (size_t{1} << 28) + 1), four); }},
      {"half a float", [&](RawMail& raw) { raw.Send(Letter(1, 1), "xx"); }},
      {"more than it says", [&](RawMail& raw) { raw.Send(Letter(1, 1), eight); }},
      {"nothing of something", [&](RawMail& raw) { raw.Send(Letter(1, 1)); }},
      {"more than a letter",
       [&](RawMail& raw) { raw.Send(Letter(1, kLetterFloats + 1), std::string((kLetterFloats + 1) * 4, 'x')); }},
      {"from beyond the end", [&](RawMail& raw) { raw.Send(Letter(1, 1, 2), four); }},
      {"a middle without a beginning", [&](RawMail& raw) { raw.Send(Letter(1, 2, 1), four); }},
      {"a beginning in the middle",
       [&](RawMail& raw) {
         raw.Send(Letter(1, 2), four);
         raw.Send(Letter(2, 2), four);
       }},
      {"a middle of something else",
       [&](RawMail& raw) {
         raw.Send(Letter(1, 2), four);
         raw.Send(with(Letter(2, 2, 1), [](v1::Letter* l) { l->set_round(1); }), four);
       }},
      {"a payload without a letter", [&](RawMail& raw) { raw.Send(v1::MailFrame(), four); }},
      {"an acknowledgement of nothing",
       [&](RawMail& raw) {
         v1::MailFrame frame;
         frame.set_ack_wanted(1);
         raw.Send(frame);
       }},
      {"a second hello", [&](RawMail& raw) { raw.Send(RawMail::Hello(2, 1, 2)); }},
      {"no frame", [&](RawMail& raw) { raw.SendBytes("\xff\xff\xff"); }},
      {"a length beyond the end", [&](RawMail& raw) { raw.SendBytes("\x12\x7f"); }},
  };
  uint64_t generation = 2;
  for (const auto& [what, say] : cases) {
    SCOPED_TRACE(what);
    const auto raw = Open(RawMail::Hello(2, 1, generation));
    ASSERT_TRUE(raw->AwaitWelcome());
    say(*raw);
    EXPECT_EQ(raw->AwaitClosed().code(), absl::StatusCode::kInvalidArgument);
    ExpectMailGoes();
    Begin(++generation);
  }
}

TEST_F(HostilePeerTest, WhoDoesNotKeepToTheWindowIsCutOff) {
  const auto raw = Open(RawMail::Hello(2, 1, 2));
  ASSERT_TRUE(raw->AwaitWelcome());
  for (uint64_t number = 1; number <= 20; ++number) raw->Send(Letter(number, 250), std::string(1000, 'x'));
  EXPECT_EQ(raw->AwaitClosed().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LE(ranks_.mail(1).waiting_bytes(), 10000u);
  ExpectMailGoes();
}

TEST_F(HostilePeerTest, CopiesAreDroppedAndAcknowledgementsComeWhenTaken) {
  const auto raw = Open(RawMail::Hello(2, 1, 2));
  ASSERT_TRUE(raw->AwaitWelcome());
  const std::string payload = {0, 0, char(0x80), 0x3f};  // 1.0F
  v1::MailFrame first = Letter(1, 1);
  first.mutable_letter()->set_ack(true);
  raw->Send(first, payload);
  raw->Send(Letter(2, 0));
  raw->Send(first, payload);
  v1::MailFrame wanted;
  wanted.set_ack_wanted(2);
  raw->Send(wanted);
  ExpectMessage(ranks_.tensor(1), 2, {1});
  EXPECT_EQ(raw->AwaitTaken(1), 1u);
  ExpectMessage(ranks_.tensor(1), 2, {});
  EXPECT_EQ(raw->AwaitTaken(2), 2u);
  EXPECT_EQ(ranks_.mail(1).waiting_bytes(), 0u);
}

// Worker-2 is said to be on rank 1's host.
TEST_F(HostilePeerTest, SharedBytesMustLieInMemoryThatIsMappedHere) {
  InProcessMailNet net;
  MailRanks ranks(&net, {.tensor = 3, .hosts = {"other", "here", "here"}}, {.shared_memory = true});
  ranks.Begin(1, 1);
  const auto region = SharedRegion::Make(1 << 16);
  ASSERT_TRUE(region.ok()) << region.status();
  std::memset((*region)->data(), 0, 8);
  const auto transport = net.network().MakeTransport("stranger");
  v1::MailFrame letter = Letter(1, 2);
  letter.mutable_shared()->set_offset(*(*region)->OffsetOf((*region)->data(), 8));
  letter.mutable_shared()->set_bytes(8);
  {
    RawMail raw(transport.get(), ranks.address(1));
    raw.Send(RawMail::Hello(2, 1, 1));
    ASSERT_TRUE(raw.AwaitWelcome());
    raw.Send(letter);
    EXPECT_EQ(raw.AwaitClosed().code(), absl::StatusCode::kFailedPrecondition) << "none was offered";
  }
  v1::MailFrame offer = RawMail::Hello(2, 1, 1);
  *offer.mutable_memory() = (*region)->description();
  const auto closed = [&](const v1::MailFrame& frame, const std::string& payload = "") {
    RawMail raw(transport.get(), ranks.address(1));
    raw.Send(offer);
    EXPECT_TRUE(raw.AwaitWelcome());
    raw.Send(frame, payload);
    return raw.AwaitClosed().code();
  };
  EXPECT_EQ(closed(letter, "12345678"), absl::StatusCode::kInvalidArgument) << "twice";
  v1::MailFrame beyond = letter;
  beyond.mutable_shared()->set_offset(uint64_t{1} << 63);
  EXPECT_EQ(closed(beyond), absl::StatusCode::kOutOfRange);
  beyond.mutable_shared()->set_offset((*region)->size());
  beyond.mutable_shared()->set_bytes(~uint64_t{0});
  EXPECT_EQ(closed(beyond), absl::StatusCode::kOutOfRange);
  RawMail raw(transport.get(), ranks.address(1));
  raw.Send(offer);
  ASSERT_TRUE(raw.AwaitWelcome());
  raw.Send(letter);
  ExpectMessage(ranks.tensor(1), 2, {0, 0});
  offer.mutable_memory()->set_nonce("0123456789abcdef");
  RawMail liar(transport.get(), ranks.address(1));
  liar.Send(offer);
  EXPECT_TRUE(liar.AwaitWelcome()) << "what cannot be mapped comes in the stream";
  liar.Send(Letter(2, 1), std::string(4, 0));
  ExpectMessage(ranks.tensor(1), 2, {0});
}

// The newest stream of a rank is the one that counts.
TEST_F(HostilePeerTest, ASecondStreamTakesTheFirstOnesPlace) {
  const auto first = Open(RawMail::Hello(2, 1, 2));
  ASSERT_TRUE(first->AwaitWelcome());
  const auto second = Open(RawMail::Hello(2, 1, 2));
  ASSERT_TRUE(second->AwaitWelcome());
  EXPECT_EQ(first->AwaitClosed().code(), absl::StatusCode::kAborted);
  second->Send(Letter(1, 0));
  ExpectMessage(ranks_.tensor(1), 2, {});
}

}  // namespace
}  // namespace sluice
