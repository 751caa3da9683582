#include "bench/round_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/parameter_job.h"
#include "common/job_spec.h"
#include "common/model_layout.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr uint32_t kRows = 1024, kColumns = 255;  // rows * (columns + 1) elements are 1 MiB
constexpr uint32_t kContext = 128, kBatch = 8, kVocabulary = 256;
constexpr uint64_t kBlock = 1 << 18;  // elements

class SyntheticModel : public Model {
 public:
  explicit SyntheticModel(ParameterSpace space)
      : space_(std::move(space)),
        parameters_(space_.size()),
        gradients_(std::make_shared<std::vector<float>>(space_.size())) {
    FillBenchGradient(0, 0, gradients_.get());
  }

  const ParameterSpace& space() const override { return space_; }
  float* parameters() override { return parameters_.data(); }
  const float* gradients() const override { return gradients_->data(); }
  std::shared_ptr<const void> gradient_owner() const override { return gradients_; }
  void ParametersChanged(Range) override {}
  absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                          const GradientSink& ready, const std::atomic<bool>*) override {
    const uint64_t blocks = (space_.size() + kBlock - 1) / kBlock;
    const auto block = [&](uint64_t i) { return Range{i * kBlock, std::min(space_.size(), (i + 1) * kBlock)}; };
    for (uint64_t i = 0; i < blocks; ++i) RETURN_IF_ERROR(needed(block(i)));
    for (uint64_t i = blocks; i-- > 0;) ready(block(i));
    return LossSum{.loss = 1, .count = static_cast<double>(microbatches.at(0).count)};
  }
  absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>*) override {
    return LossSum{.loss = 1, .count = static_cast<double>(batch.count)};
  }
  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>&) override {
    return absl::UnimplementedError("the synthetic model has no tokens");
  }

 private:
  const ParameterSpace space_;
  std::vector<float> parameters_;
  const std::shared_ptr<std::vector<float>> gradients_;
};

// One target a position, or a row of tokens that follow from the position.
class RoundData : public Dataset {
 public:
  explicit RoundData(bool gpt) : gpt_(gpt) {}
  uint64_t train_samples() const override { return 1 << 20; }
  uint64_t eval_samples() const override { return 1; }
  Batch Train(Range positions) const override {
    Batch batch;
    batch.rows = static_cast<int64_t>(positions.size());
    batch.count = batch.rows;
    if (!gpt_) return batch;
    batch.length = kContext;
    batch.count *= kContext;
    for (uint64_t p = positions.begin; p < positions.end; ++p) {
      const auto token = [p](uint64_t i) { return static_cast<int32_t>((p * 31 + i * i * 7 + i / 5) % kVocabulary); };
      for (uint64_t i = 0; i < kContext; ++i) {
        batch.tokens.push_back(token(i));
        batch.targets.push_back(token(i + 1));
      }
    }
    return batch;
  }
  Batch Evaluation(Range samples) const override { return Train(samples); }
  uint32_t vocabulary() const override { return 0; }
  uint64_t inputs() const override { return 0; }
  uint32_t classes() const override { return 0; }

 private:
  const bool gpt_;
};

}  // namespace

v1::NodeId RoundNode(const char* role, uint32_t number) {
  v1::NodeId node;
  node.set_name(absl::StrCat(role, "-", number));
  node.set_incarnation(1);
  return node;
}

absl::StatusOr<std::shared_ptr<const Layout>> MakeRoundLayout(const RoundJob& job,
                                                              const std::vector<std::string>& servers) {
  v1::Plan plan;
  plan.set_job_id("bench");
  plan.set_generation(1);
  plan.set_timeline(1);
  plan.set_discipline(job.verdict ? v1::Plan::VERDICT : v1::Plan::STREAM);
  v1::JobSpec* spec = plan.mutable_spec();
  if (job.gpt) {
    v1::Gpt2Spec* gpt2 = spec->mutable_model()->mutable_gpt2();
    gpt2->set_layers(4);
    gpt2->set_heads(8);
    gpt2->set_width(256);
    gpt2->set_context(kContext);
    gpt2->set_vocabulary(kVocabulary);
    spec->mutable_data()->mutable_rows()->set_path("none");
    spec->mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
  } else {
    spec->mutable_model()->mutable_mlp()->set_inputs(kColumns);
    spec->mutable_model()->mutable_mlp()->set_classes(job.mib * kRows);
    spec->mutable_data()->mutable_idx()->set_images("none");
    spec->mutable_data()->mutable_idx()->set_labels("none");
    spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(1e-6);
  }
  spec->mutable_optimizer()->set_clip_norm(job.verdict ? 1 : 0);
  spec->mutable_train()->set_rounds(uint64_t{1} << 30);  // it is ended, and leaves no checkpoint
  if (!job.verdict) spec->mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  spec->mutable_train()->set_batch(kBatch * job.workers);
  spec->mutable_train()->set_eval_every(0);
  spec->mutable_parallel()->set_data(job.workers);
  RETURN_IF_ERROR(SetBenchFormats(job.push, job.pull, spec->mutable_transfer()));
  FillDefaults(spec);
  ASSIGN_OR_RETURN(const ParameterSpace space, MakeParameterSpace(spec->model()));
  plan.set_chunk_elements(DefaultChunkElements(space.size()));
  plan.set_norm_block(NormBlockElements(space.size()));
  const uint64_t chunks = (space.size() + plan.chunk_elements() - 1) / plan.chunk_elements();
  plan.set_shards(static_cast<uint32_t>(std::min<uint64_t>(chunks, std::max<uint64_t>(16, 8 * servers.size()))));
  for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
    const uint32_t server = shard % static_cast<uint32_t>(servers.size());
    v1::Member* member = plan.add_chains()->add_members();
    *member->mutable_node() = RoundNode("server", server);
    member->set_address(servers[server]);
    member->set_since(1);
  }
  for (uint32_t d = 0; d < job.workers; ++d) {
    v1::Rank* rank = plan.add_ranks();
    rank->set_data(d);
    *rank->mutable_node() = RoundNode("worker", d);
  }
  plan.set_hash(PlanHash(plan));
  return Layout::Make(std::move(plan));
}

std::shared_ptr<const Dataset> MakeRoundData(const RoundJob& job) { return std::make_shared<RoundData>(job.gpt); }

absl::StatusOr<std::unique_ptr<Model>> MakeRoundModel(const RoundJob& job, const v1::ModelSpec& spec,
                                                      Backend* backend) {
  if (job.gpt) return MakeModel(spec, backend);
  ASSIGN_OR_RETURN(ParameterSpace space, MakeParameterSpace(spec));
  return std::make_unique<SyntheticModel>(std::move(space));
}

}  // namespace sluice
