// GPT-2 (Radford and others, 2019): pre-layer-norm decoder, head tied to the token embedding.
//
// N = B T rows, C width, H heads, V vocabulary. Stored weights: q, k, v, fc as [out, in], the two proj as [in, out]
// (common/model_layout.h); q, k and v lie next to each other and serve as one [3C, C].
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/model/model_base.h"

namespace sluice {
namespace {

// First elements of a layer's tensors in the space.
struct LayerOffsets {
  uint64_t ln1_weight, ln1_bias, ln2_weight, ln2_bias, out_bias, down_bias;  // out: attn.proj, down: mlp.proj
  uint64_t qkv_weight, qkv_bias, out_weight, fc_weight, fc_bias, down_weight;
};

// What the backward pass needs of a layer's forward pass.
struct LayerActivations {
  Floats ln1, ln1_mean, ln1_rstd;  // [N, C], [N], [N]
  Floats qkv;                      // [B, T, 3, H, D]
  Floats attention, log_sum;       // [N, C], [B, H, T]
  Floats middle;                   // residual stream after attention, [N, C]
  Floats ln2, ln2_mean, ln2_rstd;  // [N, C], [N], [N]
  Floats fc, gelu;                 // [N, 4C] each
  Floats out;                      // residual stream after the layer, [N, C]
};

struct Activations {
  Floats embedded;  // [N, C]
  std::vector<LayerActivations> layers;
  Floats ln_f, ln_f_mean, ln_f_rstd;  // [N, C], [N], [N]
  Floats logits;                      // [N, V]; then their gradient
  // Gradients.
  Floats stream;         // of the residual stream, [N, C]
  Floats narrow;         // [N, C]
  Floats wide;           // [N, 4C]
  Ints tokens, targets;  // [N] each
};

class Gpt2 : public ModelBase {
 public:
  Gpt2(const v1::Gpt2Spec& spec, ParameterSpace space, Backend* backend)
      : ModelBase(backend, std::move(space)),
        layers_(spec.layers()),
        heads_(spec.heads()),
        width_(spec.width()),
        context_(spec.context()),
        vocabulary_(spec.vocabulary()),
        epsilon_(static_cast<float>(spec.layer_norm_epsilon() > 0 ? spec.layer_norm_epsilon() : 1e-5)) {}

  absl::Status Init();

  absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                          const GradientSink& ready, const std::atomic<bool>* cancel) override;
  absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>* cancel) override;
  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>& tokens) override;

 private:
  // Blocks in forward order: the embedding, each layer's attention (with all of the layer's small tensors) and MLP, the
  // last layer norm.
  size_t embedding_block() const { return 0; }
  size_t attention_block(int64_t layer) const { return 2 * static_cast<size_t>(layer) + 1; }
  size_t mlp_block(int64_t layer) const { return 2 * static_cast<size_t>(layer) + 2; }
  size_t last_block() const { return 2 * static_cast<size_t>(layers_) + 1; }

  absl::Status Check(const Batch& batch, int64_t* count) const;
  absl::Status Reserve(int64_t rows);
  Activations Plan(Arena* arena, int64_t rows) const;

  // From tokens on the device to the last layer's output.
  absl::Status Forward(int64_t batch, int64_t length, const std::atomic<bool>* cancel);
  absl::Status ForwardLayer(int64_t layer, int64_t batch, int64_t length, const std::atomic<bool>* cancel);
  absl::Status Backward(int64_t batch, int64_t length, bool first, bool last, const GradientSink& ready,
                        const std::atomic<bool>* cancel);
  absl::Status BackwardLayer(int64_t layer, int64_t batch, int64_t length, float beta, bool last,
                             const GradientSink& ready);
  absl::Status Loss(const Batch& batch, bool gradient, const std::atomic<bool>* cancel);
  absl::Status Passes(const std::vector<Batch>& microbatches, const std::vector<int64_t>& counts,
                      const GradientSink& ready, const std::atomic<bool>* cancel);

  // y [rows, out] = x [rows, in] w^T, w [out, in]; and with w [in, out].
  void LinearOutIn(int64_t rows, int64_t out, int64_t in, Floats x, uint64_t w, Floats y) {
    backend().Gemm(stream(), rows, out, in, 1, {x, in}, {parameter(w), in, true}, 0, {y, out});
  }
  void LinearInOut(int64_t rows, int64_t out, int64_t in, Floats x, uint64_t w, Floats y) {
    backend().Gemm(stream(), rows, out, in, 1, {x, in}, {parameter(w), out}, 0, {y, out});
  }
  // dw [rows_w, cols_w] = left^T right (+ beta dw), both of n rows.
  void WeightGradient(int64_t n, int64_t rows_w, int64_t cols_w, Floats left, Floats right, uint64_t w, float beta) {
    backend().Gemm(stream(), rows_w, cols_w, n, 1, {left, rows_w, true}, {right, cols_w}, beta, {gradient(w), cols_w});
  }

  const int64_t layers_, heads_, width_, context_, vocabulary_;
  const float epsilon_;
  // Constant after Init.
  uint64_t wpe_ = 0, wte_ = 0, ln_f_weight_ = 0, ln_f_bias_ = 0;
  std::vector<LayerOffsets> offsets_;
  // Grown when a batch has more rows than any before.
  int64_t rows_ = 0;
  std::shared_ptr<Buffer> memory_;
  Activations at_;
};

