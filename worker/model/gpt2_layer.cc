// A layer of GPT-2, forward and backward, on one tensor rank.
#include "absl/strings/str_cat.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/model/gpt2.h"

namespace sluice {

absl::Status Gpt2::SumOverTensorRanks(Floats x, int64_t n) {
  return tensor_ranks_ == nullptr ? absl::OkStatus() : SumOverRanks(*tensor_ranks_, x, n * width_);
}

DropoutMask Gpt2::MaskAt(const std::string& site, const Activations& at, const Batch& batch) const {
  if (dropout_ == 0 || !at.training) return {};
  DropoutMask mask;
  mask.probability = dropout_;
  mask.key = StreamKey(part().seed, absl::StrCat("dropout.", version(), ".", site));
  mask.first_sample = batch.first_position;
  mask.first_head = part().place.tensor * heads_;
  mask.length = batch.length;
  return mask;
}

std::string Gpt2::Site(size_t layer, const char* name) const {
  return absl::StrCat("h.", layers_.begin + layer, ".", name);
}

void Gpt2::Drop(Floats x, int64_t n, const DropoutMask& dropout) {
  if (dropout.probability > 0) backend().Dropout(stream(), n, width_, x, dropout, x);
}

Floats Gpt2::ProjectionGradient(const DropoutMask& dropout, uint64_t bias, int64_t n) {
  Floats d = scratch_.stream;
  if (dropout.probability > 0) {
    backend().Dropout(stream(), n, width_, d, dropout, scratch_.narrow);
    d = scratch_.narrow;
  }
  backend().BiasGradient(stream(), n, width_, d, gradient(bias));
  return d;
}

void Gpt2::ForwardQkv(const LayerOffsets& w, const LayerActivations& a, int64_t n) {
  const int64_t c = width_;
  if (cut_ == c) {
    LinearOutIn(n, 3 * c, c, a.ln1, w.qkv_weight, a.qkv);
    backend().AddBias(stream(), n, 3 * c, a.qkv, parameter(w.qkv_bias));
    return;
  }
  // This rank's rows of q, k and v lie C rows apart; the bias comes first, as a product with ones.
  backend().BatchedGemm(stream(), 3, n, cut_, 1, 1, {scratch_.ones, 1}, 0, {parameter(w.qkv_bias), cut_}, c, 0,
                        {a.qkv, 3 * cut_}, cut_);
  backend().BatchedGemm(stream(), 3, n, cut_, c, 1, {a.ln1, c}, 0, {parameter(w.qkv_weight), c, true}, c * c, 1,
                        {a.qkv, 3 * cut_}, cut_);
}

// From the gradient of qkv in scratch_.wide to that of ln1 in scratch_.narrow.
void Gpt2::BackwardQkv(const LayerOffsets& w, const LayerActivations& a, int64_t n, float beta) {
  const int64_t c = width_;
  const Floats d = scratch_.wide;
  if (cut_ == c) {
    backend().BiasGradient(stream(), n, 3 * c, d, gradient(w.qkv_bias));
    WeightGradient(n, 3 * c, c, d, a.ln1, w.qkv_weight, beta);
    LinearInOut(n, c, 3 * c, d, w.qkv_weight, scratch_.narrow);
    return;
  }
  backend().BatchedGemm(stream(), 3, 1, cut_, n, 1, {scratch_.ones, n}, 0, {d, 3 * cut_}, cut_, 1,
                        {gradient(w.qkv_bias), cut_}, c);
  backend().BatchedGemm(stream(), 3, cut_, c, n, 1, {d, 3 * cut_, true}, cut_, {a.ln1, c}, 0, beta,
                        {gradient(w.qkv_weight), c}, c * c);
  for (int64_t i = 0; i < 3; ++i) {
    backend().Gemm(stream(), n, c, cut_, 1, {d + i * cut_, 3 * cut_},
                   {parameter(w.qkv_weight + static_cast<uint64_t>(i * c * c)), c}, i == 0 ? 0 : 1,
                   {scratch_.narrow, c});
  }
}

absl::Status Gpt2::FillLayer(size_t layer, Activations& at, const Batch& batch, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(Enter(attention_block(layers_.begin + layer), cancel));
  const int64_t n = batch.rows * batch.length, c = width_;
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at.layers[layer];
  const Floats in = at.residual[layer];
  Backend& b = backend();
  b.LayerNorm(stream(), n, c, epsilon_, in, parameter(w.ln1_weight), parameter(w.ln1_bias), a.ln1, a.ln1_mean,
              a.ln1_rstd);
  ForwardQkv(w, a, n);
  b.Attention(stream(), {batch.rows, batch.length, heads_, cut_ / heads_}, MaskAt(Site(layer, "attn"), at, batch),
              a.qkv, a.attention, a.log_sum);
  LinearInOut(n, c, cut_, a.attention, w.out_weight, a.middle);
  RETURN_IF_ERROR(SumOverTensorRanks(a.middle, n));
  b.AddBiasResidual(stream(), n, c, in, a.middle, parameter(w.out_bias), MaskAt(Site(layer, "attn.proj"), at, batch),
                    a.middle);
  b.LayerNorm(stream(), n, c, epsilon_, a.middle, parameter(w.ln2_weight), parameter(w.ln2_bias), a.ln2, a.ln2_mean,
              a.ln2_rstd);
  RETURN_IF_ERROR(Enter(mlp_block(layers_.begin + layer), cancel));
  LinearOutIn(n, 4 * cut_, c, a.ln2, w.fc_weight, a.fc);
  b.BiasGelu(stream(), n, 4 * cut_, a.fc, parameter(w.fc_bias), a.gelu);
  filled_ = &at;
  filled_layer_ = layer;
  return absl::OkStatus();
}

absl::Status Gpt2::ForwardLayer(size_t layer, Activations& at, const Batch& batch, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(FillLayer(layer, at, batch, cancel));
  const int64_t n = batch.rows * batch.length, c = width_;
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at.layers[layer];
  const Floats out = at.residual[layer + 1];
  LinearInOut(n, c, 4 * cut_, a.gelu, w.down_weight, out);
  RETURN_IF_ERROR(SumOverTensorRanks(out, n));
  backend().AddBiasResidual(stream(), n, c, a.middle, out, parameter(w.down_bias),
                            MaskAt(Site(layer, "mlp.proj"), at, batch), out);
  return absl::OkStatus();
}

absl::Status Gpt2::BackwardLayer(size_t layer, Activations& at, const Batch& batch, float beta, bool last,
                                 const GradientSink& ready, const std::atomic<bool>* cancel) {
  if (part().recompute && (filled_ != &at || filled_layer_ != layer)) {
    RETURN_IF_ERROR(FillLayer(layer, at, batch, cancel));
  }
  const int64_t n = batch.rows * batch.length, c = width_;
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at.layers[layer];
  const Floats in = at.residual[layer];
  Backend& b = backend();
  // out = middle + dropout(gelu(ln2(middle) fc^T + bias) down + bias)
  Floats d = ProjectionGradient(MaskAt(Site(layer, "mlp.proj"), at, batch), w.down_bias, n);
  WeightGradient(n, 4 * cut_, c, a.gelu, d, w.down_weight, beta);
  LinearOutIn(n, 4 * cut_, c, d, w.down_weight, scratch_.wide);
  b.BiasGeluGradient(stream(), n, 4 * cut_, a.fc, scratch_.wide, gradient(w.fc_bias));
  WeightGradient(n, 4 * cut_, c, scratch_.wide, a.ln2, w.fc_weight, beta);
  LinearInOut(n, c, 4 * cut_, scratch_.wide, w.fc_weight, scratch_.narrow);
  // Two thirds of the layer are on their way early.
  if (last) RETURN_IF_ERROR(Leave(mlp_block(layers_.begin + layer), ready, 1));
  RETURN_IF_ERROR(SumOverTensorRanks(scratch_.narrow, n));
  b.LayerNormGradient(stream(), n, c, a.middle, parameter(w.ln2_weight), a.ln2_mean, a.ln2_rstd, scratch_.narrow,
                      scratch_.stream, gradient(w.ln2_weight), gradient(w.ln2_bias));
  // middle = in + dropout(attention(ln1(in) qkv^T + bias) out + bias)
  d = ProjectionGradient(MaskAt(Site(layer, "attn.proj"), at, batch), w.out_bias, n);
  WeightGradient(n, cut_, c, a.attention, d, w.out_weight, beta);
  const Floats d_attention = scratch_.wide + 3 * n * cut_;
  LinearOutIn(n, cut_, c, d, w.out_weight, d_attention);
  b.AttentionGradient(stream(), {batch.rows, batch.length, heads_, cut_ / heads_},
                      MaskAt(Site(layer, "attn"), at, batch), a.qkv, a.attention, a.log_sum, d_attention,
                      scratch_.wide);
  BackwardQkv(w, a, n, beta);
  RETURN_IF_ERROR(SumOverTensorRanks(scratch_.narrow, n));
  b.LayerNormGradient(stream(), n, c, in, parameter(w.ln1_weight), a.ln1_mean, a.ln1_rstd, scratch_.narrow,
                      scratch_.stream, gradient(w.ln1_weight), gradient(w.ln1_bias));
  return last ? Leave(attention_block(layers_.begin + layer), ready, 1) : absl::OkStatus();
}

}  // namespace sluice
