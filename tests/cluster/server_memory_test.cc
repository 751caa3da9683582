// Servers with next to no memory for what waits: the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

class ServerMemoryTest : public ::testing::Test {
 protected:
  // A model of 100,000 parameters on three workers: in each chunk's tree the third waits for the sum of the first two.
  v1::JobSpec Spec() {
    std::string text;
    for (int i = 0; i < 400; ++i) absl::StrAppend(&text, "line ", i * 7919 % 1000, " of the text\n");
    Spill(folder_ / "text.txt", text);
    v1::JobSpec spec;
    spec.set_name("memory");
    v1::Gpt2Spec* gpt2 = spec.mutable_model()->mutable_gpt2();
    gpt2->set_layers(2);
    gpt2->set_heads(2);
    gpt2->set_width(64);
    gpt2->set_context(16);
    spec.mutable_data()->mutable_text()->set_path(folder_ / "text.txt");
    spec.mutable_train()->set_rounds(12);
    spec.mutable_train()->set_batch(6);
    spec.mutable_train()->set_eval_every(0);
    spec.mutable_train()->set_eval_samples(4);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(3);
    spec.mutable_parallel()->set_chunk_elements(10000);
    return spec;
  }
  uint64_t Train(const v1::JobSpec& spec, ClusterOptions options, uint64_t* declines = nullptr) {
    options.servers = 2;
    options.workers = 3;
    options.backend.threads = 1;
    InProcessCluster cluster(options);
    const auto job = cluster.Submit(spec);
    EXPECT_TRUE(job.ok()) << job.status();
    if (!job.ok()) return 0;
    const auto end = cluster.Await(*job, [&](const v1::JobStatus&) {
      for (int s = 0; s < options.servers && declines != nullptr; ++s) {
        const auto part = cluster.server(s).FindJob(*job);
        if (part != nullptr) *declines = std::max(*declines, part->declines());
      }
      return false;
    });
    EXPECT_TRUE(end.ok() && end->state() == v1::SUCCEEDED) << end.status();
    if (!end.ok()) return 0;
    const auto parameters = cluster.Parameters(*end);
    EXPECT_TRUE(parameters.ok()) << parameters.status();
    return parameters.ok() ? HashOf(*parameters) : 0;
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
