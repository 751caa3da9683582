#include "scheduler/state_store.h"

namespace sluice {

absl::StatusOr<std::vector<v1::StoredJob>> MemoryStore::LoadJobs() {
  absl::MutexLock lock(&mutex_);
  std::vector<v1::StoredJob> rows;
  for (const auto& [id, row] : jobs_) rows.push_back(row);
  return rows;
}

absl::Status MemoryStore::PutJob(const v1::StoredJob& row) {
  absl::MutexLock lock(&mutex_);
  if (!broken_.ok()) return broken_;
  jobs_[row.status().job_id()] = row;
  return absl::OkStatus();
}

absl::Status MemoryStore::PutHistory(absl::Span<const HistoryEntry> entries) {
  absl::MutexLock lock(&mutex_);
  if (!broken_.ok()) return broken_;
  for (const HistoryEntry& entry : entries) {
    History& history = history_[entry.job_id];
    if (entry.has_record) {
      history.records[{entry.record.evaluation(), entry.record.round()}] = entry.record;
    } else {
      history.events.push_back(entry.event);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::GetHistoryResponse> MemoryStore::LoadHistory(const std::string& job_id) {
  absl::MutexLock lock(&mutex_);
  v1::GetHistoryResponse response;
  const auto found = history_.find(job_id);
  if (found == history_.end()) return response;
  for (const auto& [key, record] : found->second.records) *response.add_records() = record;
  for (const v1::JobEvent& event : found->second.events) *response.add_events() = event;
  return response;
}

absl::StatusOr<std::vector<uint64_t>> MemoryStore::TrainRounds(const std::string& job_id) {
  absl::MutexLock lock(&mutex_);
  std::vector<uint64_t> rounds;
  for (const auto& [key, record] : history_[job_id].records) {
    if (!key.first) rounds.push_back(key.second);
  }
  return rounds;
}

absl::Status MemoryStore::ThinRounds(const std::string& job_id, uint64_t stride, uint64_t keep) {
  absl::MutexLock lock(&mutex_);
  if (!broken_.ok()) return broken_;
  std::erase_if(history_[job_id].records, [&](const auto& item) {
    const auto& [evaluation, round] = item.first;
    return !evaluation && round % stride != 0 && round != keep;
  });
  return absl::OkStatus();
}

void MemoryStore::FailWrites(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  broken_ = std::move(status);
}

}  // namespace sluice
