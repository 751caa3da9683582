// Buffers of float32 in mappings of their own: handed out ref-counted, taken back when the last holder lets go,
// unmapped with the pool. A transport that still sends from a buffer keeps it (and the pool's mappings) alive.
#ifndef SLUICE_SERVER_BUFFER_POOL_H_
#define SLUICE_SERVER_BUFFER_POOL_H_

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace sluice {

// Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static std::shared_ptr<BufferPool> Make() { return std::shared_ptr<BufferPool>(new BufferPool()); }
  ~BufferPool();

  // At least `elements` floats, 64-byte aligned, contents undefined.
  std::shared_ptr<float[]> Take(size_t elements);

  size_t mapped_bytes() const;

 private:
  BufferPool() = default;
  void Return(float* buffer, size_t bytes);

  mutable absl::Mutex mutex_;
  std::unordered_map<size_t, std::vector<float*>> free_ ABSL_GUARDED_BY(mutex_);  // by mapped bytes
  std::vector<std::pair<void*, size_t>> mappings_ ABSL_GUARDED_BY(mutex_);
  size_t mapped_ ABSL_GUARDED_BY(mutex_) = 0;
  // Small buffers are cut from slabs.
  char* slab_ ABSL_GUARDED_BY(mutex_) = nullptr;
  size_t slab_left_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_BUFFER_POOL_H_
