// Host sums between real processes: kill -9 of leader and member changes no bit, and without shared memory workers push
// for themselves and say so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/cluster/process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

constexpr uint64_t kRounds = 500;

class HostSumsProcessesTest : public ::testing::Test {
 protected:
  v1::JobSpec Spec(v1::TransferSpec::HostSum host_sum) {
    std::string rows;
    for (int i = 0; i < 64; ++i) {
      absl::StrAppend(&rows, "[");
      for (int j = 0; j < 17; ++j) absl::StrAppend(&rows, j > 0 ? "," : "", (i * 7 + j * j) % 64);
      absl::StrAppend(&rows, "]\n");
    }
    Spill(folder_ / "rows.jsonl", rows);
    v1::JobSpec spec;
    spec.set_name("hosts");
    v1::Gpt2Spec* gpt = spec.mutable_model()->mutable_gpt2();
    gpt->set_layers(1);
    gpt->set_heads(2);
    gpt->set_width(48);
    gpt->set_context(16);
    gpt->set_vocabulary(64);
    spec.mutable_data()->mutable_rows()->set_path(folder_ / "rows.jsonl");
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(12);
    spec.mutable_train()->set_eval_every(kRounds);
    spec.mutable_train()->set_eval_samples(4);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(3);
    spec.mutable_parallel()->set_chunk_elements(4999);
    spec.mutable_checkpoint()->set_every_rounds(0);
    spec.mutable_transfer()->set_host_sum(host_sum);
    return spec;
  }

  static uint64_t HashAtEnd(const ProcessCluster& cluster, const std::string& job, v1::JobStatus* end) {
    const absl::StatusOr<v1::JobStatus> status = cluster.AwaitEnd(job);
    EXPECT_TRUE(status.ok() && status->state() == v1::SUCCEEDED) << status.status();
    if (!status.ok()) return 0;
    *end = *status;
    const auto reader = CheckpointReader::Open(status->last_checkpoint().directory(), /*verify=*/true);
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (!reader.ok()) return 0;
    std::vector<float> values((*reader)->manifest().parameters());
    EXPECT_TRUE((*reader)->Read("value", 0, absl::MakeSpan(values)).ok());
    return HashOf(values);
  }

  TemporaryFolder folder_;
};

TEST_F(HostSumsProcessesTest, Kill9OfLeaderAndMemberChangesNoBit) {
  std::map<std::string, std::string> hosts;
  for (const char* worker : {"worker-0", "worker-1", "worker-2"}) hosts[worker] = "left";
  for (const char* server : {"server-0", "server-1"}) hosts[server] = "right";
  auto started = ProcessCluster::Start(folder_.path(), 2, 3, hosts);
  ASSERT_TRUE(started.ok()) << started.status();
  ProcessCluster& cluster = **started;
  absl::StatusOr<std::string> job = cluster.Submit(Spec(v1::TransferSpec::OFF));
  ASSERT_TRUE(job.ok()) << job.status();
  v1::JobStatus end;
  const uint64_t apart = HashAtEnd(cluster, *job, &end);
  EXPECT_EQ(end.host_sums_size(), 0);
  job = cluster.Submit(Spec(v1::TransferSpec::AUTO));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(HashAtEnd(cluster, *job, &end), apart);
  ASSERT_EQ(end.host_sums_size(), 1);
  EXPECT_EQ(end.host_sums(0).ranks(), 3u);
  EXPECT_EQ(end.recoveries(), 0u);

  job = cluster.Submit(Spec(v1::TransferSpec::AUTO));
  ASSERT_TRUE(job.ok()) << job.status();
  uint64_t round = 20;
  for (const int rank : {0, 1, 2, 0}) {
    // Whoever has the rank now.
    absl::StatusOr<v1::JobStatus> status = cluster.AwaitRounds(*job, round);
    ASSERT_TRUE(status.ok()) << status.status();
    ASSERT_EQ(status->host_sums_size(), 1) << "before round " << round;
    const std::string victim = absl::StrCat("worker-", rank);
    cluster.Kill(victim);
    const absl::Status again = cluster.StartDaemon(victim);
    ASSERT_TRUE(again.ok()) << again;
    round += 60;
  }
  EXPECT_EQ(HashAtEnd(cluster, *job, &end), apart);
  EXPECT_GE(end.recoveries(), 2u);  // progress is heard of ten times a second
  EXPECT_EQ(end.rewinds(), 0u);
  EXPECT_FALSE(end.has_exact_until_round());
  EXPECT_EQ(end.host_sums_size(), 1);
}

}  // namespace
}  // namespace sluice
