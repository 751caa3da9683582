#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/node_identity.h"

namespace sluice {
namespace {

constexpr size_t kNonceBytes = 16;
constexpr int kReadersRely = F_SEAL_SHRINK | F_SEAL_GROW;
#ifdef F_SEAL_FUTURE_WRITE
constexpr int kSeals = kReadersRely | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
#else
constexpr int kSeals = kReadersRely | F_SEAL_SEAL;
#endif

std::string MakeNonce() {
  std::random_device random;
  std::string nonce;
  while (nonce.size() < kNonceBytes) nonce.push_back(static_cast<char>(random()));
  return nonce;
}

absl::Status Unusable(const v1::SharedMemory& description, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat("the shared memory of process ", description.pid(), ", descriptor ", description.fd(), ": ", why));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Make(size_t bytes) {
  std::shared_ptr<SharedRegion> region(new SharedRegion());
  region->fd_ = memfd_create("sluice", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region->fd_ < 0) return absl::UnimplementedError(absl::StrCat("memfd_create: ", strerror(errno)));
  const size_t total = bytes + kHeader;
  if (total < bytes || ftruncate(region->fd_, static_cast<off_t>(total)) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("shared memory of ", bytes, " bytes: ", strerror(errno)));
  }
  void* const base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, region->fd_, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("shared memory of ", bytes, " bytes: ", strerror(errno)));
  }
  region->base_ = static_cast<char*>(base);
  region->size_ = bytes;
  // Kernels before 5.1 do not know the seal against later writers: there only the other two.
  if (fcntl(region->fd_, F_ADD_SEALS, kSeals) != 0 && fcntl(region->fd_, F_ADD_SEALS, kReadersRely) != 0) {
    return absl::UnimplementedError(absl::StrCat("a memfd cannot be sealed: ", strerror(errno)));
  }
  const std::string nonce = MakeNonce();
  std::memcpy(region->base_, nonce.data(), nonce.size());
  region->description_.set_host_id(HostId());
  region->description_.set_pid(getpid());
  region->description_.set_fd(region->fd_);
  region->description_.set_bytes(total);
  region->description_.set_nonce(nonce);
  return region;
}

SharedRegion::~SharedRegion() {
  if (base_ != nullptr) munmap(base_, size_ + kHeader);
  if (fd_ >= 0) close(fd_);
}

std::optional<uint64_t> SharedRegion::OffsetOf(const void* data, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(data), begin = reinterpret_cast<uintptr_t>(base_ + kHeader);
  if (at < begin || at - begin > size_ || bytes > size_ - (at - begin)) return std::nullopt;
  return at - begin + kHeader;
}

absl::StatusOr<std::shared_ptr<const MappedRegion>> MappedRegion::Open(const v1::SharedMemory& description) {
  if (description.host_id() != HostId()) return Unusable(description, "of another host");
  if (description.nonce().size() != kNonceBytes || description.bytes() < SharedRegion::kHeader) {
    return Unusable(description, "not a description");
  }
  const std::string path = absl::StrCat("/proc/", description.pid(), "/fd/", description.fd());
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    const std::string why = absl::StrCat(path, ": ", strerror(errno));
    return errno == EACCES || errno == EPERM ? absl::PermissionDeniedError(why) : Unusable(description, why);
  }
  struct stat status = {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kReadersRely) != kReadersRely || fstat(fd, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) != description.bytes()) {
    close(fd);
    return Unusable(description, "not there; do the processes see each other's PIDs?");
  }
  void* const base = mmap(nullptr, description.bytes(), PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", description.bytes(), " bytes of shared memory: ", strerror(error)));
  }
  std::shared_ptr<const MappedRegion> region(new MappedRegion(static_cast<const char*>(base), description.bytes(), fd));
  if (std::memcmp(base, description.nonce().data(), kNonceBytes) != 0) return Unusable(description, "another one");
  return region;
}

MappedRegion::~MappedRegion() {
  munmap(const_cast<char*>(base_), mapped_);
  close(fd_);
}

const void* MappedRegion::At(uint64_t offset, uint64_t bytes) const {
  if (offset < SharedRegion::kHeader || offset > mapped_ || bytes > mapped_ - offset) return nullptr;
  return base_ + offset;
}

absl::Status MappedRegion::ShowAt(void* place, const void* at, size_t bytes) const {
  const int64_t offset = static_cast<const char*>(at) - base_;
  if (mmap(place, bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_, static_cast<off_t>(offset)) !=
      MAP_FAILED) {
    return absl::OkStatus();
  }
  const std::string why = absl::StrCat("cannot map ", bytes, " bytes of shared memory once more: ", strerror(errno));
  return errno == EINVAL ? absl::InvalidArgumentError(why) : absl::ResourceExhaustedError(why);
}

}  // namespace sluice
