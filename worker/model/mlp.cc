// Linear layers with ReLU between: the multi-layer perceptron (inputs -> hidden... -> classes, softmax cross-entropy),
// softmax regression (one layer), logistic regression (one layer of one output, sigmoid cross-entropy). Weights [out,
// in]. A rank computes some of the layers: a stage of a pipeline, between which go the values after a layer and their
// gradients, [B, width].
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
  Mlp(const v1::ModelSpec& spec, std::vector<int64_t> widths, std::vector<std::string> prefixes, ParameterSpace space,
      Backend* backend, const ModelPart& part)
      : ModelBase(backend, space, ViewOf(spec, space, part.mesh, part.place.stage, 0), part),
        stage_(StageLayers(spec, part.mesh.pipeline)[part.place.stage]),
        widths_(std::move(widths)),
        prefixes_(std::move(prefixes)),
        logistic_(spec.has_logistic()) {}

  absl::Status Init();

  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>&) override {
    return absl::UnimplementedError("a classifier has no next token; logits of the last position are for token models");
  }

 private:
  // Of one microbatch.
  struct Activations {
    std::vector<Floats> values;  // [B, widths_[i]] from the stage's first layer's inputs on: features, hidden values
                                 // after ReLU, logits (then their gradient)
    Ints labels;                 // [B]
  };

  size_t layers() const { return widths_.size() - 1; }
  int64_t classes() const { return logistic_ ? 2 : widths_.back(); }
  bool is_first() const { return stage_.begin == 0; }
  bool is_last() const { return stage_.end == layers(); }
  // Inputs of layer i of the stage; outputs are those of layer i + 1.
  Floats Values(const Activations& at, size_t i) const { return at.values[i - stage_.begin]; }

  absl::Status Check(const Batch& batch, int64_t* count) const override;
  int64_t Positions(const Batch& batch) const override { return batch.rows; }
  absl::Status Reserve(int64_t rows, size_t microbatches) override;
  absl::Status Forward(size_t slot, const Batch& batch, bool gradient, const std::atomic<bool>* cancel) override;
  absl::Status Backward(size_t slot, const Batch& batch, bool first, bool last, const GradientSink& ready,
                        const std::atomic<bool>* cancel) override;

  const Range stage_;  // layers
  // Constant after Init.
  const std::vector<int64_t> widths_;
  const std::vector<std::string> prefixes_;
  const bool logistic_;
  std::vector<uint64_t> bias_, weight_;  // first elements, by layer
  // Grown when a batch has more rows, or a pass more microbatches, than any before.
  int64_t rows_ = 0;
  std::shared_ptr<Buffer> memory_;
  std::vector<Activations> at_;
  Floats even_, odd_;  // gradients of hidden values, by turns
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

absl::Status Mlp::Reserve(int64_t rows, size_t microbatches) {
  if (rows <= rows_ && microbatches <= at_.size()) return absl::OkStatus();
  rows = std::max(rows, rows_);
  microbatches = std::max(microbatches, at_.size());
  int64_t widest = 0;
  for (size_t i = 1; i < layers(); ++i) widest = std::max(widest, widths_[i]);
  const auto plan = [&](Arena* arena) {
    at_.clear();
    for (size_t m = 0; m < microbatches; ++m) {
      Activations& at = at_.emplace_back();
      for (size_t i = stage_.begin; i <= stage_.end; ++i) at.values.push_back(arena->Take(rows * widths_[i]));
      const Floats labels = arena->Take(rows);
      at.labels = {labels.buffer, labels.first};
    }
    even_ = arena->Take(rows * widest);
    odd_ = arena->Take(rows * widest);
  };
  Arena count(nullptr);
  plan(&count);
  at_.clear();
  rows_ = 0;
  memory_.reset();
  auto memory = backend().Allocate(count.bytes());
  if (!memory.ok()) {
    return Annotate(memory.status(), absl::StrCat("activations of ", microbatches, " x ", rows, " samples"));
  }
  memory_ = *std::move(memory);
  Arena arena(memory_.get());
  plan(&arena);
  rows_ = rows;
  return absl::OkStatus();
}

