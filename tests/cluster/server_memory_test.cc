// Servers with next to no memory for what waits: the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "tests/cluster/small_text_job.h"

namespace sluice {
namespace {

class ServerMemoryTest : public ::testing::Test {
 protected:
  // On three workers: in each chunk's tree the third waits for the sum of the first two.
  v1::JobSpec Spec() const { return SmallTextJob(folder_, "memory", 3); }
  uint64_t Train(const v1::JobSpec& spec, ClusterOptions options, uint64_t* declines = nullptr) {
    options.servers = 2;
    options.workers = 3;
    options.backend.threads = 1;
    InProcessCluster cluster(options);
    const auto watch = [&](InProcessCluster& running, const std::string& job) {
      const auto end = running.Await(job, [&](const v1::JobStatus&) {
        for (int s = 0; s < options.servers && declines != nullptr; ++s) {
          const auto part = running.server(s).FindJob(job);
          if (part != nullptr) *declines = std::max(*declines, part->declines());
        }
        return false;
      });
      EXPECT_TRUE(end.ok()) << end.status();
    };
    return TrainToTheEnd(&cluster, spec, watch).hash;
  }

  const TemporaryFolder folder_;
};

TEST_F(ServerMemoryTest, DeclinedContributionsComeAgain) {
  for (const bool stream : {false, true}) {
    v1::JobSpec spec = Spec();
    if (stream) {
      spec.mutable_optimizer()->set_clip_norm(0);
      spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
    }
    uint64_t declines = 0, none = 0;
    const uint64_t roomy = Train(spec, {}, &none);
    EXPECT_EQ(Train(spec, {.hold_memory = 1}, &declines), roomy) << (stream ? "streamed" : "under a verdict");
    EXPECT_GT(declines, 0u);
    EXPECT_EQ(none, 0u);
  }
}

TEST_F(ServerMemoryTest, StreamsOfNextToNoRoomAreOnlySlower) {
  EXPECT_EQ(Train(Spec(), {.hold_memory = 1, .stream_memory = 1}), Train(Spec(), {}));
}

// Answers to their senders alone.
TEST_F(ServerMemoryTest, InAsyncToo) {
  v1::JobSpec spec = Spec();
  spec.mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  EXPECT_NE(Train(spec, {.hold_memory = 1, .stream_memory = 1}), 0u);
}

}  // namespace
}  // namespace sluice
