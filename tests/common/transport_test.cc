// One contract for all transports: what common/transport.h promises, over gRPC on a socket and inside the process.
#include "common/transport.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/common/transport_fixture.h"

namespace sluice {
namespace {

struct Kind {
  const char* name;
  std::unique_ptr<Net> (*make)();
  bool cuts_when_stuck;  // an end that was closed in order gives up a peer that does not read
};

class TransportTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    net_ = GetParam().make();
    net_->Listen();
    transport_ = net_->MakeTransport();
  }
  std::shared_ptr<ByteStream> Open(std::shared_ptr<StreamHandler> handler, Plane plane = Plane::kParameter) {
    return transport_->Open(net_->address(), plane, std::move(handler));
  }

  std::unique_ptr<Net> net_;
  std::unique_ptr<Transport> transport_;
};

// Makes the accepting end of the streams that follow stand still in its first message.
class StuckReader {
 public:
  explicit StuckReader(Net* net) {
    net->parameter.make = [this](const std::shared_ptr<ByteStream>&) {
      return std::make_shared<Recorder>([this](const std::string&) {
        if (!reading_.HasBeenNotified()) reading_.Notify();
        go_on_.WaitForNotification();
      });
    };
  }
  bool AwaitReading() { return reading_.WaitForNotificationWithTimeout(kDeadline); }
  void GoOn() { go_on_.Notify(); }

 private:
  absl::Notification reading_, go_on_;
};

TEST_P(TransportTest, MessagesArriveInOrderBothWays) {
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  for (int i = 0; i < 100; ++i) stream->Write(Message(absl::StrCat("up ", i)));
  const auto accepted = net_->parameter.Await();
  EXPECT_FALSE(accepted.peer.empty());
  for (int i = 0; i < 100; ++i) accepted.stream->Write(Message(absl::StrCat("down ", i)));
  const auto up = accepted.recorder->AwaitTexts(100);
  const auto down = client->AwaitTexts(100);
  ASSERT_EQ(up.size(), 100u);
  ASSERT_EQ(down.size(), 100u);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(up[i], absl::StrCat("up ", i));
    EXPECT_EQ(down[i], absl::StrCat("down ", i));
  }
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
}

TEST_P(TransportTest, PlanesAreApart) {
  auto a = std::make_shared<Recorder>(), b = std::make_shared<Recorder>(), c = std::make_shared<Recorder>();
  auto sa = Open(a, Plane::kSession), sb = Open(b, Plane::kParameter), sc = Open(c, Plane::kShard);
  sa->Write(Message("session"));
  sb->Write(Message("parameter"));
  sc->Write(Message("shard"));
  EXPECT_EQ(net_->session.Await().recorder->AwaitTexts(1), std::vector<std::string>{"session"});
  EXPECT_EQ(net_->parameter.Await().recorder->AwaitTexts(1), std::vector<std::string>{"parameter"});
  EXPECT_EQ(net_->shard.Await().recorder->AwaitTexts(1), std::vector<std::string>{"shard"});
}

TEST_P(TransportTest, ManySmallMessages) {
  constexpr int kCount = 10000;
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  // The acceptor answers every message; both directions are full at once.
  const auto accepted = net_->parameter.Await();
  for (int i = 0; i < kCount; ++i) {
    stream->Write(Message(absl::StrCat(i)));
    accepted.stream->Write(Message(absl::StrCat(-i)));
  }
  const auto up = accepted.recorder->AwaitTexts(kCount);
  const auto down = client->AwaitTexts(kCount);
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(up.at(i), absl::StrCat(i));
    ASSERT_EQ(down.at(i), absl::StrCat(-i));
  }
  EXPECT_EQ(stream->queued_bytes(), 0u);
}

TEST_P(TransportTest, LargeAndEmptyMessages) {
  std::mt19937 random(1);
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  std::vector<std::string> sent;
  for (size_t bytes : {0, 1, 5, 16384, 1 << 20, (8 << 20) + 3, 0, 20 << 20}) {
    std::string text(bytes, '\0');
    for (size_t i = 0; i < bytes; i += 61) text[i] = static_cast<char>(random());
    stream->Write(Message(text));
    sent.push_back(std::move(text));
  }
  const auto accepted = net_->parameter.Await();
  for (const std::string& text : sent) accepted.stream->Write(Message(text));
  const auto up = accepted.recorder->AwaitTexts(sent.size());
  const auto down = client->AwaitTexts(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_TRUE(up.at(i) == sent[i]) << "message " << i << " of " << sent[i].size() << " bytes";
    EXPECT_TRUE(down.at(i) == sent[i]) << "message " << i << " of " << sent[i].size() << " bytes";
  }
}

