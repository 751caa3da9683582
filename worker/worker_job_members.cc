// A worker's part in its host's sums (docs/host_sums.md): members' streams, and the adding itself.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/optimizer.h"
#include "common/status_macros.h"
#include "common/sum_tree.h"
#include "common/wire_format.h"
#include "worker/worker_job.h"

namespace sluice {
namespace {

// Where a member's gradient of a chunk lies in its memory.
struct MemberPayload : MemberValue {
  explicit MemberPayload(Payload p) : payload(std::move(p)) {}
  Payload payload;
};

}  // namespace

// ---------------------------------------------------------------- members
absl::Status WorkerJob::AddMember(const v1::StreamHello& hello, std::shared_ptr<ByteStream> stream) {
  absl::MutexLock lock(&mutex_);
  const Layout& layout = *layout_;
  if (ended_ || hello.generation() < layout.generation()) {
    return absl::AbortedError(absl::StrCat("generation ", hello.generation(), " is over"));
  }
  if (hello.generation() == layout.generation()) {
    const uint32_t rank = hello.contributor();
    const bool member = rank < layout.ranks() && rank != rank_ && layout.host_sum(rank).first == rank_ &&
                        SameNode(layout.plan().ranks(static_cast<int>(rank)).node(), hello.node());
    if (!member) {
      return absl::PermissionDeniedError(absl::StrCat("job ", id_, " generation ", hello.generation(), ": ",
                                                      hello.node().name(), " as rank ", rank,
                                                      " has no part in the host sum of rank ", rank_));
    }
  }  // else the core looks when it has the plan
  core_.OnMember(hello.contributor());
  members_[hello.contributor()] = {hello.generation(), std::move(stream)};
  return absl::OkStatus();
}

void WorkerJob::RemoveMember(uint32_t contributor, const ByteStream* stream) {
  absl::MutexLock lock(&mutex_);
  const auto it = members_.find(contributor);
  if (it != members_.end() && it->second.stream.get() == stream) members_.erase(it);
}

absl::Status WorkerJob::OnContributions(const v1::StreamHello& hello, const ParsedFrame& frame) {
  absl::Status status;
  Deliver([&](RoundCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    size_t offset = 0;
    for (const v1::ChunkHeader& header : frame.control.header()) {
      if (header.contributor() != hello.contributor() || header.generation() != hello.generation()) {
        status = absl::InvalidArgumentError(absl::StrCat("rank ", header.contributor(), " of generation ",
                                                         header.generation(), " on the stream of ", hello.contributor(),
                                                         " of generation ", hello.generation()));
        return;
      }
      const absl::StatusOr<size_t> bytes = LengthInPayload(header.encoding(), header.elements(), frame.payload, offset);
      status = bytes.status();
      if (!status.ok()) return;
      MemberValueRef value;
      if (*bytes > 0) value = std::make_shared<MemberPayload>(frame.payload.Sub(offset, *bytes));
      status = core.OnContribution(header, std::move(value));
      if (!status.ok()) return;
      offset += *bytes;
    }
  });
  return status;
}

bool WorkerJob::IsLeader(uint64_t generation, size_t server) const {
  absl::MutexLock lock(&mutex_);
  return generation == core_.generation() && server < core_.servers().size() && core_.servers()[server].leader;
}

void WorkerJob::OnMemberFailed(const v1::StreamHello& hello, const absl::Status& status) {
  if (hello.generation() == generation()) HostSumFailed(hello.node(), status);
}

void WorkerJob::HostSumFailed(const v1::NodeId& node, const absl::Status& status) {
  v1::NodeMessage message;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    v1::HostSumFailure* failure = message.mutable_host_sum_failure();
    failure->set_job_id(id_);
    failure->set_generation(layout_->generation());
    *failure->mutable_node() = node;
    failure->set_message(std::string(status.message()));
  }
  LOG_WARN("job {}: worker {} has no part in its host's sum: {}", id_, node.name(), status.ToString());
  options_.send(message);
}

// ---------------------------------------------------------------- sums
void WorkerJob::SumOnHost(HostSum sum) { sums_.push_back(std::move(sum)); }

WorkerJob::MadeSum WorkerJob::MakeSum(const HostSum& sum) const {
  // The chunks are the same in every generation.
  const uint64_t begin = table_.range(sum.chunk).begin, elements = table_.range(sum.chunk).size();
  SumTree tree(elements, sum_pool_);
  tree.Reset(sum.span.count);
  uint32_t present = 0, lone = 0;
  for (uint32_t i = 0; i < sum.span.count; ++i) {
    Payload payload;
    if (i == 0 && sum.own) {  // stays readable: the core starts nothing that writes it
      payload = Payload(
          {grpc::Slice(const_cast<float*>(model_->gradients()) + begin, elements * sizeof(float), [](void*) {})});
    } else if (sum.values[i] != nullptr) {
      payload = static_cast<const MemberPayload&>(*sum.values[i]).payload;
    }
    if (payload.size() > 0) {
      ++present;
      lone = i;
    }
    tree.Add(i, std::move(payload));
  }
  MadeSum made{sum.generation, sum.chunk, sum.round, tree.ToBuffer(), {}};
  std::vector<uint32_t> nonfinite = tree.found_nonfinite();
  if (present == 1 && !AllFinite(made.values.get(), elements)) nonfinite = {lone};
  for (const uint32_t member : nonfinite) made.nonfinite.push_back(sum.span.first + member);
  return made;
}

}  // namespace sluice
