// Which contributions travel as one because their ranks share a host (docs/host_sums.md): pure functions of the plan.
#ifndef SLUICE_COMMON_HOST_SUM_H_
#define SLUICE_COMMON_HOST_SUM_H_

#include <cstdint>

#include "sluice/v1/plan.pb.h"

namespace sluice {

// Contributors [first, first + count); `first` is the host leader.
struct ContributorSpan {
  uint32_t first = 0, count = 1;
  bool operator==(const ContributorSpan&) const = default;
};

// The largest subtree of the sum (a node of the tree over contributor indices) that holds the rank and lies on its host
// alone; the rank by itself where that is all there is, or where the job has no host sums.
ContributorSpan HostSumOf(const v1::Plan& plan, uint32_t rank);

// Whether such a subtree's contribution to a chunk of the shard is one: with ON always, with AUTO where the shard's
// server is known to be on another host.
bool SummedOnHost(const v1::Plan& plan, const ContributorSpan& span, uint32_t shard);

}  // namespace sluice

#endif  // SLUICE_COMMON_HOST_SUM_H_
