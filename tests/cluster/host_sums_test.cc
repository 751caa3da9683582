// Workers of one host that push one sum (docs/host_sums.md): the bits of workers that push for themselves, a part of
// the bytes, whatever dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/cluster/small_text_job.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kRounds = 12;

// "first+ranks of shards" of each sum.
std::vector<std::string> Sums(const v1::JobStatus& status) {
  std::vector<std::string> sums;
  for (const v1::HostSumStatus& sum : status.host_sums()) {
    sums.push_back(absl::StrCat(sum.first(), "+", sum.ranks(), " ", sum.host_id()));
  }
  return sums;
}

class HostSumsTest : public ::testing::Test {
 protected:
  // A model of 17,000 parameters in chunks that do not divide it.
  v1::JobSpec Spec(int replicas) {
    std::string table = "a,b,c,d,label\n";
    for (int i = 0; i < 240; ++i) {
      absl::StrAppend(&table, i * 7919 % 1000, ",", i * 104729 % 997, ",", i % 17, ",", i * i % 31, ",", i % 3, "\n");
    }
    Spill(folder_ / "table.csv", table);
    v1::JobSpec spec;
    spec.set_name("hosts");
    spec.mutable_model()->mutable_mlp()->set_inputs(4);
    spec.mutable_model()->mutable_mlp()->add_hidden(120);
    spec.mutable_model()->mutable_mlp()->add_hidden(130);
    spec.mutable_model()->mutable_mlp()->set_classes(3);
    v1::CsvSource* csv = spec.mutable_data()->mutable_csv();
    csv->set_path(folder_ / "table.csv");
    csv->set_label("label");
    for (const char* feature : {"a", "b", "c", "d"}) {
      csv->mutable_schema()->add_features(feature);
      csv->mutable_schema()->add_mean(100);
      csv->mutable_schema()->add_deviation(250);
    }
    for (const char* label : {"0", "1", "2"}) csv->mutable_schema()->add_labels(label);
    spec.mutable_train()->set_rounds(kRounds);
    spec.mutable_train()->set_batch(20);
    spec.mutable_train()->set_eval_every(5);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(static_cast<uint32_t>(replicas));
    spec.mutable_parallel()->set_chunk_elements(997);
    return spec;
  }

  static v1::JobSpec With(v1::JobSpec spec, v1::TransferSpec::HostSum host_sum) {
    spec.mutable_transfer()->set_host_sum(host_sum);
    return spec;
  }

  // Of workers by number, "host" each; servers are on others unless they are named.
  static ClusterOptions On(const std::vector<std::string>& hosts) {
    ClusterOptions options{.servers = 2, .workers = static_cast<int>(hosts.size())};
    for (size_t i = 0; i < hosts.size(); ++i) options.hosts[absl::StrCat("worker-", i)] = hosts[i];
    return options;
  }

  template <typename... Disturb>
  static TrainedJob Train(const v1::JobSpec& spec, const ClusterOptions& options, const Disturb&... disturb) {
    InProcessCluster cluster(options);
    return TrainToTheEnd(&cluster, spec, disturb...);
  }

  const TemporaryFolder folder_;
};

TEST_F(HostSumsTest, TheSameBitsAndOnePushForEachHost) {
  const struct {
    std::vector<std::string> hosts;
    std::vector<std::string> sums;
    double pushes;  // instead of one for each worker
  } cases[] = {
      {{"a", "a"}, {"0+2 a"}, 1},
      {{"a", "b", "b"}, {"0+2 b"}, 2},
      {{"a", "a", "a", "a"}, {"0+4 a"}, 1},
      {{"a", "a", "a", "b", "b"}, {"0+2 b", "2+2 a"}, 3},
      {{"a", "a", "a", "a", "a", "b"}, {"0+4 a"}, 3},  // 0 1 2 3, 4, 5
  };
  for (const auto& c : cases) {
    const auto workers = static_cast<int>(c.hosts.size());
    const TrainedJob off = Train(With(Spec(workers), v1::TransferSpec::OFF), On(c.hosts));
    const TrainedJob on = Train(With(Spec(workers), v1::TransferSpec::AUTO), On(c.hosts));
    EXPECT_EQ(on.hash, off.hash) << workers << " workers";
    EXPECT_THAT(Sums(off.status), ElementsAre());
    EXPECT_EQ(Sums(on.status), c.sums);
    EXPECT_EQ(on.status.recoveries(), 0u);
    const double pushes = 4.0 * kRounds * static_cast<double>(on.status.parameters());
    const double saved = static_cast<double>(off.bytes) - static_cast<double>(on.bytes);
    EXPECT_NEAR(saved / pushes, workers - c.pushes, .15) << workers << " workers";
  }
}

TEST_F(HostSumsTest, SumsThatStreamAreTheSame) {
  v1::JobSpec spec = Spec(4);
  spec.mutable_optimizer()->set_clip_norm(0);
  spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  const ClusterOptions options = On({"a", "a", "a", "a"});
  EXPECT_EQ(Train(With(spec, v1::TransferSpec::AUTO), options).hash,
            Train(With(spec, v1::TransferSpec::OFF), options).hash);
}

// Replicas without samples: empty contributions, empty sums, sums of one.
TEST_F(HostSumsTest, EmptyContributions) {
  for (const uint32_t batch : {1, 3}) {
    v1::JobSpec spec = Spec(4);
    spec.mutable_train()->set_batch(batch);
    const ClusterOptions options = On({"a", "a", "b", "b"});
    EXPECT_EQ(Train(With(spec, v1::TransferSpec::AUTO), options).hash,
              Train(With(spec, v1::TransferSpec::OFF), options).hash);
  }
}

