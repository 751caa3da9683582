// One contract for all transports: what common/transport.h promises, over gRPC on a socket and inside the process.
#include "common/transport.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "common/grpc_transport.h"
#include "common/inprocess_transport.h"
#include "sluice/v1/parameter.grpc.pb.h"
#include "sluice/v1/scheduler.grpc.pb.h"
#include "sluice/v1/shard.grpc.pb.h"

namespace sluice {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(30);  // of a wait that normally takes milliseconds

grpc::ByteBuffer Message(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Text(const grpc::ByteBuffer& message) {
  grpc::Slice slice;
  EXPECT_TRUE(message.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

// Records the events of one end and checks that they come one at a time and end with OnClosed.
class Recorder : public StreamHandler {
 public:
  using OnText = std::function<void(const std::string&)>;
  explicit Recorder(OnText on_text = nullptr) : on_text_(std::move(on_text)) {}

  void OnMessage(grpc::ByteBuffer message) override {
    Enter();
    std::string text = Text(message);
    if (on_text_) on_text_(text);
    {
      absl::MutexLock lock(&mutex_);
      EXPECT_FALSE(closed_) << "a message after OnClosed";
      bytes_ += text.size();
      texts_.push_back(std::move(text));
    }
    inside_ = false;
  }
  void OnClosed(const absl::Status& status) override {
    Enter();
    {
      absl::MutexLock lock(&mutex_);
      EXPECT_FALSE(closed_) << "OnClosed twice";
      status_ = status;
    }
    if (on_closed) on_closed();
    inside_ = false;
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }

  std::vector<std::string> AwaitTexts(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return texts_.size() >= count || closed_; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), kDeadline)) << texts_.size() << " of " << count;
    EXPECT_GE(texts_.size(), count) << status_;
    return texts_;
  }
  absl::Status AwaitClosed() {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&closed_), kDeadline)) << "OnClosed did not come";
    return status_;
  }
  std::vector<std::string> texts() const {
    absl::MutexLock lock(&mutex_);
    return texts_;
  }
  bool closed() const {
    absl::MutexLock lock(&mutex_);
    return closed_;
  }

  std::function<void()> on_closed;  // set before the stream begins

 private:
  void Enter() { EXPECT_FALSE(inside_.exchange(true)) << "two events of one end at once"; }

  const OnText on_text_;
  std::atomic<bool> inside_{false};
  mutable absl::Mutex mutex_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// The accepted ends of a test, in order.
class Acceptance {
 public:
  struct One {
    std::shared_ptr<ByteStream> stream;
    std::shared_ptr<Recorder> recorder;
    std::string peer;
  };
  // Makes the recorder of an accepted stream; null refuses.
  std::function<std::shared_ptr<Recorder>(const std::shared_ptr<ByteStream>&)> make =
      [](const std::shared_ptr<ByteStream>&) { return std::make_shared<Recorder>(); };

  std::shared_ptr<StreamHandler> Accept(std::shared_ptr<ByteStream> stream, const std::string& peer) {
    auto recorder = make(stream);
    absl::MutexLock lock(&mutex_);
    if (recorder != nullptr) accepted_.push_back({std::move(stream), recorder, peer});
    return recorder;
  }
  One Await(size_t index = 0) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return accepted_.size() > index; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), kDeadline)) << "nothing was accepted";
    return index < accepted_.size() ? accepted_[index] : One();
  }
  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return accepted_.size();
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<One> accepted_ ABSL_GUARDED_BY(mutex_);
};

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class ParameterStreams final
    : public v1::ParameterService::WithRawCallbackMethod_Stream<v1::ParameterService::Service> {
 public:
  explicit ParameterStreams(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  RawReactor* Stream(grpc::CallbackServerContext* context) override { return NewAcceptedStream(context, acceptor_); }
  grpc::Status GetPlan(grpc::ServerContext*, const v1::GetPlanRequest* request, v1::GetPlanResponse*) override {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, request->job_id());
  }

 private:
  const Acceptor acceptor_;
};

