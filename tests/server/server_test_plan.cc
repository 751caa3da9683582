#include "tests/server/server_test_plan.h"

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/mesh.h"
#include "tests/common/model_specs.h"

namespace sluice {

v1::NodeId ServerTestNode(const std::string& role, uint32_t number) {
  v1::NodeId node;
  node.set_name(absl::StrCat(role, "-", number));
  node.set_incarnation(1);
  return node;
}

v1::Plan ServerTestPlan::Proto() const {
  v1::Plan plan;
  plan.set_job_id(job);
  plan.set_generation(generation);
  plan.set_timeline(timeline);
  plan.set_start(start);
  plan.set_chunk_elements(chunk_elements);
  plan.set_norm_block(norm_block);
  plan.set_shards(shards);
  if (verdict) *plan.mutable_verdict() = *verdict;
  if (checkpoint) *plan.mutable_checkpoint() = *checkpoint;
  for (uint32_t k = 0; k < shards; ++k) {
    v1::Member* member = plan.add_chains()->add_members();
    *member->mutable_node() = ServerTestNode("server", k % servers);
    member->set_address(member->node().name());
    member->set_since(timeline);
    member->set_host_id(member->node().name());
  }
  const Mesh mesh = {.data = replicas, .pipeline = pipeline, .tensor = tensor, .sequence_parallel = sequence_parallel};
  for (uint32_t r = 0; r < mesh.ranks(); ++r) {
    v1::Rank* rank = plan.add_ranks();
    rank->set_data(mesh.place(r).data);
    rank->set_pipeline(mesh.place(r).stage);
    rank->set_tensor(mesh.place(r).tensor);
    *rank->mutable_node() = ServerTestNode("worker", r);
    if (r < hosts.size()) rank->set_host_id(hosts[r]);
  }
  plan.set_discipline(stream ? v1::Plan::STREAM : v1::Plan::VERDICT);
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
  if (async) {
    spec->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
    spec->mutable_train()->set_staleness_scale(staleness_scale);
  }
  if (stream) spec->mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  spec->mutable_checkpoint()->set_every_rounds(checkpoint_every);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
  spec->mutable_optimizer()->mutable_sgd()->set_momentum(0.9);
  spec->mutable_optimizer()->set_clip_norm(clip_norm);
  spec->mutable_parallel()->set_data(replicas);
  spec->mutable_parallel()->set_pipeline(pipeline);
  spec->mutable_parallel()->set_tensor(tensor);
  spec->mutable_parallel()->set_sequence_parallel(sequence_parallel);
  spec->mutable_init()->set_path(init_path);
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  return plan;
}

std::shared_ptr<const Layout> ServerTestPlan::Make() const {
  absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(Proto());
  CHECK(layout.ok(), "{}", layout.status().ToString());
  return *layout;
}

}  // namespace sluice
