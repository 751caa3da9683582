#include "common/inprocess_transport.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <queue>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/log.h"

namespace sluice {
namespace {

constexpr int kOpener = 0;
constexpr int kAccepter = 1;
constexpr int kEventsPerTurn = 32;  // events of one end in a row before others get the thread

// ByteBuffer has no move, only a copy (of references, with allocations) and Swap.
grpc::ByteBuffer Take(grpc::ByteBuffer* buffer) {
  grpc::ByteBuffer taken;
  taken.Swap(buffer);
  return taken;
}

uint64_t Mix(uint64_t x) {  // the finalizer of splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t MixText(uint64_t seed, const std::string& text) {
  for (unsigned char c : text) seed = Mix(seed ^ c);
  return Mix(seed ^ text.size());
}

std::pair<std::string, std::string> Unordered(const std::string& a, const std::string& b) {
  return a < b ? std::make_pair(a, b) : std::make_pair(b, a);
}

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

  // Runs what is ready to its end, drops what waits for a time.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      wake_.SignalAll();
    }
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }

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

  void Loop() {
    while (true) {
      Task task;
      bool alarm = false;
      {
        absl::MutexLock lock(&mutex_);
        while (true) {
          if (!timed_.empty() && timed_.top().when <= absl::Now()) {
            task = timed_.top().task;
            timed_.pop();
            alarm = true;
            break;
          }
          if (!ready_.empty()) {
            task = std::move(ready_.front());
            ready_.pop_front();
            break;
          }
          if (stopping_) return;
          if (timed_.empty()) {
            wake_.Wait(&mutex_);
          } else {
            wake_.WaitWithDeadline(&mutex_, timed_.top().when);
          }
        }
      }
      if (alarm) {
        task.first->Alarm(task.second);
      } else {
        task.first->Run(task.second);
      }
    }
  }

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
  Connection(Executor* executor, std::string opener, std::string address, uint64_t delay_key, absl::Duration max_delay)
      : opener_(std::move(opener)),
        address_(std::move(address)),
        executor_(executor),
        delay_key_(delay_key),
        max_delay_(max_delay) {}

  const std::string& opener() const { return opener_; }
  const std::string& address() const { return address_; }

  // Starts the stream towards `acceptor`.
  void Start(std::shared_ptr<StreamHandler> handler, Acceptor acceptor);
  // Instead of Start: there is nobody.
  void Fail(std::shared_ptr<StreamHandler> handler, const absl::Status& status);

  void Write(int side, grpc::ByteBuffer message);
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
    bool scheduled = false;  // a task for this end is with the executor, or runs
    bool timer = false;      // a timed task is with the executor
    bool closed = false;     // OnClosed has returned
  };
  struct Turn {  // one event, taken out under the mutex
    enum { kNone, kAccept, kMessage, kClosed } kind = kNone;
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
  Executor* const executor_;
  const uint64_t delay_key_;
  const absl::Duration max_delay_;
  Acceptor acceptor_;  // of the one accepting turn

  absl::Mutex mutex_;
  End ends_[2] ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
};

class InProcessStream : public ByteStream {
 public:
  InProcessStream(std::shared_ptr<Connection> connection, int side) : connection_(std::move(connection)), side_(side) {}
  ~InProcessStream() override { connection_->Close(side_, absl::OkStatus()); }
  void Write(grpc::ByteBuffer message) override { connection_->Write(side_, Take(&message)); }
  size_t queued_bytes() const override { return connection_->QueuedBytes(side_); }
  void Close(const absl::Status& status) override { connection_->Close(side_, status); }

 private:
  const std::shared_ptr<Connection> connection_;
  const int side_;
};

void Connection::Start(std::shared_ptr<StreamHandler> handler, Acceptor acceptor) {
  absl::MutexLock lock(&mutex_);
  acceptor_ = std::move(acceptor);
  ends_[kOpener].handler = std::move(handler);
  End& accepter = ends_[kAccepter];
  accepter.accept_pending = true;
  accepter.close_due = DrawDue(kAccepter);  // of the opening itself, until it was accepted
  Schedule(kAccepter);
}

