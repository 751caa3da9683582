// GPT-2 (Radford and others, 2019): pre-layer-norm decoder, head tied to the token embedding. The part of it that one
// rank computes: some layers (a stage of a pipeline), and of these some heads, some of the MLP's inner width and some
// rows of the embedding (a tensor rank; Shoeybi and others 2019, arXiv:1909.08053).
//
// N = B T rows, C width, H heads, V vocabulary; c = C/T, v: this tensor rank's part of C and V. Stored weights: q, k,
// v, fc as [out, in], the two proj as [in, out] (common/model_layout.h); q, k and v lie next to each other and serve as
// one [3C, C] where there is one tensor rank.
//
// Dropout, in training: after the embedding, of the attention's weights, and of what each projection adds to the
// residual stream.
//
// Between tensor ranks: sums of [N, C] after the embedding, each attention and each MLP forward, before each of them
// and the head backward; once the parts of the loss. Between stages: [N, C], forward and backward, for each microbatch.
//
// With sequence parallelism (Korthikanti and others 2022, arXiv:2205.05198) tensor rank t has only its own rows of the
// residual stream, n = PartOf(N, T, t), and normalizes, drops out and adds these alone. What enters a tensor-parallel
// part is gathered, its sums are scattered, and the same backward: each all-reduce becomes its two halves, some layers
// apart, with the same bytes. Gradients of what all tensor ranks hold are then partial sums (common/mesh.h has them all
// push; the positions' are the first one's, the others have zeros). Between stages goes [n, C], to the same tensor rank
// of the next one.
#ifndef SLUICE_WORKER_MODEL_GPT2_H_
#define SLUICE_WORKER_MODEL_GPT2_H_

#include <memory>
#include <string>
#include <vector>

#include "worker/model/model_base.h"

namespace sluice {

class Gpt2 : public ModelBase {
 public:
  Gpt2(const v1::ModelSpec& spec, ParameterSpace space, Backend* backend, const ModelPart& part);

  absl::Status Init();

  int64_t activation_bytes() const override { return memory_ == nullptr ? 0 : memory_->bytes(); }
  absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>& tokens) override;

 private:
  // First elements of a layer's tensors in the space; of those that are cut, of this rank's rows.
  struct LayerOffsets {
    uint64_t ln1_weight, ln1_bias, ln2_weight, ln2_bias, out_bias, down_bias;  // out: attn.proj, down: mlp.proj
    uint64_t qkv_weight, qkv_bias, out_weight, fc_weight, fc_bias, down_weight;
  };
  // What the backward pass needs of a layer's forward pass.
  struct LayerActivations {
    Floats ln1, ln1_mean, ln1_rstd;  // [N, C], [n], [n]
    Floats qkv;                      // [B, T, 3, heads of this rank, D]
    Floats attention, log_sum;       // [N, c], [B, heads of this rank, T]
    Floats middle;                   // residual stream after attention, [n, C]
    Floats ln2, ln2_mean, ln2_rstd;  // [N, C], [n], [n]
    Floats fc, gelu;                 // [N, 4c] each
  };
  // Of one microbatch. Without sequence parallelism n is N.
  struct Activations {
    std::vector<Floats> residual;          // stream before each layer of the stage and after the last, [n, C] each
    std::vector<LayerActivations> layers;  // of the stage; with recomputation all are the same memory
    Floats ln_f, ln_f_mean, ln_f_rstd;     // last stage: [N, C], [n], [n]
    Floats logits;                         // last stage: [N, v]; then their gradient
    Ints tokens, targets;                  // [N] each
    bool training = false;                 // of the forward pass under way or done: with dropout
  };
  // Used by one microbatch after the other. wide: the gradient of qkv with that of the attention behind it as well.
  struct Scratch {
    Floats stream;  // gradient of the residual stream, [n, C]
    Floats narrow;  // [N, C]
    Floats wide;    // [N, 4c]
    Floats parts;   // of the loss, by tensor rank, [T, N, 4]
    Floats ones;    // [N]
  };

  // Blocks in the order of the space: the embedding, each layer's attention (with all of the layer's small tensors) and
  // MLP, the last layer norm.
  static constexpr size_t kEmbedding = 0;
  size_t attention_block(size_t layer) const { return 2 * layer + 1; }
  size_t mlp_block(size_t layer) const { return 2 * layer + 2; }
  size_t last_block() const { return 2 * all_layers_ + 1; }
  bool is_first() const { return part().place.stage == 0; }
  bool is_last() const { return part().place.stage + 1 == part().mesh.pipeline; }
  bool sequence() const { return part().mesh.sequence_parallel; }
  // This rank's rows of the n between the tensor-parallel parts.
  TableRows Own(int64_t n) const;
  bool leads() const { return part().place.tensor == 0; }  // adds what the stage's tensor ranks add once