TEST_P(TransportTest, BuffersAreReleasedOnceWritten) {
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  const std::string text(300000, 'x');
  absl::Notification released;
  {
    const grpc::Slice slice(
        const_cast<char*>(text.data()), text.size(), [](void* p) { static_cast<absl::Notification*>(p)->Notify(); },
        &released);
    stream->Write(grpc::ByteBuffer(&slice, 1));
  }
  const auto accepted = net_->parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitTexts(1).at(0), text);
  // Both handles are still there: nothing but the message itself may hold its bytes.
  EXPECT_TRUE(released.WaitForNotificationWithTimeout(kDeadline));
}

TEST_P(TransportTest, OpenerClosesInOrderAfterItsMessages) {
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  for (int i = 0; i < 50; ++i) stream->Write(Message(std::string(100000, 'a' + i % 26)));
  stream->Close(absl::OkStatus());
  stream->Write(Message("after the close: dropped"));
  stream->Close(absl::InternalError("twice: ignored"));
  const auto accepted = net_->parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(accepted.recorder->texts().size(), 50u);
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
}

TEST_P(TransportTest, OpenerCutsTheStream) {
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  stream->Write(Message("hello"));
  const auto accepted = net_->parameter.Await();
  accepted.recorder->AwaitTexts(1);
  stream->Close(absl::FailedPreconditionError("mine"));
  EXPECT_EQ(client->AwaitClosed(), absl::FailedPreconditionError("mine"));
  EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

TEST_P(TransportTest, AcceptorsStatusArrivesBehindItsMessages) {
  for (const auto code : {absl::StatusCode::kOk, absl::StatusCode::kInvalidArgument, absl::StatusCode::kCancelled,
                          absl::StatusCode::kUnavailable, absl::StatusCode::kInternal}) {
    const absl::Status status(code, code == absl::StatusCode::kOk ? "" : "chunk 7 lies beyond the space");
    const size_t index = net_->parameter.size();
    auto client = std::make_shared<Recorder>();
    auto stream = Open(client);
    stream->Write(Message("hello"));
    const auto accepted = net_->parameter.Await(index);
    for (int i = 0; i < 20; ++i) accepted.stream->Write(Message(std::string(100000, 'a' + i % 26)));
    accepted.stream->Close(status);
    const absl::Status seen = client->AwaitClosed();
    EXPECT_EQ(seen.code(), code) << seen;
    EXPECT_NE(std::string(seen.message()).find(std::string(status.message())), std::string::npos) << seen;
    EXPECT_EQ(client->texts().size(), 20u);
    EXPECT_EQ(accepted.recorder->AwaitClosed(), status);
  }
}

TEST_P(TransportTest, DroppingTheOpenersHandleCloses) {
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  stream->Write(Message("hello"));
  stream = nullptr;
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  const auto accepted = net_->parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(accepted.recorder->texts().size(), 1u);
}

TEST_P(TransportTest, AcceptorRefuses) {
  net_->parameter.make = [](const std::shared_ptr<ByteStream>& stream) {
    stream->Write(Message("why"));
    stream->Close(absl::ResourceExhaustedError("too many workers"));
    return nullptr;
  };
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client->texts(), std::vector<std::string>{"why"});
  net_->shard.make = [](const std::shared_ptr<ByteStream>&) { return nullptr; };
  client = std::make_shared<Recorder>();
  stream = Open(client, Plane::kShard);
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

TEST_P(TransportTest, AcceptorClosesWhileAccepting) {
  net_->parameter.make = [](const std::shared_ptr<ByteStream>& stream) {
    stream->Write(Message("bye"));
    stream->Close(absl::OutOfRangeError("at once"));
    return std::make_shared<Recorder>();
  };
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(client->texts(), std::vector<std::string>{"bye"});
  EXPECT_EQ(net_->parameter.Await().recorder->AwaitClosed().code(), absl::StatusCode::kOutOfRange);
}

TEST_P(TransportTest, CloseInsideACallbackOfTheAcceptingEnd) {
  net_->parameter.make = [](const std::shared_ptr<ByteStream>& stream) {
    const std::weak_ptr<ByteStream> weak = stream;
    return std::make_shared<Recorder>([weak](const std::string&) {
      weak.lock()->Write(Message("last"));
      weak.lock()->Close(absl::AbortedError("seen enough"));
    });
  };
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  for (int i = 0; i < 5; ++i) stream->Write(Message("x"));
  EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(client->texts(), std::vector<std::string>{"last"});
  const auto accepted = net_->parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(accepted.recorder->texts().size(), 1u) << "messages after an own Close";
}

TEST_P(TransportTest, CloseInsideCallbacksOfTheOpeningEnd) {
  std::shared_ptr<ByteStream> stream;
  absl::Notification opened;
  auto client = std::make_shared<Recorder>([&](const std::string&) {
    opened.WaitForNotification();
    stream->Close(absl::AbortedError("mine"));
  });
  client->on_closed = [&] {
    stream->Close(absl::OkStatus());  // no effect, no deadlock
    stream->Write(Message("nobody"));
  };
  stream = Open(client);
  opened.Notify();
  const auto accepted = net_->parameter.Await();
  accepted.stream->Write(Message("a"));
  accepted.stream->Write(Message("b"));
  EXPECT_EQ(client->AwaitClosed(), absl::AbortedError("mine"));
  EXPECT_EQ(client->texts().size(), 1u);
  EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  stream = nullptr;
}

TEST_P(TransportTest, NobodyListens) {
  net_->StopListening();
  for (int i = 0; i < 3; ++i) {
    auto client = std::make_shared<Recorder>();
    auto stream = Open(client);
    stream->Write(Message("hello?"));
    EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
    stream->Write(Message("still?"));
    EXPECT_EQ(stream->queued_bytes(), 0u);
  }
}

TEST_P(TransportTest, PeerDiesAndComesBack) {
  for (int life = 0; life < 4; ++life) {
    auto client = std::make_shared<Recorder>();
    auto stream = Open(client);  // the first try reaches it, although the last one failed a moment ago
    stream->Write(Message("hello"));
    const auto accepted = net_->parameter.Await(life);
    EXPECT_EQ(accepted.recorder->AwaitTexts(1), std::vector<std::string>{"hello"});
    net_->StopListening();
    EXPECT_TRUE(accepted.recorder->closed()) << "handlers run after the listener is gone";
    EXPECT_EQ(accepted.recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
    client = std::make_shared<Recorder>();
    stream = Open(client);
    EXPECT_EQ(client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
    net_->Listen();
  }
}

TEST_P(TransportTest, DestroyedTransportCallsNobodyAnyMore) {
  std::vector<std::shared_ptr<Recorder>> clients;
  std::vector<std::shared_ptr<ByteStream>> streams;
  for (int i = 0; i < 10; ++i) {
    clients.push_back(std::make_shared<Recorder>());
    streams.push_back(Open(clients.back()));
    streams.back()->Write(Message("hello"));
  }
  for (int i = 0; i < 10; ++i) net_->parameter.Await(i).recorder->AwaitTexts(1);
  transport_ = nullptr;
  for (const auto& client : clients) {
    EXPECT_TRUE(client->closed());
    EXPECT_EQ(client.use_count(), 1) << "the transport still holds the handler";
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(net_->parameter.Await(i).recorder->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  }
  streams[0]->Write(Message("nobody"));  // handles may outlive it
}

TEST_P(TransportTest, SlowReaderHoldsTheSenderBack) {
  StuckReader reader(net_.get());
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  constexpr size_t kCount = 64, kBytes = 1 << 20;
  for (size_t i = 0; i < kCount; ++i) stream->Write(Message(std::string(kBytes, 'x')));
  ASSERT_TRUE(reader.AwaitReading());
  // Whatever sockets and flow control hold, most of it must still wait here.
  EXPECT_GT(stream->queued_bytes(), kCount * kBytes / 4);
  EXPECT_LE(stream->queued_bytes(), kCount * kBytes);
  reader.GoOn();
  net_->parameter.Await().recorder->AwaitTexts(kCount);
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(stream->queued_bytes(), 0u);
}

// What takes another's place in the queue: the last one arrives, never an older one after a newer one.
TEST_P(TransportTest, LatestMessagesTakeEachOthersPlace) {
  StuckReader reader(net_.get());
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  constexpr size_t kBig = 32, kBytes = 1 << 20;
  constexpr int kLatest = 100;
  for (size_t i = 0; i < kBig; ++i) stream->Write(Message(std::string(kBytes, 'x')));
  ASSERT_TRUE(reader.AwaitReading());
  for (int i = 1; i <= kLatest; ++i) {
    stream->WriteLatest(Message(absl::StrCat(i)));
    if (i == kLatest / 2) stream->Write(Message("between"));
  }
  EXPECT_LE(stream->queued_bytes(), kBig * kBytes + 7 + 3 * kLatest);
  stream->Close(absl::OkStatus());
  reader.GoOn();
  const auto accepted = net_->parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  int last = 0, between = 0;
  const std::vector<std::string> texts = accepted.recorder->texts();
  for (const std::string& text : texts) {
    if (text.size() == kBytes) continue;
    if (text == "between") {
      ++between;
      continue;
    }
    EXPECT_GT(std::stoi(text), last);
    last = std::stoi(text);
  }
  EXPECT_EQ(last, kLatest);
  EXPECT_EQ(between, 1);
  if (std::string(GetParam().name) == "Grpc")
    EXPECT_EQ(texts.size(), kBig + 2) << "they waited behind big ones and were one";
}

TEST_P(TransportTest, ClosingDoesNotWaitForAStuckPeer) {
  StuckReader reader(net_.get());
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  for (int i = 0; i < 64; ++i) stream->Write(Message(std::string(1 << 20, 'x')));
  ASSERT_TRUE(reader.AwaitReading());
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());  // the peer has read one message of 64
  reader.GoOn();
  EXPECT_FALSE(net_->parameter.Await().recorder->AwaitClosed().ok() && GetParam().cuts_when_stuck);
}

TEST_P(TransportTest, StreamsOfManyThreadsDoNotMix) {
  constexpr int kStreams = 8, kMessages = 300;
  std::vector<std::thread> threads;
  for (int s = 0; s < kStreams; ++s) {
    threads.emplace_back([&, s] {
      auto client = std::make_shared<Recorder>();
      auto stream = Open(client);
      for (int i = 0; i < kMessages; ++i) stream->Write(Message(absl::StrCat(s, ":", i)));
      if (s % 2 == 0) {
        stream->Close(absl::OkStatus());
      } else {
        stream = nullptr;
      }
      EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
    });
  }
  for (std::thread& t : threads) t.join();
  for (int k = 0; k < kStreams; ++k) {
    const auto accepted = net_->parameter.Await(k);
    EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
    const auto texts = accepted.recorder->texts();
    ASSERT_EQ(texts.size(), size_t{kMessages});
    const std::string s = texts[0].substr(0, texts[0].find(':'));
    for (int i = 0; i < kMessages; ++i) EXPECT_EQ(texts[i], absl::StrCat(s, ":", i));
  }
}

// Ends close, cut, drop and die at random instants; every handler gets exactly one OnClosed, and nobody crashes.
TEST_P(TransportTest, RandomEnds) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 200; ++i) {
    const size_t index = net_->parameter.size();
    auto client = std::make_shared<Recorder>();
    auto stream = Open(client);
    stream->Write(Message("hello"));
    const auto accepted = net_->parameter.Await(index);
    const uint32_t up = random() % 20, down = random() % 20, kind = random() % 5;
    const size_t bytes = random() % 2 == 0 ? 10 : 100000;
    std::thread other([&, s = accepted.stream] {
      for (uint32_t k = 0; k < down; ++k) s->Write(Message(std::string(bytes, 'd')));
      if (kind == 0 || kind == 2) s->Close(absl::OkStatus());
      if (kind == 1) s->Close(absl::DataLossError("d"));
    });
    for (uint32_t k = 0; k < up; ++k) stream->Write(Message(std::string(bytes, 'u')));
    if (kind == 2 || kind == 3) stream->Close(random() % 2 == 0 ? absl::OkStatus() : absl::AbortedError("u"));
    if (kind == 4) stream = nullptr;
    other.join();
    const absl::Status at_client = client->AwaitClosed();
    const absl::Status at_server = accepted.recorder->AwaitClosed();
    if (kind == 1) {
      EXPECT_EQ(at_client.code(), absl::StatusCode::kDataLoss);
      EXPECT_EQ(at_server.code(), absl::StatusCode::kDataLoss);
    }
    if (i == 100) {
      net_->StopListening();
      net_->Listen();
      // The connection may not know yet that its peer went: then the first try ends with UNAVAILABLE.
      const auto make = net_->parameter.make;
      net_->parameter.make = [](const std::shared_ptr<ByteStream>& stream) {
        stream->Write(Message("welcome"));
        return std::make_shared<Recorder>();
      };
      for (bool welcome = false; !welcome;) {
        const size_t tried = net_->parameter.size();
        client = std::make_shared<Recorder>();
        stream = Open(client);
        welcome = client->AwaitFirst();
        if (welcome) net_->parameter.Await(tried);  // "welcome" is written before the stream is counted
        stream->Close(absl::OkStatus());
        const absl::Status status = client->AwaitClosed();
        ASSERT_TRUE(welcome || status.code() == absl::StatusCode::kUnavailable) << status;
      }
      net_->parameter.make = make;
    }
  }
}

std::unique_ptr<Net> MakeInProcess() { return std::make_unique<InProcessNet>(InProcessOptions()); }
std::unique_ptr<Net> MakeDelayed() {
  InProcessOptions options;
  options.delay_seed = 11;
  options.max_delay = absl::Microseconds(500);
  return std::make_unique<InProcessNet>(options);
}
std::unique_ptr<Net> MakeGrpc() { return std::make_unique<GrpcNet>(); }

INSTANTIATE_TEST_SUITE_P(All, TransportTest,
                         testing::Values(Kind{"InProcess", MakeInProcess, false},
                                         Kind{"InProcessDelayed", MakeDelayed, false}, Kind{"Grpc", MakeGrpc, true}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace sluice
