// Kernels run at once on the calling thread and the pool; streams are always empty, events always done.
#include "worker/backend/cpu_backend.h"

#include <utility>

#include "common/status_macros.h"
#include "worker/backend/host_backend.h"

namespace sluice {
namespace {

struct CpuStream : Stream {
  absl::Status status;
};

class CpuEvent : public Event {
 public:
  explicit CpuEvent(absl::Status status) : status_(std::move(status)) {}
  bool done() const override { return true; }
  absl::Status Wait() const override { return status_; }

 private:
  const absl::Status status_;
};

class OwningBuffer : public HostBuffer {
 public:
  OwningBuffer(std::shared_ptr<void> memory, int64_t bytes)
      : HostBuffer(memory.get(), bytes), owner_(std::move(memory)) {}

 private:
  const std::shared_ptr<void> owner_;
};

class CpuBackend : public HostBackend {
 public:
  using HostBackend::HostBackend;

  absl::StatusOr<std::shared_ptr<Buffer>> Allocate(int64_t bytes) override {
    ASSIGN_OR_RETURN(std::shared_ptr<void> memory, AllocatePages(bytes));
    return std::make_shared<OwningBuffer>(std::move(memory), bytes);
  }

  std::shared_ptr<Buffer> WrapHost(std::shared_ptr<void> host, int64_t bytes) override {
    return std::make_shared<OwningBuffer>(std::move(host), bytes);
  }

  float* InHost(Floats at) override {
    return static_cast<float*>(static_cast<HostBuffer*>(at.buffer)->memory()) + at.first;
  }

  std::unique_ptr<Stream> NewStream() override { return std::make_unique<CpuStream>(); }

  std::shared_ptr<Event> Record(Stream& stream) override {
    return std::make_shared<CpuEvent>(static_cast<CpuStream&>(stream).status);
  }

  void Wait(Stream& stream, std::shared_ptr<Event> event) override {
    absl::Status& status = static_cast<CpuStream&>(stream).status;
    if (status.ok()) status = event->Wait();
  }

  absl::Status Synchronize(Stream& stream) override {
    return std::exchange(static_cast<CpuStream&>(stream).status, absl::OkStatus());
  }

 protected:
  void Launch(Stream& stream, std::initializer_list<Buffer*>, Kernel kernel) override {
    absl::Status& status = static_cast<CpuStream&>(stream).status;
    if (status.ok()) status = kernel(pool());
  }
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(int threads) { return std::make_unique<CpuBackend>(threads); }

}  // namespace sluice
