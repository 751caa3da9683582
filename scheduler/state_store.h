// The scheduler's durable state: jobs, metric history, events. One interface; SQLite in a daemon, memory in tests.
#ifndef SLUICE_SCHEDULER_STATE_STORE_H_
#define SLUICE_SCHEDULER_STATE_STORE_H_

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "sluice/v1/scheduler.pb.h"
#include "sluice/v1/state.pb.h"

namespace sluice {

// One row of history: a record or an event of a job.
struct HistoryEntry {
  std::string job_id;
  v1::RoundRecord record;  // where has_record; key (job, evaluation, round): a repetition replaces the row
  v1::JobEvent event;      // else
  bool has_record = false;
};

// Thread-safe. After a failed write the store refuses every further one with the same error: what reached the disk is
// then unknown, and only a restart finds out.
class StateStore {
 public:
  virtual ~StateStore() = default;
  virtual absl::StatusOr<std::vector<v1::StoredJob>> LoadJobs() = 0;
  // Inserts or replaces by status.job_id; durable on return.
  virtual absl::Status PutJob(const v1::StoredJob& row) = 0;
  // All of them or none; durable on return.
  virtual absl::Status PutHistory(absl::Span<const HistoryEntry> entries) = 0;
  // Training records in order of rounds, then evaluations; events in order of arrival.
  virtual absl::StatusOr<v1::GetHistoryResponse> LoadHistory(const std::string& job_id) = 0;
  // Rounds of the training records that are kept, ascending.
  virtual absl::StatusOr<std::vector<uint64_t>> TrainRounds(const std::string& job_id) = 0;
  // Removes training records whose round is no multiple of `stride`, except round `keep`.
  virtual absl::Status ThinRounds(const std::string& job_id, uint64_t stride, uint64_t keep) = 0;
};

// <folder>/state.sqlite in WAL mode with full synchronization, and <folder>/lock with the owner's process id, locked
// for as long as the store lives. FAILED_PRECONDITION names folder and process where another one holds it, and both
// versions where the file is of another schema; DATA_LOSS where it is no database.
absl::StatusOr<std::unique_ptr<StateStore>> OpenSqliteStore(const std::string& folder);

// Survives the scheduler that uses it, so that tests can restart one.
class MemoryStore final : public StateStore {
 public:
  absl::StatusOr<std::vector<v1::StoredJob>> LoadJobs() override;
  absl::Status PutJob(const v1::StoredJob& row) override;
  absl::Status PutHistory(absl::Span<const HistoryEntry> entries) override;
  absl::StatusOr<v1::GetHistoryResponse> LoadHistory(const std::string& job_id) override;
  absl::StatusOr<std::vector<uint64_t>> TrainRounds(const std::string& job_id) override;
  absl::Status ThinRounds(const std::string& job_id, uint64_t stride, uint64_t keep) override;

  // From now on every write fails with this status (a full disk).
  void FailWrites(absl::Status status);

 private:
  struct History {
    std::map<std::pair<bool, uint64_t>, v1::RoundRecord> records;  // (evaluation, round)
    std::vector<v1::JobEvent> events;
  };
  absl::Mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::StoredJob> jobs_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, History> history_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_STATE_STORE_H_
