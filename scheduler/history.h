// Metric history on its way to the store: keeps every 2^k-th training round, so that a job has at most about 4,000
// rows.
#ifndef SLUICE_SCHEDULER_HISTORY_H_
#define SLUICE_SCHEDULER_HISTORY_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/state_store.h"

namespace sluice {

// Smallest power of two at which rounds [0, last] leave at most `limit` multiples.
uint64_t HistoryStride(uint64_t last, uint64_t limit);

// Not thread-safe.
class MetricHistory {
 public:
  static constexpr uint64_t kLimit = 4000;
  explicit MetricHistory(StateStore* store, uint64_t limit = kLimit) : store_(store), limit_(limit) {}

  // Stores the entries in order. Training rounds off the job's stride are left out, the newest one excepted.
  absl::Status Add(std::vector<HistoryEntry> entries);

 private:
  struct Job {
    uint64_t stride = 1;
    uint64_t newest = 0;  // training round stored last
    bool has_newest = false;
  };
  absl::StatusOr<Job*> Of(const std::string& job_id);

  StateStore* const store_;
  const uint64_t limit_;
  std::map<std::string, Job> jobs_;
};

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_HISTORY_H_
