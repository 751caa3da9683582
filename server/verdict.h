// The verdict holder's arithmetic (docs/protocol.md, rule 7): norm reports of all shards and the replicas' reports of
// one round in, the one decision out. Pure; not thread-safe.
#ifndef SLUICE_SERVER_VERDICT_H_
#define SLUICE_SERVER_VERDICT_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/layout.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/plan.pb.h"
#include "sluice/v1/shard.pb.h"

namespace sluice {

// One round. Reports may come in any order and more than once; a second one of the same shard or contributor is
// dropped.
class RoundTally {
 public:
  RoundTally(std::shared_ptr<const Layout> layout, uint64_t round) : layout_(std::move(layout)), round_(round) {}

  // INVALID_ARGUMENT: outside the plan. Nothing is kept of such a report.
  absl::Status AddNorm(const v1::NormReport& report);
  absl::Status AddReport(const v1::RoundReport& report);

  // Of every shard that has chunks.
  bool norms_complete() const {
    return norms_.size() == std::min<uint64_t>(layout_->plan().shards(), layout_->table().stripes());
  }
  bool reports_complete() const { return reports_.size() == layout_->ranks(); }

  // Both complete. gradient_norm = sqrt(sum over norm blocks, in block order) / count; clipping by min(1, clip / norm).
  // FAILED_PRECONDITION where shards disagree on the count or norm blocks are missing (a fault of our own).
  absl::StatusOr<v1::Verdict> Decide() const;

  const std::map<uint32_t, v1::RoundReport>& reports() const { return reports_; }  // by contributor
  double loss_sum() const;                                                         // in order of contributors
  double count() const;
  double correct() const;
  std::vector<uint32_t> nonfinite_contributors() const;
  // "round 7: waits for shards 2, 5 and contributors 1".
  std::string Missing() const;

 private:
  const std::shared_ptr<const Layout> layout_;
  const uint64_t round_;
  std::map<uint32_t, v1::NormReport> norms_;     // by shard
  std::map<uint32_t, v1::RoundReport> reports_;  // by contributor
};

}  // namespace sluice

#endif  // SLUICE_SERVER_VERDICT_H_