absl::Status Gpt2::Init() {
  std::string missing;
  const auto find = [&](const std::string& name) -> uint64_t {
    const Tensor* tensor = space().Find(name);
    if (tensor == nullptr) absl::StrAppend(&missing, " ", name);
    return tensor == nullptr ? 0 : tensor->offset;
  };
  const uint64_t c = static_cast<uint64_t>(width_);
  wpe_ = find("wpe");
  wte_ = find("wte");
  ln_f_weight_ = find("ln_f.weight");
  ln_f_bias_ = find("ln_f.bias");
  std::vector<Range> blocks(last_block() + 1);
  bool joined = true;
  for (int64_t i = 0; i < layers_; ++i) {
    const std::string h = absl::StrCat("h.", i, ".");
    offsets_.push_back({find(h + "ln_1.weight"), find(h + "ln_1.bias"), find(h + "ln_2.weight"), find(h + "ln_2.bias"),
                        find(h + "attn.proj.bias"), find(h + "mlp.proj.bias"), find(h + "attn.q.weight"),
                        find(h + "attn.q.bias"), find(h + "attn.proj.weight"), find(h + "mlp.fc.weight"),
                        find(h + "mlp.fc.bias"), find(h + "mlp.proj.weight")});
    const LayerOffsets& at = offsets_.back();
    joined = joined && find(h + "attn.k.weight") == at.qkv_weight + c * c &&
             find(h + "attn.v.weight") == at.qkv_weight + 2 * c * c && find(h + "attn.k.bias") == at.qkv_bias + c &&
             find(h + "attn.v.bias") == at.qkv_bias + 2 * c;
    blocks[attention_block(i)] = {at.ln1_weight, at.fc_weight};
    blocks[mlp_block(i)] = {at.fc_weight, at.down_weight + 4 * c * c};
  }
  blocks[embedding_block()] = {0, blocks.size() > 2 ? blocks[1].begin : ln_f_weight_};
  blocks[last_block()] = {ln_f_weight_, space().size()};
  for (size_t i = 1; i < blocks.size(); ++i) joined = joined && blocks[i].begin == blocks[i - 1].end;
  if (!missing.empty() || !joined) {
    return absl::InternalError(absl::StrCat("the parameter space does not have the order of common/model_layout.h",
                                            missing.empty() ? "" : "; missing:", missing));
  }
  return ModelBase::Init(std::move(blocks));
}

absl::Status Gpt2::Check(const Batch& batch, int64_t* count) const {
  *count = 0;
  if (batch.rows < 0 || batch.length < 0) return absl::InvalidArgumentError("batch with a negative size");
  if (batch.length > context_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a row of ", batch.length, " tokens is longer than the model's context of ", context_));
  }
  const size_t n = static_cast<size_t>(batch.rows * batch.length);
  if (batch.tokens.size() != n || batch.targets.size() != n) {
    return absl::InvalidArgumentError(absl::StrCat("batch of ", batch.rows, " rows of ", batch.length, " has ",
                                                   batch.tokens.size(), " tokens and ", batch.targets.size(),
                                                   " targets"));
  }
  for (size_t i = 0; i < n; ++i) {
    const int64_t token = batch.tokens[i], target = batch.targets[i];
    if (token < 0 || token >= vocabulary_ || target < -1 || target >= vocabulary_) {
      return absl::InvalidArgumentError(absl::StrCat("row ", i / batch.length, ", position ", i % batch.length,
                                                     ": token ", token, ", target ", target, "; the vocabulary has ",
                                                     vocabulary_));
    }
    *count += target >= 0;
  }
  return absl::OkStatus();
}