class ShardStreams final : public v1::ShardService::WithRawCallbackMethod_Stream<v1::ShardService::Service> {
 public:
  explicit ShardStreams(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  RawReactor* Stream(grpc::CallbackServerContext* context) override { return NewAcceptedStream(context, acceptor_); }

 private:
  const Acceptor acceptor_;
};

class Sessions final : public v1::SchedulerService::WithRawCallbackMethod_Session<v1::SchedulerService::Service> {
 public:
  explicit Sessions(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  RawReactor* Session(grpc::CallbackServerContext* context) override { return NewAcceptedStream(context, acceptor_); }

 private:
  const Acceptor acceptor_;
};

// A listening node with three planes, each with its Acceptance, and the transport of another node.
class Net {
 public:
  virtual ~Net() = default;
  virtual void Listen() = 0;  // again after StopListening: at the same address
  virtual void StopListening() = 0;
  virtual std::string address() const = 0;
  virtual std::unique_ptr<Transport> MakeTransport() = 0;

  Acceptance session, parameter, shard;
};

Acceptor To(Acceptance* acceptance) {
  return [acceptance](std::shared_ptr<ByteStream> stream, const std::string& peer) {
    return acceptance->Accept(std::move(stream), peer);
  };
}

class GrpcNet : public Net {
 public:
  ~GrpcNet() override { StopListening(); }
  void Listen() override {
    sessions_ = std::make_unique<Sessions>(To(&session));
    parameters_ = std::make_unique<ParameterStreams>(To(&parameter));
    shards_ = std::make_unique<ShardStreams>(To(&shard));
    GrpcServerOptions options;
    options.listen.port = port_;
    auto server = GrpcServer::Start(options, {sessions_.get(), parameters_.get(), shards_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    port_ = server_->port();
    address_ = server_->address();
  }
  void StopListening() override {
    server_ = nullptr;
    sessions_ = nullptr;
    parameters_ = nullptr;
    shards_ = nullptr;
  }
  std::string address() const override { return address_; }
  std::unique_ptr<Transport> MakeTransport() override { return std::make_unique<GrpcTransport>(); }
  int port() const { return port_; }

 private:
  int port_ = 0;
  std::string address_ = "127.0.0.1:1";  // nobody listens there before Listen
  std::unique_ptr<Sessions> sessions_;
  std::unique_ptr<ParameterStreams> parameters_;
  std::unique_ptr<ShardStreams> shards_;
  std::unique_ptr<GrpcServer> server_;
};

class InProcessNet : public Net {
 public:
  explicit InProcessNet(const InProcessOptions& options) : network_(options) {}
  ~InProcessNet() override { StopListening(); }
  void Listen() override {
    auto listener = network_.Listen(
        "server-0",
        {{Plane::kSession, To(&session)}, {Plane::kParameter, To(&parameter)}, {Plane::kShard, To(&shard)}});
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  void StopListening() override { listener_ = nullptr; }
  std::string address() const override { return "server-0"; }
  std::unique_ptr<Transport> MakeTransport() override { return network_.MakeTransport("worker-0"); }
  InProcessNetwork& network() { return network_; }

 private:
  InProcessNetwork network_;
  std::unique_ptr<Listener> listener_;
};

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
  absl::Notification reading, go_on;
  net_->parameter.make = [&](const std::shared_ptr<ByteStream>&) {
    return std::make_shared<Recorder>([&](const std::string&) {
      if (!reading.HasBeenNotified()) reading.Notify();
      go_on.WaitForNotification();
    });
  };
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  constexpr size_t kCount = 64, kBytes = 1 << 20;
  for (size_t i = 0; i < kCount; ++i) stream->Write(Message(std::string(kBytes, 'x')));
  ASSERT_TRUE(reading.WaitForNotificationWithTimeout(kDeadline));
  // Whatever sockets and flow control hold, most of it must still wait here.
  EXPECT_GT(stream->queued_bytes(), kCount * kBytes / 4);
  EXPECT_LE(stream->queued_bytes(), kCount * kBytes);
  go_on.Notify();
  net_->parameter.Await().recorder->AwaitTexts(kCount);
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(stream->queued_bytes(), 0u);
}

TEST_P(TransportTest, ClosingDoesNotWaitForAStuckPeer) {
  absl::Notification reading, go_on;
  net_->parameter.make = [&](const std::shared_ptr<ByteStream>&) {
    return std::make_shared<Recorder>([&](const std::string&) {
      if (!reading.HasBeenNotified()) reading.Notify();
      go_on.WaitForNotification();
    });
  };
  auto client = std::make_shared<Recorder>();
  auto stream = Open(client);
  for (int i = 0; i < 64; ++i) stream->Write(Message(std::string(1 << 20, 'x')));
  ASSERT_TRUE(reading.WaitForNotificationWithTimeout(kDeadline));
  stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());  // the peer has read one message of 64
  go_on.Notify();
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
    }
  }
}

// ------------------------------------------------------------------ gRPC alone
class GrpcServerTest : public testing::Test {
 protected:
  void SetUp() override { net_.Listen(); }

