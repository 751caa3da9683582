// SchedulerCore through deaths, transitions and restarts of its own, one event at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "scheduler/scheduler_core.h"
#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

using Kind = v1::SchedulerMessage;

// ----------------------------------------------------------------------------------------------------- transitions
TEST(SchedulerCoreTransition, AWorkersDeathAndItsReplacement) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Clear();
  f.log.clear();
  f.Kill("w0");
  EXPECT_EQ(f.state(f.job), v1::RECOVERING);
  EXPECT_EQ(f.log, (std::vector<std::string>{"persist g2", "fence g2", "fence g2"})) << "a lone death: at once";
  v1::Verdict verdict;
  verdict.set_round(7);
  verdict.set_gradient_scale(0.5);
  f.Report(f.job, "s0", 7, verdict);
  EXPECT_EQ(f.plan(f.job).generation(), 1u);
  f.Report(f.job, "s1", 8, verdict);
  const v1::Plan& plan = f.plan(f.job);
  EXPECT_EQ(plan.generation(), 2u);
  EXPECT_EQ(plan.start(), 7u);
  EXPECT_EQ(plan.verdict().gradient_scale(), 0.5f);
  EXPECT_EQ(plan.timeline(), 1u);
  EXPECT_EQ(plan.ranks(0).node().name(), "w2");
  EXPECT_EQ(plan.ranks(1).node().name(), "w1") << "the survivor keeps its rank";
  for (const v1::Chain& chain : plan.chains()) EXPECT_EQ(chain.members(0).since(), 1u);
  EXPECT_EQ(f.log[3], "persist g2");
  EXPECT_EQ(f.status(f.job).recoveries(), 1u);
  EXPECT_EQ(f.status(f.job).rewinds(), 0u);
  EXPECT_FALSE(f.status(f.job).has_exact_until_round());
  f.Record(f.job, 7);
  EXPECT_EQ(f.state(f.job), v1::RUNNING);
  EXPECT_TRUE(f.HasEvent("generation 2 without w0"));
}

TEST(SchedulerCoreTransition, AVerdictOfAnotherRoundIsNotCarried) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  v1::Verdict verdict;
  verdict.set_round(6);
  f.Report(f.job, "s0", 7, verdict);
  f.Report(f.job, "s1", 7, verdict);
  EXPECT_FALSE(f.plan(f.job).has_verdict());
}

TEST(SchedulerCoreTransition, WithoutAReplacementTheJobWaits) {
  RunningJob f;
  f.Kill("w0");
  EXPECT_EQ(f.state(f.job), v1::RECOVERING);
  EXPECT_EQ(f.status(f.job).message(), "waiting for a worker: has 1 of 2");
  EXPECT_TRUE(f.Fenced(f.job).empty()) << "nothing begins before the gang can be whole";
  f.Settle();
  f.Worker("w9");
  EXPECT_FALSE(f.Fenced(f.job).empty());
  f.ReportAll(f.job, 3);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w9"}));
}

TEST(SchedulerCoreTransition, AWorkerThatComesBackIsAFreshOne) {
  RunningJob f;
  f.Break("w0");
  f.Settle();
  f.Connect("w0");
  f.Settle();
  EXPECT_FALSE(f.Fenced(f.job).empty());
  f.ReportAll(f.job, 3);
  EXPECT_EQ(f.plan(f.job).generation(), 2u);
  EXPECT_EQ(f.plan(f.job).ranks(0).node().name(), "w0");
  EXPECT_EQ(f.node("w0").generation(f.job), 2u);
}

// What a worker keeps of its gradients belongs to its rank.
TEST(SchedulerCoreTransition, WorkersThatComeBackTakeTheirOwnRanks) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_transfer()->mutable_push()->mutable_int8();
  RunningJob f(spec);
  f.Break("w0");
  f.Break("w1");
  f.Connect("w1");
  f.Connect("w0");
  f.Settle();
  f.ReportAll(f.job, 3);
  EXPECT_EQ(f.plan(f.job).generation(), 2u);
  EXPECT_EQ(f.plan(f.job).ranks(0).node().name(), "w0");
  EXPECT_EQ(f.plan(f.job).ranks(1).node().name(), "w1");
  EXPECT_FALSE(f.status(f.job).has_exact_until_round());
}

TEST(SchedulerCoreTransition, AnotherProfileMarksTheEndOfExactness) {
  RunningJob f;
  f.Start("w2", v1::WORKER, "avx512/1");
  f.Settle();
  f.Kill("w0");
  f.ReportAll(f.job, 5);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w2"}));
  EXPECT_EQ(f.status(f.job).exact_until_round(), 5u);
  EXPECT_TRUE(f.HasEvent("with a worker of another numeric profile, avx512/1"));
}

