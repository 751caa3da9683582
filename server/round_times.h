// Where the time of a round went, as the verdict holder can tell it (RankTime in scheduler.proto): a worker says how
// long it computed and waited; when the reports of the round before came says how much of the wait was for slower
// replicas. Pure; not thread-safe.
#ifndef SLUICE_SERVER_ROUND_TIMES_H_
#define SLUICE_SERVER_ROUND_TIMES_H_

#include <cstdint>
#include <map>

#include "absl/time/time.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

class RoundTimes {
 public:
  // The report of a contributor came. A second one of the same round is dropped.
  void Reported(uint64_t round, uint32_t contributor, absl::Time now);
  // Writes record->times from all reports of the round. `verdict`: the round waits for one, else what is not computing
  // nor waiting for others is communication. Rounds in ascending order; those before are forgotten.
  void Fill(uint64_t round, const std::map<uint32_t, v1::RoundReport>& reports, bool verdict, v1::RoundRecord* record);
  // A generation ends: its rounds say nothing of the next one's.
  void Clear() { reported_.clear(); }

 private:
  std::map<uint64_t, std::map<uint32_t, absl::Time>> reported_;  // by round, contributor
};

// What a peer says it took; 0 for what no clock can say. Seconds.
double SaneSeconds(double seconds);

}  // namespace sluice

#endif  // SLUICE_SERVER_ROUND_TIMES_H_
