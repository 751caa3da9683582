#include "common/inprocess_connection.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace sluice::inprocess {
namespace {

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

constexpr int kEventsPerTurn = 32;  // events of one end in a row before others get the thread

// ByteBuffer has no move, only a copy (of references, with allocations) and Swap.
grpc::ByteBuffer Take(grpc::ByteBuffer* buffer) {
  grpc::ByteBuffer taken;
  taken.Swap(buffer);
  return taken;
}

}  // namespace

uint64_t DelayKey(uint64_t seed, const std::string& opener, const std::string& address, Plane plane, uint64_t count) {
  const uint64_t ends = MixText(MixText(Mix(seed), opener), address);
  return Mix(Mix(ends ^ static_cast<uint64_t>(plane)) ^ count);
}

absl::Duration MessageDelay(uint64_t key, int to, uint64_t number, absl::Duration max) {
  const uint64_t draw = Mix(Mix(key ^ static_cast<uint64_t>(to)) + number);
  return max * (static_cast<double>(draw >> 11) * 0x1p-53);
}

void Executor::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.SignalAll();
  }
  for (std::thread& t : threads_) t.join();
  threads_.clear();
}

void Executor::Loop() {
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
  const absl::Time due = absl::Now() + MessageDelay(delay_key_, to, ends_[1 - to].sent++, max_delay_);
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
  if (end.written) return true;
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

void Connection::Write(int side, grpc::ByteBuffer* message) {
  absl::MutexLock lock(&mutex_);
  if (!ends_[side].writable) return;
  End& to = ends_[1 - side];
  if (to.closed || to.close_now.has_value()) return;
  const size_t bytes = message->Length();
  to.inbox.push_back({DrawDue(1 - side), grpc::ByteBuffer(), bytes});
  to.inbox.back().message.Swap(message);
  to.inbox_bytes += bytes;
  executor_->bytes_written += bytes;
  ++executor_->messages_written[static_cast<size_t>(plane_)];
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
  } else if (std::exchange(end.written, false)) {
    turn.kind = Turn::kWritten;
  } else if (!end.inbox.empty()) {
    turn.kind = Turn::kMessage;
    turn.message.Swap(&end.inbox.front().message);
    end.inbox_bytes -= end.inbox.front().bytes;
    end.inbox.pop_front();
    ends_[1 - side].written = true;
    Schedule(1 - side);
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
      case Turn::kWritten:
        turn.handler->OnWritten();
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

}  // namespace sluice::inprocess
