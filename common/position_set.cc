#include "common/position_set.h"

#include <algorithm>
#include <iterator>

namespace sluice {

void PositionSet::Add(Range range) {
  if (range.begin >= range.end) return;
  auto at = ranges_.upper_bound(range.begin);
  if (at != ranges_.begin() && std::prev(at)->second >= range.begin) --at;
  while (at != ranges_.end() && at->first <= range.end) {
    range.begin = std::min(range.begin, at->first);
    range.end = std::max(range.end, at->second);
    size_ -= at->second - at->first;
    at = ranges_.erase(at);
  }
  ranges_[range.begin] = range.end;
  size_ += range.size();
}

void PositionSet::Remove(Range range) {
  if (range.begin >= range.end) return;
  auto at = ranges_.upper_bound(range.begin);
  if (at != ranges_.begin() && std::prev(at)->second > range.begin) --at;
  while (at != ranges_.end() && at->first < range.end) {
    const Range old{at->first, at->second};
    at = ranges_.erase(at);
    size_ -= old.size();
    for (const Range rest : {Range{old.begin, std::max(old.begin, range.begin)}, Range{range.end, old.end}}) {
      if (rest.begin >= rest.end) continue;
      ranges_[rest.begin] = rest.end;
      size_ += rest.size();
    }
  }
}

bool PositionSet::Contains(Range range) const {
  if (range.begin >= range.end) return true;
  auto at = ranges_.upper_bound(range.begin);
  return at != ranges_.begin() && std::prev(at)->second >= range.end;
}

bool PositionSet::Overlaps(Range range) const {
  if (range.begin >= range.end) return false;
  auto at = ranges_.lower_bound(range.end);
  return at != ranges_.begin() && std::prev(at)->second > range.begin;
}

Range PositionSet::FirstGap(uint64_t from, uint64_t end) const {
  auto at = ranges_.upper_bound(from);
  if (at != ranges_.begin() && std::prev(at)->second > from) from = std::prev(at)->second;
  if (from >= end) return {end, end};
  return {from, at == ranges_.end() ? end : std::min(end, at->first)};
}

std::vector<Range> PositionSet::ranges() const {
  std::vector<Range> out;
  for (const auto& [begin, end] : ranges_) out.push_back({begin, end});
  return out;
}

PositionSet PositionSet::Intersect(const PositionSet& other) const {
  PositionSet out;
  for (auto a = ranges_.begin(), b = other.ranges_.begin(); a != ranges_.end() && b != other.ranges_.end();) {
    out.Add({std::max(a->first, b->first), std::min(a->second, b->second)});
    ++(a->second < b->second ? a : b);
  }
  return out;
}

}  // namespace sluice
