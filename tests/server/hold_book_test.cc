// HoldBook: what is held and declined, and, for every order of sending that a seed draws, that all chunks become
// complete within the budget.
#include "server/hold_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <tuple>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Ask = HoldBook::Ask;

class HoldBookTest : public ::testing::Test {
 protected:
  // Contributions of 10 bytes; a sum has 10 too. Stream 100 + contributor.
  bool Take(uint64_t chunk, uint32_t contributor, uint32_t contributors, uint64_t bytes = 10, bool empty = false) {
    asks_.clear();
    return book_.Take({chunk, contributor, contributors, 1, empty, empty ? 0 : bytes, 10, 100 + contributor}, &asks_);
  }

  const std::shared_ptr<HoldBudget> budget_ = std::make_shared<HoldBudget>(20);
  HoldBook book_{budget_, ProtocolRules()};
  std::vector<Ask> asks_;
};

TEST_F(HoldBookTest, AnOnlyContributionIsNeverHeld) {
  for (uint64_t chunk = 0; chunk < 9; ++chunk) EXPECT_TRUE(Take(chunk, 0, 1));
  EXPECT_EQ(book_.bytes(), 0u);
}

TEST_F(HoldBookTest, ThePairsSecondIsTakenAndMakesRoom) {
  EXPECT_TRUE(Take(1, 0, 2));
  EXPECT_TRUE(Take(2, 0, 2));
  EXPECT_EQ(budget_->used(), 20);
  EXPECT_FALSE(Take(3, 0, 2));
  EXPECT_FALSE(Take(3, 1, 2));
  EXPECT_FALSE(Take(3, 1, 2)) << "a second copy";
  EXPECT_EQ(book_.declined(), 2u);
  EXPECT_THAT(asks_, IsEmpty());
  EXPECT_TRUE(Take(2, 1, 2));
  EXPECT_THAT(asks_, ElementsAre(Ask{100, 3})) << "the first that was declined";
  EXPECT_EQ(budget_->used(), 20) << "its room is kept";
  EXPECT_FALSE(Take(4, 0, 2));
  EXPECT_TRUE(Take(3, 0, 2));
  EXPECT_THAT(asks_, ElementsAre(Ask{101, 3})) << "it completes a pair now";
  EXPECT_TRUE(Take(3, 1, 2));
  EXPECT_THAT(asks_, ElementsAre(Ask{100, 4}));
  EXPECT_TRUE(Take(4, 0, 2));
  EXPECT_TRUE(Take(4, 1, 2));
  EXPECT_TRUE(Take(1, 1, 2));
  EXPECT_EQ(budget_->used(), 0);
  EXPECT_EQ(book_.declined(), 0u);
  EXPECT_EQ(book_.declines(), 3u);
}

TEST_F(HoldBookTest, EmptyOnesAndSharedMemoryTakeNoRoom) {
  EXPECT_TRUE(Take(1, 0, 2, 20));
  EXPECT_TRUE(Take(2, 0, 2, 10, /*empty=*/true));
  EXPECT_TRUE(Take(3, 0, 2, 0));
  EXPECT_TRUE(Take(2, 1, 2)) << "completes the chunk";
  EXPECT_TRUE(Take(3, 1, 2));
  EXPECT_EQ(budget_->used(), 20);
}

TEST_F(HoldBookTest, WhatIsLargerThanTheBudgetIsHeldAlone) {
  EXPECT_TRUE(Take(1, 0, 2, 50));
  EXPECT_FALSE(Take(2, 0, 2, 50));
  EXPECT_TRUE(Take(1, 1, 2, 50));
  EXPECT_THAT(asks_, ElementsAre(Ask{100, 2}));
  EXPECT_FALSE(Take(3, 0, 2, 50)) << "chunk 2 was asked for, and is on the way";
}

// The third waits for the sum of the first two.
TEST_F(HoldBookTest, OfThreeTheThirdCannotKeepTheOthersOutForEver) {
  EXPECT_TRUE(Take(1, 2, 3));
  EXPECT_TRUE(Take(2, 2, 3));
  EXPECT_FALSE(Take(2, 0, 3));
  EXPECT_TRUE(Take(1, 0, 3)) << "the oldest chunk";
  EXPECT_EQ(budget_->used(), 30);
  EXPECT_TRUE(Take(1, 1, 3));
  EXPECT_THAT(asks_, ElementsAre(Ask{100, 2})) << "the oldest chunk now";
  EXPECT_TRUE(Take(2, 0, 3));
  EXPECT_TRUE(Take(2, 1, 3));
  EXPECT_EQ(budget_->used(), 0);
}

