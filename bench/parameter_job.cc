#include "bench/parameter_job.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/job_spec.h"
#include "common/philox.h"

namespace sluice {
namespace {

constexpr float kLearningRate = 0.5f;
constexpr double kClipNorm = 1.0;
constexpr uint64_t kRows = 1024, kColumns = 255;  // rows * (columns + 1) elements are 1 MiB

v1::NodeId Node(const char* name) {
  v1::NodeId node;
  node.set_name(name);
  node.set_incarnation(1);
  return node;
}

}  // namespace

v1::NodeId BenchServerId() { return Node("server-0"); }
v1::NodeId BenchWorkerId() { return Node("worker-0"); }

absl::StatusOr<std::shared_ptr<const Layout>> MakeBenchLayout(uint64_t mib, uint64_t chunk_elements,
                                                              const std::string& server_address) {
  v1::Plan plan;
  plan.set_job_id("bench");
  plan.set_generation(1);
  plan.set_timeline(1);
  plan.set_chunk_elements(chunk_elements);
  plan.set_norm_block(NormBlockElements(mib * kRows * (kColumns + 1)));
  plan.set_shards(1);
  v1::Member* member = plan.add_chains()->add_members();
  *member->mutable_node() = BenchServerId();
  member->set_address(server_address);
  member->set_since(1);
  *plan.add_ranks()->mutable_node() = BenchWorkerId();
  plan.set_discipline(v1::Plan::VERDICT);
  v1::JobSpec* spec = plan.mutable_spec();
  spec->mutable_model()->mutable_mlp()->set_inputs(kColumns);
  spec->mutable_model()->mutable_mlp()->set_classes(static_cast<uint32_t>(mib * kRows));
  spec->mutable_data()->mutable_idx()->set_images("none");
  spec->mutable_data()->mutable_idx()->set_labels("none");
  spec->mutable_train()->set_rounds(uint64_t{1} << 30);
  spec->mutable_train()->set_batch(static_cast<uint32_t>(kBenchCount));
  spec->mutable_train()->set_eval_every(0);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(kLearningRate);
  spec->mutable_optimizer()->set_clip_norm(kClipNorm);
  spec->mutable_parallel()->set_data(1);
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  return Layout::Make(std::move(plan));
}

void FillBenchGradient(uint64_t round, std::vector<float>* gradient) {
  const uint32_t shift = static_cast<uint32_t>(round) * 0x9E3779B9u;
  for (size_t i = 0; i < gradient->size(); ++i) {
    const uint32_t hash = (static_cast<uint32_t>(i) + shift) * 2654435761u;
    // Exponent -2 to 1 and a sign, put together as bits.
    const uint32_t bits = (hash & 0x80000000u) | ((125u + (hash >> 29 & 3u)) << 23);
    std::memcpy(&(*gradient)[i], &bits, sizeof(bits));
  }
}

ExpectedParameters::ExpectedParameters(const Layout& layout) : values_(layout.space().size()) {
  for (const Tensor& tensor : layout.space().tensors()) {
    FillInitial(tensor, layout.plan().spec().train().seed(), 0, tensor.elements, values_.data() + tensor.offset);
  }
}

void ExpectedParameters::Apply(const std::vector<float>& gradient) {
  double squares = 0;
  for (const float g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
  const double norm = std::sqrt(squares) / kBenchCount;  // of the mean gradient
  const auto scale = static_cast<float>((norm > kClipNorm ? kClipNorm / norm : 1.0) / kBenchCount);
  for (size_t i = 0; i < values_.size(); ++i) values_[i] -= kLearningRate * (gradient[i] * scale);
}

absl::Status ExpectedParameters::Compare(absl::Span<const float> values) const {
  if (values.size() == values_.size() &&
      std::memcmp(values.data(), values_.data(), values.size() * sizeof(float)) == 0) {
    return absl::OkStatus();
  }
  for (size_t i = 0; i < values.size() && i < values_.size(); ++i) {
    if (std::memcmp(&values[i], &values_[i], sizeof(float)) == 0) continue;
    return absl::DataLossError(
        absl::StrFormat("parameters of the server: element %d is %.9g, expected %.9g", i, values[i], values_[i]));
  }
  return absl::DataLossError(absl::StrCat(values.size(), " elements, expected ", values_.size()));
}

}  // namespace sluice
