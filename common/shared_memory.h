// Memory that processes of one host share: made by one of them, mapped for reading by others that were told where it
// is.
//
// A region is a sealed memfd: it cannot shrink under a reader, nobody maps it for writing but its maker, and it is gone
// with the last process that has it mapped, however that one ends. Others open it through /proc/PID/fd/N, which the
// kernel allows to processes of the same user (and root) in the same PID namespace only; a nonce in the region's first
// page says that it is the one that was meant.
#ifndef SLUICE_COMMON_SHARED_MEMORY_H_
#define SLUICE_COMMON_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// The maker's side. Constant after construction but for the contents.
class SharedRegion {
 public:
  // `bytes` of zeros; pages are taken when they are touched. RESOURCE_EXHAUSTED, or UNIMPLEMENTED where the system has
  // no memfd.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Make(size_t bytes);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  char* data() const { return base_ + kHeader; }
  size_t size() const { return size_; }
  // Where the bytes lie for others; nothing if they are not (all) in the region.
  std::optional<uint64_t> OffsetOf(const void* data, size_t bytes) const;
  // For MappedRegion::Open in another process.
  const v1::SharedMemory& description() const { return description_; }

 private:
  friend class MappedRegion;
  static constexpr size_t kHeader = 4096;
  SharedRegion() = default;

  int fd_ = -1;
  char* base_ = nullptr;
  size_t size_ = 0;
  v1::SharedMemory description_;
};

// A reader's side. Thread-safe.
class MappedRegion {
 public:
  // FAILED_PRECONDITION: of another host, or not what the description says (another PID namespace, say);
  // PERMISSION_DENIED: of another user; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::shared_ptr<const MappedRegion>> Open(const v1::SharedMemory& description);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  // Null where they do not lie in the region.
  const void* At(uint64_t offset, uint64_t bytes) const;
  // Shows what lies at `at`, an address that At has returned, at `place` too: whole pages of the caller's, for reading,
  // in place of what is mapped there; also when the region has been destroyed. INVALID_ARGUMENT where `at` does not
  // begin a page; RESOURCE_EXHAUSTED.
  absl::Status ShowAt(void* place, const void* at, size_t bytes) const;

 private:
  MappedRegion(const char* base, size_t mapped, int fd) : base_(base), mapped_(mapped), fd_(fd) {}

  const char* const base_;
  const size_t mapped_;
  const int fd_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_SHARED_MEMORY_H_
