#include "worker/model/gpt2.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

TableRows RowsOf(const v1::Gpt2Spec& spec, const ModelPart& part) {
  const Range rows = PartOf(spec.vocabulary(), part.mesh.tensor, part.place.tensor);
  return {static_cast<int64_t>(rows.begin), static_cast<int64_t>(rows.size())};
}

}  // namespace

Gpt2::Gpt2(const v1::ModelSpec& model, ParameterSpace space, Backend* backend, const ModelPart& part)
    : ModelBase(backend, space, ViewOf(model, space, part.mesh, part.place.stage, part.place.tensor), part),
      width_(model.gpt2().width()),
      context_(model.gpt2().context()),
      vocabulary_(model.gpt2().vocabulary()),
      all_layers_(model.gpt2().layers()),
      layers_(StageLayers(model, part.mesh.pipeline)[part.place.stage]),
      cut_(width_ / part.mesh.tensor),
      heads_(model.gpt2().heads() / part.mesh.tensor),
      rows_held_(RowsOf(model.gpt2(), part)),
      epsilon_(static_cast<float>(model.gpt2().layer_norm_epsilon() > 0 ? model.gpt2().layer_norm_epsilon() : 1e-5)),
      dropout_(model.gpt2().dropout()),
      tensor_ranks_(part.mesh.tensor > 1 ? std::make_unique<Collectives>(part.tensor) : nullptr) {}

absl::Status Gpt2::Init() {
  std::string missing;
  const auto find = [&](const std::string& name) -> uint64_t {
    const Tensor* tensor = space().Find(name);
    if (tensor == nullptr) absl::StrAppend(&missing, " ", name);
    return tensor == nullptr ? 0 : tensor->offset;
  };
  const uint64_t c = static_cast<uint64_t>(width_), cut = static_cast<uint64_t>(cut_), t = part().place.tensor;
  wpe_ = find("wpe");
  wte_ = find("wte") + static_cast<uint64_t>(rows_held_.first) * c;
  ln_f_weight_ = find("ln_f.weight");
  ln_f_bias_ = find("ln_f.bias");
  std::vector<Range> blocks(last_block() + 1);
  bool joined = true;
  for (size_t i = 0; i < all_layers_; ++i) {
    const std::string h = absl::StrCat("h.", i, ".");
    const uint64_t begin = find(h + "ln_1.weight"), q = find(h + "attn.q.weight"), q_bias = find(h + "attn.q.bias"),
                   fc = find(h + "mlp.fc.weight"), down = find(h + "mlp.proj.weight");
    joined = joined && find(h + "attn.k.weight") == q + c * c && find(h + "attn.v.weight") == q + 2 * c * c &&
             find(h + "attn.k.bias") == q_bias + c && find(h + "attn.v.bias") == q_bias + 2 * c;
    blocks[attention_block(i)] = {begin, fc};
    blocks[mlp_block(i)] = {fc, down + 4 * c * c};
    if (i < layers_.begin || i >= layers_.end) continue;
    offsets_.push_back({begin, find(h + "ln_1.bias"), find(h + "ln_2.weight"), find(h + "ln_2.bias"),
                        find(h + "attn.proj.bias"), find(h + "mlp.proj.bias"), q + t * cut * c, q_bias + t * cut,
                        find(h + "attn.proj.weight") + t * cut * c, fc + t * 4 * cut * c,
                        find(h + "mlp.fc.bias") + t * 4 * cut, down + t * 4 * cut * c});
  }
  blocks[kEmbedding] = {0, all_layers_ > 0 ? blocks[1].begin : ln_f_weight_};
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

void Gpt2::Plan(Arena* arena, int64_t rows, size_t microbatches) {
  at_.clear();
  const int64_t own = sequence() ? (rows + part().mesh.tensor - 1) / part().mesh.tensor : rows;
  for (size_t m = 0; m < microbatches; ++m) {
    Activations& at = at_.emplace_back();
    for (size_t i = 0; i <= layers_.size(); ++i) at.residual.push_back(arena->Take(own * width_));
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (part().recompute && (m > 0 || i > 0)) {
        at.layers.push_back(at_[0].layers[0]);
        continue;
      }
      LayerActivations layer;
      layer.ln1 = arena->Take(rows * width_);
      layer.ln1_mean = arena->Take(own);
      layer.ln1_rstd = arena->Take(own);
      layer.qkv = arena->Take(rows * 3 * cut_);
      layer.attention = arena->Take(rows * cut_);
      layer.log_sum = arena->Take(rows * heads_);
      layer.middle = arena->Take(own * width_);
      layer.ln2 = arena->Take(rows * width_);
      layer.ln2_mean = arena->Take(own);
      layer.ln2_rstd = arena->Take(own);
      layer.fc = arena->Take(rows * 4 * cut_);
      layer.gelu = arena->Take(rows * 4 * cut_);
      at.layers.push_back(layer);
    }
    if (is_last()) {
      at.ln_f = arena->Take(rows * width_);
      at.ln_f_mean = arena->Take(own);
      at.ln_f_rstd = arena->Take(own);
      at.logits = arena->Take(rows * rows_held_.count);
    }
    const Floats tokens = arena->Take(rows), targets = arena->Take(rows);
    at.tokens = {tokens.buffer, tokens.first};
    at.targets = {targets.buffer, targets.first};
  }
  scratch_.stream = arena->Take(own * width_);
  scratch_.narrow = arena->Take(rows * width_);
  scratch_.wide = arena->Take(rows * 4 * cut_);
  if (tensor_ranks_ != nullptr) {
    scratch_.parts = arena->Take(part().mesh.tensor * rows * 4);
    scratch_.ones = arena->Take(rows);
  }
}

