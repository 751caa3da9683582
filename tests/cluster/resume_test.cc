// What a job that goes on from a checkpoint takes over from it, beside the parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

// Two features and a label; the second file's numbers are others, and its schema is what its client made of them.
TEST(ResumeTest, ATableKeepsTheSchemaThatItsParametersWereTrainedWith) {
  const TemporaryFolder folder;
  const auto csv = [&](const std::string& name, double shift) {
    std::string text = "a,b,y\n";
    for (int i = 0; i < 40; ++i)
      absl::StrAppend(&text, i + shift, ",", (i * 7) % 10, ",", i < 20 ? "low" : "high", "\n");
    Spill(folder / name, text);
    v1::JobSpec spec;
    spec.set_name("table");
    spec.mutable_model()->mutable_softmax()->set_inputs(2);
    spec.mutable_model()->mutable_softmax()->set_classes(2);
    spec.mutable_data()->mutable_csv()->set_path(folder / name);
    spec.mutable_data()->mutable_csv()->set_label("y");
    v1::TableSchema* schema = spec.mutable_data()->mutable_csv()->mutable_schema();
    for (const char* feature : {"a", "b"}) schema->add_features(feature);
    for (const char* label : {"high", "low"}) schema->add_labels(label);
    for (const double mean : {19.5 + shift, 4.5}) schema->add_mean(mean);
    for (const double deviation : {11.5, 2.9}) schema->add_deviation(deviation);
    spec.mutable_train()->set_rounds(6);
    spec.mutable_train()->set_batch(8);
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(.1);
    return spec;
  };
  InProcessCluster cluster({});
  const auto first = cluster.Submit(csv("first.csv", 0));
  ASSERT_TRUE(first.ok()) << first.status();
  const auto end = cluster.AwaitEnd(*first);
  ASSERT_TRUE(end.ok() && end->state() == v1::SUCCEEDED) << end.status() << end->message();

  v1::JobSpec next = csv("next.csv", 1000);
  next.mutable_train()->set_rounds(9);
  const auto resumed = cluster.Submit(next, *first);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  const auto last = cluster.AwaitEnd(*resumed);
  ASSERT_TRUE(last.ok() && last->state() == v1::SUCCEEDED) << last.status() << last->message();
  const auto reader = CheckpointReader::Open(last->last_checkpoint().directory(), /*verify=*/true);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const v1::CsvSource& kept = (*reader)->manifest().spec().data().csv();
  EXPECT_EQ(kept.path(), folder / "next.csv");
  EXPECT_EQ(kept.schema().mean(0), 19.5) << "of the parameters, not of the new file";
}

}  // namespace
}  // namespace sluice
