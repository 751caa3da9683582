// SchedulerCore through the lives of jobs and nodes, one event at a time.
#include "scheduler/scheduler_core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

using Kind = v1::SchedulerMessage;

TEST(SchedulerCore, NormalLife) {
  CoreFixture f;
  const std::string job = f.Submit(SmallSpec(2));
  EXPECT_EQ(job, "small-1");
  EXPECT_EQ(f.state(job), v1::QUEUED);
  EXPECT_EQ(f.status(job).message(), "waiting for 2 workers (0 idle of 0) and 1 server (0)");
  f.Server("s0");
  f.Server("s1");
  f.Worker("w0");
  f.Settle();
  EXPECT_EQ(f.status(job).message(), "waiting for 2 workers (1 idle of 1) and 1 server (2)");
  f.Worker("w1");
  f.Settle();
  ASSERT_EQ(f.state(job), v1::STARTING);
  EXPECT_EQ(f.log[f.log.size() - 5], "persist g1") << "on disk before anybody hears of it";
  const v1::Plan& plan = f.plan(job);
  EXPECT_EQ(plan.generation(), 1u);
  EXPECT_EQ(plan.timeline(), 1u);
  EXPECT_EQ(plan.start(), 0u);
  EXPECT_EQ(plan.discipline(), v1::Plan::VERDICT);
  EXPECT_EQ(f.PlanServers(job).size(), 2u);
  for (const char* name : {"s0", "s1", "w0", "w1"}) {
    EXPECT_EQ(f.node(name).inbox.front().kind_case(), Kind::kWelcome);
    EXPECT_EQ(f.node(name).Count(Kind::kPlan), 1) << name;
  }
  f.Record(job, 0);
  EXPECT_EQ(f.state(job), v1::RUNNING);
  f.Rounds(job, 1, 4);
  f.Checkpoint(job, 4);
  EXPECT_EQ(f.status(job).last_checkpoint().version(), 4u);
  ASSERT_EQ(f.published.size(), 1u);
  EXPECT_EQ(f.published[0].files_size(), static_cast<int>(plan.shards()));
  EXPECT_EQ(f.published[0].data_position(), 16u);
  EXPECT_EQ(f.published[0].slots_size(), 3);
  f.Clear();
  f.Rounds(job, 4, 10);
  for (uint32_t shard = 0; shard < f.plan(job).shards(); ++shard) f.Final(job, shard);
  EXPECT_EQ(f.state(job), v1::RUNNING) << "evaluation and checkpoint are missing";
  f.Record(job, 10, /*evaluation=*/true);
  EXPECT_EQ(f.state(job), v1::RUNNING) << "the checkpoint is missing";
  f.Checkpoint(job, 10);
  EXPECT_EQ(f.state(job), v1::SUCCEEDED);
  EXPECT_EQ(f.status(job).rounds_done(), 10u);
  for (const char* name : {"s0", "s1", "w0", "w1"}) EXPECT_EQ(f.node(name).Count(Kind::kEndJob), 1) << name;
  EXPECT_EQ(f.disk.at(job).status().state(), v1::SUCCEEDED);
}

