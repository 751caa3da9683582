#include "bench/parameter_job.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/job_spec.h"
#include "common/philox.h"

namespace sluice {
namespace {

constexpr float kLearningRate = 0.5f;
constexpr uint64_t kInt8Block = 256;

// Sums of int8's values are not exact, so the norm's last bit depends on the order: there nothing is clipped.
double ClipNorm(const ParameterJob& job) { return job.push == "int8" || job.push == "top_k" ? 1e30 : 1; }

// ---------------------------------------------------------------- formats, as the page says
// Values are finite and far from the ends of the ranges here.
float ThroughBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

// 11 bits of significand; nothing here is so small that binary16 has fewer, but for zero.
float ThroughF16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

void ThroughInt8(const float* x, size_t n, float* out) {
  for (size_t begin = 0; begin < n; begin += kInt8Block) {
    const size_t end = std::min(n, begin + kInt8Block);
    float most = 0;
    for (size_t i = begin; i < end; ++i) most = std::max(most, std::fabs(x[i]));
    const float scale = most / 127;
    for (size_t i = begin; i < end; ++i) {
      const float q = scale == 0 ? 0 : std::nearbyint(x[i] / scale);
      out[i] = std::clamp(q, -127.0f, 127.0f) * scale;
    }
  }
}

// How many values of each chunk top_k sends, by what was left out before.
std::vector<size_t> TopKCounts(const std::vector<float>& residual, uint64_t chunk_elements) {
  std::vector<uint16_t> levels(residual.size());
  for (size_t i = 0; i < residual.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &residual[i], sizeof(bits));
    levels[i] = static_cast<uint16_t>((bits & 0x7fffffffu) >> 20);
  }
  const auto all = static_cast<size_t>(std::ceil(kBenchDensity * static_cast<double>(levels.size())));
  std::vector<uint16_t> sorted = levels;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(all - 1), sorted.end(),
                   std::greater<uint16_t>());
  const uint16_t last = sorted[all - 1];
  const auto above = std::count_if(levels.begin(), levels.end(), [last](uint16_t level) { return level > last; });
  const auto equal = std::count(levels.begin(), levels.end(), last);
  const double share = static_cast<double>(static_cast<ptrdiff_t>(all) - above) / static_cast<double>(equal);
  std::vector<size_t> counts;
  for (size_t begin = 0; begin < levels.size(); begin += chunk_elements) {
    const size_t n = std::min<size_t>(chunk_elements, levels.size() - begin);
    size_t mine = 0, mine_equal = 0;
    for (size_t i = begin; i < begin + n; ++i) {
      mine += levels[i] > last;
      mine_equal += levels[i] == last;
    }
    mine += static_cast<size_t>(std::ceil(share * static_cast<double>(mine_equal)));
    counts.push_back(std::clamp<size_t>(mine, 1, n));
  }
  return counts;
}

// The `count` largest by magnitude, of equal ones the first.
void ThroughTopK(const float* x, size_t n, size_t count, float* out) {
  std::vector<float> magnitudes(n);
  for (size_t i = 0; i < n; ++i) magnitudes[i] = std::fabs(x[i]);
  std::nth_element(magnitudes.begin(), magnitudes.begin() + static_cast<ptrdiff_t>(count - 1), magnitudes.end(),
                   std::greater<float>());
  const float least = magnitudes[count - 1];
  size_t equal = count;  // that may be sent
  for (size_t i = 0; i < n; ++i) equal -= std::fabs(x[i]) > least;
  for (size_t i = 0; i < n; ++i) {
    bool sent = std::fabs(x[i]) > least;
    if (std::fabs(x[i]) == least && equal > 0) {
      sent = true;
      --equal;
    }
    out[i] = sent ? x[i] : 0;
  }
}

}  // namespace

