// The plan that the fuzzed server holds, and what its workers say.
#ifndef SLUICE_TESTS_FUZZ_FUZZ_PLAN_H_
#define SLUICE_TESTS_FUZZ_FUZZ_PLAN_H_

#include <memory>
#include <string>

#include "common/job_spec.h"
#include "common/layout.h"
#include "common/log.h"
#include "common/version.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

inline v1::NodeId FuzzNode(const std::string& name) {
  v1::NodeId node;
  node.set_name(name);
  node.set_incarnation(1);
  return node;
}

// 8 parameters in 4 chunks of 2 on one server, two workers.
struct FuzzPlan {
  bool async = false, stream = false;

  std::shared_ptr<const Layout> Make() const {
    v1::Plan plan;
    plan.set_job_id("job-1");
    plan.set_generation(1);
    plan.set_timeline(1);
    plan.set_chunk_elements(2);
    plan.set_norm_block(4);
    plan.set_shards(3);
    for (int shard = 0; shard < 3; ++shard) {
      v1::Member* member = plan.add_chains()->add_members();
      *member->mutable_node() = FuzzNode("server");
      member->set_since(1);
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      plan.add_ranks()->set_data(rank);
      *plan.mutable_ranks(static_cast<int>(rank))->mutable_node() = FuzzNode(rank == 0 ? "hostile" : "other");
    }
    plan.set_discipline(stream || async ? v1::Plan::STREAM : v1::Plan::VERDICT);
    v1::JobSpec* spec = plan.mutable_spec();
    spec->mutable_model()->mutable_softmax()->set_inputs(3);
    spec->mutable_model()->mutable_softmax()->set_classes(2);
    spec->mutable_data()->mutable_idx()->set_images("images");
    spec->mutable_data()->mutable_idx()->set_labels("labels");
    spec->mutable_train()->set_rounds(5);
    spec->mutable_train()->set_batch(4);
    if (async) spec->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
    if (stream || async) spec->mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
    spec->mutable_checkpoint()->set_every_rounds(100);
    spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
    spec->mutable_parallel()->set_data(2);
    FillDefaults(spec);
    plan.set_hash(PlanHash(plan));
    absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(plan);
    CHECK(layout.ok(), "{}", layout.status().ToString());
    return *layout;
  }
};

inline v1::StreamHello FuzzHello(const Layout& layout, uint32_t contributor) {
  v1::StreamHello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_job_id(layout.plan().job_id());
  *hello.mutable_node() = layout.plan().ranks(static_cast<int>(contributor)).node();
  hello.set_contributor(contributor);
  hello.set_generation(1);
  return hello;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_FUZZ_FUZZ_PLAN_H_
