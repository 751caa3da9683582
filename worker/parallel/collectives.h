// Collective operations of a group of ranks over messages between them. docs/collectives.md has steps and bytes.
//
// Every rank of the group calls the same operations in the same order with the same sizes. Results are the same bits on
// every rank and in every run: each element is added up once, in an order that follows from its index and the group's
// size alone, and what one rank has added the others copy.
//
// Small arrays go directly from everybody to everybody: one step. Large ones go around a ring in pieces, each handed on
// as soon as it is there: 2 (n-1) steps, 2 (n-1)/n of the bytes a rank (Patarasuk and Yuan 2009, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations").
#ifndef SLUICE_WORKER_PARALLEL_COLLECTIVES_H_
#define SLUICE_WORKER_PARALLEL_COLLECTIVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace sluice {

// A group's messages as one of its ranks sees them. Messages from one rank to another arrive in order.
class PeerGroup {
 public:
  virtual ~PeerGroup() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  // May wait for room on the way, which must be enough for one message between any two ranks whatever the others do.
  // `values` may be changed when it returns.
  virtual absl::Status Send(uint32_t to, absl::Span<const float> values) = 0;
  // Blocks until the next message of `from` is there; it must be as long as `values`. An error ends the operation,
  // which returns it: CANCELLED (a new generation, the rank has died), DEADLINE_EXCEEDED names the rank that is
  // missing.
  virtual absl::Status Receive(uint32_t from, absl::Span<float> values) = 0;
};

// Floats up to which arrays go directly. The same on all ranks; it decides bits.
inline constexpr size_t kDirectFloats = 8192;
// Floats of a piece on the ring.
inline constexpr size_t kRingPiece = 65536;

// Of one rank, one thread. Any error leaves arrays undefined and the group unusable: ranks may be at different steps.
class Collectives {
 public:
  // `group` outlives this.
  explicit Collectives(PeerGroup* group, size_t direct = kDirectFloats, size_t piece = kRingPiece)
      : group_(group), direct_(direct), piece_(piece) {}

  // x = the sum of all ranks' x.
  absl::Status AllReduce(absl::Span<float> x);
  // Parts of x are whole rows of `row` floats, which divides its size: part r is the rows PartOf(x.size() / row, n, r).
  //
  // Part r of x becomes the sum of all ranks' part r, on rank r. Other parts: undefined.
  absl::Status ReduceScatter(absl::Span<float> x, size_t row = 1);
  // Each rank r has part r of x; afterwards each has all parts.
  absl::Status AllGather(absl::Span<float> x, size_t row = 1);
  // x = rank root's x.
  absl::Status Broadcast(uint32_t root, absl::Span<float> x);
  // Returns when every rank has called it.
  absl::Status Barrier();

 private:
  bool Direct(size_t floats) const { return floats <= direct_; }
  absl::Span<float> Part(absl::Span<float> x, size_t row, uint32_t part) const;
  // Sends one array to a rank and takes another from a rank, piece by piece in turns: so no more than a piece of it
  // waits anywhere, and a ring of ranks that all do this never stands still. What has come is added to `in`, or
  // replaces it.
  absl::Status Exchange(uint32_t to, absl::Span<const float> out, uint32_t from, absl::Span<float> in, bool add);
  // x = the sum, in the order of ranks, of x and what the others send.
  absl::Status SumOfAll(absl::Span<float> x);
  absl::Status RingReduce(absl::Span<float> x, size_t row);
  absl::Status RingGather(absl::Span<float> x, size_t row);

  PeerGroup* const group_;
  const size_t direct_, piece_;
  std::vector<float> scratch_, sum_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PARALLEL_COLLECTIVES_H_
