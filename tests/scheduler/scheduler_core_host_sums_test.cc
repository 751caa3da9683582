// What the scheduler does about host sums: hosts in the plan, and a worker that turns out not to share memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "scheduler/scheduler_core.h"
#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

// Workers w0, w1, w2 on one host, servers s0 and s1 elsewhere.
class HostSums : public CoreFixture, public ::testing::Test {
 protected:
  HostSums() {
    for (const char* name : {"s0", "s1"}) On(name, v1::SERVER, name, false);
    for (const char* name : {"w0", "w1", "w2"}) On(name, v1::WORKER, "left", true);
    Settle();
    job_ = Submit(SmallSpec(3));
    Settle();
    Record(job_, 0);
  }
  void On(const std::string& name, v1::NodeRole role, const std::string& host, bool sums) {
    Start(name, role);
    Break(name);
    node(name).host = host;
    node(name).sums_on_host = sums;
    Connect(name);
  }
  void Fail(const std::string& from, const std::string& who) {
    v1::NodeMessage message;
    v1::HostSumFailure* failure = message.mutable_host_sum_failure();
    failure->set_job_id(job_);
    failure->set_generation(plan(job_).generation());
    *failure->mutable_node() = Id(who);
    failure->set_message("another user");
    Say(from, message);
  }
  std::string Hosts() {
    std::string hosts;
    for (const v1::Rank& rank : plan(job_).ranks()) hosts += rank.host_id().empty() ? "-" : rank.host_id() + " ";
    return hosts;
  }

  std::string job_;
};

TEST_F(HostSums, ThePlanNamesHostsAndStatusTheSums) {
  EXPECT_EQ(Hosts(), "left left left ");
  EXPECT_EQ(plan(job_).chains(0).members(0).host_id(), plan(job_).chains(0).members(0).node().name());
  const v1::JobStatus seen = status(job_);
  ASSERT_EQ(seen.host_sums_size(), 1);
  EXPECT_EQ(seen.host_sums(0).first(), 0u);
  EXPECT_EQ(seen.host_sums(0).ranks(), 3u);
  EXPECT_EQ(seen.host_sums(0).shards(), plan(job_).shards());
  EXPECT_EQ(seen.host_sums(0).host_id(), "left");
}

TEST_F(HostSums, WhoDoesNotShareGetsAGenerationWithoutAHost) {
  Fail("w0", "w1");
  Fail("w1", "w1");
  EXPECT_EQ(state(job_), v1::RECOVERING);
  ReportAll(job_, 1);
  EXPECT_EQ(plan(job_).generation(), 2u);
  EXPECT_EQ(Hosts(), "left -left ");
  EXPECT_EQ(status(job_).host_sums_size(), 0) << "ranks 0 and 2 are no subtree";
  const v1::JobStatus seen = status(job_);
  EXPECT_THAT(seen.warnings(seen.warnings_size() - 1),
              HasSubstr("w1 pushes for itself, not with its host: another user"));
  EXPECT_TRUE(HasEvent("w1 pushes for itself"));
  EXPECT_TRUE(HasEvent("generation 2 without the part of w1 in a host sum"));
  Record(job_, 1);
  EXPECT_EQ(state(job_), v1::RUNNING);
  // It stays so: after another death, and after the scheduler's.
  Restart();
  ConnectAll();
  Settle();
  Kill("w2");
  On("w2", v1::WORKER, "left", true);
  Settle();
  ReportAll(job_, 1);
  EXPECT_EQ(plan(job_).generation(), 3u);
  EXPECT_EQ(Hosts(), "left -left ");
}

TEST_F(HostSums, ADeathIsNotTakenForIt) {
  Kill("w0");  // the leader
  Fail("w1", "w1");
  On("w0", v1::WORKER, "left", true);
  Settle();
  ReportAll(job_, 1);
  EXPECT_EQ(plan(job_).generation(), 2u);
  EXPECT_EQ(Hosts(), "left left left ");
  EXPECT_EQ(status(job_).host_sums_size(), 1);
}

TEST_F(HostSums, StrangersAndOldGenerationsSayNothing) {
  Worker("w9");
  Settle();
  Fail("w9", "w1");
  EXPECT_EQ(state(job_), v1::RUNNING);
  Fail("w1", "s0");
  EXPECT_EQ(state(job_), v1::RUNNING);
  v1::NodeMessage message;
  message.mutable_host_sum_failure()->set_job_id(job_);
  message.mutable_host_sum_failure()->set_generation(7);
  *message.mutable_host_sum_failure()->mutable_node() = Id("w1");
  Say("w1", message);
  EXPECT_EQ(state(job_), v1::RUNNING);
}

}  // namespace
}  // namespace sluice
