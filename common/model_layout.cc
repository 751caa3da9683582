#include "common/model_layout.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr uint64_t kMaxElements = uint64_t{1} << 62;
constexpr uint32_t kMaxLayers = 1024;

// Collects tensors and refuses the one with which the space would grow past 2^62 elements.
class Builder {
 public:
  absl::Status Add(std::string name, std::vector<uint64_t> shape, bool cut, Initializer init) {
    uint64_t elements = 1;
    for (uint64_t dimension : shape) {
      if (__builtin_mul_overflow(elements, dimension, &elements) || elements > kMaxElements) return TooLarge(name);
    }
    if (elements > kMaxElements - total_) return TooLarge(name);
    total_ += elements;
    tensors_.push_back({std::move(name), std::move(shape), 0, elements, cut, init});
    return absl::OkStatus();
  }

  ParameterSpace Build() { return ParameterSpace(std::move(tensors_)); }

 private:
  static absl::Status TooLarge(const std::string& name) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: with tensor ", name, " it has more than 2^62 elements; make it smaller"));
  }

  std::vector<Tensor> tensors_;
  uint64_t total_ = 0;
};

absl::Status Missing(const char* field, const char* hint) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is 0; ", hint));
}

absl::Status TooManyLayers(const char* field, uint64_t found) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": found ", found, " layers, allowed at most ", kMaxLayers));
}

absl::StatusOr<ParameterSpace> MakeGpt2(const v1::Gpt2Spec& spec) {
  if (spec.layers() == 0) return Missing("model.gpt2.layers", "expected at least 1");
  if (spec.layers() > kMaxLayers) return TooManyLayers("model.gpt2.layers", spec.layers());
  if (spec.width() == 0) return Missing("model.gpt2.width", "expected at least 1");
  if (spec.context() == 0) return Missing("model.gpt2.context", "expected at least 1");
  if (spec.vocabulary() == 0) return Missing("model.gpt2.vocabulary", "set it, or let the client read the data");

  const uint64_t c = spec.width();
  const Initializer zeros = {Initializer::kZeros, 0};
  const Initializer ones = {Initializer::kOnes, 0};
  const Initializer normal = {Initializer::kNormal, 0.02f};
  // Layers that add to the residual stream start smaller, so that its variance does not grow with depth (GPT-2).
  Initializer residual = normal;
  if (!spec.has_scaled_residual_init() || spec.scaled_residual_init()) {
    residual.scale = static_cast<float>(0.02 / std::sqrt(2.0 * spec.layers()));
  }
  const bool kWhole = false, kCut = true;

  Builder builder;
  RETURN_IF_ERROR(builder.Add("wpe", {spec.context(), c}, kWhole, normal));
  RETURN_IF_ERROR(builder.Add("wte", {spec.vocabulary(), c}, kCut, normal));
  for (uint32_t i = 0; i < spec.layers(); ++i) {
    const std::string h = absl::StrCat("h.", i, ".");
    RETURN_IF_ERROR(builder.Add(h + "ln_1.weight", {c}, kWhole, ones));
    RETURN_IF_ERROR(builder.Add(h + "ln_1.bias", {c}, kWhole, zeros));
    RETURN_IF_ERROR(builder.Add(h + "ln_2.weight", {c}, kWhole, ones));
    RETURN_IF_ERROR(builder.Add(h + "ln_2.bias", {c}, kWhole, zeros));
    RETURN_IF_ERROR(builder.Add(h + "attn.proj.bias", {c}, kWhole, zeros));
    RETURN_IF_ERROR(builder.Add(h + "mlp.proj.bias", {c}, kWhole, zeros));
    for (const char* part : {"q", "k", "v"}) {
      RETURN_IF_ERROR(builder.Add(absl::StrCat(h, "attn.", part, ".weight"), {c, c}, kCut, normal));  // [out, in]
    }
    for (const char* part : {"q", "k", "v"}) {
      RETURN_IF_ERROR(builder.Add(absl::StrCat(h, "attn.", part, ".bias"), {c}, kCut, zeros));
    }
    RETURN_IF_ERROR(builder.Add(h + "attn.proj.weight", {c, c}, kCut, residual));     // [in, out]
    RETURN_IF_ERROR(builder.Add(h + "mlp.fc.weight", {4 * c, c}, kCut, normal));      // [out, in]
    RETURN_IF_ERROR(builder.Add(h + "mlp.fc.bias", {4 * c}, kCut, zeros));            // [out]
    RETURN_IF_ERROR(builder.Add(h + "mlp.proj.weight", {4 * c, c}, kCut, residual));  // [in, out]
  }
  RETURN_IF_ERROR(builder.Add("ln_f.weight", {c}, kWhole, ones));
  RETURN_IF_ERROR(builder.Add("ln_f.bias", {c}, kWhole, zeros));
  return builder.Build();
}

