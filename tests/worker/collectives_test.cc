#include "worker/parallel/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/mesh.h"
#include "tests/worker/mailroom.h"

namespace sluice {
namespace {

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

// Parts of whole rows, in one step and around the ring, some of them empty.
TEST(CollectivesRowsTest, RowsAreNotCut) {
  for (const uint32_t ranks : {1u, 2u, 3u, 5u}) {
    for (const size_t rows : {0, 1, 3, 7, 20}) {
      for (const size_t row : {1, 4, 9}) {
        const Arrays before = Random(ranks, rows * row, static_cast<uint32_t>(ranks + 10 * rows + 1000 * row));
        Arrays x = before;
        OnAll(&x, [&](Collectives& c, absl::Span<float> v) { return c.ReduceScatter(v, row); });
        const std::vector<double> sum = SumOf(before);
        for (uint32_t r = 0; r < ranks; ++r) {
          const Range part = PartOf(rows, ranks, r);
          for (size_t i = 0; i < rows * row; ++i) {
            if (i / row < part.begin || i / row >= part.end) {
              x[r][i] = -1;  // undefined
            } else {
              EXPECT_NEAR(x[r][i], sum[i], 1e-5) << ranks << " ranks, row " << i / row << " of " << rows;
            }
          }
        }
        OnAll(&x, [&](Collectives& c, absl::Span<float> v) { return c.AllGather(v, row); });
        for (uint32_t r = 0; r < ranks; ++r) {
          for (size_t i = 0; i < rows * row; ++i) EXPECT_NEAR(x[r][i], sum[i], 1e-5) << "rank " << r;
        }
      }
    }
  }
}

class CollectivesTest : public ::testing::TestWithParam<std::tuple<uint32_t, size_t>> {
 protected:
  const uint32_t ranks_ = std::get<0>(GetParam());
  const size_t floats_ = std::get<1>(GetParam());
  const Arrays before_ = Random(ranks_, floats_, static_cast<uint32_t>(ranks_ * 1000 + floats_));
};

INSTANTIATE_TEST_SUITE_P(RanksAndSizes, CollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5, 8), ::testing::Values(0, 1, 8, 21, 57, 400)),
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
      for (uint32_t i = 1; i <= 8; ++i) {
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
      for (int i = 0; i < 40; ++i) {
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
