// Buffers of float32 in mappings of their own, or in a region that other processes read: handed out ref-counted, taken
// back when the last holder lets go, unmapped with the pool. A transport that still sends from a buffer keeps it (and
// the pool's mappings) alive.
#ifndef SLUICE_COMMON_BUFFER_POOL_H_
#define SLUICE_COMMON_BUFFER_POOL_H_

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/shared_memory.h"

namespace sluice {

// Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Where the region (may be null) is full, own mappings follow.
  static std::shared_ptr<BufferPool> Make(std::shared_ptr<const SharedRegion> region = nullptr) {
    return std::shared_ptr<BufferPool>(new BufferPool(std::move(region)));
  }
  ~BufferPool();

  // At least `elements` floats, 64-byte aligned (in a region: whole pages), contents undefined. `rather`: this buffer
  // if it is free.
  std::shared_ptr<float[]> Take(size_t elements, const float* rather = nullptr);

  size_t mapped_bytes() const;

 private:
  explicit BufferPool(std::shared_ptr<const SharedRegion> region) : region_(std::move(region)) {}
  char* Map(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(float* buffer, size_t bytes);

  const std::shared_ptr<const SharedRegion> region_;
  mutable absl::Mutex mutex_;
  std::unordered_map<size_t, std::vector<float*>> free_ ABSL_GUARDED_BY(mutex_);  // by mapped bytes
  std::vector<std::pair<void*, size_t>> mappings_ ABSL_GUARDED_BY(mutex_);
  size_t mapped_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t region_used_ ABSL_GUARDED_BY(mutex_) = 0;
  // Small buffers are cut from slabs.
  char* slab_ ABSL_GUARDED_BY(mutex_) = nullptr;
  size_t slab_left_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_BUFFER_POOL_H_