Activations Gpt2::Plan(Arena* arena, int64_t rows) const {
  Activations at;
  at.embedded = arena->Take(rows * width_);
  for (int64_t i = 0; i < layers_; ++i) {
    LayerActivations layer;
    layer.ln1 = arena->Take(rows * width_);
    layer.ln1_mean = arena->Take(rows);
    layer.ln1_rstd = arena->Take(rows);
    layer.qkv = arena->Take(rows * 3 * width_);
    layer.attention = arena->Take(rows * width_);
    layer.log_sum = arena->Take(rows * heads_);
    layer.middle = arena->Take(rows * width_);
    layer.ln2 = arena->Take(rows * width_);
    layer.ln2_mean = arena->Take(rows);
    layer.ln2_rstd = arena->Take(rows);
    layer.fc = arena->Take(rows * 4 * width_);
    layer.gelu = arena->Take(rows * 4 * width_);
    layer.out = arena->Take(rows * width_);
    at.layers.push_back(layer);
  }
  at.ln_f = arena->Take(rows * width_);
  at.ln_f_mean = arena->Take(rows);
  at.ln_f_rstd = arena->Take(rows);
  at.logits = arena->Take(rows * vocabulary_);
  at.stream = arena->Take(rows * width_);
  at.narrow = arena->Take(rows * width_);
  at.wide = arena->Take(rows * 4 * width_);
  const Floats tokens = arena->Take(rows), targets = arena->Take(rows);
  at.tokens = {tokens.buffer, tokens.first};
  at.targets = {targets.buffer, targets.first};
  return at;
}

absl::Status Gpt2::Reserve(int64_t rows) {
  if (rows <= rows_) return absl::OkStatus();
  Arena count(nullptr);
  Plan(&count, rows);
  rows_ = 0;
  memory_.reset();
  auto memory = backend().Allocate(count.bytes());
  if (!memory.ok()) return Annotate(memory.status(), absl::StrCat("activations of ", rows, " tokens"));
  memory_ = *std::move(memory);
  Arena arena(memory_.get());
  at_ = Plan(&arena, rows);
  rows_ = rows;
  return absl::OkStatus();
}

absl::Status Gpt2::Forward(int64_t batch, int64_t length, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(Enter(embedding_block(), cancel));
  backend().Embedding(stream(), batch, length, width_, at_.tokens, {0, vocabulary_}, parameter(wte_), parameter(wpe_),
                      at_.embedded);
  for (int64_t i = 0; i < layers_; ++i) {
    RETURN_IF_ERROR(ForwardLayer(i, batch, length, cancel));
  }
  return Enter(last_block(), cancel);
}

absl::Status Gpt2::ForwardLayer(int64_t layer, int64_t batch, int64_t length, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(Enter(attention_block(layer), cancel));
  const int64_t n = batch * length, c = width_;
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at_.layers[layer];
  const Floats in = layer == 0 ? at_.embedded : at_.layers[layer - 1].out;
  Backend& b = backend();
  b.LayerNorm(stream(), n, c, epsilon_, in, parameter(w.ln1_weight), parameter(w.ln1_bias), a.ln1, a.ln1_mean,
              a.ln1_rstd);
  LinearOutIn(n, 3 * c, c, a.ln1, w.qkv_weight, a.qkv);
  b.AddBias(stream(), n, 3 * c, a.qkv, parameter(w.qkv_bias));
  b.Attention(stream(), {batch, length, heads_, c / heads_}, a.qkv, a.attention, a.log_sum);
  LinearInOut(n, c, c, a.attention, w.out_weight, a.middle);
  b.AddBiasResidual(stream(), n, c, in, a.middle, parameter(w.out_bias), a.middle);
  b.LayerNorm(stream(), n, c, epsilon_, a.middle, parameter(w.ln2_weight), parameter(w.ln2_bias), a.ln2, a.ln2_mean,
              a.ln2_rstd);
  RETURN_IF_ERROR(Enter(mlp_block(layer), cancel));
  LinearOutIn(n, 4 * c, c, a.ln2, w.fc_weight, a.fc);
  b.BiasGelu(stream(), n, 4 * c, a.fc, parameter(w.fc_bias), a.gelu);
  LinearInOut(n, c, 4 * c, a.gelu, w.down_weight, a.out);
  b.AddBiasResidual(stream(), n, c, a.middle, a.out, parameter(w.down_bias), a.out);
  return absl::OkStatus();
}