void Connection::Fail(std::shared_ptr<StreamHandler> handler, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  ends_[kOpener].handler = std::move(handler);
  ends_[kAccepter].closed = true;
  ends_[kAccepter].writable = false;
  CloseNow(kOpener, status);
}

absl::Time Connection::DrawDue(int to) {
  if (max_delay_ <= absl::ZeroDuration()) return absl::InfinitePast();
  const uint64_t draw = Mix(Mix(delay_key_ ^ static_cast<uint64_t>(to)) + ends_[1 - to].sent++);
  const absl::Time due = absl::Now() + max_delay_ * (static_cast<double>(draw >> 11) * 0x1p-53);
  return ends_[to].last_due = std::max(ends_[to].last_due, due);
}

void Connection::Schedule(int side) {
  End& end = ends_[side];
  absl::Time due;
  if (end.scheduled || end.closed || !HasWork(side, &due)) return;
  if (due > absl::InfinitePast() && due > absl::Now()) {
    if (end.timer) return;
    end.timer = true;
    executor_->AddAt(due, {shared_from_this(), side});
    return;
  }
  end.scheduled = true;
  executor_->Add({shared_from_this(), side});
}

bool Connection::HasWork(int side, absl::Time* due) {
  const End& end = ends_[side];
  *due = absl::InfinitePast();
  if (end.closed) return false;
  if (end.close_now.has_value()) return true;
  if (held_) return false;
  if (end.accept_pending) {
    *due = end.close_due;
    return true;
  }
  if (end.handler == nullptr) return false;
  if (!end.inbox.empty()) {
    *due = end.inbox.front().due;
    return true;
  }
  if (end.close_after_inbox.has_value()) {
    *due = end.close_due;
    return true;
  }
  return false;
}

void Connection::CloseNow(int side, const absl::Status& status) {
  End& end = ends_[side];
  if (end.closed || end.close_now.has_value()) return;
  end.close_now = status;
  end.writable = false;
  end.inbox.clear();
  end.inbox_bytes = 0;
  Schedule(side);
}

void Connection::Write(int side, grpc::ByteBuffer message) {
  absl::MutexLock lock(&mutex_);
  if (!ends_[side].writable) return;
  End& to = ends_[1 - side];
  if (to.closed || to.close_now.has_value()) return;
  const size_t bytes = message.Length();
  to.inbox.push_back({DrawDue(1 - side), grpc::ByteBuffer(), bytes});
  to.inbox.back().message.Swap(&message);
  to.inbox_bytes += bytes;
  Schedule(1 - side);
}

size_t Connection::QueuedBytes(int side) {
  absl::MutexLock lock(&mutex_);
  return ends_[1 - side].inbox_bytes;
}

void Connection::Close(int side, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  End& own = ends_[side];
  End& other = ends_[1 - side];
  if (own.closed || own.close_now.has_value()) return;
  const bool heard = own.close_after_inbox.has_value();  // the other end closed first
  CloseNow(side, status);
  if (heard || other.closed || other.close_now.has_value() || other.close_after_inbox.has_value()) return;
  other.writable = false;
  if (side == kOpener && !status.ok()) {
    // What is under way is lost, as with a reset connection; but not past a partition.
    other.inbox.clear();
    other.inbox_bytes = 0;
    other.close_after_inbox = absl::UnavailableError(absl::StrCat(opener_, " cut the stream"));
  } else {
    other.close_after_inbox = status;
  }
  const absl::Time due = DrawDue(1 - side);
  if (!other.accept_pending) other.close_due = due;
  Schedule(1 - side);
}

void Connection::Break(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  for (int side : {kOpener, kAccepter}) {
    End& end = ends_[side];
    if (end.accept_pending) {  // nobody has heard of it yet
      end.accept_pending = false;
      end.closed = true;
      end.writable = false;
      end.inbox.clear();
      end.inbox_bytes = 0;
    } else {
      CloseNow(side, status);
    }
  }
}

