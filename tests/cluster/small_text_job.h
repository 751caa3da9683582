// A job of seconds that several tests of clusters train: tokens of a small text, a GPT of 100,000 parameters.
#ifndef SLUICE_TESTS_CLUSTER_SMALL_TEXT_JOB_H_
#define SLUICE_TESTS_CLUSTER_SMALL_TEXT_JOB_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {

// 12 rounds, VERDICT with clipping, chunks that no page and no tensor ends with. The text is written to the folder.
inline v1::JobSpec SmallTextJob(const TemporaryFolder& folder, const std::string& name, uint32_t replicas) {
  std::string text;
  for (int i = 0; i < 400; ++i) absl::StrAppend(&text, "line ", i * 7919 % 1000, " of the text\n");
  Spill(folder / "text.txt", text);
  v1::JobSpec spec;
  spec.set_name(name);
  v1::Gpt2Spec* gpt2 = spec.mutable_model()->mutable_gpt2();
  gpt2->set_layers(2);
  gpt2->set_heads(2);
  gpt2->set_width(64);
  gpt2->set_context(16);
  spec.mutable_data()->mutable_text()->set_path(folder / "text.txt");
  spec.mutable_train()->set_rounds(12);
  spec.mutable_train()->set_batch(2 * replicas);
  spec.mutable_train()->set_eval_every(0);
  spec.mutable_train()->set_eval_samples(4);
  spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
  spec.mutable_optimizer()->set_clip_norm(1);
  spec.mutable_parallel()->set_data(replicas);
  spec.mutable_parallel()->set_chunk_elements(10000);
  return spec;
}

struct TrainedJob {
  uint64_t hash = 0;   // of the final parameters
  uint64_t bytes = 0;  // in messages, until the job's end
  v1::JobStatus status;
};

// Submits, lets `disturb` do what it does meanwhile, waits for success. A failure is the test's.
inline TrainedJob TrainToTheEnd(InProcessCluster* cluster, const v1::JobSpec& spec,
                                const std::function<void(InProcessCluster&, const std::string& job)>& disturb = {}) {
  TrainedJob trained;
  const auto job = cluster->Submit(spec);
  EXPECT_TRUE(job.ok()) << job.status();
  if (!job.ok()) return trained;
  if (disturb) disturb(*cluster, *job);
  const auto end = cluster->AwaitEnd(*job);
  EXPECT_TRUE(end.ok() && end->state() == v1::SUCCEEDED) << end.status() << (end.ok() ? end->message() : "");
  if (!end.ok()) return trained;
  trained.bytes = cluster->network().bytes_written();
  const auto parameters = cluster->Parameters(*end);
  EXPECT_TRUE(parameters.ok()) << parameters.status();
  if (parameters.ok()) trained.hash = HashOf(*parameters);
  trained.status = *end;
  return trained;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_CLUSTER_SMALL_TEXT_JOB_H_
