// Workers that may take only so much memory (--memory_limit): who waits, what is refused, what trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/model_layout.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/cluster/small_text_job.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

uint64_t ParametersOf(v1::JobSpec spec) {
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(256);
  return MakeParameterSpace(spec.model())->size();
}

TEST(WorkerMemoryTest, AModelThatNoWorkerMayHoldIsRefusedInBytes) {
  const TemporaryFolder folder;
  v1::JobSpec spec = SmallTextJob(folder, "large", 1);
  const std::string arithmetic =
      absl::StrCat(ParametersOf(spec), " parameters x 8 bytes (parameter 4 + gradient 4) = ", 8 * ParametersOf(spec),
                   " bytes, activations not counted");
  InProcessCluster cluster({.workers = 1, .worker_memory_limit = 8 * ParametersOf(spec) - 1});
  // Submitted before the worker has said anything it may wait for others; then it says what for.
  const auto early = cluster.Submit(spec);
  if (early.ok()) {
    const auto waits = cluster.Await(
        *early, [&](const v1::JobStatus& s) { return s.message().find(arithmetic) != std::string::npos; });
    ASSERT_TRUE(waits.ok()) << waits.status();
    EXPECT_EQ(waits->state(), v1::QUEUED);
    EXPECT_THAT(waits->message(), HasSubstr("waiting for workers with a larger --memory_limit"));
  }
  const absl::Status refused = cluster.Submit(spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("parallel.tensor: found 1; "));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(arithmetic));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the nearest value allowed is 2"));
}

TEST(WorkerMemoryTest, OneThatItMayJustHoldTrains) {
  const TemporaryFolder folder;
  const v1::JobSpec spec = SmallTextJob(folder, "fits", 1);
  InProcessCluster cluster({.workers = 1, .worker_memory_limit = 8 * ParametersOf(spec)});
  EXPECT_EQ(TrainToTheEnd(&cluster, spec).status.state(), v1::SUCCEEDED);
}

}  // namespace
}  // namespace sluice
