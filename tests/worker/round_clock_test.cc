#include "worker/round_clock.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

absl::Time At(int ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); }
int Ms(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

// Pushed all the time until 100, taken at 110, the first commit of version 1 at 130.
class RoundClockTest : public ::testing::Test {
 protected:
  RoundClockTest() {
    clock_.Restart(At(0));
    clock_.Arrived(0, At(5));
    clock_.Pushed();
    clock_.Taken(At(90));
    clock_.Pushed();
    clock_.Computed();
  }
  RoundClock clock_;
};

TEST_F(RoundClockTest, AWaitIsSplitWhereTheServersHadAllAndWhereTheFirstCommitCame) {
  clock_.Taken(At(110));
  clock_.Taken(At(115));  // said again: it was then already
  clock_.Arrived(1, At(130));
  clock_.Arrived(1, At(140));
  clock_.Waited(At(100), At(150), 1, true);
  clock_.Waited(At(160), At(175), 1, true);
  const RoundClock::Times times = clock_.Computed();
  EXPECT_EQ(Ms(times.wait), 65);
  EXPECT_EQ(Ms(times.answer), 20);
  EXPECT_EQ(Ms(times.wait_in_work), 65);
  EXPECT_EQ(Ms(clock_.Computed().wait), 0) << "each round its own";
}

TEST_F(RoundClockTest, WhatIsComputedMeanwhileIsNoWait) {
  clock_.Taken(At(110));
  clock_.Waited(At(105), At(120), 1, false);
  clock_.Arrived(1, At(130));
  clock_.Waited(At(125), At(140), 1, true);
  const RoundClock::Times times = clock_.Computed();
  EXPECT_EQ(Ms(times.wait), 30);
  EXPECT_EQ(Ms(times.answer), 10 + 5);
  EXPECT_EQ(Ms(times.wait_in_work), 15);
}

TEST_F(RoundClockTest, PushesOnTheWayAreNoWaitForAnAnswer) {
  clock_.Arrived(1, At(120));  // streamed: a chunk that was pushed early
  clock_.Waited(At(100), At(125), 1, true);
  clock_.Taken(At(126));
  clock_.Waited(At(130), At(140), 1, true);
  const RoundClock::Times times = clock_.Computed();
  EXPECT_EQ(Ms(times.wait), 35);
  EXPECT_EQ(Ms(times.answer), 0);
}

TEST_F(RoundClockTest, AGenerationBeginsAnew) {
  clock_.Waited(At(100), At(125), 1, true);
  clock_.Restart(At(200));
  clock_.Waited(At(150), At(230), 1, false);
  clock_.Arrived(0, At(240));  // versions may fall
  clock_.Waited(At(235), At(250), 0, false);
  const RoundClock::Times times = clock_.Computed();
  EXPECT_EQ(Ms(times.wait), 30 + 15);
  EXPECT_EQ(Ms(times.wait_in_work), 0);
}

}  // namespace
}  // namespace sluice
