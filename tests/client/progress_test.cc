#include "client/progress.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

namespace sluice {
namespace {

v1::JobStatus Running(uint64_t done, uint64_t rounds = 2000) {
  v1::JobStatus status;
  status.set_job_id("kjv-1");
  status.set_state(v1::RUNNING);
  status.set_rounds_done(done);
  status.set_rounds(rounds);
  status.mutable_last_train()->set_loss(2.34567);
  return status;
}

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);

TEST(Progress, TextOfEverythingKnown) {
  v1::JobStatus status = Running(120);
  EXPECT_EQ(ProgressText(status), "round 120/2000  6%  loss 2.3457");
  status.mutable_last_evaluation()->set_loss(2.5);
  status.set_tokens_per_second(12345);
  status.set_eta_seconds(151);
  EXPECT_EQ(ProgressText(status), "round 120/2000  6%  loss 2.3457  validation loss 2.5000  12.3k tokens/s  ETA 2m31s");
  status.mutable_spec()->mutable_model()->mutable_mlp();
  status.mutable_last_evaluation()->set_accuracy(0.875);
  EXPECT_EQ(ProgressText(status),
            "round 120/2000  6%  loss 2.3457  validation loss 2.5000  accuracy 0.8750  12.3k samples/s  ETA 2m31s");
  status.mutable_last_train()->set_skipped(true);
  EXPECT_NE(ProgressText(status).find("round skipped"), std::string::npos);
}

TEST(Progress, RoundTimeInShares) {
  v1::JobStatus status = Running(120);
  EXPECT_EQ(RoundTimeText(status), "") << "no round has ended";
  v1::RoundTime* time = status.mutable_round_time();
  time->set_total(.041);
  time->set_compute(.0361);
  time->set_exposed(.0029);
  time->set_others(.0016);
  time->set_verdict(.0004);
  EXPECT_EQ(RoundTimeText(status), "41 ms: compute 88%, exposed communication 7%, waiting for others 4%, verdict 1%");
  time->set_total(.0041);
  EXPECT_EQ(RoundTimeText(status).substr(0, 6), "4.1 ms");
  time->set_total(41);
  EXPECT_EQ(RoundTimeText(status).substr(0, 6), "41.0 s");
  status.mutable_spec()->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  EXPECT_EQ(RoundTimeText(status).find("others"), std::string::npos) << "nobody waits for others";
}

TEST(Progress, PercentNeverRoundsUpToTheEnd) {
  EXPECT_NE(ProgressText(Running(1999)).find(" 99%"), std::string::npos);
  EXPECT_NE(ProgressText(Running(2000)).find(" 100%"), std::string::npos);
  EXPECT_EQ(ProgressText(Running(0, 0)).find('%'), std::string::npos);
}

TEST(Progress, Numbers) {
  EXPECT_EQ(ShortDuration(absl::Seconds(14.4)), "14s");
  EXPECT_EQ(ShortDuration(absl::Seconds(59.6)), "1m00s");
  EXPECT_EQ(ShortDuration(absl::Seconds(3720)), "1h02m");
  EXPECT_EQ(ShortDuration(absl::Hours(49)), "2d01h");
  EXPECT_EQ(ShortDuration(-absl::Seconds(5)), "0s");
  EXPECT_EQ(ShortNumber(950), "950");
  EXPECT_EQ(ShortNumber(12345), "12.3k");
  EXPECT_EQ(ShortNumber(4.5e6), "4.5M");
  EXPECT_EQ(ShortNumber(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(Progress, PlainLinesAtMostOneASecondAndTheLastAlways) {
  std::ostringstream out;
  ProgressPrinter printer(&out, false, 80);
  for (int i = 1; i <= 25; ++i) printer.Update(Running(i), kStart + absl::Milliseconds(100 * i));
  printer.Finish();
  EXPECT_EQ(out.str(),
            "running, at round 1\n"
            "round 1/2000  0%  loss 2.3457\n"
            "round 11/2000  0%  loss 2.3457\n"
            "round 21/2000  1%  loss 2.3457\n"
            "round 25/2000  1%  loss 2.3457\n");
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(Progress, NothingTwice) {
  std::ostringstream out;
  ProgressPrinter printer(&out, false, 80);
  for (int i = 0; i < 5; ++i) printer.Update(Running(3), kStart + absl::Seconds(2 * i));
  printer.Finish();
  printer.Finish();
  EXPECT_EQ(out.str(), "running, at round 3\nround 3/2000  0%  loss 2.3457\n");
}

TEST(Progress, TerminalRedrawsOneLineCutToItsWidth) {
  std::ostringstream out;
  ProgressPrinter printer(&out, true, 20);
  printer.Update(Running(100), kStart);
  printer.Update(Running(200), kStart);
  printer.Line("note");
  printer.Finish();
  EXPECT_EQ(out.str(),
            "running, at round 100\n"
            "\rround 100/2000  5% \x1b[K"
            "\rround 200/2000  10%\x1b[K"
            "\r\x1b[Knote\n"
            "\rround 200/2000  10%\x1b[K\n");
}

TEST(Progress, WhatAQueuedJobWaitsForOncePerReason) {
  std::ostringstream out;
  ProgressPrinter printer(&out, false, 80);
  v1::JobStatus status;
  status.set_state(v1::QUEUED);
  status.set_message("waits for 2 workers, 1 is free");
  printer.Update(status, kStart);
  printer.Update(status, kStart + absl::Seconds(5));
  status.set_message("waits for 2 workers, none is free");
  printer.Update(status, kStart + absl::Seconds(6));
  status.set_state(v1::STARTING);
  status.clear_message();
  printer.Update(status, kStart + absl::Seconds(7));
  printer.Finish();
  EXPECT_EQ(out.str(),
            "queued: waits for 2 workers, 1 is free\n"
            "queued: waits for 2 workers, none is free\n"
            "starting\n");
}

TEST(Progress, RecoveriesRewindsAndWarnings) {
  std::ostringstream out;
  ProgressPrinter printer(&out, false, 80);
  v1::JobStatus status = Running(50);
  status.add_warnings("copies: 1");
  printer.Update(status, kStart);
  status.set_state(v1::RECOVERING);
  status.set_message("worker-1 was lost");
  printer.Update(status, kStart);
  status.set_state(v1::RUNNING);
  status.clear_message();
  status.set_generation(2);
  status.set_recoveries(1);
  printer.Update(status, kStart);
  status.set_rewinds(1);
  status.set_recoveries(2);
  status.set_generation(3);
  status.set_rounds_done(40);
  status.set_exact_until_round(41);
  printer.Update(status, kStart);
  const std::string expected =
      "warning: copies: 1\n"
      "running, at round 50\n"
      "round 50/2000  2%  loss 2.3457\n"
      "recovering: worker-1 was lost\n"
      "recovered in generation 2; goes on from round 50\n"
      "rewound to round 40: a server was lost\n"
      "recovered in generation 3; goes on from round 40\n"
      "bits equal those of an undisturbed run up to round 41; sluice logs and status say why\n";
  EXPECT_EQ(out.str(), expected);
}

}  // namespace
}  // namespace sluice