absl::Status Gpt2::Loss(const Batch& batch, bool gradient, const std::atomic<bool>* cancel) {
  const int64_t n = batch.rows * batch.length;
  backend().Upload(stream(), batch.tokens.data(), at_.tokens.buffer, at_.tokens.first * 4, n * 4);
  backend().Upload(stream(), batch.targets.data(), at_.targets.buffer, at_.targets.first * 4, n * 4);
  RETURN_IF_ERROR(Forward(batch.rows, batch.length, cancel));
  const Floats out = layers_ == 0 ? at_.embedded : at_.layers.back().out;
  backend().LayerNorm(stream(), n, width_, epsilon_, out, parameter(ln_f_weight_), parameter(ln_f_bias_), at_.ln_f,
                      at_.ln_f_mean, at_.ln_f_rstd);
  LinearOutIn(n, vocabulary_, width_, at_.ln_f, wte_, at_.logits);
  backend().CrossEntropy(stream(), n, vocabulary_, at_.logits, at_.targets, gradient, sums());
  return absl::OkStatus();
}

absl::Status Gpt2::Backward(int64_t batch, int64_t length, bool first, bool last, const GradientSink& ready,
                            const std::atomic<bool>* cancel) {
  const int64_t n = batch * length, c = width_;
  const float beta = first ? 0 : 1;
  const Floats out = layers_ == 0 ? at_.embedded : at_.layers.back().out;
  if (first) {
    for (size_t block = 0; block <= last_block(); ++block) ClearVectors(block);
    backend().Fill(stream(), gradient(wpe_), context_ * c, 0.0f);  // shorter rows leave the rest of it at zero
  }
  WeightGradient(n, vocabulary_, c, at_.logits, at_.ln_f, wte_, beta);
  LinearInOut(n, c, vocabulary_, at_.logits, wte_, at_.narrow);
  backend().Fill(stream(), at_.stream, n * c, 0.0f);
  backend().LayerNormGradient(stream(), n, c, out, parameter(ln_f_weight_), at_.ln_f_mean, at_.ln_f_rstd, at_.narrow,
                              at_.stream, gradient(ln_f_weight_), gradient(ln_f_bias_));
  if (last) RETURN_IF_ERROR(Leave(last_block(), ready, 1));
  for (int64_t i = layers_ - 1; i >= 0; --i) {
    RETURN_IF_ERROR(CheckCancel(cancel));
    RETURN_IF_ERROR(BackwardLayer(i, batch, length, beta, last, ready));
  }
  backend().EmbeddingGradient(stream(), batch, length, c, at_.tokens, {0, vocabulary_}, at_.stream, gradient(wte_),
                              gradient(wpe_));
  return last ? Leave(embedding_block(), ready, 0) : absl::OkStatus();
}

absl::Status Gpt2::BackwardLayer(int64_t layer, int64_t batch, int64_t length, float beta, bool last,
                                 const GradientSink& ready) {
  const int64_t n = batch * length, c = width_;
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at_.layers[layer];
  const Floats in = layer == 0 ? at_.embedded : at_.layers[layer - 1].out;
  const Floats d = at_.stream;
  Backend& b = backend();
  // out = middle + gelu(ln2(middle) fc^T + bias) down + bias
  b.BiasGradient(stream(), n, c, d, gradient(w.down_bias));
  WeightGradient(n, 4 * c, c, a.gelu, d, w.down_weight, beta);
  LinearOutIn(n, 4 * c, c, d, w.down_weight, at_.wide);
  b.BiasGeluGradient(stream(), n, 4 * c, a.fc, at_.wide, gradient(w.fc_bias));
  WeightGradient(n, 4 * c, c, at_.wide, a.ln2, w.fc_weight, beta);
  LinearInOut(n, c, 4 * c, at_.wide, w.fc_weight, at_.narrow);
  if (last) RETURN_IF_ERROR(Leave(mlp_block(layer), ready, 1));  // two thirds of the layer are on their way early
  b.LayerNormGradient(stream(), n, c, a.middle, parameter(w.ln2_weight), a.ln2_mean, a.ln2_rstd, at_.narrow, d,
                      gradient(w.ln2_weight), gradient(w.ln2_bias));
  // middle = in + attention(ln1(in) qkv^T + bias) out + bias
  b.BiasGradient(stream(), n, c, d, gradient(w.out_bias));
  WeightGradient(n, c, c, a.attention, d, w.out_weight, beta);
  LinearOutIn(n, c, c, d, w.out_weight, at_.narrow);
  b.AttentionGradient(stream(), {batch, length, heads_, c / heads_}, a.qkv, a.attention, a.log_sum, at_.narrow,
                      at_.wide);
  b.BiasGradient(stream(), n, 3 * c, at_.wide, gradient(w.qkv_bias));
  WeightGradient(n, 3 * c, c, at_.wide, a.ln1, w.qkv_weight, beta);
  LinearInOut(n, c, 3 * c, at_.wide, w.qkv_weight, at_.narrow);
  b.LayerNormGradient(stream(), n, c, in, parameter(w.ln1_weight), a.ln1_mean, a.ln1_rstd, at_.narrow, d,
                      gradient(w.ln1_weight), gradient(w.ln1_bias));
  return last ? Leave(attention_block(layer), ready, 1) : absl::OkStatus();
}

