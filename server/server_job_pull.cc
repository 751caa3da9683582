// What stock clients ask a job for: one chunk at one version, and what there is.
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/server_job.h"

namespace sluice {

std::shared_ptr<const Layout> ServerJob::layout() const {
  absl::MutexLock lock(&mutex_);
  return core_.layout();
}

uint64_t ServerJob::generation() const {
  absl::MutexLock lock(&mutex_);
  return core_.generation();
}

std::vector<uint64_t> ServerJob::Chunks() const {
  absl::MutexLock lock(&mutex_);
  std::vector<uint64_t> out;
  if (core_.layout() == nullptr) return out;
  for (uint64_t c = 0; c < core_.layout()->table().chunks(); ++c) {
    if (core_.holds(c)) out.push_back(c);
  }
  return out;
}

absl::StatusOr<std::pair<uint64_t, ChunkValue>> ServerJob::GetChunk(uint64_t chunk, std::optional<uint64_t> version,
                                                                    absl::Time deadline) {
  absl::StatusOr<ChunkValue> value = absl::UnknownError("");
  absl::Notification done;
  uint64_t at;
  {
    absl::MutexLock lock(&mutex_);
    while (true) {
      if (ended_) return absl::NotFoundError(absl::StrCat("job ", options_.job_id, " has ended"));
      if (core_.layout() != nullptr && core_.holds(chunk) && (!version || core_.version(chunk) >= *version)) break;
      if (version_changed_.WaitWithDeadline(&mutex_, deadline)) {
        return absl::DeadlineExceededError(
            absl::StrCat("job ", options_.job_id, ": chunk ", chunk, " has not reached version ", version.value_or(0)));
      }
    }
    at = version.value_or(core_.version(chunk));
    if (at + 1 < core_.version(chunk) || (at < core_.version(chunk) && !core_.has_previous(chunk))) {
      return absl::OutOfRangeError(absl::StrCat("job ", options_.job_id, ": chunk ", chunk, " version ", at,
                                                " is gone; now ", core_.version(chunk)));
    }
    // Posted under the lock: at its turn the lane has just what the core speaks of here.
    options_.lanes->Post(chunk, [store = store_, chunk, at, &value, &done] {
      value = store->Get(chunk, at);
      done.Notify();
    });
  }
  done.WaitForNotification();
  if (!value.ok()) return value.status();
  return std::make_pair(at, *std::move(value));
}

size_t ServerJob::mapped_bytes() const {
  absl::MutexLock lock(&mutex_);
  return store_ == nullptr ? 0 : store_->mapped_bytes();
}

std::string ServerJob::Describe() const {
  absl::MutexLock lock(&mutex_);
  return core_.Describe();
}

}  // namespace sluice