absl::StatusOr<ParameterSpace> MakeMlp(const v1::MlpSpec& spec) {
  if (spec.inputs() == 0) return Missing("model.mlp.inputs", "set it, or let the client read the data");
  if (spec.classes() == 0) return Missing("model.mlp.classes", "set it, or let the client read the data");
  if (spec.hidden_size() > static_cast<int>(kMaxLayers) - 1) {
    return TooManyLayers("model.mlp.hidden", static_cast<uint64_t>(spec.hidden_size()) + 1);
  }
  Builder builder;
  uint64_t in = spec.inputs();
  for (int i = 0; i <= spec.hidden_size(); ++i) {
    const uint64_t out = i < spec.hidden_size() ? spec.hidden(i) : spec.classes();
    if (out == 0) return Missing(absl::StrCat("model.mlp.hidden[", i, "]").c_str(), "expected at least 1");
    // Uniform with variance 1 / (3 in), PyTorch's default for a linear layer.
    const Initializer uniform = {Initializer::kUniform, static_cast<float>(1.0 / std::sqrt(static_cast<double>(in)))};
    const std::string layer = absl::StrCat("layer.", i, ".");
    RETURN_IF_ERROR(builder.Add(layer + "bias", {out}, false, uniform));
    RETURN_IF_ERROR(builder.Add(layer + "weight", {out, in}, true, uniform));
    in = out;
  }
  return builder.Build();
}

// One linear layer that begins at zero: its loss is convex, so there is no symmetry to break.
absl::StatusOr<ParameterSpace> MakeRegression(const std::string& kind, uint64_t inputs, uint64_t outputs) {
  constexpr char kHint[] = "set it, or let the client read the data";
  if (inputs == 0) return Missing(absl::StrCat("model.", kind, ".inputs").c_str(), kHint);
  if (outputs == 0) return Missing(absl::StrCat("model.", kind, ".classes").c_str(), kHint);
  const Initializer zeros = {Initializer::kZeros, 0};
  Builder builder;
  RETURN_IF_ERROR(builder.Add("bias", {outputs}, false, zeros));
  RETURN_IF_ERROR(builder.Add("weight", {outputs, inputs}, true, zeros));
  return builder.Build();
}

}  // namespace

ParameterSpace::ParameterSpace(std::vector<Tensor> tensors) : tensors_(std::move(tensors)), by_name_(tensors_.size()) {
  for (Tensor& tensor : tensors_) {
    tensor.offset = size_;
    size_ += tensor.elements;
  }
  std::iota(by_name_.begin(), by_name_.end(), size_t{0});
  std::sort(by_name_.begin(), by_name_.end(),
            [this](size_t a, size_t b) { return tensors_[a].name < tensors_[b].name; });
}

size_t ParameterSpace::TensorAt(uint64_t element) const {
  // The last tensor that begins at or before the element: an empty one that begins there too comes earlier.
  const auto after = std::upper_bound(tensors_.begin(), tensors_.end(), element,
                                      [](uint64_t e, const Tensor& tensor) { return e < tensor.offset; });
  return static_cast<size_t>(after - tensors_.begin()) - 1;
}

const Tensor* ParameterSpace::Find(const std::string& name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [this](size_t i, const std::string& n) { return tensors_[i].name < n; });
  return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

absl::StatusOr<ParameterSpace> MakeParameterSpace(const v1::ModelSpec& model) {
  switch (model.kind_case()) {
    case v1::ModelSpec::kGpt2:
      return MakeGpt2(model.gpt2());
    case v1::ModelSpec::kMlp:
      return MakeMlp(model.mlp());
    case v1::ModelSpec::kSoftmax:
      return MakeRegression("softmax", model.softmax().inputs(), model.softmax().classes());
    case v1::ModelSpec::kLogistic:
      return MakeRegression("logistic", model.logistic().inputs(), 1);
    case v1::ModelSpec::KIND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("model: none is set; expected one of gpt2, mlp, softmax, logistic");
}

std::optional<ClassifierSizes> ClassifierSizesOf(const v1::ModelSpec& model) {
  if (model.has_mlp()) return ClassifierSizes{"mlp", model.mlp().inputs(), model.mlp().classes()};
  if (model.has_softmax()) return ClassifierSizes{"softmax", model.softmax().inputs(), model.softmax().classes()};
  if (model.has_logistic()) return ClassifierSizes{"logistic", model.logistic().inputs(), 2};
  return std::nullopt;
}

}  // namespace sluice
