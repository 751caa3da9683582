#include "server/round_times.h"

#include <gtest/gtest.h>

#include <limits>

namespace sluice {
namespace {

absl::Time At(int ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); }

v1::RoundReport Report(double compute, double wait, double answer) {
  v1::RoundReport report;
  report.set_compute_seconds(compute);
  report.set_wait_seconds(wait);
  report.set_answer_seconds(answer);
  return report;
}

void Expect(const v1::RankTime& time, uint32_t contributor, float compute, float exposed, float others, float verdict) {
  EXPECT_EQ(time.contributor(), contributor);
  EXPECT_FLOAT_EQ(time.compute(), compute);
  EXPECT_FLOAT_EQ(time.exposed(), exposed);
  EXPECT_FLOAT_EQ(time.others(), others);
  EXPECT_FLOAT_EQ(time.verdict(), verdict);
}

TEST(RoundTimes, AWaitIsForTheSlowestFirstThenForTheVerdict) {
  RoundTimes times;
  times.Reported(3, 0, At(100));
  times.Reported(3, 0, At(900));  // said again after a reconnect
  times.Reported(3, 1, At(130));
  v1::RoundRecord before;
  times.Fill(3, {{0, Report(.5, .01, .01)}, {1, Report(.6, 0, 0)}}, true, &before);
  Expect(before.times(0), 0, .5f, 0, 0, .01f);  // nothing is known of round 2

  v1::RoundRecord record;
  times.Fill(4, {{0, Report(.5, .05, .04)}, {1, Report(.6, .02, .015)}}, true, &record);
  ASSERT_EQ(record.times_size(), 2);
  Expect(record.times(0), 0, .5f, .01f, .03f, .01f);
  Expect(record.times(1), 1, .6f, .005f, 0, .015f);
}

TEST(RoundTimes, NoMoreIsSharedOutThanWasWaited) {
  RoundTimes times;
  times.Reported(3, 0, At(100));
  times.Reported(3, 1, At(500));
  v1::RoundRecord record;
  times.Fill(4, {{0, Report(.5, .2, .19)}, {1, Report(.6, .02, .05)}}, true, &record);
  Expect(record.times(0), 0, .5f, 0, .2f, 0);
  Expect(record.times(1), 1, .6f, 0, 0, .02f);
}

TEST(RoundTimes, WithoutAVerdictTheRestIsCommunication) {
  RoundTimes times;
  times.Reported(0, 0, At(100));
  times.Reported(0, 1, At(110));
  v1::RoundRecord record;
  times.Fill(1, {{0, Report(.5, .05, .04)}}, false, &record);
  Expect(record.times(0), 0, .5f, .04f, .01f, 0);
}

TEST(RoundTimes, AGenerationKnowsNothingOfTheOneBefore) {
  RoundTimes times;
  times.Reported(0, 0, At(100));
  times.Reported(0, 1, At(110));
  times.Clear();
  v1::RoundRecord record;
  times.Fill(1, {{0, Report(.5, .05, 0)}}, true, &record);
  Expect(record.times(0), 0, .5f, .05f, 0, 0);
}

TEST(RoundTimes, WhatNoClockCanSayIsNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  RoundTimes times;
  v1::RoundRecord record;
  times.Fill(0, {{0, Report(nan, -1, nan)}, {1, Report(-2, std::numeric_limits<double>::infinity(), 5)}}, true,
             &record);
  Expect(record.times(0), 0, 0, 0, 0, 0);
  Expect(record.times(1), 1, 0, 0, 0, 0);
}

}  // namespace
}  // namespace sluice
