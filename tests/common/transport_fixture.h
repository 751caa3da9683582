// What the transports' tests share: recording handlers, collected accepted ends, a listening node of either kind.
#ifndef SLUICE_TESTS_COMMON_TRANSPORT_FIXTURE_H_
#define SLUICE_TESTS_COMMON_TRANSPORT_FIXTURE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/grpc_transport.h"
#include "common/inprocess_transport.h"
#include "common/transport.h"
#include "sluice/v1/parameter.grpc.pb.h"
#include "sluice/v1/scheduler.grpc.pb.h"
#include "sluice/v1/shard.grpc.pb.h"

namespace sluice {

inline constexpr absl::Duration kDeadline = absl::Seconds(30);  // of a wait that normally takes milliseconds

inline grpc::ByteBuffer Message(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

inline std::string Text(const grpc::ByteBuffer& message) {
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
  // Whether a message came before the end.
  bool AwaitFirst() {
    absl::MutexLock lock(&mutex_);
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !texts_.empty() || closed_; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), kDeadline)) << "no event";
    return !texts_.empty();
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

inline Acceptor To(Acceptance* acceptance) {
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

}  // namespace sluice

#endif  // SLUICE_TESTS_COMMON_TRANSPORT_FIXTURE_H_
