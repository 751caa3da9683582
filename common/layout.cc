#include "common/layout.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

template <typename... Args>
absl::Status Wrong(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat("plan: ", args...));
}

std::string NodeText(const v1::NodeId& node) { return absl::StrCat(node.name(), " (life ", node.incarnation(), ")"); }

// Part `i` of `parts` of the range: contiguous, in order, sizes that differ by at most one (the first ones are larger).
Range Part(Range whole, uint64_t i, uint64_t parts) {
  parts = std::max<uint64_t>(parts, 1);
  i = std::min(i, parts);
  const uint64_t each = whole.size() / parts, rest = whole.size() % parts;
  const uint64_t begin = whole.begin + each * i + std::min(i, rest);
  return {begin, begin + (i < parts ? each + (i < rest ? 1 : 0) : 0)};
}

absl::Status CheckRanks(const v1::Plan& plan) {
  const v1::ParallelSpec& degrees = plan.spec().parallel();
  const uint64_t stages = uint64_t{degrees.data()} * degrees.pipeline();  // < 2^64
  uint64_t expected = 0;
  if (__builtin_mul_overflow(stages, uint64_t{degrees.tensor()}, &expected) || expected == 0 ||
      expected != static_cast<uint64_t>(plan.ranks_size())) {
    return Wrong("expected data ", degrees.data(), " x pipeline ", degrees.pipeline(), " x tensor ", degrees.tensor(),
                 " ranks, found ", plan.ranks_size());
  }
  const Mesh mesh = MeshOf(degrees);
  std::set<std::pair<std::string_view, uint64_t>> nodes;
  for (int i = 0; i < plan.ranks_size(); ++i) {
    const v1::Rank& rank = plan.ranks(i);
    const Mesh::Place place = mesh.place(static_cast<uint32_t>(i));
    if (place != Mesh::Place{rank.data(), rank.pipeline(), rank.tensor()}) {
      return Wrong("rank ", i, " has the coordinates (", rank.data(), ", ", rank.pipeline(), ", ", rank.tensor(),
                   "), expected (", place.data, ", ", place.stage, ", ", place.tensor, ")");
    }
    if (!nodes.emplace(rank.node().name(), rank.node().incarnation()).second) {
      return Wrong("rank ", i, " is given to node ", NodeText(rank.node()), ", which holds another rank");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckChains(const v1::Plan& plan) {
  if (plan.shards() == 0 || plan.shards() != static_cast<uint32_t>(plan.chains_size())) {
    return Wrong("expected one chain for each of at least 1 shards, found ", plan.shards(), " shards and ",
                 plan.chains_size(), " chains");
  }
  for (int shard = 0; shard < plan.chains_size(); ++shard) {
    const v1::Chain& chain = plan.chains(shard);
    if (chain.members_size() == 0) return Wrong("the chain of shard ", shard, " has no member");
    std::set<std::pair<std::string_view, uint64_t>> nodes;
    for (const v1::Member& member : chain.members()) {
      if (!nodes.emplace(member.node().name(), member.node().incarnation()).second) {
        return Wrong("node ", NodeText(member.node()), " is twice in the chain of shard ", shard);
      }
      if (member.since() > plan.generation()) {
        return Wrong("node ", NodeText(member.node()), " is in the chain of shard ", shard, " since generation ",
                     member.since(), ", later than the plan's ", plan.generation());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlan(const v1::Plan& plan) {
  if (const uint64_t hash = PlanHash(plan); hash != plan.hash()) {
    return Wrong("its hash is ", absl::Hex(plan.hash(), absl::kZeroPad16), " but its contents hash to ",
                 absl::Hex(hash, absl::kZeroPad16), "; both ends must run the same build");
  }
  if (plan.generation() == 0) return Wrong("generation is 0; they count from 1");
  if (plan.timeline() == 0 || plan.timeline() > plan.generation()) {
    return Wrong("timeline is ", plan.timeline(), ", expected 1 to the generation, ", plan.generation());
  }
  if (plan.space() != 0) return Wrong("space is ", plan.space(), "; this version knows space 0");
  if (plan.start() > plan.spec().train().rounds()) {
    return Wrong("start is version ", plan.start(), ", later than the job's last, ", plan.spec().train().rounds());
  }
  if (plan.has_verdict() && plan.verdict().round() != plan.start()) {
    return Wrong("it carries a verdict of round ", plan.verdict().round(), ", expected one of its start, ",
                 plan.start());
  }
  if (plan.chunk_elements() == 0 || plan.chunk_elements() > uint64_t{1} << 62) {
    return Wrong("chunk_elements is ", plan.chunk_elements(), ", expected 1 to 2^62");
  }
  if (plan.norm_block() == 0) return Wrong("norm_block is 0");
  if (plan.discipline() != v1::Plan::VERDICT && plan.discipline() != v1::Plan::STREAM) {
    return Wrong("discipline is ", static_cast<int>(plan.discipline()), ", expected VERDICT or STREAM");
  }
  if (plan.discipline() == v1::Plan::STREAM && NeedsVerdict(plan.spec())) {
    return Wrong("discipline is STREAM, but clipping or nonfinite: SKIP_ROUND needs VERDICT");
  }
  if (plan.spec().train().mode() == v1::TrainSpec::ASYNC &&
      (plan.discipline() != v1::Plan::STREAM || plan.spec().train().batch() == 0)) {
    return Wrong("train.mode is ASYNC, expected discipline STREAM and a batch of at least 1");
  }
  RETURN_IF_ERROR(CheckRanks(plan));
  return CheckChains(plan);
}

}  // namespace

uint64_t DefaultChunkElements(uint64_t parameters) {
  constexpr uint64_t kStep = 4096;
  const uint64_t wanted = std::clamp<uint64_t>(parameters / 32, 16384, 262144);
  return (wanted + kStep - 1) / kStep * kStep;
}

uint64_t NormBlockElements(uint64_t parameters) { return DefaultChunkElements(parameters); }

uint32_t ShardCount(uint64_t parameters, uint64_t chunk_elements, uint32_t servers_at_start) {
  const uint64_t stripes = parameters / chunk_elements + (parameters % chunk_elements > 0);
  const uint64_t wanted = std::min<uint64_t>(stripes, std::max<uint64_t>(16, uint64_t{8} * servers_at_start));
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, UINT32_MAX));
}

Range ReplicaSlots(uint64_t batch, uint32_t d, uint32_t replicas) { return Part({0, batch}, d, replicas); }

Range MicrobatchSlots(Range replica, uint32_t m, uint32_t microbatches) { return Part(replica, m, microbatches); }

uint64_t PlanHash(const v1::Plan& plan) {
  v1::Plan hashed = plan;
  hashed.clear_hash();
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream sink(&bytes);
    google::protobuf::io::CodedOutputStream coded(&sink);
    coded.SetSerializationDeterministic(true);
    hashed.SerializeToCodedStream(&coded);
  }
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return hash;
}

absl::StatusOr<std::shared_ptr<const Layout>> Layout::Make(v1::Plan plan) {
  RETURN_IF_ERROR(CheckPlan(plan));
  absl::StatusOr<ParameterSpace> space = MakeParameterSpace(plan.spec().model());
  if (!space.ok()) return Annotate(space.status(), "plan");
  RETURN_IF_ERROR(Annotate(CheckMesh(plan.spec().model(), MeshOf(plan.spec().parallel())), "plan"));
  return std::shared_ptr<const Layout>(new Layout(std::move(plan), *std::move(space)));
}

ChunkTable::ChunkTable(uint64_t parameters, uint64_t stripe_elements, uint32_t shards,
                       const std::vector<Segment>& segments)
    : stripe_(stripe_elements), of_shard_(shards) {
  auto segment = segments.begin();
  for (uint64_t at = 0, next; at < parameters; at = next) {
    next = parameters - at / stripe_ * stripe_ > stripe_ ? (at / stripe_ + 1) * stripe_ : parameters;
    while (segment != segments.end() && segment->range.end <= at) ++segment;
    if (segment != segments.end()) next = std::min(next, segment->range.end);
    of_shard_[at / stripe_ % shards].push_back(begins_.size());
    begins_.push_back(at);
  }
  begins_.push_back(parameters);
}

uint64_t ChunkTable::chunk_at(uint64_t element) const {
  return static_cast<uint64_t>(std::upper_bound(begins_.begin(), begins_.end(), element) - begins_.begin()) - 1;
}

Layout::Layout(v1::Plan plan, ParameterSpace space)
    : plan_(std::move(plan)),
      space_(std::move(space)),
      mesh_(MeshOf(plan_.spec().parallel())),
      segments_(SegmentsOf(plan_.spec().model(), space_, mesh_)),
      table_(space_.size(), plan_.chunk_elements(), plan_.shards(), segments_),
      norm_blocks_(space_.size(), plan_.norm_block(), 1, segments_) {
  for (uint64_t chunk = 0, s = 0; chunk < table_.chunks(); ++chunk) {
    while (segments_[s].range.end <= table_.range(chunk).begin) ++s;
    segment_of_.push_back(static_cast<uint32_t>(s));
  }
  for (uint32_t rank = 0; rank < mesh_.ranks_of_replica(); ++rank) {
    const Mesh::Place place = mesh_.place(rank);
    std::vector<uint64_t>& view = views_.emplace_back();
    uint64_t chunk = 0;
    for (const Range& held : ViewOf(plan_.spec().model(), space_, mesh_, place.stage, place.tensor)) {
      for (chunk = std::max(chunk, table_.chunk_at(held.begin));
           chunk < table_.chunks() && table_.range(chunk).begin < held.end; ++chunk) {
        view.push_back(chunk);
      }
    }
  }
  while (host_sums_.size() < ranks()) {
    const ContributorSpan span = HostSumOf(plan_, static_cast<uint32_t>(host_sums_.size()));
    host_sums_.insert(host_sums_.end(), span.count, span);
  }
}

std::optional<uint32_t> Layout::slot(uint64_t chunk, uint32_t rank) const {
  const std::vector<uint32_t>& pushing = segment(chunk).contributors;
  const auto it = std::lower_bound(pushing.begin(), pushing.end(), rank % mesh_.ranks_of_replica());
  if (it == pushing.end() || *it != rank % mesh_.ranks_of_replica()) return std::nullopt;
  return rank / mesh_.ranks_of_replica() * per_replica(chunk) + static_cast<uint32_t>(it - pushing.begin());
}

int Layout::RankOf(const v1::NodeId& node) const {
  for (int i = 0; i < plan_.ranks_size(); ++i) {
    if (SameNode(plan_.ranks(i).node(), node)) return i;
  }
  return -1;
}

bool Layout::IsMember(uint32_t shard, const v1::NodeId& node) const {
  if (shard >= static_cast<uint32_t>(plan_.chains_size())) return false;
  for (const v1::Member& member : plan_.chains(static_cast<int>(shard)).members()) {
    if (SameNode(member.node(), node)) return true;
  }
  return false;
}

bool Layout::CheckpointAt(uint64_t version) const {
  const uint64_t every = plan_.spec().checkpoint().every_rounds();
  return version > 0 && (version == rounds() || (every > 0 && version % every == 0));
}

bool Layout::EvaluateAt(uint64_t version) const {
  const uint64_t every = plan_.spec().train().eval_every();
  return version > 0 && (version == rounds() || (every > 0 && version % every == 0));
}

bool SameNode(const v1::NodeId& a, const v1::NodeId& b) {
  return a.incarnation() == b.incarnation() && a.name() == b.name();
}

}  // namespace sluice