  void ExpectServes() {
    GrpcTransport transport;
    auto client = std::make_shared<Recorder>();
    const size_t index = net_.parameter.size();
    auto stream = transport.Open(net_.address(), Plane::kParameter, client);
    stream->Write(Message("hello"));
    EXPECT_EQ(net_.parameter.Await(index).recorder->AwaitTexts(1), std::vector<std::string>{"hello"});
    stream->Close(absl::OkStatus());
    EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  }

  GrpcNet net_;
};

TEST_F(GrpcServerTest, PortZeroBecomesAFreeOne) {
  EXPECT_GT(net_.port(), 0);
  EXPECT_EQ(net_.address(), absl::StrCat("127.0.0.1:", net_.port()));
}

TEST_F(GrpcServerTest, UsedPortIsAClearError) {
  GrpcServerOptions options;
  options.listen.port = net_.port();
  const auto second = GrpcServer::Start(options, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status();
  EXPECT_NE(std::string(second.status().message()).find(absl::StrCat("127.0.0.1:", net_.port())), std::string::npos);
  ExpectServes();
}

TEST_F(GrpcServerTest, AddressesThatCannotBe) {
  GrpcServerOptions options;
  options.listen = {"0.0.0.0", 0};
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  options.insecure = true;
  options.advertise = {"trainer-7.example", 0};
  const auto open = GrpcServer::Start(options, {});
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_EQ((*open)->address(), absl::StrCat("trainer-7.example:", (*open)->port()));
  options.listen = {"198.51.100.1", 0};  // set aside for documentation: nobody's
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kInvalidArgument);
  options.listen = {"no.such.host.invalid", 0};
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(GrpcServerTest, UnaryMethodsLiveBesideTheStream) {
  const auto stub = v1::ParameterService::NewStub(MakeChannel(net_.address()));
  grpc::ClientContext context;
  v1::GetPlanRequest request;
  request.set_job_id("none-1");
  v1::GetPlanResponse response;
  const absl::Status status = FromGrpc(stub->GetPlan(&context, request, &response));
  EXPECT_EQ(status, absl::NotFoundError("none-1"));
}

TEST_F(GrpcServerTest, StockStubSpeaksToAnAcceptedStream) {
  const auto stub = v1::ParameterService::NewStub(MakeChannel(net_.address()));
  grpc::ClientContext context;
  const auto call = stub->Stream(&context);
  v1::ChunkFrame frame;
  frame.mutable_hello()->set_job_id("from outside");
  ASSERT_TRUE(call->Write(frame));
  const auto accepted = net_.parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitTexts(1).at(0), frame.SerializeAsString());
  frame.mutable_ack()->set_bytes(12);
  accepted.stream->Write(Message(frame.SerializeAsString()));
  v1::ChunkFrame answer;
  ASSERT_TRUE(call->Read(&answer));
  EXPECT_EQ(answer.SerializeAsString(), frame.SerializeAsString());
  call->WritesDone();
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_TRUE(call->Finish().ok());
}

TEST_F(GrpcServerTest, BytesThatAreNotHttp2HarmNobody) {
  GrpcTransport transport;
  auto client = std::make_shared<Recorder>();
  auto stream = transport.Open(net_.address(), Plane::kParameter, client);
  stream->Write(Message("before"));
  const auto accepted = net_.parameter.Await();
  accepted.recorder->AwaitTexts(1);

  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  std::string noise(5000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), noise, preface + noise,
                                   preface.substr(0, 10), std::string(), std::string("\x16\x03\x01\x02\x00", 5)}) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(net_.port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    shutdown(fd, SHUT_WR);
    const timeval limit = {.tv_sec = 10, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    char answer[4096];
    ssize_t n;
    while ((n = recv(fd, answer, sizeof(answer), 0)) > 0) {
    }
    EXPECT_TRUE(n == 0 || errno == ECONNRESET) << "the server keeps the connection";
    close(fd);
  }
  stream->Write(Message("after"));
  EXPECT_EQ(accepted.recorder->AwaitTexts(2).at(1), "after");
  ExpectServes();
}

