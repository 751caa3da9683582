#include "scheduler/history.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace sluice {
uint64_t HistoryStride(uint64_t last, uint64_t limit) {
  uint64_t stride = 1;
  while (last / stride + 1 > std::max<uint64_t>(limit, 2)) stride *= 2;
  return stride;
}

absl::StatusOr<MetricHistory::Job*> MetricHistory::Of(const std::string& job_id) {
  if (auto found = jobs_.find(job_id); found != jobs_.end()) return &found->second;
  ASSIGN_OR_RETURN(const std::vector<uint64_t> rounds, store_->TrainRounds(job_id));
  Job job;
  if (!rounds.empty()) {
    job.newest = rounds.back();
    job.has_newest = true;
    job.stride = HistoryStride(job.newest, limit_);
  }
  return &jobs_.emplace(job_id, job).first->second;
}

absl::Status MetricHistory::Add(std::vector<HistoryEntry> entries) {
  std::vector<HistoryEntry> kept;
  std::set<std::string> crowded, touched;
  for (HistoryEntry& entry : entries) {
    if (entry.has_record && !entry.record.evaluation()) {
      ASSIGN_OR_RETURN(Job* const job, Of(entry.job_id));
      job->newest = entry.record.round();
      job->has_newest = true;
      touched.insert(entry.job_id);
      if (const uint64_t stride = HistoryStride(job->newest, limit_); stride > job->stride) {
        job->stride = stride;
        crowded.insert(entry.job_id);
      }
    }
    kept.push_back(std::move(entry));
  }
  // Rounds between two strides are of no use once a newer one of the same batch is there.
  std::erase_if(kept, [&](const HistoryEntry& entry) {
    if (!entry.has_record || entry.record.evaluation()) return false;
    const Job& job = jobs_.at(entry.job_id);
    return entry.record.round() % job.stride != 0 && entry.record.round() != job.newest;
  });
  RETURN_IF_ERROR(store_->PutHistory(kept));
  for (const std::string& id : touched) {
    const Job& job = jobs_.at(id);
    // Off the stride only the newest stays; without a stride there is nothing to remove.
    if (job.stride > 1 || crowded.count(id) > 0) RETURN_IF_ERROR(store_->ThinRounds(id, job.stride, job.newest));
  }
  return absl::OkStatus();
}

}  // namespace sluice