absl::Status Mlp::Forward(size_t slot, const Batch& batch, bool gradient, const std::atomic<bool>* cancel) {
  Activations& at = at_[slot];
  const int64_t n = batch.rows, inputs = widths_[stage_.begin];
  if (is_first()) {
    backend().Upload(stream(), batch.features.data(), at.values[0].buffer, at.values[0].first * 4, n * inputs * 4);
  } else {
    RETURN_IF_ERROR(ReceiveFrom(*part().stages, part().place.stage - 1, at.values[0], n * inputs));
  }
  for (size_t i = stage_.begin; i < stage_.end; ++i) {
    RETURN_IF_ERROR(Enter(i, cancel));
    const int64_t in = widths_[i], out = widths_[i + 1];
    const Floats x = Values(at, i), y = Values(at, i + 1);
    backend().Gemm(stream(), n, out, in, 1, {x, in}, {parameter(weight_[i]), in, true}, 0, {y, out});
    if (i + 1 < layers()) {
      backend().BiasRelu(stream(), n, out, y, parameter(bias_[i]));
    } else {
      backend().AddBias(stream(), n, out, y, parameter(bias_[i]));
    }
  }
  if (!is_last()) {
    return SendTo(*part().stages, part().place.stage + 1, at.values.back(), n * widths_[stage_.end]);
  }
  backend().Upload(stream(), batch.labels.data(), at.labels.buffer, at.labels.first * 4, n * 4);
  if (logistic_) {
    backend().SigmoidCrossEntropy(stream(), n, at.values.back(), at.labels, gradient, sums());
  } else {
    backend().CrossEntropy(stream(), n, widths_.back(), at.values.back(), at.labels, gradient, sums());
  }
  return absl::OkStatus();
}

absl::Status Mlp::Backward(size_t slot, const Batch& batch, bool first, bool last, const GradientSink& ready,
                           const std::atomic<bool>* cancel) {
  Activations& at = at_[slot];
  const int64_t rows = batch.rows;
  Floats d = at.values.back(), next = even_, other = odd_;
  if (!is_last()) {
    RETURN_IF_ERROR(ReceiveFrom(*part().stages, part().place.stage + 1, next, rows * widths_[stage_.end]));
    d = next;
    std::swap(next, other);
  }
  for (size_t i = stage_.end; i-- > stage_.begin;) {
    RETURN_IF_ERROR(CheckCancel(cancel));
    const int64_t in = widths_[i], out = widths_[i + 1];
    if (first) ClearVectors(i);
    if (i + 1 < layers()) {
      backend().BiasReluGradient(stream(), rows, out, Values(at, i + 1), d, gradient(bias_[i]));
    } else {
      backend().BiasGradient(stream(), rows, out, d, gradient(bias_[i]));
    }
    backend().Gemm(stream(), out, in, rows, 1, {d, out, true}, {Values(at, i), in}, first ? 0 : 1,
                   {gradient(weight_[i]), in});
    if (i > 0) {
      backend().Gemm(stream(), rows, in, out, 1, {d, out}, {parameter(weight_[i]), in}, 0, {next, in});
      d = next;
      std::swap(next, other);
    }
    if (last) RETURN_IF_ERROR(Leave(i, ready, 1));
  }
  if (!is_first()) RETURN_IF_ERROR(SendTo(*part().stages, part().place.stage - 1, d, rows * widths_[stage_.begin]));
  return last ? Deliver(ready, 0) : absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeClassifier(const v1::ModelSpec& spec, ParameterSpace space, Backend* backend,
                                                      const ModelPart& part) {
  std::vector<int64_t> widths;
  std::vector<std::string> prefixes;
  const std::optional<ClassifierSizes> sizes = ClassifierSizesOf(spec);
  if (!sizes.has_value()) return absl::InvalidArgumentError("model: expected mlp, softmax or logistic, found neither");
  widths.push_back(static_cast<int64_t>(sizes->inputs));
  for (const uint64_t width : spec.mlp().hidden()) widths.push_back(static_cast<int64_t>(width));
  widths.push_back(spec.has_logistic() ? 1 : static_cast<int64_t>(sizes->classes));
  for (size_t i = 0; i + 1 < widths.size(); ++i)
    prefixes.push_back(spec.has_mlp() ? absl::StrCat("layer.", i, ".") : "");
  auto model = std::make_unique<Mlp>(spec, std::move(widths), std::move(prefixes), std::move(space), backend, part);
  RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace sluice