TEST_F(HoldBookTest, AStreamThatClosesGivesItsRoomBack) {
  EXPECT_TRUE(Take(1, 0, 2));
  EXPECT_TRUE(Take(2, 0, 2));
  EXPECT_FALSE(Take(3, 0, 2));
  EXPECT_FALSE(Take(4, 1, 2));
  EXPECT_TRUE(Take(1, 1, 2));
  EXPECT_THAT(asks_, ElementsAre(Ask{100, 3}));
  asks_.clear();
  book_.OnStreamClosed(100, &asks_);
  EXPECT_THAT(asks_, ElementsAre(Ask{101, 4}));
  EXPECT_TRUE(Take(4, 1, 2));
  book_.Clear();
  EXPECT_EQ(budget_->used(), 0);
}

TEST_F(HoldBookTest, TheBudgetIsSharedByJobs) {
  HoldBook other(budget_, ProtocolRules());
  EXPECT_TRUE(Take(1, 0, 2, 20));
  std::vector<Ask> asks;
  EXPECT_TRUE(other.Take({1, 0, 2, 1, false, 10, 10, 7}, &asks)) << "the first of a job always";
  EXPECT_FALSE(other.Take({2, 0, 2, 1, false, 10, 10, 7}, &asks));
  other.Clear();
  EXPECT_EQ(budget_->used(), 20);
}

// What a broken stream still held may be handled after its successor's first messages.
TEST_F(HoldBookTest, ADeclineOutlivesABrokenStreamOfTheSameContributor) {
  EXPECT_TRUE(Take(1, 0, 2, 20));
  std::vector<Ask> asks;
  EXPECT_FALSE(book_.Take({2, 0, 2, 1, false, 10, 10, 8}, &asks)) << "the new stream's copy";
  EXPECT_FALSE(book_.Take({2, 0, 2, 1, false, 10, 10, 7}, &asks)) << "the old stream's";
  book_.OnStreamClosed(7, &asks);
  EXPECT_THAT(asks, IsEmpty());
  EXPECT_EQ(book_.declined(), 1u);
  EXPECT_TRUE(Take(1, 1, 2, 20));
  EXPECT_THAT(asks_, ElementsAre(Ask{8, 2}));
}

// A host's sum stands for a subtree.
TEST_F(HoldBookTest, ASumOfSeveralContributorsIsOneNode) {
  std::vector<Ask> asks;
  const auto take = [&](uint64_t chunk, uint32_t first, uint32_t span) {
    asks.clear();
    HoldBook::Item item{.chunk = chunk, .contributor = first, .contributors = 5, .span = span};
    item.bytes = item.sum_bytes = 20;
    item.stream = 100 + first;
    return book_.Take(item, &asks);
  };
  EXPECT_TRUE(take(1, 0, 4));
  EXPECT_EQ(budget_->used(), 20);
  EXPECT_FALSE(take(2, 0, 4));
  EXPECT_FALSE(take(2, 0, 4)) << "said again";
  book_.OnStreamClosed(100, &asks);
  EXPECT_FALSE(take(2, 0, 4)) << "on the next stream";
  EXPECT_TRUE(take(1, 4, 1)) << "completes the chunk";
  EXPECT_THAT(asks, ElementsAre(Ask{100, 2}));
  EXPECT_TRUE(take(2, 0, 4));
  EXPECT_TRUE(take(2, 4, 1));
  EXPECT_EQ(budget_->used(), 0);
  EXPECT_EQ(book_.declined(), 0u);
}

// One round of several workers. Each sends its chunks in an order of its own and whatever it is asked for behind the
// rest; streams break at any moment, and then everything is sent again on a new one, while what the old one still held
// arrives some time, and then its end.
struct Round {
  Round(uint64_t seed, const ProtocolRules& rules, uint32_t contributors)
      : rng(seed),
        contributors(contributors),
        chunks(Draw(1, 12)),
        limit(Draw(0, 5) * Draw(1, 12)),
        sum_bytes(Draw(1, 12)) {
    budget = std::make_shared<HoldBudget>(limit);
    book = std::make_unique<HoldBook>(budget, rules);
    small = Draw(0, 2) == 0;  // contributions in fewer bytes than their sum has
    for (uint32_t c = 0; c < contributors; ++c) {
      for (uint64_t i = 0; i < chunks; ++i) {
        if (Draw(0, 6) == 0) empty.insert({c, i});
      }
    }
    unsent.resize(contributors);
    for (uint32_t c = 0; c < contributors; ++c) SendAll(c);
  }
  uint64_t Draw(uint64_t low, uint64_t high) { return std::uniform_int_distribution<uint64_t>(low, high)(rng); }
  uint64_t StreamOf(uint32_t contributor) const { return contributor + 1000 * life[contributor]; }

  void SendAll(uint32_t c) {
    unsent[c].clear();
    for (uint64_t i = 0; i < chunks; ++i) {
      if (!taken.contains({c, i})) unsent[c].push_back(i);
    }
    std::shuffle(unsent[c].begin(), unsent[c].end(), rng);
  }
  void Heed(const std::vector<Ask>& asks) {
    for (const Ask& ask : asks) {
      const uint32_t c = ask.stream % 1000;
      if (ask.stream != StreamOf(c)) continue;  // lost with the stream
      unsent[c].push_back(ask.chunk);
    }
  }

