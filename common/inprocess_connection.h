// Streams of the in-process network: the threads that deliver events, and the two ends of one stream.
// Internal to common/inprocess_transport.h.
#ifndef SLUICE_COMMON_INPROCESS_CONNECTION_H_
#define SLUICE_COMMON_INPROCESS_CONNECTION_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/transport.h"

namespace sluice::inprocess {

inline constexpr int kOpener = 0;
inline constexpr int kAccepter = 1;

// Identifies a stream for its delays: the count-th (from 0) that `opener` opened to `address` on `plane`.
uint64_t DelayKey(uint64_t seed, const std::string& opener, const std::string& address, Plane plane, uint64_t count);

// How long the number-th message to end `to` waits: in [0, max). A pure function.
absl::Duration MessageDelay(uint64_t key, int to, uint64_t number, absl::Duration max);

// Runs turns of stream ends on its threads, at once or at a time.
class Executor {
 public:
  class Job {
   public:
    virtual ~Job() = default;
    virtual void Run(int side) = 0;    // added by Add
    virtual void Alarm(int side) = 0;  // added by AddAt
  };
  using Task = std::pair<std::shared_ptr<Job>, int>;

  explicit Executor(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
  }

  std::atomic<uint64_t> bytes_written{0};                            // of all messages
  std::array<std::atomic<uint64_t>, kPlanes> messages_written = {};  // by plane

  // Runs what is ready to its end, drops what waits for a time.
  void Stop();

  void Add(Task task) {
    absl::MutexLock lock(&mutex_);
    ready_.push_back(std::move(task));
    wake_.Signal();
  }

  void AddAt(absl::Time when, Task task) {
    absl::MutexLock lock(&mutex_);
    timed_.push(Timed{when, next_++, std::move(task)});
    wake_.Signal();
  }

 private:
  struct Timed {
    absl::Time when;
    uint64_t number;
    Task task;
    bool operator<(const Timed& other) const { return std::tie(when, number) > std::tie(other.when, other.number); }
  };

  void Loop();

  absl::Mutex mutex_;
  absl::CondVar wake_;
  std::deque<Task> ready_ ABSL_GUARDED_BY(mutex_);
  std::priority_queue<Timed> timed_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Both ends of one stream. The mutex is never held while a handler or an acceptor runs.
class Connection : public Executor::Job, public std::enable_shared_from_this<Connection> {
 public:
  Connection(Executor* executor, std::string opener, std::string address, Plane plane, uint64_t delay_key,
             absl::Duration max_delay)
      : opener_(std::move(opener)),
        address_(std::move(address)),
        plane_(plane),
        executor_(executor),
        delay_key_(delay_key),
        max_delay_(max_delay) {}

  const std::string& opener() const { return opener_; }
  const std::string& address() const { return address_; }

  // Starts the stream towards `acceptor`.
  void Start(std::shared_ptr<StreamHandler> handler, Acceptor acceptor);
  // Instead of Start: there is nobody.
  void Fail(std::shared_ptr<StreamHandler> handler, const absl::Status& status);

  void Write(int side, grpc::ByteBuffer* message);  // takes it
  size_t QueuedBytes(int side);
  void Close(int side, const absl::Status& status);
  void Break(const absl::Status& status);
  // While held nothing passes from one end to the other.
  void SetHeld(bool held);
  // Returns when the handler of `side` got OnClosed and that has returned.
  void AwaitClosed(int side);

  bool BothClosed();

  void Run(int side) override;
  void Alarm(int side) override;

 private:
  struct Event {
    absl::Time due;
    grpc::ByteBuffer message;
    size_t bytes;
  };
  struct End {
    std::shared_ptr<StreamHandler> handler;
    std::shared_ptr<ByteStream> keep;  // accepting end: alive until OnClosed has returned
    bool accept_pending = false;
    std::deque<Event> inbox;  // what the other end wrote
    size_t inbox_bytes = 0;
    absl::Time last_due = absl::InfinitePast();
    uint64_t sent = 0;  // messages and closes that this end sent: numbers the draws of the delay
    std::optional<absl::Status> close_after_inbox;  // the other end closed
    absl::Time close_due;
    std::optional<absl::Status> close_now;  // closed here, or broken
    bool writable = true;
    bool written = false;    // the other end took something out of its inbox
    bool scheduled = false;  // a task for this end is with the executor, or runs
    bool timer = false;      // a timed task is with the executor
    bool closed = false;     // OnClosed has returned
  };
  struct Turn {  // one event, taken out under the mutex
    enum { kNone, kAccept, kWritten, kMessage, kClosed } kind = kNone;
    std::shared_ptr<StreamHandler> handler;
    grpc::ByteBuffer message;
    absl::Status status;
  };

  absl::Time DrawDue(int to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Schedule(int side) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork(int side, absl::Time* due) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseNow(int side, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Turn TakeTurn(int side) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunAccept() ABSL_LOCKS_EXCLUDED(mutex_);
  void Finish(int side) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string opener_;
  const std::string address_;
  const Plane plane_;
  Executor* const executor_;
  const uint64_t delay_key_;
  const absl::Duration max_delay_;
  Acceptor acceptor_;  // of the one accepting turn

  absl::Mutex mutex_;
  End ends_[2] ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
};

// The handle that users hold of one end.
class InProcessStream : public ByteStream {
 public:
  InProcessStream(std::shared_ptr<Connection> connection, int side) : connection_(std::move(connection)), side_(side) {}
  ~InProcessStream() override { connection_->Close(side_, absl::OkStatus()); }
  void Write(grpc::ByteBuffer message) override { connection_->Write(side_, &message); }
  size_t queued_bytes() const override { return connection_->QueuedBytes(side_); }
  void Close(const absl::Status& status) override { connection_->Close(side_, status); }

 private:
  const std::shared_ptr<Connection> connection_;
  const int side_;
};

}  // namespace sluice::inprocess

#endif  // SLUICE_COMMON_INPROCESS_CONNECTION_H_