void Connection::SetHeld(bool held) {
  absl::MutexLock lock(&mutex_);
  held_ = held;
  Schedule(kOpener);
  Schedule(kAccepter);
}

void Connection::AwaitClosed(int side) {
  absl::MutexLock lock(&mutex_);
  const auto closed = [this, side]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ends_[side].closed; };
  mutex_.Await(absl::Condition(&closed));
}

bool Connection::BothClosed() {
  absl::MutexLock lock(&mutex_);
  return ends_[kOpener].closed && ends_[kAccepter].closed;
}

Connection::Turn Connection::TakeTurn(int side) {
  absl::MutexLock lock(&mutex_);
  End& end = ends_[side];
  Turn turn;
  absl::Time due;
  if (!HasWork(side, &due) || (due > absl::InfinitePast() && due > absl::Now())) {
    end.scheduled = false;
    Schedule(side);  // for a later time
    return turn;
  }
  turn.handler = end.handler;
  if (end.accept_pending) {
    end.accept_pending = false;
    turn.kind = Turn::kAccept;
  } else if (end.close_now.has_value()) {
    turn.kind = Turn::kClosed;
    turn.status = *end.close_now;
  } else if (!end.inbox.empty()) {
    turn.kind = Turn::kMessage;
    turn.message.Swap(&end.inbox.front().message);
    end.inbox_bytes -= end.inbox.front().bytes;
    end.inbox.pop_front();
  } else {
    turn.kind = Turn::kClosed;
    turn.status = *end.close_after_inbox;
    end.close_now = turn.status;
    end.writable = false;
  }
  return turn;
}

void Connection::RunAccept() {
  auto stream = std::make_shared<InProcessStream>(shared_from_this(), kAccepter);
  std::shared_ptr<StreamHandler> handler = acceptor_(stream, opener_);
  acceptor_ = nullptr;
  if (handler == nullptr) {
    stream->Close(absl::UnavailableError(absl::StrCat(address_, " refused the stream")));
    absl::MutexLock lock(&mutex_);
    ends_[kAccepter].closed = true;
    return;
  }
  absl::MutexLock lock(&mutex_);
  End& end = ends_[kAccepter];
  end.handler = std::move(handler);
  end.keep = std::move(stream);
}

void Connection::Finish(int side) {
  std::shared_ptr<StreamHandler> handler;
  std::shared_ptr<ByteStream> keep;
  {
    absl::MutexLock lock(&mutex_);
    handler = std::move(ends_[side].handler);
    keep = std::move(ends_[side].keep);
  }
  handler = nullptr;  // may be the last reference: before anybody hears that this end is done
  keep = nullptr;
  absl::MutexLock lock(&mutex_);
  ends_[side].closed = true;
  ends_[side].scheduled = false;
}

void Connection::Alarm(int side) {
  absl::MutexLock lock(&mutex_);
  ends_[side].timer = false;
  Schedule(side);
}

void Connection::Run(int side) {
  for (int i = 0; i < kEventsPerTurn; ++i) {
    Turn turn = TakeTurn(side);
    switch (turn.kind) {
      case Turn::kNone:
        return;
      case Turn::kAccept:
        RunAccept();
        break;
      case Turn::kMessage:
        turn.handler->OnMessage(Take(&turn.message));
        break;
      case Turn::kClosed:
        if (turn.handler != nullptr) turn.handler->OnClosed(turn.status);
        turn.handler = nullptr;
        Finish(side);
        return;
    }
  }
  absl::MutexLock lock(&mutex_);
  ends_[side].scheduled = false;
  Schedule(side);
}

}  // namespace

struct InProcessNetwork::State {
  struct Accepting {
    uint64_t id;
    std::map<Plane, Acceptor> acceptors;
  };
  struct Live {
    std::shared_ptr<Connection> connection;
    uint64_t transport;  // that opened it
    uint64_t listener;   // that accepted it; 0: none
  };

