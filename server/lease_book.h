// The verdict holder's book of an async job: which positions are consumed, leased or free, who evaluates what, and what
// the leases of a round came to. docs/protocol.md, section Async, has its rules. Pure: no threads, clock or I/O.
//
//   request (with the report of the lease before) -> positions or a slice of an evaluation, or nothing yet: then the
//   answer comes when there is something. A new generation returns what was leased; consumed positions stay consumed.
//
// The same cells are leased whatever happens: the parts of a round (layout.h, ReplicaSlots), cut where a checkpoint's
// chunks disagree. So a cell has been applied to a chunk whole or not at all.
#ifndef SLUICE_SERVER_LEASE_BOOK_H_
#define SLUICE_SERVER_LEASE_BOOK_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/layout.h"
#include "common/position_set.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

// What a chunk holds when a timeline begins: by `cuts` (the checkpoint's, by chunk, where it has any), else all
// positions before plan.start.
v1::ChunkCut CutOf(const Layout& layout, const std::vector<v1::ChunkCut>& cuts, uint64_t chunk);
PositionSet AppliedOf(const v1::ChunkCut& cut);

// Not thread-safe.
class LeaseBook {
 public:
  // A timeline begins: consumed is what every chunk has applied.
  LeaseBook(std::shared_ptr<const Layout> layout, const std::vector<v1::ChunkCut>& cuts);
  // The next generation of the timeline: nobody has asked yet, leases and slices that are not done are free again.
  void NewGeneration(std::shared_ptr<const Layout> layout);

  // `stream` is where the answer goes, or a later one that asked; they grow. The same request again: the same answer.
  // An error: the request breaks the protocol and changed nothing (INVALID_ARGUMENT, OUT_OF_RANGE,
  // FAILED_PRECONDITION).
  absl::Status OnRequest(const v1::LeaseRequest& request, uint64_t stream);

  // What came out since the last call: answers, and records of rounds and evaluations that are complete (without the
  // fields that name job, generation, timeline and time).
  std::vector<std::pair<uint64_t, v1::Lease>> TakeAnswers() { return std::exchange(answers_, {}); }
  std::vector<v1::RoundRecord> TakeRecords() { return std::exchange(records_, {}); }

  const PositionSet& consumed() const { return consumed_; }
  uint64_t leased() const { return taken_.size() - consumed_.size(); }  // positions
  // "1200 of 4000 positions consumed, 32 leased to contributors 1, 2; 1 waits".
  std::string Describe() const;

 private:
  struct Asker {
    uint64_t number = 0, stream = 0;
    std::optional<v1::Lease> answer;
  };
  struct Evaluation {
    uint64_t version = 0;
    std::vector<bool> given;
    std::vector<std::optional<v1::RoundReport>> done;
  };
  struct Tally {
    double loss = 0, count = 0, correct = 0, staleness = 0, norm = 0;
    uint64_t leases = 0, staleness_count = 0, staleness_max = 0;
    std::set<uint32_t> nonfinite;
    std::map<uint32_t, v1::RankTime> times;  // by contributor
  };

  absl::Status Check(const v1::LeaseRequest& request, const Asker& asker) const;
  void Finish(uint32_t contributor, const v1::Lease& lease, const v1::RoundReport& report);
  void FinishEvaluation(const v1::Lease& lease, const v1::RoundReport& report);
  void Grant();
  bool GrantTo(Asker* asker);
  uint64_t EvaluationFrom(uint64_t version) const;  // the first version due from `version` on
  void RecordRound();
  void NoteEvaluations();  // those that are due

  std::shared_ptr<const Layout> layout_;
  std::set<uint64_t> borders_;    // where cells are cut beside the parts of rounds
  PositionSet consumed_, taken_;  // taken: consumed or leased
  std::map<uint32_t, Asker> askers_;
  std::deque<uint32_t> waiting_;
  std::deque<Evaluation> evaluations_;  // due and not complete
  uint64_t next_evaluation_ = 0;
  uint64_t recorded_ = 0;  // rounds below it have a record
  Tally tally_;            // since the last record
  std::vector<std::pair<uint64_t, v1::Lease>> answers_;
  std::vector<v1::RoundRecord> records_;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_LEASE_BOOK_H_
