// Host memory of a model's parameters, seen through two windows: one for even versions, one for odd ones.
//
// Both windows show the same own memory, into which values are copied, except where a value lies in the shared memory
// of a server of this host: there the window of its version shows the server's very pages. Servers keep a chunk's even
// and odd versions in two buffers, turn and turn about, so after the first two rounds each window shows what it has to
// and a pull in shared memory costs nothing: no copy, no system call.
//
// While a model computes from version v, v + 1 arrives in the other window, or in place where it is copied, under the
// same condition as ever: this rank must be done with the elements (worker/round_core.h). What a server does with the
// pages of version v afterwards is no concern any more: it writes them again with version v + 2, which takes this
// rank's contribution to v + 1, computed from the other window (common/shared_frames.h).
#ifndef SLUICE_WORKER_MODEL_PARAMETER_MEMORY_H_
#define SLUICE_WORKER_MODEL_PARAMETER_MEMORY_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/layout.h"
#include "common/shared_memory.h"

namespace sluice {

// Thread-safe for disjoint ranges.
class ParameterMemory {
 public:
  // `floats` of zeros; pages of own memory are taken when they are touched. RESOURCE_EXHAUSTED, or UNIMPLEMENTED where
  // the system has no memfd.
  static absl::StatusOr<std::shared_ptr<ParameterMemory>> Make(uint64_t floats);
  ~ParameterMemory();
  ParameterMemory(const ParameterMemory&) = delete;
  ParameterMemory& operator=(const ParameterMemory&) = delete;

  // Page-aligned; read-only where it shows what is not own.
  float* window(uint64_t version) const { return windows_[version % 2]; }

  // Lets the window of `version` show `range` as it lies in the region at `at`. False, and nothing done, where that is
  // not possible: both must be whole pages (the end of the space apart), and the system may have no more mappings.
  bool Show(uint64_t version, Range range, const std::shared_ptr<const MappedRegion>& region, const void* at)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets the window of `version` show own memory in `range`; returns where that lies, to be written. The contents are
  // what was last written there for either version.
  float* Own(uint64_t version, Range range) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Shown {
    uint64_t end = 0;
    std::shared_ptr<const MappedRegion> region;
    const void* at = nullptr;
  };
  using Window = std::map<uint64_t, Shown>;  // by first element

  explicit ParameterMemory(uint64_t floats) : floats_(floats) {}
  void TakeBack(uint64_t version, Range range) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t floats_;
  uint64_t bytes_ = 0;  // of a window, whole pages
  int fd_ = -1;         // the own memory
  std::array<float*, 2> windows_ = {nullptr, nullptr};
  absl::Mutex mutex_;
  std::array<Window, 2> shown_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice

#endif  // SLUICE_WORKER_MODEL_PARAMETER_MEMORY_H_
