#include "common/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace sluice {
namespace {

constexpr size_t kSlab = 1 << 20;
constexpr size_t kPage = 4096;

}  // namespace

BufferPool::~BufferPool() {
  for (auto [p, bytes] : mappings_) munmap(p, bytes);
}

char* BufferPool::Map(size_t bytes) {
  mapped_ += bytes;
  if (region_ != nullptr && bytes <= region_->size() - region_used_) {
    return region_->data() + std::exchange(region_used_, region_used_ + bytes);
  }
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mappings_.emplace_back(p, bytes);
  return static_cast<char*>(p);
}

std::shared_ptr<float[]> BufferPool::Take(size_t elements, const float* rather) {
  // Readers map whole pages of a region (worker/model/parameter_memory.h).
  const size_t unit = region_ == nullptr ? 64 : kPage;
  const size_t bytes = std::max<size_t>((elements * sizeof(float) + unit - 1) / unit, 1) * unit;
  float* buffer = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    std::vector<float*>& free = free_[bytes];
    if (!free.empty()) {
      const auto wanted = std::find(free.rbegin(), free.rend(), rather);
      if (wanted != free.rend()) std::swap(*wanted, free.back());
      buffer = free.back();
      free.pop_back();
    } else if (bytes >= kSlab / 4) {
      buffer = reinterpret_cast<float*>(Map(bytes));
    } else {
      if (slab_left_ < bytes) {
        slab_ = Map(kSlab);
        slab_left_ = kSlab;
      }
      buffer = reinterpret_cast<float*>(slab_);
      slab_ += bytes;
      slab_left_ -= bytes;
    }
  }
  return std::shared_ptr<float[]>(buffer, [pool = shared_from_this(), bytes](float* p) { pool->Return(p, bytes); });
}

void BufferPool::Return(float* buffer, size_t bytes) {
  absl::MutexLock lock(&mutex_);
  free_[bytes].push_back(buffer);
}

size_t BufferPool::mapped_bytes() const {
  absl::MutexLock lock(&mutex_);
  return mapped_;
}

}  // namespace sluice
