// A set of positions of a job's data order as disjoint ranges: which samples a chunk's value has seen (async), and what
// the lease book has given out.
#ifndef SLUICE_COMMON_POSITION_SET_H_
#define SLUICE_COMMON_POSITION_SET_H_

#include <cstdint>
#include <map>
#include <vector>

#include "common/layout.h"

namespace sluice {

// Not thread-safe. Ranges are kept disjoint and merged where they touch. Each call costs O(log ranges) plus what it
// merges or takes out.
class PositionSet {
 public:
  PositionSet() = default;
  explicit PositionSet(Range range) { Add(range); }

  // What is in it already stays in it.
  void Add(Range range);
  void Remove(Range range);
  // Of an empty range: true, false.
  bool Contains(Range range) const;
  bool Overlaps(Range range) const;
  // The first range that is not in the set, from `from` on, cut at `end`; empty where all of [from, end) is in it.
  Range FirstGap(uint64_t from, uint64_t end) const;

  uint64_t size() const { return size_; }  // positions
  bool empty() const { return size_ == 0; }
  std::vector<Range> ranges() const;  // ascending
  PositionSet Intersect(const PositionSet& other) const;
  bool operator==(const PositionSet&) const = default;

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end
  uint64_t size_ = 0;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_POSITION_SET_H_
