#include "worker/backend/fake_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status_macros.h"
#include "worker/backend/host_backend.h"

namespace sluice {
namespace {

// Readable and writable only while an operation is open on it.
class FakeBuffer : public HostBuffer {
 public:
  static absl::StatusOr<std::shared_ptr<Buffer>> Make(int64_t bytes) {
    ASSIGN_OR_RETURN(std::shared_ptr<void> memory, AllocatePages(bytes));
    auto buffer = std::make_shared<FakeBuffer>(std::move(memory), bytes);
    buffer->Protect(PROT_NONE);
    return buffer;
  }

  FakeBuffer(std::shared_ptr<void> memory, int64_t bytes)
      : HostBuffer(memory.get(), bytes), owner_(std::move(memory)) {}

  void Open() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (users_++ == 0) Protect(PROT_READ | PROT_WRITE);
  }
  void Close() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (--users_ == 0) Protect(PROT_NONE);
  }

 private:
  void Protect(int protection) { mprotect(memory(), static_cast<size_t>(std::max<int64_t>(1, bytes())), protection); }

  const std::shared_ptr<void> owner_;
  absl::Mutex mutex_;
  int users_ ABSL_GUARDED_BY(mutex_) = 0;  // operations of several streams may overlap on one buffer
};

class FakeEvent : public Event {
 public:
  bool done() const override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return done_;
  }
  absl::Status Wait() const override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done_));
    return status_;
  }
  void Reach(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    status_ = std::move(status);
  }

 private:
  mutable absl::Mutex mutex_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// A thread that runs what was enqueued, in order.
class FakeStream : public Stream {
 public:
  // Gets the stream's status so far and returns the status after it.
  using Step = std::function<absl::Status(absl::Status)>;

  explicit FakeStream(uint64_t delay_seed)
      : random_(delay_seed), delays_(delay_seed != 0), thread_([this] { Run(); }) {}
  ~FakeStream() override {
    Enqueue(nullptr);
    thread_.join();
  }

  void Enqueue(Step step) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    steps_.push_back(std::move(step));
  }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::Status status;
    while (true) {
      Step step;
      {
        absl::MutexLock lock(&mutex_);
        const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !steps_.empty(); };
        mutex_.Await(absl::Condition(&ready));
        step = std::move(steps_.front());
        steps_.pop_front();
      }
      if (step == nullptr) return;
      if (delays_) Delay();
      status = step(std::move(status));
    }
  }

  // One operation in eight is late (splitmix64).
  void Delay() {
    uint64_t x = random_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    if (x % 8 == 0) absl::SleepFor(absl::Microseconds(x / 8 % 100));
  }

  uint64_t random_;  // the thread's own
  const bool delays_;
  absl::Mutex mutex_;
  std::deque<Step> steps_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the rest is there
};

class FakeDevice : public HostBackend {
 public:
  FakeDevice(int threads, uint64_t delay_seed) : HostBackend(threads), delay_seed_(delay_seed) {}

  absl::StatusOr<std::shared_ptr<Buffer>> Allocate(int64_t bytes) override { return FakeBuffer::Make(bytes); }
  std::shared_ptr<Buffer> WrapHost(std::shared_ptr<void>, int64_t) override { return nullptr; }

  std::unique_ptr<Stream> NewStream() override {
    return std::make_unique<FakeStream>(delay_seed_ == 0 ? 0 : delay_seed_ + 1000003 * streams_++);
  }

  std::shared_ptr<Event> Record(Stream& stream) override {
    auto event = std::make_shared<FakeEvent>();
    static_cast<FakeStream&>(stream).Enqueue([event](absl::Status status) {
      event->Reach(status);
      return status;
    });
    return event;
  }

  void Wait(Stream& stream, std::shared_ptr<Event> event) override {
    static_cast<FakeStream&>(stream).Enqueue([event = std::move(event)](absl::Status status) {
      absl::Status other = event->Wait();
      return status.ok() ? other : status;
    });
  }

  absl::Status Synchronize(Stream& stream) override {
    auto event = std::make_shared<FakeEvent>();
    static_cast<FakeStream&>(stream).Enqueue([event](absl::Status status) {
      event->Reach(std::move(status));
      return absl::OkStatus();
    });
    return event->Wait();
  }

 protected:
  void Launch(Stream& stream, std::initializer_list<Buffer*> buffers, Kernel kernel) override {
    std::vector<FakeBuffer*> open;
    for (Buffer* buffer : buffers) open.push_back(static_cast<FakeBuffer*>(buffer));
    static_cast<FakeStream&>(stream).Enqueue(
        [this, open = std::move(open), kernel = std::move(kernel)](absl::Status status) {
          if (!status.ok()) return status;
          for (FakeBuffer* buffer : open) buffer->Open();
          status = kernel(pool());
          for (FakeBuffer* buffer : open) buffer->Close();
          return status;
        });
  }

 private:
  const uint64_t delay_seed_;
  std::atomic<uint64_t> streams_ = 1;
};

}  // namespace

std::unique_ptr<Backend> MakeFakeDevice(int threads, uint64_t delay_seed) {
  return std::make_unique<FakeDevice>(threads, delay_seed);
}

}  // namespace sluice