// What an encoding left out of a worker's gradients dies with it.
TEST(SchedulerCoreTransition, ADroppedResidualMarksTheEndOfExactness) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_transfer()->mutable_push()->mutable_int8();
  RunningJob f(spec);
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.ReportAll(f.job, 5);
  EXPECT_EQ(f.status(f.job).exact_until_round(), 5u);
  EXPECT_TRUE(f.HasEvent("what INT8 had left out of the gradients of 1 of 2 ranks is dropped"));
}

// ... but a rewind goes where the checkpoint has what was left out.
TEST(SchedulerCoreTransition, ARewindKeepsResidualsThatTheCheckpointHolds) {
  v1::JobSpec spec = SmallSpec(2);
  spec.mutable_transfer()->mutable_push()->mutable_int8();
  RunningJob f(spec);
  f.Rounds(f.job, 1, 9);
  f.Checkpoint(f.job, 8);
  f.Worker("w2");
  f.Settle();
  f.Kill("s0");
  f.Kill("w0");  // who takes its rank begins at the checkpoint too
  f.Advance(absl::Seconds(3));
  f.ReportAll(f.job, 9);
  EXPECT_EQ(f.plan(f.job).start(), 8u);
  EXPECT_EQ(f.plan(f.job).checkpoint().residuals(), 2u);
  EXPECT_FALSE(f.status(f.job).has_exact_until_round());
}

TEST(SchedulerCoreTransition, AnotherProfileIsNotTakenWhereTheJobForbidsIt) {
  v1::JobSpec spec = SmallSpec(2);
  spec.set_allow_profile_change(false);
  RunningJob f(spec);
  f.Start("w2", v1::WORKER, "avx512/1");
  f.Settle();
  f.Kill("w0");
  EXPECT_EQ(f.status(f.job).message(), "waiting for a worker: has 1 of 2");
  f.Worker("w3");
  f.Settle();
  f.ReportAll(f.job, 5);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w3"}));
}

TEST(SchedulerCoreTransition, AServersDeathRewindsToTheNewestCheckpointOfTheTimeline) {
  RunningJob f;
  f.Rounds(f.job, 1, 9);
  f.Checkpoint(f.job, 4);
  f.Checkpoint(f.job, 8);
  f.Snapshot(f.job, 9, 0);  // an open snapshot of the timeline that ends
  f.Kill("s0");
  EXPECT_TRUE(f.Fenced(f.job).empty()) << "not before its lease has run out";
  f.Advance(absl::Seconds(3));
  EXPECT_EQ(f.Fenced(f.job), (std::set<std::string>{"s1"}));
  f.ReportAll(f.job, 9);
  const v1::Plan& plan = f.plan(f.job);
  EXPECT_EQ(plan.generation(), 2u);
  EXPECT_EQ(plan.timeline(), 2u);
  EXPECT_EQ(plan.start(), 8u);
  EXPECT_EQ(plan.checkpoint().version(), 8u);
  EXPECT_EQ(plan.checkpoint().timeline(), 1u);
  EXPECT_EQ(f.PlanServers(f.job), (std::set<std::string>{"s1"}));
  for (const v1::Chain& chain : plan.chains()) EXPECT_EQ(chain.members(0).since(), 2u);
  EXPECT_EQ(f.status(f.job).rewinds(), 1u);
  EXPECT_EQ(f.status(f.job).rounds_done(), 8u);
  EXPECT_EQ(f.removed, (std::vector<std::string>{"/checkpoints/small-1/staging-t1-v9"}));
  EXPECT_TRUE(f.HasEvent("rewinds from round 9 to version 8"));

  // The next rewind, without a checkpoint of timeline 2, goes where timeline 2 began.
  f.Server("s2");
  f.Settle();
  f.Kill("s1");
  f.Advance(absl::Seconds(3));
  EXPECT_EQ(f.plan(f.job).timeline(), 3u);
  EXPECT_EQ(f.plan(f.job).start(), 8u);
  EXPECT_EQ(f.PlanServers(f.job), (std::set<std::string>{"s2"}));
  f.RunToEnd(f.job, 8);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

TEST(SchedulerCoreTransition, ARewindWithoutACheckpointBeginsAgain) {
  RunningJob f;
  f.Kill("s0");
  f.Server("s0");  // a newer life: no lease is waited for
  EXPECT_FALSE(f.Fenced(f.job).empty());
  f.ReportAll(f.job, 1);
  EXPECT_EQ(f.plan(f.job).timeline(), 2u);
  EXPECT_EQ(f.plan(f.job).start(), 0u);
  EXPECT_FALSE(f.plan(f.job).has_checkpoint());
}

TEST(SchedulerCoreTransition, WorkerAndServerDieTogether) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("s0");
  f.Kill("w0");
  f.Report(f.job, "s1", 3);
  EXPECT_EQ(f.plan(f.job).generation(), 1u) << "s0 has not reported and is not given up";
  f.Advance(absl::Seconds(3));
  f.ReportAll(f.job, 3);
  EXPECT_EQ(f.plan(f.job).generation(), 3u) << "the fenced server died: another generation";
  EXPECT_EQ(f.plan(f.job).timeline(), 3u);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w2"}));
}

