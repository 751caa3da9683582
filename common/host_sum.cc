#include "common/host_sum.h"

#include <algorithm>
#include <string>

#include "common/wire_format.h"

namespace sluice {
namespace {

bool HasHostSums(const v1::Plan& plan) {
  const v1::JobSpec& spec = plan.spec();
  const bool wanted =
      spec.transfer().host_sum() == v1::TransferSpec::AUTO || spec.transfer().host_sum() == v1::TransferSpec::ON;
  return wanted && spec.train().mode() == v1::TrainSpec::SYNC && PushEncoding(spec) == v1::F32 &&
         std::max(1u, spec.parallel().tensor()) * std::max(1u, spec.parallel().pipeline()) == 1;
}

}  // namespace

ContributorSpan HostSumOf(const v1::Plan& plan, uint32_t rank) {
  ContributorSpan span{rank, 1};
  const auto ranks = static_cast<uint32_t>(plan.ranks_size());
  const std::string& host = plan.ranks(static_cast<int>(rank)).host_id();
  if (host.empty() || !HasHostSums(plan)) return span;
  // From the leaf up, a level at a time, for as long as all of the node is on the host.
  for (uint32_t width = 2; width / 2 < ranks; width *= 2) {
    const uint32_t first = rank / width * width, end = std::min(first + width, ranks);
    for (uint32_t i = first; i < end; ++i) {
      if (plan.ranks(static_cast<int>(i)).host_id() != host) return span;
    }
    span = {first, end - first};
  }
  return span;
}

bool SummedOnHost(const v1::Plan& plan, const ContributorSpan& span, uint32_t shard) {
  if (span.count < 2) return false;
  if (plan.spec().transfer().host_sum() == v1::TransferSpec::ON) return true;
  const std::string& server = plan.chains(static_cast<int>(shard)).members(0).host_id();
  return !server.empty() && server != plan.ranks(static_cast<int>(span.first)).host_id();
}

}  // namespace sluice
