// Linear layers with ReLU between: the multi-layer perceptron (inputs -> hidden... -> classes, softmax cross-entropy),
// softmax regression (one layer), logistic regression (one layer of one output, sigmoid cross-entropy). Weights [out,
// in].
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/model/model_base.h"

namespace sluice {
namespace {

class Mlp : public ModelBase {
 public:
  // `widths`: inputs, hidden, outputs. `prefixes`: of the tensors' names, by layer.
  Mlp(std::vector<int64_t> widths, std::vector<std::string> prefixes, bool logistic, ParameterSpace space,
      Backend* backend)
      : ModelBase(backend, space, {{0, space.size()}}),
        widths_(std::move(widths)),
        prefixes_(std::move(prefixes)),
        logistic_(logistic) {}

  absl::Status Init();

  absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                          const GradientSink& ready, const std::atomic<bool>* cancel) override;
  absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>* cancel) override;
  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>&) override {
    return absl::UnimplementedError("a classifier has no next token; logits of the last position are for token models");
  }

 private:
  size_t layers() const { return widths_.size() - 1; }
  int64_t classes() const { return logistic_ ? 2 : widths_.back(); }

  absl::Status Check(const Batch& batch, int64_t* count) const;
  absl::Status Reserve(int64_t rows);
  absl::Status Loss(const Batch& batch, bool gradient, const std::atomic<bool>* cancel);
  absl::Status Backward(int64_t rows, bool first, bool last, const GradientSink& ready,
                        const std::atomic<bool>* cancel);
  absl::Status Passes(const std::vector<Batch>& microbatches, const std::vector<int64_t>& counts,
                      const GradientSink& ready, const std::atomic<bool>* cancel);

  // Constant after Init.
  const std::vector<int64_t> widths_;
  const std::vector<std::string> prefixes_;
  const bool logistic_;
  std::vector<uint64_t> bias_, weight_;  // first elements, by layer
  // Grown when a batch has more rows than any before.
  int64_t rows_ = 0;
  std::shared_ptr<Buffer> memory_;
  std::vector<Floats> values_;  // [B, widths_[i]]: features, hidden values after ReLU, logits (then their gradient)
  Floats even_, odd_;           // gradients of hidden values, by turns
  Ints labels_;                 // [B]
};

absl::Status Mlp::Init() {
  std::vector<Range> blocks;
  for (size_t i = 0; i < layers(); ++i) {
    const Tensor* bias = space().Find(prefixes_[i] + "bias");
    const Tensor* weight = space().Find(prefixes_[i] + "weight");
    if (bias == nullptr || weight == nullptr || weight->offset != bias->offset + bias->elements ||
        (i > 0 && blocks.back().end != bias->offset)) {
      return absl::InternalError(
          absl::StrCat("the parameter space does not have the order of common/model_layout.h at layer ", i));
    }
    bias_.push_back(bias->offset);
    weight_.push_back(weight->offset);
    blocks.push_back({bias->offset, weight->offset + weight->elements});
  }
  return ModelBase::Init(std::move(blocks));
}

absl::Status Mlp::Check(const Batch& batch, int64_t* count) const {
  *count = 0;
  if (batch.rows < 0) return absl::InvalidArgumentError("batch with a negative size");
  const size_t n = static_cast<size_t>(batch.rows);
  if (batch.features.size() != n * static_cast<size_t>(widths_.front()) || batch.labels.size() != n) {
    return absl::InvalidArgumentError(absl::StrCat("batch of ", n, " rows of ", widths_.front(), " features has ",
                                                   batch.features.size(), " features and ", batch.labels.size(),
                                                   " labels"));
  }
  for (size_t i = 0; i < n; ++i) {
    if (batch.labels[i] < -1 || batch.labels[i] >= classes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", i, ": label ", batch.labels[i], "; the model has ", classes(), " classes"));
    }
    *count += batch.labels[i] >= 0;
  }
  return absl::OkStatus();
}

absl::Status Mlp::Reserve(int64_t rows) {
  if (rows <= rows_) return absl::OkStatus();
  int64_t widest = 0;
  for (size_t i = 1; i < layers(); ++i) widest = std::max(widest, widths_[i]);
  const auto plan = [&](Arena* arena) {
    values_.clear();
    for (const int64_t width : widths_) values_.push_back(arena->Take(rows * width));
    even_ = arena->Take(rows * widest);
    odd_ = arena->Take(rows * widest);
    const Floats labels = arena->Take(rows);
    labels_ = {labels.buffer, labels.first};
  };
  Arena count(nullptr);
  plan(&count);
  rows_ = 0;
  memory_.reset();
  auto memory = backend().Allocate(count.bytes());
  if (!memory.ok()) return Annotate(memory.status(), absl::StrCat("activations of ", rows, " samples"));
  memory_ = *std::move(memory);
  Arena arena(memory_.get());
  plan(&arena);
  rows_ = rows;
  return absl::OkStatus();
}

