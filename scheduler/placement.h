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
  uint64_t memory_limit = 0;  // bytes for what its rank holds (RankBytes); 0: not limited
  bool serves_peers = true;   // can be one of several ranks of a replica
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

// What a rank holds in its worker's memory, by stage and tensor rank (stage * T + tensor): 4 bytes for each parameter
// of its view, 4 for its gradient, with error feedback 4 for what the push format leaves out. Activations, the windows
// of streams and host sums are not counted. The arithmetic in words: "parameter 4 + gradient 4". `spec`: valid.
std::vector<uint64_t> RankBytes(const v1::JobSpec& spec);
std::string RankBytesText(const v1::JobSpec& spec);

inline bool Holds(const WorkerSlot& worker, uint64_t bytes) {
  return worker.memory_limit == 0 || worker.memory_limit >= bytes;
}
// How many of the ranks of a gang find a worker that holds them, as many as possible. `bytes`: RankBytes.
uint64_t RanksHeld(const v1::ParallelSpec& parallel, const std::vector<uint64_t>& bytes,
                   const std::vector<WorkerSlot>& workers);

// The gang in contributor order: data outermost, tensor innermost. Workers of one numeric profile where enough of them
// are idle.
//
// Of whole replicas (pipeline and tensor 1): ranks of one host next to each other, hosts with the most factors of two
// in their number of workers first, so that the subtrees that they add up for themselves are large (docs/host_sums.md).
//
// Of replicas of several ranks: on as few hosts as can be. Replicas that fit on one host are placed first, each on the
// host that it leaves the least room on; then the stages of the others one after the other, the tensor ranks of a stage
// on one host (they talk the most: every layer), on the host of the stage before where it has room; then what does not
// fit on one host anywhere.
//
// `bytes`: RankBytes; empty: workers hold whatever there is. Where all of the gang can be workers that hold the largest
// rank, it is; else workers with less memory get the ranks that they hold, whatever their host.
// RESOURCE_EXHAUSTED where workers are too few, or too few hold their rank, with the numbers.
absl::StatusOr<std::vector<v1::Rank>> PlaceRanks(const v1::ParallelSpec& parallel, std::vector<WorkerSlot> idle,
                                                 const std::vector<uint64_t>& bytes = {});

// What the rank that needs a new worker wants.
struct Vacancy {
  std::string numeric_profile;
  bool allow_other_profile = true;
  uint64_t bytes = 0;                // that the worker must hold
  std::vector<std::string> hosts{};  // best first: the lost rank's, those of its neighbours
};
// Index into `idle` of the best one: holds the rank; of the profile before others; on the first of `hosts` that has
// one; of equals the first. -1: none.
int ChooseReplacement(const Vacancy& vacancy, const std::vector<WorkerSlot>& idle);

// One chain of one member, since `generation`, for each shard of the table: bytes balanced over the servers within this
// job first, then by what they hold already, never beyond a server's limit. RESOURCE_EXHAUSTED says what was needed and
// what there is; UNAVAILABLE: no server.
absl::StatusOr<std::vector<v1::Chain>> PlaceShards(const ChunkTable& table, uint64_t bytes_per_parameter,
                                                   const std::vector<ServerSlot>& servers, uint64_t generation);

// Elements of all chunks of a shard.
uint64_t ShardElements(const ChunkTable& table, uint32_t shard);

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_PLACEMENT_H_
