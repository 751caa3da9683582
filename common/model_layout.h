// From a model's spec to its parameter space: all tensors laid end to end, element indices [0, P).
//
// Order and offsets follow from the model alone, never from degrees or servers; docs/parameter_space.md states them as
// a file format. Every tensor is stored so that tensor parallelism cuts it along its outermost dimension; within a
// layer all uncut tensors come first.
#ifndef SLUICE_COMMON_MODEL_LAYOUT_H_
#define SLUICE_COMMON_MODEL_LAYOUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

struct Range {
  uint64_t begin = 0, end = 0;  // elements [begin, end)
  uint64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

struct Initializer {
  enum Kind { kZeros, kOnes, kNormal, kUniform };
  Kind kind = kZeros;
  float scale = 0;  // kNormal: standard deviation; kUniform: values in [-scale, scale)
};

struct Tensor {
  std::string name;             // "h.0.attn.q.weight"
  std::vector<uint64_t> shape;  // outermost first, row-major
  uint64_t offset = 0;          // first element in the space
  uint64_t elements = 0;
  bool cut = false;  // along shape[0] by tensor parallelism
  Initializer init;

  bool decays() const { return shape.size() >= 2; }  // weight decay applies
};

// Constant after construction; thread-safe.
class ParameterSpace {
 public:
  explicit ParameterSpace(std::vector<Tensor> tensors);  // offsets are assigned here

  uint64_t size() const { return size_; }  // P
  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Index of the tensor that holds `element`; element < size().
  size_t TensorAt(uint64_t element) const;
  // nullptr where there is none.
  const Tensor* Find(const std::string& name) const;

 private:
  std::vector<Tensor> tensors_;
  std::vector<size_t> by_name_;  // indices into tensors_
  uint64_t size_ = 0;
};

// GPT-2: "wpe" [context, C], "wte" [vocabulary, C] (cut); per layer i, prefix "h.i.": ln_1.weight [C], ln_1.bias [C],
// ln_2.weight, ln_2.bias, attn.proj.bias [C], mlp.proj.bias [C]; then the cut ones attn.q.weight [C, C] (out, in),
// attn.k.weight, attn.v.weight, attn.q.bias [C], attn.k.bias, attn.v.bias, attn.proj.weight [C, C] (in, out),
// mlp.fc.weight [4C, C] (out, in), mlp.fc.bias [4C], mlp.proj.weight [4C, C] (in, out); last ln_f.weight, ln_f.bias.
// MLP: per layer i, prefix "layer.i.": bias [out], weight [out, in] (cut).
// Softmax regression: bias [classes], weight [classes, inputs] (cut). Logistic regression: bias [1], weight [1, inputs]
// (cut).
// Errors: INVALID_ARGUMENT where the spec's sizes are missing or the number of elements exceeds 2^62.
absl::StatusOr<ParameterSpace> MakeParameterSpace(const v1::ModelSpec& model);

// What models of dense samples (features and a class) have in common.
struct ClassifierSizes {
  std::string kind;      // "mlp", "softmax", "logistic"
  uint64_t inputs = 0;   // 0: not decided yet
  uint64_t classes = 0;  // 0: not decided yet; 2 with logistic
};
// nullopt for models of tokens, and where there is none.
std::optional<ClassifierSizes> ClassifierSizesOf(const v1::ModelSpec& model);

}  // namespace sluice

#endif  // SLUICE_COMMON_MODEL_LAYOUT_H_