TEST(SchedulerCoreTransition, AWorkerDiesDuringTheTransition) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.Report(f.job, "s0", 3);
  f.Kill("w2");  // the replacement
  f.Report(f.job, "s1", 3);
  EXPECT_EQ(f.plan(f.job).generation(), 1u);
  EXPECT_EQ(f.status(f.job).message(), "waiting for a worker: has 1 of 2");
  f.Settle();
  f.Worker("w3");
  f.Settle();
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 3u) << "the servers were fenced: a higher one";
  f.ReportAll(f.job, 3);
  EXPECT_EQ(f.plan(f.job).generation(), 3u);
}

TEST(SchedulerCoreTransition, AFencedServersReconnectGetsTheFenceAgain) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.Break("s1");
  f.Clear();
  f.Connect("s1");
  EXPECT_EQ(f.node("s1").Count(Kind::kFence), 1);
  f.ReportAll(f.job, 2);
  f.ReportAll(f.job, 2);  // told twice
  EXPECT_EQ(f.plan(f.job).generation(), 2u);
}

TEST(SchedulerCoreTransition, AReportOfAnOlderPlanDoesNotCount) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  v1::NodeMessage message;
  message.mutable_fence_report()->set_job_id(f.job);
  message.mutable_fence_report()->set_generation(2);
  message.mutable_fence_report()->set_plan_generation(0);
  f.Say("s0", message);
  f.Report(f.job, "s1", 2);
  EXPECT_EQ(f.plan(f.job).generation(), 1u);
  f.Report(f.job, "s0", 2);
  EXPECT_EQ(f.plan(f.job).generation(), 2u);
  EXPECT_EQ(f.plan(f.job).timeline(), 1u);
}

TEST(SchedulerCoreTransition, NoServerLeft) {
  RunningJob f;
  f.Kill("s0");
  f.Kill("s1");
  f.Advance(absl::Seconds(3));
  EXPECT_EQ(f.state(f.job), v1::RECOVERING);
  EXPECT_NE(f.status(f.job).message().find("waiting for a server"), std::string::npos);
  f.Server("s7");
  f.Settle();
  EXPECT_EQ(f.PlanServers(f.job), (std::set<std::string>{"s7"}));
  EXPECT_GT(f.plan(f.job).timeline(), 1u);
}

TEST(SchedulerCoreTransition, AServerThatWasOnlySilentBringsItsShardsBack) {
  RunningJob f;
  f.Advance(absl::Seconds(3), {"s0", "s1"});  // both stopped: given up, and no other is there
  EXPECT_EQ(f.state(f.job), v1::RECOVERING);
  f.Connect("s0");
  f.Connect("s1");
  f.Settle();
  f.ReportAll(f.job, 1);
  f.Settle();
  EXPECT_EQ(f.status(f.job).rewinds(), 0u);
  EXPECT_EQ(f.plan(f.job).timeline(), 1u);
}

// -------------------------------------------------------------------------------------------------- after a restart
TEST(SchedulerCoreTransition, ARestartChangesNothingWhenAllComeBack) {
  RunningJob f;
  f.Restart();
  f.Advance(absl::Milliseconds(500));
  f.ConnectAll();
  f.Advance(absl::Seconds(5));
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 1u);
  for (const char* name : {"s0", "s1", "w0", "w1"}) EXPECT_EQ(f.node(name).Count(Kind::kPlan), 0) << name;
  f.RunToEnd(f.job, 1);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

TEST(SchedulerCoreTransition, ARestartWaitsOneLeaseForWhoIsMissing) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.ReportAll(f.job, 2);
  ASSERT_EQ(f.plan(f.job).generation(), 2u);
  f.Worker("w3");
  f.Settle();
  f.Restart();
  f.node("w2").incarnation = 0;  // dies meanwhile
  f.ConnectAll();
  f.Advance(absl::Milliseconds(1900));
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 2u);
  f.Advance(absl::Milliseconds(200));
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 3u);
  f.ReportAll(f.job, 2);
  EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w3"}));
}

