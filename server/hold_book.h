// Which contributions a server holds while their neighbour in the sum tree (common/sum_tree.h) is not there yet, within
// --hold_memory. One that finds no room is *declined*: its payload is dropped, the worker keeps it (a gradient stays
// readable until its commit is seen) and is asked for it again when the server can take it. Nobody polls, nothing times
// out: a decline is on record here until it is asked for, its stream closes (on the next one the worker pushes
// everything again) or the generation ends.
//
// Always taken, whether there is room or not:
//   a) what need not wait: an empty contribution, one that lies in shared memory, a chunk's only one, and one whose
//      neighbour is there: the two become one buffer, no larger than what the neighbour held;
//   b) what belongs to the *oldest* chunk: of those that hold something, the one that began to first;
//   c) what was asked for: its room is kept free from then on.
//
// Why no order of sending deadlocks. Say some chunk of the open round is not complete, and let C be the oldest chunk;
// if there is none nothing is held, so that the next contribution to come is taken and makes its chunk the oldest one
// (and where all that is missing has been declined, the first of them is asked for). C stays the oldest until it is
// complete: what a chunk holds only moves up in its tree. Each contribution that C lacks either comes and is taken by
// (b), or was declined before C was the oldest: then it was asked for at the moment when C became it, and is taken by
// (c). Workers send whatever they have not sent and whatever they are asked for without waiting for anything else of
// the round. So C becomes complete, and so, one after the other, do all. Rule (a) alone is not enough: of three
// contributors the third waits for the sum of the first two. It may fill the budget, and then neither of these would
// ever be held.
//
// What is held may pass the limit by the oldest chunk's contributions and, where contributions come in fewer bytes than
// their sum has (encodings, shared memory), by the sums of pairs.
#ifndef SLUICE_SERVER_HOLD_BOOK_H_
#define SLUICE_SERVER_HOLD_BOOK_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "common/protocol_rules.h"

namespace sluice {

using StreamId = uint64_t;

// What all jobs of a server hold, in bytes. Thread-safe.
class HoldBudget {
 public:
  explicit HoldBudget(uint64_t limit = INT64_MAX) : limit_(static_cast<int64_t>(limit)) {}
  bool Fits(uint64_t more) const { return used_.load() + static_cast<int64_t>(more) <= limit_; }
  void Add(int64_t bytes) { used_ += bytes; }  // negative: given back
  int64_t used() const { return used_.load(); }
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  std::atomic<int64_t> used_{0};
};

// Of one job. Not thread-safe. Room that another job gives back is used at this job's next event; no progress depends
// on it.
class HoldBook {
 public:
  struct Item {
    uint64_t chunk = 0;
    uint32_t contributor = 0, contributors = 0;
    uint32_t span = 1;  // contributors from this one on whose sum it is: those of a whole subtree, all by this plan
    bool empty = false;
    uint64_t bytes = 0;      // of memory that it pins while it waits
    uint64_t sum_bytes = 0;  // of the buffer that a sum of two takes
    StreamId stream = 0;
  };
  struct Ask {
    StreamId stream;
    uint64_t chunk;
    bool operator==(const Ask&) const = default;
  };

  HoldBook(std::shared_ptr<HoldBudget> budget, const ProtocolRules& rules);
  ~HoldBook();
  HoldBook(const HoldBook&) = delete;
  HoldBook& operator=(const HoldBook&) = delete;

  // A contribution that was not taken yet. False: declined. Adds to `asks` whom to ask for what now.
  bool Take(const Item& item, std::vector<Ask>* asks);
  void OnStreamClosed(StreamId stream, std::vector<Ask>* asks);
  // The open round's contributions are dropped.
  void Clear();

  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }  // held, or kept free for what was asked for
  uint64_t declined() const { return queue_.size() + asked_; }      // and still missing
  uint64_t declines() const { return declines_; }                   // ever

 private:
  struct Node {
    enum State { kPending, kAbsent, kHeld } state = kPending;
    uint64_t bytes = 0;
  };
  struct Declined {
    // Whose copies were declined: more than one where what a broken stream still held is handled after its successor's
    // first messages.
    std::set<StreamId> streams;
    uint64_t bytes = 0;
    uint64_t order = 0;  // its place in queue_
    bool asked = false;  // `kept` bytes are counted for it
    uint64_t kept = 0;
  };
  struct Chunk {
    std::vector<Node> nodes;  // leaves, then the level above, ..., the root
    uint32_t contributors = 0, missing = 0;
    int held = 0;  // nodes that wait
    uint64_t sum_bytes = 0;
    uint64_t since = 0;  // its place in holding_, while held > 0
    std::map<uint32_t, Declined> declined;
    std::set<uint32_t> sums;  // first contributors of sums, whose others have been made absent
  };
  // What putting one contribution into the tree comes to.
  struct Placed {
    bool completes = false;  // a pair, or the tree
    int64_t bytes = 0;       // held more than before
    int held = 0;            // nodes more than before
  };

  static Placed Place(Chunk* chunk, const Item& item, bool keep);
  Chunk& Open(const Item& item);
  bool Completes(Chunk* chunk, uint32_t contributor) const;
  bool Oldest(uint64_t chunk) const;
  void Count(int64_t bytes);
  void Decline(Chunk* chunk, const Item& item);
  void Forget(Chunk* chunk, std::map<uint32_t, Declined>::iterator declined);
  void AskFor(uint64_t index, Declined* declined, uint64_t kept, std::vector<Ask>* asks);
  void AskOf(uint64_t index, Chunk* chunk, std::vector<Ask>* asks);
  void AskWhereThereIsRoom(std::vector<Ask>* asks);

  const std::shared_ptr<HoldBudget> budget_;
  const bool take_pairs_, take_oldest_;
  std::map<uint64_t, Chunk> chunks_;                         // that some contributions have come for, and not all
  std::map<uint64_t, uint64_t> holding_;                     // by age: chunks that hold something
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> queue_;  // by age: (chunk, contributor) declined and not asked for
  uint64_t next_ = 1;
  uint64_t asked_ = 0;
  uint64_t declines_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_HOLD_BOOK_H_
