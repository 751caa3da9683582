// Which node does what: pure functions. Ranks onto idle workers (a whole gang or nothing), shards onto servers.
#ifndef SLUICE_SCHEDULER_PLACEMENT_H_
#define SLUICE_SCHEDULER_PLACEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/layout.h"
#include "sluice/v1/job.pb.h"
#include "sluice/v1/plan.pb.h"

namespace sluice {

struct WorkerSlot {
  v1::NodeId node;
  std::string address;
  std::string host_id;
  std::string numeric_profile;
  bool sums_on_host = false;  // may add up its contributions with others of its host
};

struct ServerSlot {
  v1::NodeId node;
  std::string address;
  uint64_t memory_limit = 0;  // bytes; 0: not limited
  uint64_t memory_used = 0;   // bytes of other jobs
  std::string host_id = {};
};

// The rank's node, address, host and profile are those of `worker`.
void Assign(const WorkerSlot& worker, v1::Rank* rank);

// Ranks that a job has: data x pipeline x tensor.
uint64_t GangSize(const v1::ParallelSpec& parallel);

// Server bytes per parameter of a job: value, value before, optimizer slots, sums under VERDICT; and the arithmetic in
// words ("value 4 + previous 4 + m 4 + v 4 + sums 4").
uint64_t BytesPerParameter(const v1::JobSpec& spec);
std::string BytesPerParameterText(const v1::JobSpec& spec);

// The gang in contributor order: data outermost, tensor innermost; workers of one numeric profile where enough of them
// are idle; ranks of one host next to each other, hosts with the most factors of two in their number of workers first,
// so that the subtrees that they add up for themselves are large (docs/host_sums.md). RESOURCE_EXHAUSTED where workers
// are too few.
absl::StatusOr<std::vector<v1::Rank>> PlaceRanks(const v1::ParallelSpec& parallel, std::vector<WorkerSlot> idle);

// Index into `idle` of the best one for a rank that wants this profile: of that profile, the first; else, where another
// profile is allowed, the first of all; -1: none.
int ChooseReplacement(const std::string& numeric_profile, bool allow_other_profile,
                      const std::vector<WorkerSlot>& idle);

// One chain of one member, since `generation`, for each shard of the table: bytes balanced over the servers within this
// job first, then by what they hold already, never beyond a server's limit. RESOURCE_EXHAUSTED says what was needed and
// what there is; UNAVAILABLE: no server.
absl::StatusOr<std::vector<v1::Chain>> PlaceShards(const ChunkTable& table, uint64_t bytes_per_parameter,
                                                   const std::vector<ServerSlot>& servers, uint64_t generation);

// Elements of all chunks of a shard.
uint64_t ShardElements(const ChunkTable& table, uint32_t shard);

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_PLACEMENT_H_