TEST(SchedulerCoreTransition, ARestartWithinATransitionBeginsAHigherOne) {
  for (const bool one_report : {false, true}) {
    RunningJob f;
    f.Worker("w2");
    f.Settle();
    f.Kill("w0");
    if (one_report) f.Report(f.job, "s0", 2);
    f.Restart();
    f.Clear();
    f.ConnectAll();
    f.Advance(absl::Seconds(3));
    EXPECT_EQ(f.core().job(f.job)->row.generation(), 3u) << "generation 2 may have been heard of";
    EXPECT_EQ(f.Fenced(f.job), (std::set<std::string>{"s0", "s1"}));
    f.ReportAll(f.job, 2);
    EXPECT_EQ(f.plan(f.job).generation(), 3u);
    EXPECT_EQ(f.PlanWorkers(f.job), (std::set<std::string>{"w1", "w2"}));
  }
}

TEST(SchedulerCoreTransition, ARestartAfterThePlanWasPersistedSendsItAgain) {
  RunningJob f;
  f.Worker("w2");
  f.Settle();
  f.Kill("w0");
  f.ReportAll(f.job, 2);
  for (const char* name : {"s1", "w1", "w2"}) f.node(name).plans.clear();  // never got it
  f.Restart();
  f.Clear();
  f.ConnectAll();
  f.Settle();
  for (const char* name : {"s1", "w1", "w2"}) EXPECT_EQ(f.node(name).generation(f.job), 2u) << name;
  EXPECT_EQ(f.node("s0").Count(Kind::kPlan), 0);
  EXPECT_EQ(f.core().job(f.job)->row.generation(), 2u);
}

TEST(SchedulerCoreTransition, AQueuedJobSurvivesARestart) {
  CoreFixture f;
  const std::string job = f.Submit(SmallSpec(1));
  f.Restart();
  f.Server("s0");
  f.Worker("w0");
  f.Settle();
  EXPECT_EQ(f.state(job), v1::STARTING) << "no grace without a job under way";
}

TEST(SchedulerCoreTransition, ARestartBeforeTheCheckpointIsRecordedPublishesAgain) {
  RunningJob f;
  for (uint32_t shard = 0; shard < f.plan(f.job).shards(); ++shard) f.Snapshot(f.job, 4, shard);
  ASSERT_EQ(f.publishing.size(), 1u);
  f.publishing.clear();
  f.Restart();
  f.ConnectAll();
  f.Checkpoint(f.job, 4);  // servers say it again after Welcome
  EXPECT_EQ(f.status(f.job).last_checkpoint().version(), 4u);
  f.Checkpoint(f.job, 4);
  EXPECT_EQ(f.published.size(), 1u) << "told again: nothing";
}

TEST(SchedulerCoreTransition, AWorkerThatAnotherJobTookStaysTakenAfterARestart) {
  CoreFixture f;
  f.Server("s0");
  f.Worker("w0");
  f.Settle();
  const std::string second = f.Submit(SmallSpec(2)), first = f.Submit(SmallSpec(1));
  ASSERT_EQ(f.state(first), v1::STARTING);
  f.Worker("w1");
  f.Worker("w2");
  f.Settle();
  ASSERT_EQ(f.PlanWorkers(second), (std::set<std::string>{"w1", "w2"}));
  f.Kill("w2");
  f.Break("w1");  // comes back idle; the second job still lacks one, the first takes it
  f.Kill("w0");
  f.Settle();
  f.Connect("w1");
  f.Settle();
  f.ReportAll(first, 0);
  ASSERT_EQ(f.PlanWorkers(first), (std::set<std::string>{"w1"}));
  f.Restart();
  f.ConnectAll();
  f.Advance(absl::Seconds(3));
  EXPECT_EQ(f.status(second).message(), "waiting for a worker: has 0 of 2");
  EXPECT_EQ(f.PlanWorkers(first), (std::set<std::string>{"w1"}));
}

TEST(SchedulerCoreTransition, ARestartWithEverybodyDeadRewinds) {
  RunningJob f;
  f.Rounds(f.job, 1, 5);
  f.Checkpoint(f.job, 4);
  for (const char* name : {"s0", "s1", "w0", "w1"}) f.Kill(name);
  f.Restart();
  f.Server("s0");
  f.Server("s1");
  f.Worker("w0");
  f.Worker("w1");
  f.Settle();
  EXPECT_EQ(f.plan(f.job).start(), 4u) << "newer lives of all names: the lease is not waited for";
  EXPECT_EQ(f.plan(f.job).timeline(), f.plan(f.job).generation());
  f.RunToEnd(f.job, 4);
  EXPECT_EQ(f.state(f.job), v1::SUCCEEDED);
}

}  // namespace
}  // namespace sluice