  absl::Status Check(const Batch& batch, int64_t* count) const override;
  int64_t Positions(const Batch& batch) const override { return batch.rows * batch.length; }
  absl::Status Reserve(int64_t rows, size_t microbatches) override;
  void Plan(Arena* arena, int64_t rows, size_t microbatches);

  // The stage's part: from tokens, or what the stage before sends, to what it sends on, or the loss.
  absl::Status Forward(size_t slot, const Batch& batch, bool gradient, const std::atomic<bool>* cancel) override;
  absl::Status Embed(Activations& at, const Batch& batch, const std::atomic<bool>* cancel);
  absl::Status Loss(Activations& at, int64_t n, bool gradient, const std::atomic<bool>* cancel);
  absl::Status Backward(size_t slot, const Batch& batch, bool first, bool last, const GradientSink& ready,
                        const std::atomic<bool>* cancel) override;
  absl::Status LossBackward(Activations& at, int64_t n, bool first, bool last, const GradientSink& ready);
  // gpt2_layer.cc. `layer` counts from the stage's first.
  absl::Status ForwardLayer(size_t layer, Activations& at, const Batch& batch, const std::atomic<bool>* cancel);
  // What the backward pass needs of it, from the residual stream before it.
  absl::Status FillLayer(size_t layer, Activations& at, const Batch& batch, const std::atomic<bool>* cancel);
  absl::Status BackwardLayer(size_t layer, Activations& at, const Batch& batch, float beta, bool last,
                             const GradientSink& ready, const std::atomic<bool>* cancel);
  void ForwardQkv(const LayerOffsets& w, const LayerActivations& a, int64_t n);
  void BackwardQkv(const LayerOffsets& w, const LayerActivations& a, int64_t n, float beta);
  // Of this round and pass at a site of the model ("h.3.attn").
  DropoutMask MaskAt(const std::string& site, const Activations& at, const Batch& batch) const;
  std::string Site(size_t layer, const char* name) const;

  // x [N, C]: own rows become the sum of the tensor ranks'; all rows become what their owners have.
  absl::Status SumToOwn(Floats x, int64_t n);
  absl::Status GatherOwn(Floats x, int64_t n);
  // The residual stream x [n, C] into a tensor-parallel part, normalized: y [N, C].
  absl::Status Normalize(int64_t n, Floats x, uint64_t weight, uint64_t bias, Floats y, Floats mean, Floats rstd);
  // And out of it: y [n, C] = residual + dropout(x [N, in] w + bias).
  absl::Status Project(int64_t n, int64_t in, Floats x, uint64_t w, uint64_t bias, const DropoutMask& dropout,
                       Floats residual, Floats y);
  // Backward, from the gradient of the stream to that of the projection without its bias, [N, C]; adds the bias's.
  absl::StatusOr<Floats> ProjectGradient(int64_t n, uint64_t bias, const DropoutMask& dropout);
  // From the gradient of y in scratch_.narrow, this rank's share of it, to that of x, added to the stream's.
  absl::Status NormalizeGradient(int64_t n, Floats x, uint64_t weight, uint64_t bias, Floats mean, Floats rstd);
  // Own rows of the stream's gradient with dropout, in their place in an [N, C].
  Floats Dropped(int64_t n, const DropoutMask& dropout);

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

  const int64_t width_, context_, vocabulary_;
  const size_t all_layers_;
  const Range layers_;         // of the stage
  const int64_t cut_, heads_;  // c, and the heads of this rank
  const TableRows rows_held_;  // of the embedding
  const float epsilon_;
  const double dropout_;
  std::unique_ptr<Collectives> tensor_ranks_;  // null: one
  // Constant after Init.
  uint64_t wpe_ = 0, wte_ = 0, ln_f_weight_ = 0, ln_f_bias_ = 0;  // wte: of this rank's rows
  std::vector<LayerOffsets> offsets_;                             // of the stage
  // Grown when a batch has more rows, or a pass more microbatches, than any before.
  int64_t rows_ = 0;
  std::shared_ptr<Buffer> memory_;
  std::vector<Activations> at_;
  Scratch scratch_;
  // With recomputation: whose activations the layers' memory holds.
  const Activations* filled_ = nullptr;
  size_t filled_layer_ = 0;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_MODEL_GPT2_H_
