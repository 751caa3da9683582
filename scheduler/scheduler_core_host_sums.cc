// Which ranks add up their contributions on their host: what goes wrong with it, and what status says
// (docs/host_sums.md).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/host_sum.h"
#include "scheduler/scheduler_core.h"

namespace sluice {

void SchedulerCore::OnHostSumFailure(const NodeKey& from, const v1::HostSumFailure& failure, absl::Time now) {
  JobEntry* const job = Active(failure.job_id());
  if (job == nullptr || failure.generation() != job->plan().generation() || PlanNodes(job->plan()).count(from) == 0) {
    return;
  }
  const v1::Plan& plan = job->plan();
  const auto rank = std::find_if(plan.ranks().begin(), plan.ranks().end(),
                                 [&](const v1::Rank& r) { return SameNode(r.node(), failure.node()); });
  if (rank == plan.ranks().end()) return;
  const ContributorSpan span = HostSumOf(plan, static_cast<uint32_t>(rank - plan.ranks().begin()));
  if (span.count < 2) return;
  // Where one of the two is dead, that is the trouble, and is mended as such.
  for (const v1::NodeId* node : {&rank->node(), &plan.ranks(static_cast<int>(span.first)).node()}) {
    if (!Here(KeyOf(*node)) || job->lost.count(KeyOf(*node)) > 0) return;
  }
  const bool known = std::any_of(job->row.push_alone().begin(), job->row.push_alone().end(),
                                 [&](const v1::NodeId& node) { return SameNode(node, failure.node()); });
  if (!known) {
    *job->row.add_push_alone() = failure.node();
    const std::string text = absl::StrCat(
        failure.node().name(), " pushes for itself, not with its host: ", failure.message(), " (docs/host_sums.md)");
    job->row.mutable_status()->add_warnings(text);
    AddEvent(*job, now, text);
    actions_->Persist(job->row);
  }
  if (job->transition || !job->lost.empty() || !GraceOver(now)) return;  // the next plan has it; or it is said again
  job->trouble.insert(absl::StrCat("the part of ", failure.node().name(), " in a host sum"));
  Begin(*job, now);
}

void SchedulerCore::AddHostSums(const JobEntry& job, v1::JobStatus* status) const {
  const v1::Plan& plan = job.plan();
  ContributorSpan span;
  for (uint32_t rank = 0; rank < static_cast<uint32_t>(plan.ranks_size()); rank += span.count) {
    span = HostSumOf(plan, rank);
    uint32_t shards = 0;
    for (uint32_t shard = 0; shard < plan.shards(); ++shard) shards += SummedOnHost(plan, span, shard);
    if (shards == 0) continue;
    v1::HostSumStatus* const sum = status->add_host_sums();
    sum->set_host_id(plan.ranks(static_cast<int>(rank)).host_id());
    sum->set_first(span.first);
    sum->set_ranks(span.count);
    sum->set_shards(shards);
  }
}

}  // namespace sluice