absl::Status Gpt2::Reserve(int64_t rows, size_t microbatches) {
  if (rows <= rows_ && microbatches <= at_.size()) return absl::OkStatus();
  rows = std::max(rows, rows_);
  microbatches = std::max(microbatches, at_.size());
  Arena count(nullptr);
  Plan(&count, rows, microbatches);
  at_.clear();
  filled_ = nullptr;
  rows_ = 0;
  memory_.reset();
  auto memory = backend().Allocate(count.bytes());
  if (!memory.ok()) {
    return Annotate(memory.status(), absl::StrCat("activations of ", microbatches, " x ", rows, " tokens"));
  }
  memory_ = *std::move(memory);
  Arena arena(memory_.get());
  Plan(&arena, rows, microbatches);
  rows_ = rows;
  if (tensor_ranks_ != nullptr) backend().Fill(stream(), scratch_.ones, rows, 1.0f);
  return absl::OkStatus();
}

absl::Status Gpt2::Embed(Activations& at, const Batch& batch, const std::atomic<bool>* cancel) {
  const int64_t n = batch.rows * batch.length;
  RETURN_IF_ERROR(Enter(kEmbedding, cancel));
  backend().Upload(stream(), batch.tokens.data(), at.tokens.buffer, at.tokens.first * 4, n * 4);
  const Floats sums = sequence() ? scratch_.narrow : at.residual[0];
  backend().Embedding(stream(), batch.rows, batch.length, width_, at.tokens, rows_held_, parameter(wte_),
                      leads() ? parameter(wpe_) : Floats(), sums);
  RETURN_IF_ERROR(SumToOwn(sums, n));
  const DropoutMask dropout = MaskAt("embedding", at, batch);
  if (sequence() || dropout.probability > 0) {
    const TableRows own = Own(n);
    backend().Dropout(stream(), own.count, width_, sums + own.first * width_, dropout, at.residual[0]);
  }
  return absl::OkStatus();
}

absl::Status Gpt2::Forward(size_t slot, const Batch& batch, bool gradient, const std::atomic<bool>* cancel) {
  Activations& at = at_[slot];
  const int64_t n = batch.rows * batch.length;
  at.training = gradient;
  if (is_first()) {
    RETURN_IF_ERROR(Embed(at, batch, cancel));
  } else {
    RETURN_IF_ERROR(ReceiveFrom(*part().stages, part().place.stage - 1, at.residual[0], Own(n).count * width_));
  }
  for (size_t i = 0; i < layers_.size(); ++i) RETURN_IF_ERROR(ForwardLayer(i, at, batch, cancel));
  if (!is_last()) return SendTo(*part().stages, part().place.stage + 1, at.residual.back(), Own(n).count * width_);
  backend().Upload(stream(), batch.targets.data(), at.targets.buffer, at.targets.first * 4, n * 4);
  return Loss(at, n, gradient, cancel);
}

absl::Status Gpt2::Loss(Activations& at, int64_t n, bool gradient, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(Enter(last_block(), cancel));
  RETURN_IF_ERROR(Enter(kEmbedding, cancel));  // the head
  Backend& b = backend();
  RETURN_IF_ERROR(Normalize(n, at.residual.back(), ln_f_weight_, ln_f_bias_, at.ln_f, at.ln_f_mean, at.ln_f_rstd));
  LinearOutIn(n, rows_held_.count, width_, at.ln_f, wte_, at.logits);
  if (tensor_ranks_ == nullptr) {
    b.CrossEntropy(stream(), n, vocabulary_, at.logits, at.targets, gradient, sums());
    return absl::OkStatus();
  }
  b.CrossEntropyPart(stream(), n, rows_held_, at.logits, at.targets, scratch_.parts + part().place.tensor * n * 4);
  RETURN_IF_ERROR(GatherFromRanks(*tensor_ranks_, scratch_.parts, part().mesh.tensor * n * 4, 4));
  b.CrossEntropyJoin(stream(), n, rows_held_, part().mesh.tensor, at.logits, at.targets, scratch_.parts, gradient,
                     sums());
  return absl::OkStatus();
}