  explicit State(const InProcessOptions& o) : options(o), executor(o.threads) {}

  std::shared_ptr<ByteStream> Open(uint64_t transport, const std::string& node, const std::string& address, Plane plane,
                                   std::shared_ptr<StreamHandler> handler);
  // Breaks the streams for which `which` holds and returns them.
  template <typename Which>
  std::vector<std::shared_ptr<Connection>> Break(const Which& which, const std::string& why);
  // Why `node` cannot open a stream to `address`; empty: it can.
  std::string Obstacle(const std::string& node, const std::string& address, Plane plane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void SetHeld(const std::string& a, const std::string& b, bool held);

  const InProcessOptions options;
  Executor executor;

  absl::Mutex mutex;  // taken before any Connection's
  uint64_t next_id ABSL_GUARDED_BY(mutex) = 1;
  std::map<std::string, Accepting> listeners ABSL_GUARDED_BY(mutex);
  std::vector<Live> live ABSL_GUARDED_BY(mutex);
  size_t prune_at ABSL_GUARDED_BY(mutex) = 64;
  std::map<std::tuple<std::string, std::string, Plane>, uint64_t> opened ABSL_GUARDED_BY(mutex);
  std::set<std::pair<std::string, std::string>> partitions ABSL_GUARDED_BY(mutex);
  std::set<std::string> killed ABSL_GUARDED_BY(mutex);
};

std::string InProcessNetwork::State::Obstacle(const std::string& node, const std::string& address, Plane plane) {
  if (killed.count(node) != 0) return absl::StrCat(node, " was killed");
  if (killed.count(address) != 0) return absl::StrCat(address, " was killed");
  if (partitions.count(Unordered(node, address)) != 0) return absl::StrCat(address, " is cut off from ", node);
  const auto listener = listeners.find(address);
  if (listener == listeners.end()) return absl::StrCat("nobody listens at ", address);
  if (listener->second.acceptors.count(plane) == 0) return absl::StrCat(address, " does not serve this plane");
  return "";
}

std::shared_ptr<ByteStream> InProcessNetwork::State::Open(uint64_t transport, const std::string& node,
                                                          const std::string& address, Plane plane,
                                                          std::shared_ptr<StreamHandler> handler) {
  absl::MutexLock lock(&mutex);
  if (live.size() >= prune_at) {
    live.erase(std::remove_if(live.begin(), live.end(), [](const Live& l) { return l.connection->BothClosed(); }),
               live.end());
    prune_at = 2 * live.size() + 64;
  }
  const uint64_t count = opened[{node, address, plane}]++;
  uint64_t key = MixText(MixText(Mix(options.delay_seed), node), address);
  key = Mix(Mix(key ^ static_cast<uint64_t>(plane)) ^ count);
  auto connection = std::make_shared<Connection>(&executor, node, address, key, options.max_delay);
  const std::string obstacle = Obstacle(node, address, plane);
  if (obstacle.empty()) {
    const Accepting& accepting = listeners.find(address)->second;
    live.push_back({connection, transport, accepting.id});
    connection->Start(std::move(handler), accepting.acceptors.find(plane)->second);
  } else {
    live.push_back({connection, transport, 0});
    connection->Fail(std::move(handler), absl::UnavailableError(obstacle));
  }
  return std::make_shared<InProcessStream>(std::move(connection), kOpener);
}

template <typename Which>
std::vector<std::shared_ptr<Connection>> InProcessNetwork::State::Break(const Which& which, const std::string& why) {
  std::vector<std::shared_ptr<Connection>> broken;
  absl::MutexLock lock(&mutex);
  for (const Live& l : live) {
    if (!which(l)) continue;
    l.connection->Break(absl::UnavailableError(why));
    broken.push_back(l.connection);
  }
  return broken;
}

void InProcessNetwork::State::SetHeld(const std::string& a, const std::string& b, bool held) {
  absl::MutexLock lock(&mutex);
  if (held) {
    partitions.insert(Unordered(a, b));
  } else {
    partitions.erase(Unordered(a, b));
  }
  for (const Live& l : live) {
    if (Unordered(l.connection->opener(), l.connection->address()) == Unordered(a, b)) l.connection->SetHeld(held);
  }
}

namespace {

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<InProcessNetwork::State> state, uint64_t id, std::string node)
      : state_(std::move(state)), id_(id), node_(std::move(node)) {}

