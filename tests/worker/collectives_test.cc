#include "worker/parallel/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/mesh.h"

namespace sluice {
namespace {

// Messages of all ranks of a group in one process; from one rank to another no more than `room` wait.
class Mailroom {
 public:
  Mailroom(uint32_t ranks, size_t room) : ranks_(ranks), room_(room) {}

  class Rank : public PeerGroup {
   public:
    Rank(Mailroom* room, uint32_t rank) : room_(room), rank_(rank) {}
    uint32_t rank() const override { return rank_; }
    uint32_t size() const override { return room_->ranks_; }
    absl::Status Send(uint32_t to, absl::Span<const float> values) override {
      return room_->Put(rank_, to, {values.begin(), values.end()});
    }
    absl::Status Receive(uint32_t from, absl::Span<float> values) override { return room_->Take(from, rank_, values); }

   private:
    Mailroom* const room_;
    const uint32_t rank_;
  };

  // Every send and receive from now on fails, those that wait too.
  void Break() {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }
  size_t messages() const {
    absl::MutexLock lock(&mutex_);
    return messages_;
  }
  // Of the rank that sent the most.
  size_t most_floats() const {
    absl::MutexLock lock(&mutex_);
    size_t most = 0;
    for (const auto& [rank, floats] : floats_) most = std::max(most, floats);
    return most;
  }
  bool empty() const {
    absl::MutexLock lock(&mutex_);
    for (const auto& [link, waiting] : waiting_) {
      if (!waiting.empty()) return false;
    }
    return true;
  }

 private:
  using Link = std::pair<uint32_t, uint32_t>;

  absl::Status Put(uint32_t from, uint32_t to, std::vector<float> values) {
    EXPECT_NE(from, to);
    absl::MutexLock lock(&mutex_);
    std::deque<std::vector<float>>& waiting = waiting_[{from, to}];
    const auto ready = [&]() { return broken_ || waiting.size() < room_; };
    mutex_.Await(absl::Condition(&ready));
    if (broken_) return absl::CancelledError("broken");
    ++messages_;
    floats_[from] += values.size();
    waiting.push_back(std::move(values));
    return absl::OkStatus();
  }
  absl::Status Take(uint32_t from, uint32_t to, absl::Span<float> values) {
    absl::MutexLock lock(&mutex_);
    std::deque<std::vector<float>>& waiting = waiting_[{from, to}];
    const auto ready = [&]() { return broken_ || !waiting.empty(); };
    mutex_.Await(absl::Condition(&ready));
    if (broken_) return absl::CancelledError("broken");
    EXPECT_EQ(waiting.front().size(), values.size());
    if (waiting.front().size() == values.size()) {
      std::copy(waiting.front().begin(), waiting.front().end(), values.begin());
    }
    waiting.pop_front();
    return absl::OkStatus();
  }

  const uint32_t ranks_;
  const size_t room_;
  mutable absl::Mutex mutex_;
  bool broken_ = false;
  std::map<Link, std::deque<std::vector<float>>> waiting_;
  std::map<uint32_t, size_t> floats_;
  size_t messages_ = 0;
};

constexpr size_t kDirect = 20, kPiece = 7;  // small, so that all paths are short

using Arrays = std::vector<std::vector<float>>;  // by rank

struct Traffic {
  size_t messages = 0, most_floats = 0;
};

// Runs one operation on all ranks; `x` holds their arrays before and after.
Traffic OnAll(Arrays* x, const std::function<absl::Status(Collectives&, absl::Span<float>)>& operation,
              size_t room = 1) {
  const uint32_t n = static_cast<uint32_t>(x->size());
  Mailroom mailroom(n, room);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      Mailroom::Rank rank(&mailroom, r);
      Collectives collectives(&rank, kDirect, kPiece);
      const absl::Status status = operation(collectives, absl::MakeSpan((*x)[r]));
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(mailroom.empty()) << "messages that nobody received";
  return {mailroom.messages(), mailroom.most_floats()};
}

Arrays Random(uint32_t ranks, size_t floats, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Arrays x(ranks, std::vector<float>(floats));
  for (auto& array : x) {
    for (float& value : array) value = normal(random);
  }
  return x;
}

std::vector<double> SumOf(const Arrays& x) {
  std::vector<double> sum(x[0].size());
  for (const auto& array : x) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += array[i];
  }
  return sum;
}

bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class CollectivesTest : public ::testing::TestWithParam<std::tuple<uint32_t, size_t>> {
 protected:
  const uint32_t ranks_ = std::get<0>(GetParam());
  const size_t floats_ = std::get<1>(GetParam());
  const Arrays before_ = Random(ranks_, floats_, static_cast<uint32_t>(ranks_ * 1000 + floats_));
};

INSTANTIATE_TEST_SUITE_P(RanksAndSizes, CollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 6, 7, 8),
                                            ::testing::Values(0, 1, 7, 8, 20, 21, 57, 1001)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "ranks", std::get<1>(info.param), "floats");
                         });

