#include "worker/model/parameter_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace sluice {
namespace {

uint64_t PageBytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t WholePages(uint64_t bytes) { return (bytes + PageBytes() - 1) / PageBytes() * PageBytes(); }

}  // namespace

absl::StatusOr<std::shared_ptr<ParameterMemory>> ParameterMemory::Make(uint64_t floats) {
  std::shared_ptr<ParameterMemory> memory(new ParameterMemory(floats));
  memory->fd_ = memfd_create("sluice-parameters", MFD_CLOEXEC);
  if (memory->fd_ < 0) return absl::UnimplementedError(absl::StrCat("memfd_create: ", strerror(errno)));
  memory->bytes_ = WholePages(std::max<uint64_t>(floats * sizeof(float), 1));
  if (ftruncate(memory->fd_, static_cast<off_t>(memory->bytes_)) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("memory of ", memory->bytes_, " bytes: ", strerror(errno)));
  }
  for (float*& window : memory->windows_) {
    void* const base =
        mmap(nullptr, memory->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory->fd_, 0);
    if (base == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot map ", memory->bytes_, " bytes of memory: ", strerror(errno)));
    }
    window = static_cast<float*>(base);
  }
  return memory;
}

ParameterMemory::~ParameterMemory() {
  for (float* window : windows_) {
    if (window != nullptr) munmap(window, bytes_);
  }
  if (fd_ >= 0) close(fd_);
}

bool ParameterMemory::Show(uint64_t version, Range range, const std::shared_ptr<const MappedRegion>& region,
                           const void* at) {
  const uint64_t first = range.begin * sizeof(float), bytes = range.size() * sizeof(float);
  if (first % PageBytes() != 0 || (bytes % PageBytes() != 0 && range.end != floats_)) return false;
  absl::MutexLock lock(&mutex_);
  Window& shown = shown_[version % 2];
  const auto it = shown.find(range.begin);
  if (it != shown.end() && it->second.end == range.end && it->second.region == region && it->second.at == at) {
    return true;
  }
  TakeBack(version, range);
  const absl::Status status = region->ShowAt(reinterpret_cast<char*>(window(version)) + first, at, WholePages(bytes));
  if (!status.ok()) {
    LOG_DEBUG("parameters [{}, {}) are copied: {}", range.begin, range.end, status.ToString());
    return false;
  }
  shown[range.begin] = {range.end, region, at};
  return true;
}

float* ParameterMemory::Own(uint64_t version, Range range) {
  absl::MutexLock lock(&mutex_);
  TakeBack(version, range);
  return window(version) + range.begin;
}

// Whole pieces that were shown, also where they reach beyond the range.
void ParameterMemory::TakeBack(uint64_t version, Range range) {
  Window& shown = shown_[version % 2];
  auto it = shown.lower_bound(range.begin);
  if (it != shown.begin() && std::prev(it)->second.end > range.begin) --it;
  while (it != shown.end() && it->first < range.end) {
    const uint64_t first = it->first * sizeof(float);
    void* const place = reinterpret_cast<char*>(window(version)) + first;
    const uint64_t bytes = WholePages((it->second.end - it->first) * sizeof(float));
    // In place of a mapping as large, so it takes no more of them than there were.
    CHECK(mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_,
               static_cast<off_t>(first)) != MAP_FAILED,
          "cannot map own memory again: {}", strerror(errno));
    it = shown.erase(it);
  }
}

}  // namespace sluice