TEST(SchedulerCore, TheEndWaitsForEveryShard) {
  RunningJob f;
  f.Record(f.job, 10, true);
  f.Checkpoint(f.job, 10);
  const uint32_t shards = f.plan(f.job).shards();
  for (uint32_t shard = 1; shard < shards; ++shard) f.Final(f.job, shard);
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  f.Final(f.job, 0);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

TEST(SchedulerCore, QueuedJobsStartInOrderAndASmallOneMayPass) {
  CoreFixture f;
  f.Server("s0");
  f.Worker("w0");
  f.Worker("w1");
  f.Settle();
  const std::string first = f.Submit(SmallSpec(2)), second = f.Submit(SmallSpec(2)), third = f.Submit(SmallSpec(1));
  EXPECT_EQ(f.state(first), v1::STARTING);
  EXPECT_EQ(f.state(second), v1::QUEUED);
  EXPECT_EQ(f.state(third), v1::QUEUED);
  f.Worker("w2");
  f.Settle();
  EXPECT_EQ(f.state(second), v1::QUEUED);
  EXPECT_EQ(f.state(third), v1::STARTING) << "fits while the second does not";
  f.RunToEnd(first, 0);
  EXPECT_EQ(f.state(first), v1::SUCCEEDED);
  EXPECT_EQ(f.state(second), v1::STARTING);
  EXPECT_EQ(f.PlanWorkers(second), (std::set<std::string>{"w0", "w1"}));
}

TEST(SchedulerCore, IdsPrefixesLatestAndRequestIds) {
  CoreFixture f;
  EXPECT_EQ(f.core().Find("latest").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(f.Submit(SmallSpec(1, "kjv"), "req"), "kjv-1");
  EXPECT_EQ(f.Submit(SmallSpec(1, "kjv"), "req"), "kjv-1") << "the same submission";
  EXPECT_EQ(f.Submit(SmallSpec(1, "kjv")), "kjv-2");
  EXPECT_EQ(f.Submit(SmallSpec(1, "other")), "other-1");
  EXPECT_EQ(*f.core().Find("latest"), "other-1");
  EXPECT_EQ(*f.core().Find("o"), "other-1");
  EXPECT_EQ(f.core().Find("kjv").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(f.core().Find("nope").status().code(), absl::StatusCode::kNotFound);
  f.Restart();
  EXPECT_EQ(f.Submit(SmallSpec(1, "kjv"), "req"), "kjv-1") << "also after a restart";
  EXPECT_EQ(f.Submit(SmallSpec(1, "kjv")), "kjv-3");
}

TEST(SchedulerCore, SubmissionsThatAreRefused) {
  CoreFixture f;
  f.Start("s0", v1::SERVER, "", 100);
  v1::SubmitJobRequest request;
  *request.mutable_spec() = SmallSpec(1);
  const absl::Status memory = f.core().Submit(request, std::nullopt, f.now()).status();
  EXPECT_EQ(memory.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(memory.message().find("23 parameters x 20 bytes"), absl::string_view::npos) << memory;
  request.mutable_spec()->mutable_train()->set_batch(0);
  EXPECT_EQ(f.core().Submit(request, std::nullopt, f.now()).status().code(), absl::StatusCode::kInvalidArgument);
  *request.mutable_spec() = SmallSpec(1);
  ResumeFrom from{"/elsewhere/t1-v4", {}};
  from.manifest.set_parameters(99);
  EXPECT_EQ(f.core().Submit(request, from, f.now()).status().code(), absl::StatusCode::kFailedPrecondition);
  from.manifest.set_parameters(23);
  from.manifest.add_slots("value");
  EXPECT_EQ(f.core().Submit(request, from, f.now()).status().code(), absl::StatusCode::kFailedPrecondition);
  from.manifest.add_slots("m");
  from.manifest.add_slots("v");
  from.manifest.set_version(10);
  EXPECT_EQ(f.core().Submit(request, from, f.now()).status().code(), absl::StatusCode::kFailedPrecondition)
      << "nothing left to do";
  EXPECT_TRUE(f.core().JobIds().empty());
}

TEST(SchedulerCore, AResumedJobBeginsAtItsCheckpoint) {
  CoreFixture f;
  f.Server("s0");
  f.Worker("w0");
  f.Settle();
  v1::SubmitJobRequest request;
  *request.mutable_spec() = SmallSpec(1);
  ResumeFrom from{"/elsewhere/t1-v4", {}};
  from.manifest.set_parameters(23);
  from.manifest.set_timeline(1);
  from.manifest.set_version(4);
  for (const char* slot : {"value", "m", "v"}) from.manifest.add_slots(slot);
  const auto response = f.core().Submit(request, from, f.now());
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(f.plan("small-1").start(), 4u);
  EXPECT_EQ(f.plan("small-1").checkpoint().directory(), "/elsewhere/t1-v4");
  f.Kill("s0");
  f.Server("s0");
  f.Settle();
  EXPECT_EQ(f.plan("small-1").start(), 4u) << "a rewind without a checkpoint of its own goes back to it";
  EXPECT_EQ(f.plan("small-1").timeline(), 2u);
}

// What workers had left out of their gradients goes on, or the status says that it does not.
TEST(SchedulerCore, AResumedJobSaysWhatBecomesOfResiduals) {
  CoreFixture f;
  f.Server("s0");
  ResumeFrom from{"/elsewhere/t1-v4", {}};
  from.manifest.set_parameters(23);
  from.manifest.set_version(4);
  for (const char* slot : {"value", "m", "v"}) from.manifest.add_slots(slot);
  const auto submit = [&](bool feedback) {
    v1::SubmitJobRequest request;
    *request.mutable_spec() = SmallSpec(1);
    if (feedback) request.mutable_spec()->mutable_transfer()->mutable_push()->mutable_int8();
    const auto response = f.core().Submit(request, from, f.now());
    EXPECT_TRUE(response.ok()) << response.status();
    return f.status(response->job_id());
  };
  const auto warns = [](const v1::JobStatus& status, const std::string& what) {
    return std::any_of(status.warnings().begin(), status.warnings().end(),
                       [&](const std::string& text) { return text.find(what) != std::string::npos; });
  };
  EXPECT_FALSE(submit(true).has_exact_until_round()) << "the job before left nothing out";
  *from.manifest.mutable_spec() = SmallSpec(1);
  from.manifest.mutable_spec()->mutable_transfer()->mutable_push()->mutable_int8();
  v1::JobStatus status = submit(true);
  EXPECT_EQ(status.exact_until_round(), 4u);
  EXPECT_TRUE(warns(status, "is dropped: the checkpoint does not hold it"));
  from.manifest.add_slots("residual-0");
  status = submit(true);
  EXPECT_FALSE(status.has_exact_until_round());
  EXPECT_FALSE(warns(status, "left out"));
  status = submit(false);
  EXPECT_EQ(status.exact_until_round(), 4u);
  EXPECT_TRUE(
      warns(status, "INT8 had left out of the gradients of /elsewhere/t1-v4 is dropped: this job pushes without"));
  from.manifest.add_slots("residual-1");
  status = submit(true);
  EXPECT_FALSE(status.has_exact_until_round());
  EXPECT_TRUE(warns(status, "what was left out of the gradients of 2 ranks goes on with 1 rank"));
  from.manifest.mutable_spec()->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  from.manifest.mutable_slots()->DeleteSubrange(3, 2);
  EXPECT_TRUE(warns(submit(true), "is dropped: checkpoints of async jobs do not hold it"));
  from.manifest.set_exact_until_round(3);
  EXPECT_EQ(submit(true).exact_until_round(), 3u) << "the checkpoint's own";
}

// ------------------------------------------------------------------------------------------------------ membership
TEST(SchedulerCore, AnotherProtocolVersionIsRefusedWithBoth) {
  CoreFixture f;
  f.Worker("w0");
  f.Break("w0");
  f.Connect("w0", kProtocolVersion + 6);
  const absl::Status& status = f.node("w0").closed;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find(std::to_string(kProtocolVersion + 6)), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("version " + std::to_string(kProtocolVersion)), absl::string_view::npos) << status;
}

TEST(SchedulerCore, TheFirstMessageMustBeRegister) {
  CoreFixture f;
  f.Worker("w0");
  f.Break("w0");
  f.node("w0").session = 0;
  f.Connect("w0");
  v1::NodeMessage again;
  *again.mutable_register_()->mutable_node() = f.Id("w0");
  f.Say("w0", again);
  EXPECT_EQ(f.node("w0").closed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(f.core().Cluster().nodes_size(), 0);
}

TEST(SchedulerCore, ANewerLifeSupersedesTheOlderAtOnce) {
  RunningJob f;
  f.Start("w1", v1::WORKER);  // while the old session is still there
  EXPECT_EQ(f.core().Cluster().nodes_size(), 4);
  EXPECT_EQ(f.Fenced(f.job), (std::set<std::string>{"s0", "s1"})) << "without waiting for a lease";
  f.ReportAll(f.job, 1);
  EXPECT_EQ(f.plan(f.job).generation(), 2u);
  EXPECT_EQ(f.plan(f.job).ranks(1).node().incarnation(), f.node("w1").incarnation);
}

TEST(SchedulerCore, AnOlderLifeThatWakesUpIsSentAway) {
  CoreFixture f;
  f.Worker("w0");
  const uint64_t old = f.node("w0").incarnation;
  f.Worker("w0");
  f.Break("w0");
  f.node("w0").incarnation = old;
  f.Connect("w0");
  EXPECT_EQ(f.node("w0").closed.code(), absl::StatusCode::kAborted);
}

TEST(SchedulerCore, AMissedLeaseClosesTheSession) {
  RunningJob f;
  f.Worker("w2");
  f.Advance(absl::Seconds(3), {"w0"});
  EXPECT_EQ(f.node("w0").closed.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(f.Fenced(f.job).empty());
  f.ReportAll(f.job, 1);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w2"}));
  f.Connect("w0");  // it wakes up
  EXPECT_EQ(f.node("w0").Count(Kind::kEndJob), 1) << "and is idle";
}

TEST(SchedulerCore, AServersBreakIsNothingWithinItsLease) {
  RunningJob f;
  f.Break("s0");
  f.Advance(absl::Milliseconds(1500));
  f.Connect("s0");
  f.Advance(absl::Seconds(5));
  EXPECT_EQ(f.plan(f.job).generation(), 1u);
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 1u);
  EXPECT_EQ(f.node("s0").Count(Kind::kPlan), 0) << "it has the plan";
}

TEST(SchedulerCore, ANodeOfAnUnknownJobIsToldToDropIt) {
  RunningJob f;
  f.Worker("w2");
  f.node("w2").plans["old-7"] = v1::Plan();
  f.Break("w2");
  f.Connect("w2");
  EXPECT_EQ(f.node("w2").Count(Kind::kEndJob), 1);
}

TEST(SchedulerCore, LeavingIsReplacedAtOnce) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  v1::NodeMessage leaving;
  leaving.mutable_leaving();
  f.Say("w0", leaving);
  EXPECT_FALSE(f.Fenced(f.job).empty());
  f.ReportAll(f.job, 1);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w2"}));
}

// ----------------------------------------------------------------------------------------------------- end of a job
TEST(SchedulerCore, CancelInEveryState) {
  {
    CoreFixture f;
    const std::string job = f.Submit(SmallSpec(2));
    ASSERT_TRUE(f.core().Cancel(job, true, f.now()).ok());
    EXPECT_EQ(f.state(job), v1::CANCELLED) << "queued";
    ASSERT_TRUE(f.core().Cancel(job, false, f.now()).ok());
  }
  {
    RunningJob f;
    ASSERT_TRUE(f.core().Cancel(f.job, false, f.now()).ok());
    EXPECT_EQ(f.state(f.job), v1::CANCELLED) << "running";
    EXPECT_EQ(f.node("w0").Count(Kind::kEndJob), 1);
    EXPECT_EQ(f.core().Cluster().nodes(2).job_id(), "") << "its workers are idle";
  }
  {
    RunningJob f;
    f.Worker("w2");
    f.Settle();
    f.Kill("w0");
    ASSERT_TRUE(f.core().Cancel(f.job, false, f.now()).ok());
    EXPECT_EQ(f.state(f.job), v1::CANCELLED) << "within a transition";
    f.ReportAll(f.job, 2);
    EXPECT_EQ(f.plan(f.job).generation(), 1u);
  }
  {
    RunningJob f;
    f.Kill("w0");
    ASSERT_TRUE(f.core().Cancel(f.job, false, f.now()).ok());
    EXPECT_EQ(f.state(f.job), v1::CANCELLED) << "waiting";
  }
  {
    RunningJob f;
    f.RunToEnd(f.job, 1);
    ASSERT_TRUE(f.core().Cancel(f.job, false, f.now()).ok());
    EXPECT_EQ(f.state(f.job), v1::SUCCEEDED) << "an ended job stays as it is";
  }
}

TEST(SchedulerCore, CancelAfterACheckpoint) {
  RunningJob f;
  ASSERT_TRUE(f.core().Cancel(f.job, true, f.now()).ok());
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  ASSERT_EQ(f.node("s0").Count(Kind::kCheckpoint), 1);
  EXPECT_EQ(f.node("s0").inbox.back().checkpoint().version(), 3u) << "two ahead of round 1";
  f.Checkpoint(f.job, 3);
  EXPECT_EQ(f.state(f.job), v1::CANCELLED);
  EXPECT_EQ(f.status(f.job).last_checkpoint().version(), 3u);
}

TEST(SchedulerCore, CancelAfterTheLastCheckpointFindsNothingToCancel) {
  RunningJob f;
  const uint64_t rounds = f.status(f.job).rounds();
  f.Rounds(f.job, 1, rounds);
  ASSERT_TRUE(f.core().Cancel(f.job, true, f.now()).ok());
  f.Checkpoint(f.job, rounds);
  EXPECT_EQ(f.state(f.job), v1::RUNNING) << "the last evaluation is to come";
  for (uint32_t shard = 0; shard < f.plan(f.job).shards(); ++shard) f.Final(f.job, shard);
  f.Record(f.job, rounds, /*evaluation=*/true);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

TEST(SchedulerCore, SkippedRoundsInARowEndTheJobAndNameTheCause) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_train()->set_max_skipped_rounds(3);
  RunningJob f(spec);
  f.Record(f.job, 1, false, true, {1});
  f.Record(f.job, 2, false, true, {1});
  f.Record(f.job, 2, false, true, {1});  // told again
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  f.Record(f.job, 3);
  f.Record(f.job, 4, false, true, {1});
  f.Record(f.job, 5, false, true, {1});
  EXPECT_EQ(f.state(f.job), v1::RUNNING) << "not in a row";
  f.Record(f.job, 6, false, true, {1});
  EXPECT_EQ(f.state(f.job), v1::FAILED);
  EXPECT_NE(f.status(f.job).message().find("w1 (rank 1)"), std::string::npos) << f.status(f.job).message();
}

TEST(SchedulerCore, ANodesProblemEndsTheJobWithItsText) {
  RunningJob f;
  v1::NodeMessage message;
  message.mutable_problem()->set_job_id(f.job);
  message.mutable_problem()->set_generation(1);
  message.mutable_problem()->set_code(5);
  message.mutable_problem()->set_message("/data/kjv.txt: no such file");
  f.Worker("w2");
  f.Say("w2", message);
  EXPECT_EQ(f.state(f.job), v1::RUNNING) << "not of this job";
  f.Say("w0", message);
  EXPECT_EQ(f.state(f.job), v1::FAILED);
  EXPECT_EQ(f.status(f.job).message(), "w0: NOT_FOUND: /data/kjv.txt: no such file");
}

// ----------------------------------------------------------------------------------------------------- checkpoints
TEST(SchedulerCore, AnOrderThatCameTooLateIsRepeatedLater) {
  RunningJob f;
  f.Rounds(f.job, 1, 5);
  f.Clear();
  ASSERT_TRUE(f.core().OrderCheckpoint(f.job, f.now()).ok());
  ASSERT_EQ(f.node("s1").inbox.back().checkpoint().version(), 7u);
  f.Snapshot(f.job, 7, 1);
  f.Snapshot(f.job, 7, 0, "passed: shard 0 is at or past version 7");
  EXPECT_EQ(f.node("s1").inbox.back().checkpoint().version(), 9u);
  f.Snapshot(f.job, 7, 2, "passed: shard 2 is at or past version 7");  // of the same order: nothing more
  EXPECT_EQ(f.node("s1").Count(Kind::kCheckpoint), 2);
  EXPECT_EQ(f.removed, (std::vector<std::string>{"/checkpoints/small-1/staging-t1-v7"}));
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  f.Checkpoint(f.job, 8);
  EXPECT_TRUE(f.core().job(f.job)->row.order()) << "the ordered one is version 9";
  f.Checkpoint(f.job, 9);
  EXPECT_FALSE(f.core().job(f.job)->row.order());
}

TEST(SchedulerCore, AnOrderIsGivenAgainAfterATransition) {
  RunningJob f;
  ASSERT_TRUE(f.core().OrderCheckpoint(f.job, f.now()).ok());
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.Clear();
  f.ReportAll(f.job, 1);
  ASSERT_EQ(f.node("s0").Count(Kind::kCheckpoint), 1);
  EXPECT_EQ(f.node("s0").inbox.back().checkpoint().generation(), 2u);
}

TEST(SchedulerCore, AFailedSnapshotIsAWarningAndTheLastOneAnEnd) {
  RunningJob f;
  f.Snapshot(f.job, 4, 0, "disk is full");
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  EXPECT_TRUE(f.HasEvent("disk is full"));
  f.Checkpoint(f.job, 8);
  EXPECT_EQ(f.status(f.job).last_checkpoint().version(), 8u);
  f.Snapshot(f.job, 10, 0, "disk is full");
  EXPECT_EQ(f.state(f.job), v1::FAILED);
  EXPECT_NE(f.status(f.job).message().find("disk is full"), std::string::npos);
}

TEST(SchedulerCore, OldCheckpointsGoButNotWhereTheTimelineBegan) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_checkpoint()->set_every_rounds(1);
  spec.mutable_checkpoint()->set_keep(2);
  RunningJob f(spec);
  for (uint64_t v = 1; v <= 3; ++v) f.Checkpoint(f.job, v);
  EXPECT_EQ(f.removed, (std::vector<std::string>{"/checkpoints/small-1/t1-v1"}));
  f.Kill("s0");
  f.Server("s0");
  f.ReportAll(f.job, 3);
  ASSERT_EQ(f.plan(f.job).checkpoint().version(), 3u);
  f.removed.clear();
  for (uint64_t v = 4; v <= 6; ++v) f.Checkpoint(f.job, v);
  EXPECT_EQ(f.removed, (std::vector<std::string>{"/checkpoints/small-1/t1-v2", "/checkpoints/small-1/t2-v4",
                                                 "/checkpoints/small-1/t2-v5"}));
  EXPECT_EQ(f.status(f.job).last_checkpoint().version(), 6u);
}

TEST(SchedulerCore, AServerLostAfterTheLastCheckpointStillEndsTheJob) {
  RunningJob f;
  f.Rounds(f.job, 1, 10);
  f.Checkpoint(f.job, 10);
  f.Kill("s0");
  f.Server("s0");
  f.ReportAll(f.job, 10);
  EXPECT_EQ(f.plan(f.job).start(), 10u);
  for (uint32_t shard = 0; shard < f.plan(f.job).shards(); ++shard) f.Final(f.job, shard);
  f.Record(f.job, 10, true);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

TEST(SchedulerCore, WithoutPersistFirstAFenceLeavesBeforeItIsOnDisk) {
  SchedulerCoreOptions options;
  options.rules.persist_first = false;
  CoreFixture f(options);
  f.expect_persist_first = false;
  f.Server("s0");
  f.Worker("w0");
  f.Settle();
  const std::string job = f.Submit(SmallSpec(1));
  f.Settle();
  f.log.clear();
  f.Kill("w0");
  f.Worker("w1");
  f.Settle();
  const auto at = [&](const std::string& what) { return std::find(f.log.begin(), f.log.end(), what) - f.log.begin(); };
  EXPECT_LT(at("fence g2"), at("persist g2"));
}

}  // namespace
}  // namespace sluice
