// What stock clients ask a job for: one chunk at one version, and what there is.
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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

void ServerJob::Fetch(const void* who, uint64_t chunk, std::optional<uint64_t> version, FetchDone done) {
  Waiting fetch{chunk, version, std::move(done)};
  absl::MutexLock lock(&mutex_);
  if (!TryFetch(fetch)) fetches_.insert_or_assign(who, std::move(fetch));
}

bool ServerJob::TryFetch(const Waiting& fetch) {
  const uint64_t chunk = fetch.chunk;
  const auto fail = [&](absl::Status status) {
    options_.lanes->Post(chunk, [done = fetch.done, status = std::move(status)] { done(status); });
    return true;
  };
  if (ended_) return fail(absl::NotFoundError(absl::StrCat("job ", options_.job_id, " has ended")));
  if (core_.layout() == nullptr || !core_.holds(chunk)) return false;
  const uint64_t now = core_.version(chunk), at = fetch.version.value_or(now);
  if (at > now) return false;
  if (at + 1 < now || (at < now && !core_.has_previous(chunk))) {
    return fail(absl::OutOfRangeError(
        absl::StrCat("job ", options_.job_id, ": chunk ", chunk, " version ", at, " is gone; now ", now)));
  }
  // Posted under the lock: at its turn the lane has just what the core speaks of here.
  options_.lanes->Post(chunk, [store = store_, chunk, at, generation = core_.generation(), done = fetch.done] {
    absl::StatusOr<ChunkValue> value = store->Get(chunk, at);
    if (!value.ok()) return done(value.status());
    done(FetchedChunk{generation, at, *std::move(value)});
  });
  return true;
}

void ServerJob::CancelFetch(const void* who) {
  absl::MutexLock lock(&mutex_);
  const auto it = fetches_.find(who);
  if (it == fetches_.end()) return;
  options_.lanes->Post(it->second.chunk, [done = it->second.done] { done(absl::CancelledError("no longer wanted")); });
  fetches_.erase(it);
}

size_t ServerJob::mapped_bytes() const {
  absl::MutexLock lock(&mutex_);
  return store_ == nullptr ? 0 : store_->mapped_bytes();
}

uint64_t ServerJob::declines() const {
  absl::MutexLock lock(&mutex_);
  return core_.hold().declines();
}

std::string ServerJob::Describe() const {
  absl::MutexLock lock(&mutex_);
  return core_.Describe();
}

}  // namespace sluice