  ~InProcessTransport() override {
    const auto own = [this](const InProcessNetwork::State::Live& l) { return l.transport == id_; };
    for (const auto& connection : state_->Break(own, absl::StrCat(node_, " ended"))) connection->AwaitClosed(kOpener);
  }

  std::shared_ptr<ByteStream> Open(const std::string& address, Plane plane,
                                   std::shared_ptr<StreamHandler> handler) override {
    return state_->Open(id_, node_, address, plane, std::move(handler));
  }

 private:
  const std::shared_ptr<InProcessNetwork::State> state_;
  const uint64_t id_;
  const std::string node_;
};

class InProcessListener : public Listener {
 public:
  InProcessListener(std::shared_ptr<InProcessNetwork::State> state, uint64_t id, std::string address)
      : state_(std::move(state)), id_(id), address_(std::move(address)) {}

  ~InProcessListener() override {
    {
      absl::MutexLock lock(&state_->mutex);
      state_->listeners.erase(address_);
    }
    const auto own = [this](const InProcessNetwork::State::Live& l) { return l.listener == id_; };
    for (const auto& connection : state_->Break(own, absl::StrCat(address_, " ended"))) {
      connection->AwaitClosed(kAccepter);
    }
  }

  const std::string& address() const override { return address_; }

 private:
  const std::shared_ptr<InProcessNetwork::State> state_;
  const uint64_t id_;
  const std::string address_;
};

}  // namespace

InProcessNetwork::InProcessNetwork(const InProcessOptions& options) : state_(std::make_shared<State>(options)) {}

InProcessNetwork::~InProcessNetwork() {
  for (const auto& connection : state_->Break([](const State::Live&) { return true; }, "the network ended")) {
    connection->AwaitClosed(kOpener);
    connection->AwaitClosed(kAccepter);
  }
  state_->executor.Stop();
}

std::unique_ptr<Transport> InProcessNetwork::MakeTransport(const std::string& node) {
  absl::MutexLock lock(&state_->mutex);
  return std::make_unique<InProcessTransport>(state_, state_->next_id++, node);
}

absl::StatusOr<std::unique_ptr<Listener>> InProcessNetwork::Listen(const std::string& address,
                                                                   std::map<Plane, Acceptor> acceptors) {
  absl::MutexLock lock(&state_->mutex);
  if (state_->listeners.count(address) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("somebody listens at ", address, " already"));
  }
  const uint64_t id = state_->next_id++;
  state_->listeners[address] = {id, std::move(acceptors)};
  return std::make_unique<InProcessListener>(state_, id, address);
}

void InProcessNetwork::Break(const std::string& a, const std::string& b) {
  const auto pair = Unordered(a, b);
  state_->Break(
      [&pair](const State::Live& l) { return Unordered(l.connection->opener(), l.connection->address()) == pair; },
      absl::StrCat("the connection of ", a, " and ", b, " broke"));
}

void InProcessNetwork::Partition(const std::string& a, const std::string& b) { state_->SetHeld(a, b, true); }

void InProcessNetwork::Heal(const std::string& a, const std::string& b) { state_->SetHeld(a, b, false); }

void InProcessNetwork::Kill(const std::string& node) {
  {
    absl::MutexLock lock(&state_->mutex);
    state_->killed.insert(node);
  }
  state_->Break(
      [&node](const State::Live& l) { return l.connection->opener() == node || l.connection->address() == node; },
      absl::StrCat(node, " was killed"));
}

void InProcessNetwork::Revive(const std::string& node) {
  absl::MutexLock lock(&state_->mutex);
  state_->killed.erase(node);
}

}  // namespace sluice