absl::Status Mlp::Loss(const Batch& batch, bool gradient, const std::atomic<bool>* cancel) {
  const int64_t n = batch.rows;
  backend().Upload(stream(), batch.features.data(), values_[0].buffer, values_[0].first * 4, n * widths_[0] * 4);
  backend().Upload(stream(), batch.labels.data(), labels_.buffer, labels_.first * 4, n * 4);
  for (size_t i = 0; i < layers(); ++i) {
    RETURN_IF_ERROR(Enter(i, cancel));
    const int64_t in = widths_[i], out = widths_[i + 1];
    backend().Gemm(stream(), n, out, in, 1, {values_[i], in}, {parameter(weight_[i]), in, true}, 0,
                   {values_[i + 1], out});
    if (i + 1 < layers()) {
      backend().BiasRelu(stream(), n, out, values_[i + 1], parameter(bias_[i]));
    } else {
      backend().AddBias(stream(), n, out, values_[i + 1], parameter(bias_[i]));
    }
  }
  if (logistic_) {
    backend().SigmoidCrossEntropy(stream(), n, values_.back(), labels_, gradient, sums());
  } else {
    backend().CrossEntropy(stream(), n, widths_.back(), values_.back(), labels_, gradient, sums());
  }
  return absl::OkStatus();
}

absl::Status Mlp::Backward(int64_t rows, bool first, bool last, const GradientSink& ready,
                           const std::atomic<bool>* cancel) {
  Floats d = values_.back(), next = even_, other = odd_;
  for (size_t i = layers(); i-- > 0;) {
    RETURN_IF_ERROR(CheckCancel(cancel));
    const int64_t in = widths_[i], out = widths_[i + 1];
    if (first) ClearVectors(i);
    if (i + 1 < layers()) {
      backend().BiasReluGradient(stream(), rows, out, values_[i + 1], d, gradient(bias_[i]));
    } else {
      backend().BiasGradient(stream(), rows, out, d, gradient(bias_[i]));
    }
    backend().Gemm(stream(), out, in, rows, 1, {d, out, true}, {values_[i], in}, first ? 0 : 1,
                   {gradient(weight_[i]), in});
    if (i > 0) {
      backend().Gemm(stream(), rows, in, out, 1, {d, out}, {parameter(weight_[i]), in}, 0, {next, in});
      d = next;
      std::swap(next, other);
    }
    if (last) RETURN_IF_ERROR(Leave(i, ready, i > 0 ? 1 : 0));
  }
  return absl::OkStatus();
}

absl::Status Mlp::Passes(const std::vector<Batch>& microbatches, const std::vector<int64_t>& counts,
                         const GradientSink& ready, const std::atomic<bool>* cancel) {
  const size_t first = std::find_if(counts.begin(), counts.end(), [](int64_t n) { return n > 0; }) - counts.begin();
  size_t last = counts.size() - 1;
  while (counts[last] == 0) --last;
  for (size_t i = first; i <= last; ++i) {
    if (counts[i] == 0) continue;
    RETURN_IF_ERROR(Loss(microbatches[i], true, cancel));
    RETURN_IF_ERROR(Backward(microbatches[i].rows, i == first, i == last, ready, cancel));
  }
  return absl::OkStatus();
}

absl::StatusOr<LossSum> Mlp::ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                             const GradientSink& ready, const std::atomic<bool>* cancel) {
  std::vector<int64_t> counts(microbatches.size());
  int64_t rows = 0;
  for (size_t i = 0; i < microbatches.size(); ++i) {
    RETURN_IF_ERROR(Annotate(Check(microbatches[i], &counts[i]), absl::StrCat("microbatch ", i)));
    if (counts[i] > 0) rows = std::max(rows, microbatches[i].rows);
  }
  if (rows == 0) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  RETURN_IF_ERROR(Reserve(rows));
  BeginPass(&needed);
  return EndPass(Passes(microbatches, counts, ready, cancel));
}

absl::StatusOr<LossSum> Mlp::Evaluate(const Batch& batch, const std::atomic<bool>* cancel) {
  int64_t count = 0;
  RETURN_IF_ERROR(Check(batch, &count));
  if (count == 0) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  RETURN_IF_ERROR(Reserve(batch.rows));
  BeginPass(nullptr);
  return EndPass(Loss(batch, false, cancel));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeClassifier(const v1::ModelSpec& spec, ParameterSpace space,
                                                      Backend* backend) {
  std::vector<int64_t> widths;
  std::vector<std::string> prefixes;
  const std::optional<ClassifierSizes> sizes = ClassifierSizesOf(spec);
  if (!sizes.has_value()) return absl::InvalidArgumentError("model: expected mlp, softmax or logistic, found neither");
  widths.push_back(static_cast<int64_t>(sizes->inputs));
  for (const uint64_t width : spec.mlp().hidden()) widths.push_back(static_cast<int64_t>(width));
  widths.push_back(spec.has_logistic() ? 1 : static_cast<int64_t>(sizes->classes));
  for (size_t i = 0; i + 1 < widths.size(); ++i)
    prefixes.push_back(spec.has_mlp() ? absl::StrCat("layer.", i, ".") : "");
  auto model =
      std::make_unique<Mlp>(std::move(widths), std::move(prefixes), spec.has_logistic(), std::move(space), backend);
  RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace sluice
