// A layer of GPT-2, forward and backward, on one tensor rank.
#include "absl/strings/str_cat.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/model/gpt2.h"

namespace sluice {

TableRows Gpt2::Own(int64_t n) const {
  if (!sequence()) return {0, n};
  const Range rows = PartOf(static_cast<uint64_t>(n), part().mesh.tensor, part().place.tensor);
  return {static_cast<int64_t>(rows.begin), static_cast<int64_t>(rows.size())};
}

absl::Status Gpt2::SumToOwn(Floats x, int64_t n) {
  if (tensor_ranks_ == nullptr) return absl::OkStatus();
  if (!sequence()) return SumOverRanks(*tensor_ranks_, x, n * width_);
  return ScatterSumOverRanks(*tensor_ranks_, x, n * width_, width_);
}

absl::Status Gpt2::GatherOwn(Floats x, int64_t n) {
  return sequence() ? GatherFromRanks(*tensor_ranks_, x, n * width_, width_) : absl::OkStatus();
}

absl::Status Gpt2::Normalize(int64_t n, Floats x, uint64_t weight, uint64_t bias, Floats y, Floats mean, Floats rstd) {
  const TableRows own = Own(n);
  backend().LayerNorm(stream(), own.count, width_, epsilon_, x, parameter(weight), parameter(bias),
                      y + own.first * width_, mean, rstd);
  return GatherOwn(y, n);
}

absl::Status Gpt2::NormalizeGradient(int64_t n, Floats x, uint64_t weight, uint64_t bias, Floats mean, Floats rstd) {
  RETURN_IF_ERROR(SumToOwn(scratch_.narrow, n));
  const TableRows own = Own(n);
  backend().LayerNormGradient(stream(), own.count, width_, x, parameter(weight), mean, rstd,
                              scratch_.narrow + own.first * width_, scratch_.stream, gradient(weight), gradient(bias));
  return absl::OkStatus();
}

absl::Status Gpt2::Project(int64_t n, int64_t in, Floats x, uint64_t w, uint64_t bias, const DropoutMask& dropout,
                           Floats residual, Floats y) {
  const Floats sums = sequence() ? scratch_.narrow : y;
  LinearInOut(n, width_, in, x, w, sums);
  RETURN_IF_ERROR(SumToOwn(sums, n));
  const TableRows own = Own(n);
  backend().AddBiasResidual(stream(), own.count, width_, residual, sums + own.first * width_, parameter(bias), dropout,
                            y);
  return absl::OkStatus();
}

Floats Gpt2::Dropped(int64_t n, const DropoutMask& dropout) {
  if (!sequence() && dropout.probability == 0) return scratch_.stream;
  const TableRows own = Own(n);
  backend().Dropout(stream(), own.count, width_, scratch_.stream, dropout, scratch_.narrow + own.first * width_);
  return scratch_.narrow;
}

absl::StatusOr<Floats> Gpt2::ProjectGradient(int64_t n, uint64_t bias, const DropoutMask& dropout) {
  const Floats d = Dropped(n, dropout);
  const TableRows own = Own(n);
  backend().BiasGradient(stream(), own.count, width_, d + own.first * width_, gradient(bias));
  RETURN_IF_ERROR(GatherOwn(d, n));
  return d;
}

DropoutMask Gpt2::MaskAt(const std::string& site, const Activations& at, const Batch& batch) const {
  if (dropout_ == 0 || !at.training) return {};
  DropoutMask mask;
  mask.probability = dropout_;
  mask.key = StreamKey(part().seed, absl::StrCat("dropout.", version(), ".", site));
  mask.first_sample = batch.first_position;
  mask.first_head = part().place.tensor * heads_;
  mask.first_row = Own(batch.rows * batch.length).first;
  mask.length = batch.length;
  return mask;
}

std::string Gpt2::Site(size_t layer, const char* name) const {
  return absl::StrCat("h.", layers_.begin + layer, ".", name);
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
  RETURN_IF_ERROR(Normalize(n, in, w.ln1_weight, w.ln1_bias, a.ln1, a.ln1_mean, a.ln1_rstd));
  ForwardQkv(w, a, n);
  b.Attention(stream(), {batch.rows, batch.length, heads_, cut_ / heads_}, MaskAt(Site(layer, "attn"), at, batch),
              a.qkv, a.attention, a.log_sum);
  RETURN_IF_ERROR(Project(n, cut_, a.attention, w.out_weight, w.out_bias, MaskAt(Site(layer, "attn.proj"), at, batch),
                          in, a.middle));
  RETURN_IF_ERROR(Normalize(n, a.middle, w.ln2_weight, w.ln2_bias, a.ln2, a.ln2_mean, a.ln2_rstd));
  RETURN_IF_ERROR(Enter(mlp_block(layers_.begin + layer), cancel));
  LinearOutIn(n, 4 * cut_, c, a.ln2, w.fc_weight, a.fc);
  b.BiasGelu(stream(), n, 4 * cut_, a.fc, parameter(w.fc_bias), a.gelu);
  filled_ = &at;
  filled_layer_ = layer;
  return absl::OkStatus();
}

absl::Status Gpt2::ForwardLayer(size_t layer, Activations& at, const Batch& batch, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(FillLayer(layer, at, batch, cancel));
  const LayerOffsets& w = offsets_[layer];
  const LayerActivations& a = at.layers[layer];
  return Project(batch.rows * batch.length, 4 * cut_, a.gelu, w.down_weight, w.down_bias,
                 MaskAt(Site(layer, "mlp.proj"), at, batch), a.middle, at.residual[layer + 1]);
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
  ASSIGN_OR_RETURN(Floats d, ProjectGradient(n, w.down_bias, MaskAt(Site(layer, "mlp.proj"), at, batch)));
  WeightGradient(n, 4 * cut_, c, a.gelu, d, w.down_weight, beta);
  LinearOutIn(n, 4 * cut_, c, d, w.down_weight, scratch_.wide);
  b.BiasGeluGradient(stream(), n, 4 * cut_, a.fc, scratch_.wide, gradient(w.fc_bias));
  WeightGradient(n, 4 * cut_, c, scratch_.wide, a.ln2, w.fc_weight, beta);
  LinearInOut(n, c, 4 * cut_, scratch_.wide, w.fc_weight, scratch_.narrow);
  // Two thirds of the layer are on their way early.
  if (last) RETURN_IF_ERROR(Leave(mlp_block(layers_.begin + layer), ready, 1));
  RETURN_IF_ERROR(NormalizeGradient(n, a.middle, w.ln2_weight, w.ln2_bias, a.ln2_mean, a.ln2_rstd));
  // middle = in + dropout(attention(ln1(in) qkv^T + bias) out + bias)
  ASSIGN_OR_RETURN(d, ProjectGradient(n, w.out_bias, MaskAt(Site(layer, "attn.proj"), at, batch)));
  WeightGradient(n, cut_, c, a.attention, d, w.out_weight, beta);
  const Floats d_attention = scratch_.wide + 3 * n * cut_;
  LinearOutIn(n, cut_, c, d, w.out_weight, d_attention);
  b.AttentionGradient(stream(), {batch.rows, batch.length, heads_, cut_ / heads_},
                      MaskAt(Site(layer, "attn"), at, batch), a.qkv, a.attention, a.log_sum, d_attention,
                      scratch_.wide);
  BackwardQkv(w, a, n, beta);
  RETURN_IF_ERROR(NormalizeGradient(n, in, w.ln1_weight, w.ln1_bias, a.ln1_mean, a.ln1_rstd));
  return last ? Leave(attention_block(layers_.begin + layer), ready, 1) : absl::OkStatus();
}

}  // namespace sluice
