#include "common/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/frame.h"
#include "common/log.h"

namespace sluice {
namespace {

constexpr absl::Duration kFirstDelay = absl::Milliseconds(50);
constexpr absl::Duration kLongestDelay = absl::Seconds(1);
constexpr absl::Duration kWelcomeDeadline = absl::Seconds(10);  // from opening to Welcome
constexpr absl::Duration kRemindEvery = absl::Seconds(10);      // of a scheduler that cannot be reached, in the log
constexpr uint64_t kDefaultLeaseMs = 2000;

bool IsRefusal(const absl::Status& status) {
  return status.code() == absl::StatusCode::kFailedPrecondition || status.code() == absl::StatusCode::kAborted ||
         status.code() == absl::StatusCode::kInvalidArgument;
}

// Shared by the session's owner, its thread and the handlers of its streams; outlives whichever ends last.
class SessionState {
 public:
  SessionState(Transport* transport, std::string address, Session::Callbacks callbacks)
      : transport_(transport), address_(std::move(address)), callbacks_(std::move(callbacks)) {}

  void Run(const std::shared_ptr<SessionState>& self);
  void End();
  void Send(const v1::NodeMessage& message);
  // Events of the stream with this number; those of an earlier stream come before a later one is opened.
  void OnMessage(uint64_t life, const grpc::ByteBuffer& buffer);
  void OnClosed(uint64_t life, const absl::Status& status);

 private:
  void Connect(const std::shared_ptr<SessionState>& self);
  // Takes the right to call the owner back; false once the session ends.
  bool EnterCallback();
  void LeaveCallback();
  bool MayEnter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ || !in_callback_; }
  bool Quiet() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !in_callback_; }
  bool Awake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ || changed_; }

  Transport* const transport_;
  const std::string address_;
  const Session::Callbacks callbacks_;

  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool refused_ ABSL_GUARDED_BY(mutex_) = false;
  bool in_callback_ ABSL_GUARDED_BY(mutex_) = false;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t life_ ABSL_GUARDED_BY(mutex_) = 0;  // number of the newest stream
  bool open_ ABSL_GUARDED_BY(mutex_) = false;  // that stream has not been closed
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<ByteStream> stream_ ABSL_GUARDED_BY(mutex_);
  absl::Duration heartbeat_ ABSL_GUARDED_BY(mutex_) = absl::Milliseconds(kDefaultLeaseMs) / 3;
  absl::Duration delay_ ABSL_GUARDED_BY(mutex_) = kFirstDelay;
  absl::Time next_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // attempt, Welcome's deadline or heartbeat
  absl::Time reminded_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

class SessionStream : public StreamHandler {
 public:
  SessionStream(std::shared_ptr<SessionState> state, uint64_t life) : state_(std::move(state)), life_(life) {}
  void OnMessage(grpc::ByteBuffer message) override { state_->OnMessage(life_, message); }
  void OnClosed(const absl::Status& status) override { state_->OnClosed(life_, status); }

 private:
  const std::shared_ptr<SessionState> state_;
  const uint64_t life_;
};

bool SessionState::EnterCallback() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &SessionState::MayEnter));
  if (ended_) return false;
  in_callback_ = true;
  return true;
}

void SessionState::LeaveCallback() {
  absl::MutexLock lock(&mutex_);
  in_callback_ = false;
}

void SessionState::Run(const std::shared_ptr<SessionState>& self) {
  for (;;) {
    bool connect = false;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithDeadline(absl::Condition(this, &SessionState::Awake), refused_ ? absl::InfiniteFuture() : next_);
      changed_ = false;
      if (ended_) return;
      const absl::Time now = absl::Now();
      if (refused_ || now < next_) continue;
      if (!open_) {
        connect = true;
      } else if (welcomed_) {
        v1::NodeMessage message;
        message.mutable_heartbeat();
        if (stream_ != nullptr) stream_->Write(EncodeMessage(message));
        next_ = now + heartbeat_;
      } else {
        if (stream_ != nullptr) {
          stream_->Close(absl::DeadlineExceededError("no Welcome from the scheduler within 10 s"));
        }
        next_ = absl::InfiniteFuture();  // until OnClosed
      }
    }
    if (connect) Connect(self);
  }
}