absl::Status Gpt2::Passes(const std::vector<Batch>& microbatches, const std::vector<int64_t>& counts,
                          const GradientSink& ready, const std::atomic<bool>* cancel) {
  const size_t first = std::find_if(counts.begin(), counts.end(), [](int64_t n) { return n > 0; }) - counts.begin();
  size_t last = counts.size() - 1;
  while (counts[last] == 0) --last;
  for (size_t i = first; i <= last; ++i) {
    if (counts[i] == 0) continue;
    const Batch& batch = microbatches[i];
    RETURN_IF_ERROR(Loss(batch, true, cancel));
    RETURN_IF_ERROR(Backward(batch.rows, batch.length, i == first, i == last, ready, cancel));
  }
  return absl::OkStatus();
}

absl::StatusOr<LossSum> Gpt2::ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                              const GradientSink& ready, const std::atomic<bool>* cancel) {
  std::vector<int64_t> counts(microbatches.size());
  int64_t rows = 0;
  for (size_t i = 0; i < microbatches.size(); ++i) {
    RETURN_IF_ERROR(Annotate(Check(microbatches[i], &counts[i]), absl::StrCat("microbatch ", i)));
    if (counts[i] > 0) rows = std::max(rows, microbatches[i].rows * microbatches[i].length);
  }
  if (rows == 0) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  RETURN_IF_ERROR(Reserve(rows));
  BeginPass(&needed);
  return EndPass(Passes(microbatches, counts, ready, cancel));
}

absl::StatusOr<LossSum> Gpt2::Evaluate(const Batch& batch, const std::atomic<bool>* cancel) {
  int64_t count = 0;
  RETURN_IF_ERROR(Check(batch, &count));
  if (count == 0) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  RETURN_IF_ERROR(Reserve(batch.rows * batch.length));
  BeginPass(nullptr);
  return EndPass(Loss(batch, false, cancel));
}

absl::StatusOr<std::vector<float>> Gpt2::NextLogits(const std::vector<int32_t>& tokens) {
  Batch batch;
  batch.rows = 1;
  batch.length = static_cast<int64_t>(tokens.size());
  batch.tokens = tokens;
  batch.targets.assign(tokens.size(), -1);
  if (tokens.empty()) return absl::InvalidArgumentError("logits need at least one token, found none");
  int64_t count = 0;
  RETURN_IF_ERROR(Check(batch, &count));
  RETURN_IF_ERROR(Reserve(batch.length));
  std::vector<float> logits(static_cast<size_t>(vocabulary_));
  BeginPass(nullptr);
  backend().Upload(stream(), tokens.data(), at_.tokens.buffer, at_.tokens.first * 4, batch.length * 4);
  absl::Status status = Forward(1, batch.length, nullptr);
  const Floats out = (layers_ == 0 ? at_.embedded : at_.layers.back().out) + (batch.length - 1) * width_;
  backend().LayerNorm(stream(), 1, width_, epsilon_, out, parameter(ln_f_weight_), parameter(ln_f_bias_), at_.ln_f,
                      at_.ln_f_mean, at_.ln_f_rstd);
  LinearOutIn(1, vocabulary_, width_, at_.ln_f, wte_, at_.logits);
  backend().Download(stream(), at_.logits.buffer, at_.logits.first * 4, vocabulary_ * 4, logits.data());
  RETURN_IF_ERROR(EndPass(status).status());
  return logits;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeGpt2(const v1::Gpt2Spec& spec, ParameterSpace space, Backend* backend) {
  if (spec.heads() == 0 || spec.width() % spec.heads() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.gpt2: heads (", spec.heads(), ") must divide width (", spec.width(), ")"));
  }
  auto model = std::make_unique<Gpt2>(spec, std::move(space), backend);
  RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace sluice
