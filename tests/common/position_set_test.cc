#include "common/position_set.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace sluice {
namespace {

TEST(PositionSetTest, RangesMergeWhereTheyTouch) {
  PositionSet set;
  set.Add({10, 20});
  set.Add({30, 40});
  set.Add({20, 30});
  EXPECT_EQ(set.ranges(), (std::vector<Range>{{10, 40}}));
  set.Remove({15, 16});
  EXPECT_EQ(set.ranges(), (std::vector<Range>{{10, 15}, {16, 40}}));
  EXPECT_EQ(set.size(), 29u);
  EXPECT_EQ(set.FirstGap(0, 50), (Range{0, 10}));
  EXPECT_EQ(set.FirstGap(10, 50), (Range{15, 16}));
  EXPECT_EQ(set.FirstGap(16, 50), (Range{40, 50}));
  EXPECT_EQ(set.FirstGap(16, 40).size(), 0u);
  EXPECT_TRUE(set.Contains({5, 5}));
  EXPECT_FALSE(set.Overlaps({12, 12}));
}

// Against a set of single positions.
TEST(PositionSetTest, AgreesWithASetOfPositions) {
  std::mt19937 random(3);
  const auto draw = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  for (int run = 0; run < 200; ++run) {
    PositionSet set, other;
    std::set<uint64_t> plain, plain_other;
    for (int step = 0; step < 40; ++step) {
      const uint64_t begin = draw(60);
      const Range range{begin, begin + draw(8)};
      const bool add = draw(3) > 0, first = draw(3) > 0;
      PositionSet& s = first ? set : other;
      std::set<uint64_t>& p = first ? plain : plain_other;
      add ? s.Add(range) : s.Remove(range);
      for (uint64_t i = range.begin; i < range.end; ++i) add ? (void)p.insert(i) : (void)p.erase(i);
      ASSERT_EQ(s.size(), p.size());
      const uint64_t at = draw(60);
      const Range asked{at, at + draw(6)};
      size_t inside = 0;
      for (uint64_t i = asked.begin; i < asked.end; ++i) inside += p.count(i);
      EXPECT_EQ(s.Contains(asked), inside == asked.size());
      EXPECT_EQ(s.Overlaps(asked), inside > 0);
      const Range gap = s.FirstGap(at, 80);
      uint64_t first_gap = at;
      while (first_gap < 80 && p.count(first_gap)) ++first_gap;
      EXPECT_EQ(gap.begin, first_gap);
      for (uint64_t i = gap.begin; i < gap.end; ++i) EXPECT_EQ(p.count(i), 0u);
      EXPECT_TRUE(gap.end == 80 || p.count(gap.end));
      for (const Range& r : s.ranges()) EXPECT_LT(r.begin, r.end);
    }
    const PositionSet both = set.Intersect(other);
    for (uint64_t i = 0; i < 80; ++i) EXPECT_EQ(both.Contains({i, i + 1}), plain.count(i) && plain_other.count(i)) << i;
  }
}

}  // namespace
}  // namespace sluice