TEST_F(HostSumsTest, ServersOfTheHostAreLeftOutUnlessItIsOn) {
  ClusterOptions options = On({"a", "a"});
  options.hosts["server-0"] = "a";
  const TrainedJob off = Train(With(Spec(2), v1::TransferSpec::OFF), options);
  const TrainedJob half = Train(With(Spec(2), v1::TransferSpec::AUTO), options);
  const TrainedJob on = Train(With(Spec(2), v1::TransferSpec::ON), options);
  EXPECT_EQ(half.hash, off.hash);
  EXPECT_EQ(on.hash, off.hash);
  ASSERT_EQ(half.status.host_sums_size(), 1);
  ASSERT_EQ(on.status.host_sums_size(), 1);
  EXPECT_EQ(half.status.host_sums(0).shards() * 2, on.status.host_sums(0).shards());
  options.hosts["server-1"] = "a";
  const TrainedJob none = Train(With(Spec(2), v1::TransferSpec::AUTO), options);
  EXPECT_EQ(none.hash, off.hash);
  EXPECT_EQ(none.status.host_sums_size(), 0);
}

// More than a stream's window in every round: members get their acknowledgements.
TEST_F(HostSumsTest, LargerThanAWindow) {
  v1::JobSpec spec = Spec(3);
  spec.mutable_model()->mutable_mlp()->set_hidden(0, 1500);
  spec.mutable_model()->mutable_mlp()->set_hidden(1, 1000);
  spec.mutable_parallel()->set_chunk_elements(65536);
  spec.mutable_train()->set_rounds(6);
  spec.mutable_train()->set_batch(3);
  const ClusterOptions options = On({"a", "a", "a"});
  EXPECT_EQ(Train(With(spec, v1::TransferSpec::AUTO), options).hash,
            Train(With(spec, v1::TransferSpec::OFF), options).hash);
}

TEST_F(HostSumsTest, DeathsOfLeaderAndMemberChangeNoBit) {
  const std::vector<std::string> hosts = {"a", "a", "a", "b", "b"};
  v1::JobSpec spec = Spec(5);
  spec.mutable_train()->set_rounds(150);
  const TrainedJob off = Train(With(spec, v1::TransferSpec::OFF), On(hosts));
  ClusterOptions options = On(hosts);
  options.network.max_delay = absl::Milliseconds(1);  // so that it is still under way when its progress is heard of
  // By the numbers of their hosts b's workers are ranks 0 and 1, a's 2 and 3 (a sum) and 4.
  for (const int victim : {3, 4, 0, 1, 2}) {
    const TrainedJob on = Train(With(spec, v1::TransferSpec::AUTO), options, [&](InProcessCluster& cluster, auto& job) {
      ASSERT_TRUE(cluster.AwaitRounds(job, 7).ok());
      cluster.KillWorker(victim);
      cluster.StartWorker(victim);
      ASSERT_TRUE(cluster.AwaitRounds(job, 20).ok());
      cluster.KillWorker(victim);
      cluster.StartWorker(victim);
    });
    EXPECT_EQ(on.hash, off.hash) << "victim " << victim;
    EXPECT_GE(on.status.recoveries(), 1u) << "victim " << victim;
    EXPECT_THAT(Sums(on.status), ElementsAre("0+2 b", "2+2 a")) << "victim " << victim;
  }
}

TEST_F(HostSumsTest, BrokenStreamsChangeNoBit) {
  v1::JobSpec spec = Spec(4);
  spec.mutable_train()->set_rounds(40);
  ClusterOptions options = On({"a", "a", "a", "a"});
  const TrainedJob off = Train(With(spec, v1::TransferSpec::OFF), options);
  options.network.delay_seed = 5;
  options.network.max_delay = absl::Milliseconds(2);
  const TrainedJob on = Train(With(spec, v1::TransferSpec::AUTO), options, [&](InProcessCluster& cluster, auto& job) {
    for (uint64_t round = 2; round < 38; ++round) {
      ASSERT_TRUE(cluster.AwaitRounds(job, round).ok());
      cluster.network().Break(absl::StrCat("worker-", 1 + round % 3), "worker-0");
      if (round % 5 == 0) cluster.network().Break("worker-0", "server-1");
    }
  });
  EXPECT_EQ(on.hash, off.hash);
  EXPECT_EQ(on.status.recoveries(), 0u);
}

TEST_F(HostSumsTest, WhoCannotReachItsLeaderPushesForItselfAndStatusSaysSo) {
  v1::JobSpec spec = Spec(2);
  spec.mutable_train()->set_rounds(40);
  ClusterOptions options = On({"a", "a"});
  const TrainedJob off = Train(With(spec, v1::TransferSpec::OFF), options);
  options.peers_answer = false;
  const TrainedJob on = Train(With(spec, v1::TransferSpec::AUTO), options);
  EXPECT_EQ(on.hash, off.hash);
  EXPECT_EQ(on.status.host_sums_size(), 0);
  EXPECT_EQ(on.status.recoveries(), 1u);
  ASSERT_GT(on.status.warnings_size(), 0);
  EXPECT_THAT(on.status.warnings(on.status.warnings_size() - 1), HasSubstr("worker-1 pushes for itself"));
}

}  // namespace
}  // namespace sluice
