// A node's session over the in-process transport: registration, heartbeats, breaks, refusals, its end.
#include "common/session.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/inprocess_transport.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);  // of a wait that normally takes milliseconds

// The scheduler's end: welcomes everybody, unless told to refuse, and keeps what comes.
class Host {
 public:
  explicit Host(InProcessNetwork* network) {
    auto listener =
        network->Listen("scheduler", {{Plane::kSession, [this](std::shared_ptr<ByteStream> stream, const std::string&) {
                                         return std::make_shared<Handler>(this, std::move(stream));
                                       }}});
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  void Refuse(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    refusal_ = std::move(status);
  }
  // Waits for the n-th message of this kind on all streams together.
  bool Await(v1::NodeMessage::KindCase kind, int n) {
    const auto there = [&]() {
      mutex_.AssertHeld();
      int count = 0;
      for (const v1::NodeMessage& message : heard_) count += message.kind_case() == kind;
      return count >= n;
    };
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&there), kPatience);
  }
  v1::NodeMessage first() {
    absl::MutexLock lock(&mutex_);
    return heard_.at(0);
  }
  void CloseNewest(const absl::Status& status) {
    std::shared_ptr<ByteStream> stream;
    {
      absl::MutexLock lock(&mutex_);
      stream = newest_;
    }
    stream->Close(status);
  }

 private:
  class Handler : public StreamHandler {
   public:
    Handler(Host* host, std::shared_ptr<ByteStream> stream) : host_(host), stream_(std::move(stream)) {}
    void OnMessage(grpc::ByteBuffer buffer) override {
      v1::NodeMessage message;
      ASSERT_TRUE(DecodeMessage(buffer, &message));
      absl::MutexLock lock(&host_->mutex_);
      host_->heard_.push_back(message);
      if (!message.has_register_()) return;
      host_->newest_ = stream_;
      if (!host_->refusal_.ok()) return stream_->Close(host_->refusal_);
      v1::SchedulerMessage welcome;
      welcome.mutable_welcome()->set_lease_ms(150);
      stream_->Write(EncodeMessage(welcome));
    }
    void OnClosed(const absl::Status&) override { stream_ = nullptr; }

   private:
    Host* const host_;
    std::shared_ptr<ByteStream> stream_;
  };

  absl::Mutex mutex_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::NodeMessage> heard_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ByteStream> newest_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Listener> listener_;
};

class SessionTest : public testing::Test {
 protected:
  std::unique_ptr<Session> Start() {
    Session::Callbacks callbacks;
    callbacks.make_register = [this] {
      absl::MutexLock lock(&mutex_);
      ++registers_;
      v1::Register reg;
      reg.mutable_node()->set_name("worker-0");
      return reg;
    };
    callbacks.on_message = [this](const v1::SchedulerMessage& message) {
      if (!message.has_welcome()) return;
      v1::NodeMessage progress;
      progress.mutable_shard_progress();
      absl::MutexLock lock(&mutex_);
      ++welcomes_;
      if (session_ != nullptr) session_->Send(progress);  // what the scheduler may have missed
    };
    callbacks.on_refused = [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      refused_ = status;
    };
    return Session::Start(transport_.get(), "scheduler", std::move(callbacks));
  }
  bool AwaitWelcomes(int n) {
    const auto there = [&]() {
      mutex_.AssertHeld();
      return welcomes_ >= n;
    };
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&there), kPatience);
  }
  absl::Status AwaitRefused() {
    const auto there = [&]() {
      mutex_.AssertHeld();
      return !refused_.ok();
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&there), kPatience);
    return refused_;
  }

  InProcessNetwork network_;
  std::unique_ptr<Transport> transport_ = network_.MakeTransport("worker-0");
  absl::Mutex mutex_;
  int registers_ ABSL_GUARDED_BY(mutex_) = 0;
  int welcomes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);
  Session* session_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

TEST_F(SessionTest, RegistersFirstAndKeepsTheLease) {
  Host host(&network_);
  const auto session = Start();
  ASSERT_TRUE(AwaitWelcomes(1));
  EXPECT_EQ(host.first().register_().node().name(), "worker-0");
  EXPECT_TRUE(host.Await(v1::NodeMessage::kHeartbeat, 3));
}

TEST_F(SessionTest, RegistersAgainAfterEveryBreak) {
  Host host(&network_);
  const auto session = Start();
  ASSERT_TRUE(AwaitWelcomes(1));
  {
    absl::MutexLock lock(&mutex_);
    session_ = session.get();
  }
  network_.Break("worker-0", "scheduler");
  ASSERT_TRUE(AwaitWelcomes(2));
  EXPECT_TRUE(host.Await(v1::NodeMessage::kShardProgress, 1)) << "what is said at Welcome arrives";
  host.CloseNewest(absl::DeadlineExceededError("lease"));
  EXPECT_TRUE(AwaitWelcomes(3));
  absl::MutexLock lock(&mutex_);
  session_ = nullptr;
}

TEST_F(SessionTest, WaitsForASchedulerThatIsNotThereYet) {
  const auto session = Start();
  v1::NodeMessage lost;
  lost.mutable_shard_progress();
  session->Send(lost);  // nobody hears it
  {
    const auto tried = [&]() {
      mutex_.AssertHeld();
      return registers_ >= 3;
    };
    absl::MutexLock lock(&mutex_);
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&tried), kPatience));
  }
  Host host(&network_);
  EXPECT_TRUE(AwaitWelcomes(1));
  EXPECT_EQ(host.first().kind_case(), v1::NodeMessage::kRegister);
}

TEST_F(SessionTest, ARefusalIsFinal) {
  Host host(&network_);
  host.Refuse(absl::AbortedError("superseded"));
  const auto session = Start();
  EXPECT_EQ(AwaitRefused().code(), absl::StatusCode::kAborted);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(registers_, 1);
}

TEST_F(SessionTest, EndsAtAnyMomentWithoutACallAfterwards) {
  Host host(&network_);
  for (int i = 0; i < 50; ++i) {
    auto session = Start();
    if (i % 2 == 0) {
      ASSERT_TRUE(AwaitWelcomes(1));
    }
    if (i % 5 == 0) network_.Break("worker-0", "scheduler");
    session = nullptr;
    absl::MutexLock lock(&mutex_);
    registers_ = welcomes_ = 0;
  }
}

}  // namespace
}  // namespace sluice