void SessionState::Connect(const std::shared_ptr<SessionState>& self) {
  if (!EnterCallback()) return;
  v1::NodeMessage message;
  *message.mutable_register_() = callbacks_.make_register();
  LeaveCallback();
  uint64_t life;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    life = ++life_;
    open_ = true;
    welcomed_ = false;
    next_ = absl::Now() + kWelcomeDeadline;
  }
  std::shared_ptr<ByteStream> stream =
      transport_->Open(address_, Plane::kSession, std::make_shared<SessionStream>(self, life));
  absl::MutexLock lock(&mutex_);
  if (ended_ || !open_) return;  // dropping the stream closes it
  stream->Write(EncodeMessage(message));
  stream_ = std::move(stream);
}

void SessionState::OnMessage(uint64_t life, const grpc::ByteBuffer& buffer) {
  v1::SchedulerMessage message;
  const bool legal = DecodeMessage(buffer, &message);
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || life != life_ || !open_) return;
    if (!legal) {
      LOG_ERROR("scheduler at {}: bytes that are no SchedulerMessage; opening the session anew", address_);
      if (stream_ != nullptr) stream_->Close(absl::InternalError("bytes that are no SchedulerMessage"));
      return;
    }
    if (message.has_welcome()) {
      const uint64_t lease_ms = message.welcome().lease_ms() > 0 ? message.welcome().lease_ms() : kDefaultLeaseMs;
      heartbeat_ = absl::Milliseconds(static_cast<int64_t>(lease_ms)) / 3;
      welcomed_ = true;
      changed_ = true;
      delay_ = kFirstDelay;
      reminded_ = absl::InfinitePast();
      next_ = absl::Now() + heartbeat_;
    }
  }
  if (!EnterCallback()) return;
  callbacks_.on_message(message);
  LeaveCallback();
}

void SessionState::OnClosed(uint64_t life, const absl::Status& status) {
  std::shared_ptr<ByteStream> dropped;
  bool refused = false;
  {
    absl::MutexLock lock(&mutex_);
    if (life != life_ || !open_) return;
    open_ = welcomed_ = false;
    dropped = std::move(stream_);
    stream_ = nullptr;
    if (ended_ || refused_) return;
    const absl::Time now = absl::Now();
    refused = refused_ = IsRefusal(status);
    changed_ = true;
    next_ = now + delay_;
    delay_ = std::min(2 * delay_, kLongestDelay);
    if (!refused && now - reminded_ >= kRemindEvery) {
      reminded_ = now;
      LOG_WARN("no session with the scheduler at {} ({}); trying again", address_, status.ToString());
    }
  }
  if (!refused) return;
  LOG_ERROR("the scheduler at {} refused this node: {}", address_, std::string(status.message()));
  if (!EnterCallback()) return;
  callbacks_.on_refused(status);
  LeaveCallback();
}

void SessionState::Send(const v1::NodeMessage& message) {
  absl::MutexLock lock(&mutex_);
  if (!ended_ && open_ && stream_ != nullptr) stream_->Write(EncodeMessage(message));
}

void SessionState::End() {
  std::shared_ptr<ByteStream> stream;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    mutex_.Await(absl::Condition(this, &SessionState::Quiet));
    stream = std::move(stream_);
    stream_ = nullptr;
  }
  if (stream != nullptr) stream->Close(absl::OkStatus());
}

class SessionImpl final : public Session {
 public:
  SessionImpl(Transport* transport, std::string address, Callbacks callbacks)
      : state_(std::make_shared<SessionState>(transport, std::move(address), std::move(callbacks))),
        thread_([state = state_] { state->Run(state); }) {}
  ~SessionImpl() override {
    state_->End();
    thread_.join();
  }
  void Send(const v1::NodeMessage& message) override { state_->Send(message); }

 private:
  const std::shared_ptr<SessionState> state_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Session> Session::Start(Transport* transport, std::string scheduler_address, Callbacks callbacks) {
  return std::make_unique<SessionImpl>(transport, std::move(scheduler_address), std::move(callbacks));
}

}  // namespace sluice
