// The host leader's part of a host sum (docs/host_sums.md) as a state machine: which contributions to which round of a
// chunk are there, whether their sum has been made. No threads, clock, gRPC or memory; the round core owns it.
//
// A contribution is identified by (generation, round, contributor, chunk); a second copy is dropped. A member is ahead
// of this rank by at most one round, and then the round before is committed: contributions to it are of no use any
// more. What comes for a generation that has not begun here waits.
#ifndef SLUICE_WORKER_HOST_SUM_CORE_H_
#define SLUICE_WORKER_HOST_SUM_CORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layout.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// A member's gradient of one chunk; the cores never look into it.
class MemberValue {
 public:
  virtual ~MemberValue() = default;
};
using MemberValueRef = std::shared_ptr<const MemberValue>;

// Contributions that are to be added up.
struct HostSum {
  uint64_t generation = 0, chunk = 0, round = 0;
  ContributorSpan span;
  bool own = false;                    // the leader's own is not empty
  bool empty = false;                  // all are: there is nothing to add up, the push may leave
  std::vector<MemberValueRef> values;  // [span.count]; null: empty; [0] is the leader's own: null
};

// Not thread-safe.
class HostSumCore {
 public:
  // A generation ends: what was gathered is dropped.
  void End();
  // One begins, in which this node is `rank`. TakeWaiting has what came early.
  void Begin(std::shared_ptr<const Layout> layout, uint32_t rank);

  // Whether this rank adds up the contributions to the chunk.
  bool Gathers(uint64_t chunk) const { return !chunks_.empty() && chunks_[chunk] != nullptr; }
  // The own contribution; `count` 0: empty. Returns the sum where it is complete by it.
  std::optional<HostSum> AddOwn(uint64_t chunk, uint64_t round, double count);
  // A member opened a stream: what it said on the one before it says again.
  void OnMember(uint32_t contributor) { waiting_.erase(contributor); }
  // Its contribution to header.round; `open`: the round that this rank has open. As AddOwn. Of an older generation, or
  // one that is there or not needed any more: dropped. INVALID_ARGUMENT or OUT_OF_RANGE: outside the plan.
  absl::StatusOr<std::optional<HostSum>> Add(const v1::ChunkHeader& header, MemberValueRef value, uint64_t open);
  std::vector<std::pair<v1::ChunkHeader, MemberValueRef>> TakeWaiting();

  // The sum was made. False where it is not wanted any more.
  bool OnMade(uint64_t generation, uint64_t chunk, uint64_t round, const std::vector<uint32_t>& nonfinite);
  // What is pushed for the round; null as long as it is not made.
  const v1::ChunkHeader* Made(uint64_t chunk, uint64_t round) const;
  // Ranks whose contribution to the round is not there, of the chunk; for messages to people.
  std::vector<uint32_t> Missing(uint64_t chunk, uint64_t round) const;

 private:
  struct Chunk {
    uint64_t rounds = 0;  // 1 + the round that is gathered; 0: none
    std::vector<bool> have;
    std::vector<double> counts;
    std::vector<MemberValueRef> values;
    uint32_t missing = 0;
    bool made = false;
    v1::ChunkHeader header;  // of the push
  };
  // The chunk's state for the round; null where the round is past.
  Chunk* Open(uint64_t chunk, uint64_t round);
  std::optional<HostSum> Note(uint64_t index, Chunk* chunk, uint32_t contributor, double count, MemberValueRef value);

  std::shared_ptr<const Layout> layout_;  // null between generations
  uint64_t generation_ = 0;               // that began last
  ContributorSpan span_;
  std::vector<std::unique_ptr<Chunk>> chunks_;                                           // null: not summed here
  std::map<uint32_t, std::vector<std::pair<v1::ChunkHeader, MemberValueRef>>> waiting_;  // by contributor
};

}  // namespace sluice

#endif  // SLUICE_WORKER_HOST_SUM_CORE_H_
