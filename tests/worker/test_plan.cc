#include "tests/worker/test_plan.h"

#include <string>

#include "common/job_spec.h"
#include "common/log.h"
#include "common/mesh.h"
#include "tests/common/model_specs.h"

namespace sluice {

v1::NodeId TestNode(const std::string& role, uint32_t number) {
  v1::NodeId node;
  node.set_name(role + "-" + std::to_string(number));
  node.set_incarnation(1);
  return node;
}

std::shared_ptr<const Layout> TestPlan::Make() const {
  v1::Plan plan;
  plan.set_job_id("job-1");
  plan.set_generation(generation);
  plan.set_timeline(timeline);
  plan.set_start(start);
  plan.set_chunk_elements(chunk_elements);
  plan.set_norm_block(16384);
  plan.set_shards(shards);
  for (uint32_t k = 0; k < shards; ++k) {
    v1::Member* member = plan.add_chains()->add_members();
    *member->mutable_node() = TestNode("server", k % servers);
    member->set_address(member->node().name());
    member->set_since(timeline);
    member->set_host_id(member->node().name());
  }
  const Mesh mesh = {.data = replicas, .pipeline = pipeline, .tensor = tensor};
  for (uint32_t r = 0; r < mesh.ranks(); ++r) {
    v1::Rank* rank = plan.add_ranks();
    const Mesh::Place place = mesh.place(r);
    rank->set_data(place.data);
    rank->set_pipeline(place.stage);
    rank->set_tensor(place.tensor);
    *rank->mutable_node() = TestNode("worker", r);
    rank->set_address(r < addresses.size() ? addresses[r] : rank->node().name());
    if (r < hosts.size()) rank->set_host_id(hosts[r]);
  }
  plan.set_discipline(async ? v1::Plan::STREAM : v1::Plan::VERDICT);
  v1::JobSpec* spec = plan.mutable_spec();
  if (mesh.ranks_of_replica() > 1) {
    *spec->mutable_model() = GptSpec(pipeline, tensor, tensor, /*context=*/2, /*vocabulary=*/tensor + 1);
  } else {
    spec->mutable_model()->mutable_mlp()->set_inputs(3);
    if (hidden > 0) spec->mutable_model()->mutable_mlp()->add_hidden(hidden);
    spec->mutable_model()->mutable_mlp()->set_classes(2);
  }
  spec->mutable_data()->mutable_idx()->set_images("images");
  spec->mutable_data()->mutable_idx()->set_labels("labels");
  spec->mutable_train()->set_rounds(rounds);
  spec->mutable_train()->set_batch(batch);
  spec->mutable_parallel()->set_microbatches(microbatches);
  spec->mutable_train()->set_eval_every(eval_every);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1);
  spec->mutable_parallel()->set_data(replicas);
  spec->mutable_parallel()->set_pipeline(pipeline);
  spec->mutable_parallel()->set_tensor(tensor);
  if (async) spec->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  spec->mutable_optimizer()->set_clip_norm(clip_norm);
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(plan);
  CHECK(layout.ok(), "{}", layout.status().ToString());
  return *layout;
}

}  // namespace sluice