TEST_F(GrpcServerTest, ShutdownLetsCallsEndWithinItsGrace) {
  Sessions service(To(&net_.session));
  auto server = GrpcServer::Start({}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  GrpcTransport transport;
  auto client = std::make_shared<Recorder>();
  auto stream = transport.Open((*server)->address(), Plane::kSession, client);
  stream->Write(Message("hello"));
  const auto accepted = net_.session.Await();
  accepted.recorder->AwaitTexts(1);
  std::thread stopping([&] { (*server)->Shutdown(absl::Seconds(60)); });
  accepted.stream->Write(Message("the end"));
  accepted.stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(client->texts(), std::vector<std::string>{"the end"});
  stopping.join();
  (*server)->Shutdown();
}

// ------------------------------------------------------------- in process alone
TEST(InProcessTest, SameSeedSameDelays) {
  // With one thread the order in which messages of two streams arrive shows their delays.
  const auto order = [](uint64_t seed) {
    InProcessOptions options;
    options.delay_seed = seed;
    options.max_delay = absl::Milliseconds(200);
    options.threads = 1;
    InProcessNetwork network(options);
    absl::Mutex mutex;
    std::string arrived;
    const auto acceptor = [&](std::shared_ptr<ByteStream>, const std::string&) {
      return std::make_shared<Recorder>([&](const std::string& text) {
        absl::MutexLock lock(&mutex);
        arrived += text;
      });
    };
    auto listener = network.Listen("s", {{Plane::kShard, acceptor}});
    auto transport = network.MakeTransport("w");
    std::vector<std::shared_ptr<ByteStream>> streams;
    for (int i = 0; i < 8; ++i) {
      streams.push_back(transport->Open("s", Plane::kShard, std::make_shared<Recorder>()));
      streams.back()->Write(Message(std::string(1, 'a' + i)));
    }
    absl::MutexLock lock(&mutex);
    const auto all = [&] { return arrived.size() == 8; };
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&all), kDeadline));
    return arrived;
  };
  // Delays differ by many milliseconds; a busy machine may still swap two neighbours, so the check is on several runs.
  const std::string first = order(1);
  int same = 0, other = 0;
  for (int i = 0; i < 5; ++i) {
    same += order(1) == first;
    other += order(2 + i) == first;
  }
  EXPECT_GT(same, other);
  EXPECT_LE(other, 1);
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
