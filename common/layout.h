// What follows from a plan: chunk table, shards, views, contributors, data slots. Pure functions; every node computes
// the same.
#ifndef SLUICE_COMMON_LAYOUT_H_
#define SLUICE_COMMON_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/host_sum.h"
#include "common/mesh.h"
#include "common/model_layout.h"
#include "sluice/v1/plan.pb.h"

namespace sluice {

// clamp(P/32, 16384, 262144), rounded up to a multiple of 4096.
uint64_t DefaultChunkElements(uint64_t parameters);
// Elements of a norm block: DefaultChunkElements(P), whatever chunk size is forced.
uint64_t NormBlockElements(uint64_t parameters);
// K = min(stripes, max(16, 8 * servers)), at least 1.
uint32_t ShardCount(uint64_t parameters, uint64_t chunk_elements, uint32_t servers_at_start);
// Slots [begin, end) of a round's batch that replica d of `replicas` computes: contiguous, in order, maybe empty.
Range ReplicaSlots(uint64_t batch, uint32_t d, uint32_t replicas);
// The same for microbatch m of `microbatches` within a replica's slots.
Range MicrobatchSlots(Range replica, uint32_t m, uint32_t microbatches);
// Of all fields but `hash`, deterministic serialization (FNV-1a 64).
uint64_t PlanHash(const v1::Plan& plan);

// A space of P elements is cut into stripes of one size, stripe i = elements [i*C, min(P, (i+1)*C)), and a stripe into
// chunks where a segment (common/mesh.h) begins within it; shard of stripe i = i mod K. Chunks are numbered in the
// order of the space. Constant after construction; thread-safe.
class ChunkTable {
 public:
  // Without segments: a chunk is a stripe.
  ChunkTable(uint64_t parameters, uint64_t stripe_elements, uint32_t shards, const std::vector<Segment>& segments = {});

  uint64_t chunks() const { return begins_.size() - 1; }
  uint64_t stripes() const { return parameters() / stripe_ + (parameters() % stripe_ > 0); }
  uint32_t shards() const { return static_cast<uint32_t>(of_shard_.size()); }
  uint64_t parameters() const { return begins_.back(); }
  Range range(uint64_t chunk) const { return {begins_[chunk], begins_[chunk + 1]}; }
  uint32_t shard(uint64_t chunk) const { return static_cast<uint32_t>(begins_[chunk] / stripe_ % of_shard_.size()); }
  uint64_t chunk_at(uint64_t element) const;  // element < P
  // In ascending order.
  const std::vector<uint64_t>& chunks_of(uint32_t shard) const { return of_shard_[shard]; }

 private:
  uint64_t stripe_;
  std::vector<uint64_t> begins_;  // [chunks + 1]
  std::vector<std::vector<uint64_t>> of_shard_;
};

// A plan with what follows from it. Constant after construction; thread-safe; shared.
class Layout {
 public:
  // Checks the plan (hash, ranks, chains) and builds its parameter space. INVALID_ARGUMENT says what is wrong.
  static absl::StatusOr<std::shared_ptr<const Layout>> Make(v1::Plan plan);

  const v1::Plan& plan() const { return plan_; }
  const ParameterSpace& space() const { return space_; }
  const ChunkTable& table() const { return table_; }
  uint64_t generation() const { return plan_.generation(); }
  uint64_t rounds() const { return plan_.spec().train().rounds(); }
  uint64_t batch() const { return plan_.spec().train().batch(); }
  bool async() const { return plan_.spec().train().mode() == v1::TrainSpec::ASYNC; }

  const Mesh& mesh() const { return mesh_; }
  uint32_t ranks() const { return static_cast<uint32_t>(plan_.ranks_size()); }
  uint32_t replicas() const { return mesh_.data; }
  // Blocks of the gradient norm: as chunks, of stripes of plan.norm_block elements.
  const ChunkTable& norm_blocks() const { return norm_blocks_; }

  // Who pushes for a chunk: slots [0, contributors) of its sum, by replica, then as its segment lists them.
  uint32_t contributors(uint64_t chunk) const { return mesh_.data * per_replica(chunk); }
  uint32_t rank_of_slot(uint64_t chunk, uint32_t slot) const {
    return slot / per_replica(chunk) * mesh_.ranks_of_replica() +
           segment(chunk).contributors[slot % per_replica(chunk)];
  }
  // The slot of what the rank pushes; none: it does not push for this chunk.
  std::optional<uint32_t> slot(uint64_t chunk, uint32_t rank) const;
  // Whether the contribution's count is that of its replica's samples: each replica's counts once.
  bool counts(uint64_t chunk, uint32_t slot) const { return slot % per_replica(chunk) == 0; }
  // Whether the rank says the loss of its replica's samples.
  bool tells_loss(uint32_t rank) const {
    const Mesh::Place place = mesh_.place(rank);
    return place.stage + 1 == mesh_.pipeline && place.tensor == 0;
  }
  // Chunks that the rank holds, in ascending order.
  const std::vector<uint64_t>& view(uint32_t rank) const { return views_[rank % mesh_.ranks_of_replica()]; }
  // HostSumOf of the rank, and what its contribution to the chunks of a shard is part of (count 1: its own).
  const ContributorSpan& host_sum(uint32_t rank) const { return host_sums_[rank]; }
  ContributorSpan contribution(uint32_t rank, uint32_t shard) const {
    return SummedOnHost(plan_, host_sums_[rank], shard) ? host_sums_[rank] : ContributorSpan{rank, 1};
  }

  // Index in plan().ranks of this node (name and incarnation), or -1.
  int RankOf(const v1::NodeId& node) const;
  // Whether this node (name and incarnation) is a member of the shard's chain; primary: the first; tail: the last.
  bool IsMember(uint32_t shard, const v1::NodeId& node) const;
  const v1::Member& primary(uint32_t shard) const { return plan_.chains(shard).members(0); }
  const v1::Member& tail(uint32_t shard) const {
    return plan_.chains(shard).members(plan_.chains(shard).members_size() - 1);
  }
  // Whether the version is written as a checkpoint by the spec: every `checkpoint.every_rounds`, and the last one.
  bool CheckpointAt(uint64_t version) const;
  // Whether the version is evaluated by the spec: every `train.eval_every` > 0 rounds, and the last one.
  bool EvaluateAt(uint64_t version) const;

 private:
  Layout(v1::Plan plan, ParameterSpace space);

  const Segment& segment(uint64_t chunk) const { return segments_[segment_of_[chunk]]; }
  uint32_t per_replica(uint64_t chunk) const { return static_cast<uint32_t>(segment(chunk).contributors.size()); }

  const v1::Plan plan_;
  const ParameterSpace space_;
  const Mesh mesh_;
  const std::vector<Segment> segments_;
  const ChunkTable table_, norm_blocks_;
  std::vector<uint32_t> segment_of_;          // [chunks]
  std::vector<std::vector<uint64_t>> views_;  // [ranks of a replica]
  std::vector<ContributorSpan> host_sums_;    // [ranks]
};

bool SameNode(const v1::NodeId& a, const v1::NodeId& b);

}  // namespace sluice

#endif  // SLUICE_COMMON_LAYOUT_H_