TEST_P(CollectivesTest, AllReduceIsTheSumTheSameOnEveryRankAndInEveryRun) {
  Arrays x = before_, again = before_;
  const Traffic traffic = OnAll(&x, [](Collectives& c, absl::Span<float> v) { return c.AllReduce(v); });
  const std::vector<double> sum = SumOf(before_);
  for (size_t i = 0; i < floats_; ++i) EXPECT_NEAR(x[0][i], sum[i], 1e-5) << i;
  for (uint32_t r = 1; r < ranks_; ++r) EXPECT_TRUE(SameBits(x[r], x[0])) << "rank " << r;
  OnAll(
      &again, [](Collectives& c, absl::Span<float> v) { return c.AllReduce(v); }, /*room=*/100);
  EXPECT_TRUE(SameBits(again[0], x[0]));
  // docs/collectives.md.
  if (floats_ > kDirect) {
    EXPECT_LE(traffic.most_floats, 2 * (ranks_ - 1) * ((floats_ + ranks_ - 1) / ranks_));
  } else {
    EXPECT_EQ(traffic.messages, floats_ == 0 ? 0 : ranks_ * (ranks_ - 1));
  }
}

TEST_P(CollectivesTest, ReduceScatterAndAllGatherAreTheTwoHalves) {
  Arrays x = before_, all = before_;
  OnAll(&x, [](Collectives& c, absl::Span<float> v) { return c.ReduceScatter(v); });
  const std::vector<double> sum = SumOf(before_);
  for (uint32_t r = 0; r < ranks_; ++r) {
    const Range part = PartOf(floats_, ranks_, r);
    for (size_t i = part.begin; i < part.end; ++i) EXPECT_NEAR(x[r][i], sum[i], 1e-5) << "rank " << r << " " << i;
    // What others' parts hold is undefined.
    for (size_t i = 0; i < floats_; ++i) {
      if (i < part.begin || i >= part.end) x[r][i] = -1;
    }
  }
  OnAll(&x, [](Collectives& c, absl::Span<float> v) { return c.AllGather(v); });
  OnAll(&all, [](Collectives& c, absl::Span<float> v) { return c.AllReduce(v); });
  for (uint32_t r = 0; r < ranks_; ++r) EXPECT_TRUE(SameBits(x[r], all[0])) << "rank " << r;
}

TEST_P(CollectivesTest, BroadcastFromEveryRoot) {
  for (uint32_t root = 0; root < ranks_; ++root) {
    Arrays x = before_;
    OnAll(&x, [root](Collectives& c, absl::Span<float> v) { return c.Broadcast(root, v); });
    for (uint32_t r = 0; r < ranks_; ++r) EXPECT_TRUE(SameBits(x[r], before_[root])) << root << " to " << r;
  }
}

TEST(CollectivesBarrierTest, NobodyPassesBeforeTheLastHasCome) {
  for (uint32_t ranks = 1; ranks <= 8; ++ranks) {
    Arrays x(ranks);
    std::atomic<uint32_t> came = 0;
    OnAll(&x, [&](Collectives& c, absl::Span<float>) {
      for (uint32_t i = 1; i <= 20; ++i) {
        ++came;
        if (absl::Status status = c.Barrier(); !status.ok()) return status;
        EXPECT_GE(came, i * ranks);
      }
      return absl::OkStatus();
    });
  }
}

// Operations one after the other, of random kinds and sizes, with room for one message only: no order of them stands
// still or mixes up messages.
TEST(CollectivesSequenceTest, ManyInARow) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (uint32_t ranks = 2; ranks <= 8; ++ranks) {
    Arrays x = Random(ranks, 300, seed);
    OnAll(&x, [&](Collectives& c, absl::Span<float> v) {
      std::mt19937 random(seed);  // the same on every rank
      for (int i = 0; i < 100; ++i) {
        const absl::Span<float> some = v.first(random() % v.size());
        const uint32_t kind = random() % 5, root = random() % ranks;
        absl::Status status;
        if (kind == 0) status = c.AllReduce(some);
        if (kind == 1) status = c.ReduceScatter(some);
        if (kind == 1 && status.ok()) status = c.AllGather(some);
        if (kind == 2) status = c.AllGather(some);
        if (kind == 3) status = c.Broadcast(root, some);
        if (kind == 4) status = c.Barrier();
        if (!status.ok()) return status;
        for (float& value : v) value *= 0.25f;
      }
      return c.Broadcast(0, v);
    });
    for (uint32_t r = 1; r < ranks; ++r) EXPECT_TRUE(SameBits(x[r], x[0]));
  }
}

TEST(CollectivesFailureTest, AnErrorEndsTheOperationOnEveryRank) {
  Mailroom mailroom(3, 1);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 2; ++r) {  // the third never comes
    threads.emplace_back([&, r] {
      Mailroom::Rank rank(&mailroom, r);
      Collectives collectives(&rank, kDirect, kPiece);
      std::vector<float> x(1000);
      EXPECT_EQ(collectives.AllReduce(absl::MakeSpan(x)).code(), absl::StatusCode::kCancelled);
    });
  }
  mailroom.Break();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace sluice