absl::Status SetBenchFormats(const std::string& push, const std::string& pull, v1::TransferSpec* transfer) {
  v1::PushSpec* up = transfer->mutable_push();
  if (push == "f32") {
    up->mutable_f32();
  } else if (push == "bf16") {
    up->mutable_bf16();
  } else if (push == "f16") {
    up->mutable_f16();
  } else if (push == "int8") {
    up->mutable_int8();
  } else if (push == "top_k") {
    up->mutable_top_k()->set_density(kBenchDensity);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("push format \"", push, "\": expected f32, bf16, f16, int8 or top_k"));
  }
  if (pull == "f32") {
    transfer->mutable_pull()->mutable_f32();
  } else if (pull == "bf16") {
    transfer->mutable_pull()->mutable_bf16();
  } else {
    return absl::InvalidArgumentError(absl::StrCat("pull format \"", pull, "\": expected f32 or bf16"));
  }
  return absl::OkStatus();
}

v1::NodeId BenchNode(const char* role, uint32_t number) {
  v1::NodeId node;
  node.set_name(absl::StrCat(role, "-", number));
  node.set_incarnation(1);
  return node;
}

absl::StatusOr<std::shared_ptr<const Layout>> MakeBenchLayout(const ParameterJob& job,
                                                              const std::vector<std::string>& servers) {
  v1::Plan plan;
  plan.set_job_id("bench");
  plan.set_generation(1);
  plan.set_timeline(1);
  plan.set_chunk_elements(job.chunk_elements);
  plan.set_norm_block(NormBlockElements(job.elements));
  plan.set_shards(ShardCount(job.elements, job.chunk_elements, job.servers));
  for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
    v1::Member* member = plan.add_chains()->add_members();
    *member->mutable_node() = BenchNode("server", shard % job.servers);
    member->set_address(servers.at(shard % job.servers));
    member->set_since(1);
  }
  for (uint32_t d = 0; d < job.workers; ++d) {
    v1::Rank* rank = plan.add_ranks();
    rank->set_data(d);
    *rank->mutable_node() = BenchNode("worker", d);
  }
  plan.set_discipline(job.verdict ? v1::Plan::VERDICT : v1::Plan::STREAM);
  v1::JobSpec* spec = plan.mutable_spec();
  const uint32_t row = job.elements >= 512 ? 256 : 128;  // weights of a class and its bias
  spec->mutable_model()->mutable_mlp()->set_inputs(row - 1);
  spec->mutable_model()->mutable_mlp()->set_classes(static_cast<uint32_t>(job.elements / row));
  spec->mutable_data()->mutable_idx()->set_images("none");
  spec->mutable_data()->mutable_idx()->set_labels("none");
  spec->mutable_train()->set_rounds(uint64_t{1} << 30);
  spec->mutable_train()->set_batch(static_cast<uint32_t>(kBenchCount) * job.workers);
  spec->mutable_train()->set_eval_every(0);
  if (!job.verdict) spec->mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(kLearningRate);
  spec->mutable_optimizer()->set_clip_norm(job.verdict ? ClipNorm(job) : 0);
  spec->mutable_parallel()->set_data(job.workers);
  if (absl::Status status = SetBenchFormats(job.push, job.pull, spec->mutable_transfer()); !status.ok()) return status;
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  return Layout::Make(std::move(plan));
}

void FillBenchGradient(uint64_t round, uint32_t worker, std::vector<float>* gradient) {
  const uint32_t shift = static_cast<uint32_t>(round) * 0x9E3779B9u + worker * 0x85EBCA6Bu;
  for (size_t i = 0; i < gradient->size(); ++i) {
    const uint32_t hash = (static_cast<uint32_t>(i) + shift) * 2654435761u;
    // Exponent -2 to 1 and a sign, put together as bits.
    const uint32_t bits = (hash & 0x80000000u) | ((125u + (hash >> 29 & 3u)) << 23);
    std::memcpy(&(*gradient)[i], &bits, sizeof(bits));
  }
}