absl::Status Gpt2::LossBackward(Activations& at, int64_t n, bool first, bool last, const GradientSink& ready) {
  const int64_t c = width_;
  WeightGradient(n, rows_held_.count, c, at.logits, at.ln_f, wte_, first ? 0 : 1);
  LinearInOut(n, c, rows_held_.count, at.logits, wte_, scratch_.narrow);
  backend().Fill(stream(), scratch_.stream, Own(n).count * c, 0.0f);
  RETURN_IF_ERROR(NormalizeGradient(n, at.residual.back(), ln_f_weight_, ln_f_bias_, at.ln_f_mean, at.ln_f_rstd));
  if (!last) return absl::OkStatus();
  RETURN_IF_ERROR(Leave(last_block(), ready, 1));
  return is_first() ? absl::OkStatus() : Leave(kEmbedding, ready, 1);
}

absl::Status Gpt2::Backward(size_t slot, const Batch& batch, bool first, bool last, const GradientSink& ready,
                            const std::atomic<bool>* cancel) {
  Activations& at = at_[slot];
  const int64_t n = batch.rows * batch.length, c = width_;
  if (first) {
    for (size_t block = 0; block <= last_block(); ++block) ClearVectors(block);
    if (is_first() && (leads() || sequence())) {
      backend().Fill(stream(), gradient(wpe_), context_ * c, 0.0f);  // shorter rows leave the rest of it at zero
    }
    if (is_first() && !is_last()) backend().Fill(stream(), gradient(wte_), rows_held_.count * c, 0.0f);
  }
  if (is_last()) {
    RETURN_IF_ERROR(LossBackward(at, n, first, last, ready));
  } else {
    RETURN_IF_ERROR(ReceiveFrom(*part().stages, part().place.stage + 1, scratch_.stream, Own(n).count * c));
  }
  for (size_t i = layers_.size(); i-- > 0;) {
    RETURN_IF_ERROR(CheckCancel(cancel));
    RETURN_IF_ERROR(BackwardLayer(i, at, batch, first ? 0 : 1, last, ready, cancel));
  }
  if (!is_first()) {
    RETURN_IF_ERROR(SendTo(*part().stages, part().place.stage - 1, scratch_.stream, Own(n).count * c));
    return last ? Deliver(ready, 0) : absl::OkStatus();
  }
  const Floats d = Dropped(n, MaskAt("embedding", at, batch));
  RETURN_IF_ERROR(GatherOwn(d, n));
  backend().EmbeddingGradient(stream(), batch.rows, batch.length, c, at.tokens, rows_held_, d, gradient(wte_),
                              leads() ? gradient(wpe_) : Floats());
  return last ? Leave(kEmbedding, ready, 0) : absl::OkStatus();
}

absl::StatusOr<std::vector<float>> Gpt2::NextLogits(const std::vector<int32_t>& tokens) {
  if (part().mesh.ranks_of_replica() > 1) return absl::UnimplementedError("logits are made by a whole model only");
  Batch batch;
  batch.rows = 1;
  batch.length = static_cast<int64_t>(tokens.size());
  batch.tokens = tokens;
  batch.targets.assign(tokens.size(), -1);
  if (tokens.empty()) return absl::InvalidArgumentError("logits need at least one token, found none");
  int64_t count = 0;
  RETURN_IF_ERROR(Check(batch, &count));
  RETURN_IF_ERROR(Reserve(batch.length, 1));
  std::vector<float> logits(static_cast<size_t>(vocabulary_));
  BeginPass(nullptr);
  Activations& at = at_[0];
  at.training = false;
  absl::Status status = Embed(at, batch, nullptr);
  for (size_t i = 0; status.ok() && i < layers_.size(); ++i) status = ForwardLayer(i, at, batch, nullptr);
  if (status.ok()) status = Enter(last_block(), nullptr);
  backend().LayerNorm(stream(), 1, width_, epsilon_, at.residual.back() + (batch.length - 1) * width_,
                      parameter(ln_f_weight_), parameter(ln_f_bias_), at.ln_f, at.ln_f_mean, at.ln_f_rstd);
  LinearOutIn(1, vocabulary_, width_, at.ln_f, wte_, at.logits);
  backend().Download(stream(), at.logits.buffer, at.logits.first * 4, vocabulary_ * 4, logits.data());
  RETURN_IF_ERROR(EndPass(status).status());
  return logits;
}

absl::StatusOr<std::unique_ptr<Model>> MakeGpt2(const v1::ModelSpec& spec, ParameterSpace space, Backend* backend,
                                                const ModelPart& part) {
  if (spec.gpt2().heads() == 0 || spec.gpt2().width() % spec.gpt2().heads() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.gpt2: heads (", spec.gpt2().heads(), ") must divide width (", spec.gpt2().width(), ")"));
  }
  if (const double p = spec.gpt2().dropout(); !(p >= 0 && p < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("model.gpt2.dropout: found ", p, "; it must be in [0, 1)"));
  }
  auto model = std::make_unique<Gpt2>(spec, std::move(space), backend, part);
  RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace sluice
