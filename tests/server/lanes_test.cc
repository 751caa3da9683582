#include "server/lanes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"

namespace sluice {
namespace {

TEST(Lanes, OneLanesWorkRunsInOrderOnOneThread) {
  for (const int count : {1, 2, 5}) {
    Lanes lanes(count);
    ASSERT_EQ(lanes.count(), count);
    constexpr uint64_t kKeys = 13;
    std::vector<std::vector<int>> seen(kKeys);  // of one lane each: no lock
    std::vector<std::thread::id> threads(kKeys);
    for (int i = 0; i < 1000; ++i) {
      for (uint64_t key = 0; key < kKeys; ++key) {
        lanes.Post(key, [&, key, i] {
          if (i == 0) threads[key] = std::this_thread::get_id();
          if (threads[key] == std::this_thread::get_id()) seen[key].push_back(i);
        });
      }
    }
    lanes.Drain();
    for (uint64_t key = 0; key < kKeys; ++key) {
      ASSERT_EQ(seen[key].size(), 1000u);
      for (int i = 0; i < 1000; ++i) EXPECT_EQ(seen[key][static_cast<size_t>(i)], i);
      EXPECT_EQ(threads[key], threads[key % static_cast<uint64_t>(count)]);
    }
  }
}

TEST(Lanes, LanesRunBesideEachOther) {
  Lanes lanes(3);
  auto* barrier = new absl::Barrier(3);  // passed only by three at once
  absl::BlockingCounter done(3);
  for (uint64_t lane = 0; lane < 3; ++lane) {
    lanes.Post(lane, [&] {
      if (barrier->Block()) delete barrier;
      done.DecrementCount();
    });
  }
  done.Wait();
}

TEST(Lanes, WorkMayPostMoreAndTheDestructorRunsAllOfIt) {
  std::atomic<int> ran = 0;
  {
    Lanes lanes(2);
    for (uint64_t lane = 0; lane < 2; ++lane) {
      lanes.Post(lane, [&, lane] {
        ++ran;
        lanes.Post(lane, [&, lane] {
          ++ran;
          lanes.Post(lane, [&] { ++ran; });
        });
      });
    }
  }
  EXPECT_EQ(ran, 6);
}

TEST(Lanes, WorkIsLetGoBeforeTheNextRuns) {
  Lanes lanes(1);
  auto held = std::make_shared<int>(7);
  std::weak_ptr<int> weak = held;
  bool gone = false;
  lanes.Post(0, [held = std::move(held)] {});
  lanes.Post(0, [&] { gone = weak.expired(); });
  lanes.Drain();
  EXPECT_TRUE(gone);
}

TEST(Lanes, ManyPosters) {
  Lanes lanes(2);
  std::vector<std::thread> posters;
  std::vector<uint64_t> sums(4);  // by key
  for (int p = 0; p < 4; ++p) {
    posters.emplace_back([&] {
      for (uint64_t i = 0; i < 4000; ++i) lanes.Post(i % 4, [&sums, i] { sums[i % 4] += i; });
    });
  }
  for (std::thread& t : posters) t.join();
  lanes.Drain();
  EXPECT_EQ(sums[0] + sums[1] + sums[2] + sums[3], 4u * (4000u * 3999u / 2));
}

TEST(LanesTest, WithoutThreadsWorkRunsInDrain) {
  std::vector<int> order;
  {
    Lanes lanes(0);
    lanes.Post(7, [&] {
      order.push_back(1);
      lanes.Post(0, [&] { order.push_back(3); });
    });
    lanes.Post(3, [&] { order.push_back(2); });
    EXPECT_TRUE(order.empty());
    lanes.Drain();
    EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
    lanes.Post(0, [&] { order.push_back(4); });
  }
  EXPECT_EQ(order.back(), 4);
}

}  // namespace
}  // namespace sluice
