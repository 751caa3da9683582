// Payloads in shared memory: the same bits as in the streams, and next to nothing in the streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/cluster/small_text_job.h"

namespace sluice {
namespace {

class SharedMemoryTest : public ::testing::Test {
 protected:
  v1::JobSpec Spec() const { return SmallTextJob(folder_, "shared", 2); }
  TrainedJob Train(const v1::JobSpec& spec, bool shared, const std::string& device = "cpu") {
    InProcessCluster cluster(
        {.servers = 2, .workers = 2, .backend = {.kind = device, .threads = 1}, .shared_memory = shared});
    return TrainToTheEnd(&cluster, spec);
  }

  const TemporaryFolder folder_;
};

TEST_F(SharedMemoryTest, TheSameBitsAndNextToNothingInTheStreams) {
  v1::JobSpec spec = Spec();
  spec.mutable_train()->set_rounds(24);
  for (const uint64_t chunk : {10000, 8192}) {  // copied by the worker; whole pages: read where servers keep them
    spec.mutable_parallel()->set_chunk_elements(chunk);
    const TrainedJob streamed = Train(spec, false);
    for (const char* device : {"cpu", "fake_device"}) {
      const TrainedJob shared = Train(spec, true, device);
      EXPECT_EQ(shared.hash, streamed.hash) << chunk << " " << device;
      // Memory is offered and mapped beside the first round: its values, pushes and commits (an eighth of 24 rounds is
      // three) may go by stream, all others must not.
      EXPECT_LT(shared.bytes, streamed.bytes / 8) << chunk << " " << device;
    }
  }
}

TEST_F(SharedMemoryTest, SumsThatStreamAreTheSame) {
  v1::JobSpec spec = Spec();
  spec.mutable_optimizer()->set_clip_norm(0);
  spec.mutable_train()->set_max_skipped_rounds(1);
  EXPECT_EQ(Train(spec, true).hash, Train(spec, false).hash);
}

TEST_F(SharedMemoryTest, RecomputationHasTheSameBits) {
  v1::JobSpec spec = Spec();
  const uint64_t kept = Train(spec, true).hash;
  spec.mutable_train()->set_recompute(true);
  EXPECT_EQ(Train(spec, true).hash, kept);
}

// In async only the pushes stay in shared memory: nobody waits for a reader before a value's memory is used again.
TEST_F(SharedMemoryTest, AsyncCommitsStayInTheStream) {
  v1::JobSpec spec = Spec();
  spec.mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  const TrainedJob streamed = Train(spec, false), shared = Train(spec, true);
  EXPECT_LT(shared.bytes, streamed.bytes * 3 / 4);
  EXPECT_GT(shared.bytes, streamed.bytes / 4);
  EXPECT_LT(shared.status.last_evaluation().loss(), 5.6);
}

}  // namespace
}  // namespace sluice