ExpectedParameters::ExpectedParameters(const ParameterJob& job, const Layout& layout)
    : job_(job),
      values_(job.elements),
      sum_(job.workers > 1 ? job.elements : 0),
      sent_(job.push == "f32" ? 0 : job.elements) {
  residuals_.resize(job.workers, std::vector<float>(sent_.size()));
  for (const Tensor& tensor : layout.space().tensors()) {
    FillInitial(tensor, layout.plan().spec().train().seed(), 0, tensor.elements, values_.data() + tensor.offset);
  }
}

const std::vector<float>& ExpectedParameters::Contribution(uint32_t worker, const std::vector<float>& gradient) {
  if (job_.push == "f32") return gradient;
  std::vector<float>& left = residuals_[worker];
  std::vector<size_t> counts;
  if (job_.push == "top_k") counts = TopKCounts(left, job_.chunk_elements);
  for (size_t i = 0; i < left.size(); ++i) left[i] += gradient[i];
  for (size_t begin = 0; begin < left.size(); begin += job_.chunk_elements) {
    const size_t n = std::min<size_t>(job_.chunk_elements, left.size() - begin);
    const float* x = left.data() + begin;
    float* out = sent_.data() + begin;
    if (job_.push == "bf16") std::transform(x, x + n, out, ThroughBf16);
    if (job_.push == "f16") std::transform(x, x + n, out, ThroughF16);
    if (job_.push == "int8") ThroughInt8(x, n, out);
    if (job_.push == "top_k") ThroughTopK(x, n, counts[begin / job_.chunk_elements], out);
  }
  for (size_t i = 0; i < left.size(); ++i) left[i] -= sent_[i];
  return sent_;
}

void ExpectedParameters::Apply(const std::vector<std::vector<float>>& gradients, uint64_t rounds) {
  const bool same = job_.push == "f32";  // in every round
  for (uint64_t round = 0; round < (same ? 1 : rounds); ++round) {
    const std::vector<float>* sum = nullptr;
    for (uint32_t w = 0; w < job_.workers; ++w) {
      const std::vector<float>& contribution = Contribution(w, gradients.at(w));
      if (job_.workers == 1) {
        sum = &contribution;
      } else {
        for (size_t i = 0; i < sum_.size(); ++i) sum_[i] = (w == 0 ? 0.0f : sum_[i]) + contribution[i];
        sum = &sum_;
      }
    }
    ApplySum(*sum, same ? rounds : 1);
  }
}

void ExpectedParameters::ApplySum(const std::vector<float>& sum, uint64_t rounds) {
  const double count = kBenchCount * job_.workers;
  double scale = 1;
  if (job_.verdict) {
    double squares = 0;
    for (const float g : sum) squares += static_cast<double>(g) * static_cast<double>(g);
    const double norm = std::sqrt(squares) / count;  // of the mean gradient
    if (norm > ClipNorm(job_)) scale = ClipNorm(job_) / norm;
  }
  const auto factor = static_cast<float>(scale / count);
  for (size_t i = 0; i < values_.size(); ++i) {
    const float step = kLearningRate * (sum[i] * factor);
    for (uint64_t round = 0; round < rounds; ++round) values_[i] -= step;
  }
}

absl::Status ExpectedParameters::Compare(absl::Span<const float> values) const {
  if (values.size() != values_.size()) {
    return absl::DataLossError(absl::StrCat(values.size(), " elements, expected ", values_.size()));
  }
  const bool rounded = job_.pull == "bf16";
  if (!rounded && std::memcmp(values.data(), values_.data(), values.size() * sizeof(float)) == 0) {
    return absl::OkStatus();
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected = rounded ? ThroughBf16(values_[i]) : values_[i];
    if (std::memcmp(&values[i], &expected, sizeof(float)) == 0) continue;
    return absl::DataLossError(
        absl::StrFormat("parameters at the worker (push %s, pull %s): element %d is %.9g, expected %.9g", job_.push,
                        job_.pull, i, values[i], expected));
  }
  return absl::OkStatus();
}

}  // namespace sluice
