// Payloads in shared memory: the same bits as in the streams, and next to nothing in the streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

struct Outcome {
  uint64_t hash = 0;
  uint64_t bytes = 0;  // in messages
  v1::JobStatus status;
};

class SharedMemoryTest : public ::testing::Test {
 protected:
  // Tokens of a small text; a model of 100,000 parameters.
  v1::JobSpec Spec() {
    std::string text;
    for (int i = 0; i < 400; ++i) absl::StrAppend(&text, "line ", i * 7919 % 1000, " of the text\n");
    Spill(folder_ / "text.txt", text);
    v1::JobSpec spec;
    spec.set_name("shared");
    v1::Gpt2Spec* gpt2 = spec.mutable_model()->mutable_gpt2();
    gpt2->set_layers(2);
    gpt2->set_heads(2);
    gpt2->set_width(64);
    gpt2->set_context(16);
    spec.mutable_data()->mutable_text()->set_path(folder_ / "text.txt");
    spec.mutable_train()->set_rounds(12);
    spec.mutable_train()->set_batch(4);
    spec.mutable_train()->set_eval_every(0);
    spec.mutable_train()->set_eval_samples(4);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(2);
    spec.mutable_parallel()->set_chunk_elements(10000);
    return spec;
  }
  Outcome Train(const v1::JobSpec& spec, bool shared, const std::string& device = "cpu") {
    InProcessCluster cluster(
        {.servers = 2, .workers = 2, .backend = {.kind = device, .threads = 1}, .shared_memory = shared});
    Outcome outcome;
    const auto job = cluster.Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return outcome;
    const auto end = cluster.AwaitEnd(*job);
    EXPECT_TRUE(end.ok() && end->state() == v1::SUCCEEDED) << end.status();
    if (!end.ok()) return outcome;
    outcome.bytes = cluster.network().bytes_written();
    const auto parameters = cluster.Parameters(*end);
    EXPECT_TRUE(parameters.ok()) << parameters.status();
    if (parameters.ok()) outcome.hash = HashOf(*parameters);
    outcome.status = *end;
    return outcome;
  }

  const TemporaryFolder folder_;
};

TEST_F(SharedMemoryTest, TheSameBitsAndNextToNothingInTheStreams) {
  v1::JobSpec spec = Spec();
  spec.mutable_train()->set_rounds(24);
  for (const uint64_t chunk : {10000, 8192}) {  // copied by the worker; whole pages: read where servers keep them
    spec.mutable_parallel()->set_chunk_elements(chunk);
    const Outcome streamed = Train(spec, false);
    for (const char* device : {"cpu", "fake_device"}) {
      const Outcome shared = Train(spec, true, device);
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
  const Outcome streamed = Train(spec, false), shared = Train(spec, true);
  EXPECT_LT(shared.bytes, streamed.bytes * 3 / 4);
  EXPECT_GT(shared.bytes, streamed.bytes / 4);
  EXPECT_LT(shared.status.last_evaluation().loss(), 5.6);
}

}  // namespace
}  // namespace sluice