  void Arrive(uint64_t stream, uint64_t chunk) {
    const uint32_t c = stream % 1000;
    if (taken.contains({c, chunk})) return;  // what the core drops
    const bool none = empty.contains({c, chunk});
    const uint64_t bytes = none ? 0 : small ? Draw(0, sum_bytes) : sum_bytes + Draw(0, 3);
    std::vector<Ask> asks;
    if (book->Take({chunk, c, contributors, 1, none, bytes, sum_bytes, stream}, &asks)) {
      taken.insert({c, chunk});
    } else {
      ++declines;
    }
    Heed(asks);
  }

  // Empty: every chunk became complete.
  std::string Run() {
    for (int step = 0; step < 100000; ++step) {
      if (!old.empty() &&
          (Draw(0, 3) == 0 || std::all_of(unsent.begin(), unsent.end(), [](auto& t) { return t.empty(); }))) {
        const size_t at = Draw(0, old.size() - 1);
        if (old[at].rest.empty()) {
          std::vector<Ask> asks;
          book->OnStreamClosed(old[at].stream, &asks);
          old.erase(old.begin() + static_cast<std::ptrdiff_t>(at));
          Heed(asks);
        } else {
          const uint64_t chunk = old[at].rest.front();
          old[at].rest.pop_front();
          Arrive(old[at].stream, chunk);
        }
        continue;
      }
      std::vector<uint32_t> ready;
      for (uint32_t c = 0; c < contributors; ++c) {
        if (!unsent[c].empty()) ready.push_back(c);
      }
      if (breaks > 0 && Draw(0, 9) == 0) {
        --breaks;
        const uint32_t c = static_cast<uint32_t>(Draw(0, contributors - 1));
        const size_t left = Draw(0, unsent[c].size());
        old.push_back({StreamOf(c), {unsent[c].begin(), unsent[c].begin() + static_cast<std::ptrdiff_t>(left)}});
        ++life[c];
        SendAll(c);
        continue;
      }
      if (ready.empty()) break;
      const uint32_t c = ready[Draw(0, ready.size() - 1)];
      const uint64_t chunk = unsent[c].front();
      unsent[c].erase(unsent[c].begin());
      Arrive(StreamOf(c), chunk);
      // The oldest chunk may hold all of its contributions beyond the limit.
      if (!small && budget->used() > static_cast<int64_t>(limit + contributors * (sum_bytes + 3))) {
        return "holds " + std::to_string(budget->used()) + " of " + std::to_string(limit);
      }
      if (budget->used() < 0) return "gives back more than it took";
    }
    if (taken.size() < contributors * chunks) return "waits for ever";
    return budget->used() == 0 && book->declined() == 0 ? "" : "something is left";
  }

  std::mt19937_64 rng;
  const uint32_t contributors;
  const uint64_t chunks, limit, sum_bytes;
  std::shared_ptr<HoldBudget> budget;
  std::unique_ptr<HoldBook> book;
  bool small = false;
  int breaks = static_cast<int>(Draw(0, 3)), declines = 0;
  std::set<std::pair<uint32_t, uint64_t>> empty, taken;
  std::vector<std::vector<uint64_t>> unsent;
  struct Old {
    uint64_t stream;
    std::deque<uint64_t> rest;
  };
  std::vector<Old> old;
  std::vector<uint64_t> life = std::vector<uint64_t>(16);
};

TEST(HoldBookRandom, NoOrderOfSendingDeadlocks) {
  int declines = 0;
  for (uint64_t i = 0; i < 6000; ++i) {
    const uint64_t seed = i < 4000 ? i : std::random_device{}();
    Round round(seed, ProtocolRules(), static_cast<uint32_t>(1 + seed % 9));
    ASSERT_EQ(round.Run(), "") << "seed " << seed;
    declines += round.declines > 0;
  }
  EXPECT_GT(declines, 2000);
}

int Deadlocks(const ProtocolRules& rules, uint32_t contributors) {
  int failed = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) failed += Round(seed, rules, contributors).Run() == "waits for ever";
  return failed;
}

// What the rules are for.
TEST(HoldBookRandom, WithoutItsRulesItDeadlocks) {
  EXPECT_GT(Deadlocks({.take_pairs = false, .take_oldest = false}, 2), 100);
  EXPECT_GT(Deadlocks({.take_oldest = false}, 3), 50) << "pairs are not enough";
  EXPECT_EQ(Deadlocks({.take_pairs = false}, 5), 0) << "the oldest chunk's is enough, if slow";
}

}  // namespace
}  // namespace sluice
