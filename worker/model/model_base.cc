#include "worker/model/model_base.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr int64_t kFloat = sizeof(float);

}  // namespace

absl::StatusOr<Image> Image::Make(Backend* backend, int64_t floats) {
  ASSIGN_OR_RETURN(std::shared_ptr<void> host, backend->AllocateHost(floats * kFloat));
  return Over(backend, std::move(host), floats);
}

absl::StatusOr<Image> Image::MakeShared(Backend* backend, int64_t floats) {
  auto region = SharedRegion::Make(static_cast<size_t>(floats * kFloat));
  if (!region.ok()) {
    LOG_INFO("gradients are not shared with servers of this host: {}", region.status().ToString());
    return Make(backend, floats);
  }
  ASSIGN_OR_RETURN(Image image, Over(backend, std::shared_ptr<void>(*region, (*region)->data()), floats));
  image.region_ = *std::move(region);
  return image;
}

absl::StatusOr<Image> Image::MakeWindows(Backend* backend, int64_t floats) {
  auto memory = ParameterMemory::Make(static_cast<uint64_t>(floats));
  if (!memory.ok()) {
    LOG_INFO("parameters are copied out of the memory of servers of this host: {}", memory.status().ToString());
    return Make(backend, floats);
  }
  const auto window = [&](uint64_t version) { return std::shared_ptr<void>(*memory, (*memory)->window(version)); };
  std::shared_ptr<Buffer> odd = backend->WrapHost(window(1), floats * kFloat);
  if (odd == nullptr) return Make(backend, floats);
  ASSIGN_OR_RETURN(Image image, Over(backend, window(0), floats));
  image.odd_device_ = std::move(odd);
  image.windows_ = *std::move(memory);
  return image;
}

absl::StatusOr<Image> Image::Over(Backend* backend, std::shared_ptr<void> host, int64_t floats) {
  Image image;
  image.host_ = std::move(host);
  image.device_ = backend->WrapHost(image.host_, floats * kFloat);
  image.one_memory_ = image.device_ != nullptr;
  if (!image.one_memory_) {
    ASSIGN_OR_RETURN(image.device_, backend->Allocate(floats * kFloat));
  }
  image.odd_device_ = image.device_;
  return image;
}

absl::Status CheckCancel(const std::atomic<bool>* cancel) {
  if (cancel == nullptr || !cancel->load(std::memory_order_relaxed)) return absl::OkStatus();
  return absl::CancelledError("the pass was cancelled");
}

ModelBase::~ModelBase() {
  if (compute_ != nullptr) backend_->Synchronize(*compute_).IgnoreError();
  if (copy_ != nullptr) backend_->Synchronize(*copy_).IgnoreError();
}

absl::Status ModelBase::Init(std::vector<Range> blocks) {
  blocks_ = std::move(blocks);
  entered_.resize(blocks_.size());
  for (const Range& block : blocks_) {
    std::vector<Range>& pieces = pieces_.emplace_back();
    for (const Range& held : view_) {
      const Range piece = {std::max(held.begin, block.begin), std::min(held.end, block.end)};
      if (piece.begin < piece.end) pieces.push_back(piece);
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    changed_.resize(blocks_.size());
  }
  const int64_t elements = static_cast<int64_t>(space_.size());
  ASSIGN_OR_RETURN(parameters_, Image::MakeWindows(backend_, elements));
  ASSIGN_OR_RETURN(gradients_, Image::MakeShared(backend_, elements));
  ASSIGN_OR_RETURN(sums_, backend_->Allocate(3 * sizeof(double)));
  compute_ = backend_->NewStream();
  copy_ = backend_->NewStream();
  return absl::OkStatus();
}

void ModelBase::ParametersChanged(Range range) {
  if (parameters_.one_memory() || range.begin >= range.end) return;
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Range part = {std::max(range.begin, blocks_[i].begin), std::min(range.end, blocks_[i].end)};
    if (part.begin >= part.end) continue;
    std::erase_if(changed_[i], [&](const Range& old) { return part.begin <= old.begin && old.end <= part.end; });
    if (!changed_[i].empty() && changed_[i].back().end == part.begin) {
      changed_[i].back().end = part.end;
    } else {
      changed_[i].push_back(part);
    }
  }
}

absl::Status ModelBase::Steps(const std::vector<const Batch*>& batches, uint32_t slots, const GradientSink& ready,
                              const std::atomic<bool>* cancel) {
  const uint32_t n = static_cast<uint32_t>(batches.size());
  for (const PipelineStep& step : StageSteps(part_.schedule, part_.mesh.pipeline, part_.place.stage, n)) {
    const uint32_t m = step.microbatch;
    if (step.kind == PipelineStep::kForward) {
      RETURN_IF_ERROR(Forward(m % slots, *batches[m], true, cancel));
    } else {
      RETURN_IF_ERROR(Backward(m % slots, *batches[m], m == 0, m + 1 == n, ready, cancel));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LossSum> ModelBase::ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                                   const GradientSink& ready, const std::atomic<bool>* cancel) {
  std::vector<const Batch*> batches;  // with something to predict
  int64_t positions = 0;
  for (size_t i = 0; i < microbatches.size(); ++i) {
    int64_t count = 0;
    RETURN_IF_ERROR(Annotate(Check(microbatches[i], &count), absl::StrCat("microbatch ", i)));
    if (count == 0) continue;
    batches.push_back(&microbatches[i]);
    positions = std::max(positions, Positions(microbatches[i]));
  }
  if (batches.empty()) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  const uint32_t slots =
      MostInFlight(part_.schedule, part_.mesh.pipeline, part_.place.stage, static_cast<uint32_t>(batches.size()));
  RETURN_IF_ERROR(Reserve(positions, slots));
  BeginPass(&needed);
  return EndPass(Steps(batches, slots, ready, cancel));
}

absl::StatusOr<LossSum> ModelBase::Evaluate(const Batch& batch, const std::atomic<bool>* cancel) {
  int64_t count = 0;
  RETURN_IF_ERROR(Check(batch, &count));
  if (count == 0) return LossSum{};
  RETURN_IF_ERROR(CheckCancel(cancel));
  RETURN_IF_ERROR(Reserve(Positions(batch), 1));
  BeginPass(nullptr);
  return EndPass(Forward(0, batch, false, cancel));
}

absl::Status ModelBase::Meet() {
  for (PeerGroup* const ranks : {part_.tensor, part_.stages}) {
    if (ranks != nullptr) RETURN_IF_ERROR(Collectives(ranks).Barrier());
  }
  return absl::OkStatus();
}

void ModelBase::BeginPass(const ParameterGate* needed) {
  static constexpr double kZeros[3] = {0, 0, 0};
  backend_->Upload(*compute_, kZeros, sums_.get(), 0, sizeof(kZeros));
  needed_ = needed;
  entered_.assign(blocks_.size(), false);
}

absl::StatusOr<LossSum> ModelBase::EndPass(absl::Status status) {
  double sums[3] = {0, 0, 0};
  if (status.ok()) backend_->Download(*compute_, sums_.get(), 0, sizeof(sums), sums);
  // What is enqueued refers to memory of the caller: wait for it in any case.
  const absl::Status compute = backend_->Synchronize(*compute_), copy = backend_->Synchronize(*copy_);
  arrivals_.clear();
  needed_ = nullptr;
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(compute);
  RETURN_IF_ERROR(copy);
  return LossSum{sums[0], sums[1], sums[2]};
}

absl::Status ModelBase::Enter(size_t block, const std::atomic<bool>* cancel) {
  RETURN_IF_ERROR(CheckCancel(cancel));
  if (entered_[block]) return absl::OkStatus();
  if (needed_ != nullptr && *needed_) {
    for (const Range& piece : pieces_[block]) RETURN_IF_ERROR((*needed_)(piece));
  }
  entered_[block] = true;
  std::vector<Range> changed;
  {
    absl::MutexLock lock(&mutex_);
    changed.swap(changed_[block]);
  }
  if (changed.empty()) return absl::OkStatus();
  for (const Range& range : changed) {
    backend_->Upload(*copy_, parameters_.host() + range.begin, parameters_.device().buffer, range.begin * kFloat,
                     range.size() * kFloat);
  }
  backend_->Wait(*compute_, backend_->Record(*copy_));
  return absl::OkStatus();
}

void ModelBase::ClearVectors(size_t block) {
  for (const Tensor& tensor : space_.tensors()) {
    if (tensor.shape.size() >= 2) continue;
    for (const Range& piece : pieces_[block]) {
      const uint64_t begin = std::max(tensor.offset, piece.begin),
                     end = std::min(tensor.offset + tensor.elements, piece.end);
      if (begin < end) backend_->Fill(*compute_, gradient(begin), static_cast<int64_t>(end - begin), 0.0f);
    }
  }
}

absl::Status ModelBase::Leave(size_t block, const GradientSink& ready, size_t behind) {
  if (gradients_.one_memory()) {
    arrivals_.push_back({block, backend_->Record(*compute_)});
  } else {
    backend_->Wait(*copy_, backend_->Record(*compute_));
    for (const Range& piece : pieces_[block]) {
      backend_->Download(*copy_, gradients_.device().buffer, piece.begin * kFloat, piece.size() * kFloat,
                         gradients_.host() + piece.begin);
    }
    arrivals_.push_back({block, backend_->Record(*copy_)});
  }
  return Deliver(ready, behind);
}

absl::Status ModelBase::Deliver(const GradientSink& ready, size_t behind) {
  while (!arrivals_.empty() && (arrivals_.size() > behind || arrivals_.front().event->done())) {
    RETURN_IF_ERROR(arrivals_.front().event->Wait());
    const size_t arrived = arrivals_.front().block;
    arrivals_.pop_front();
    if (!ready) continue;
    for (const Range& piece : pieces_[arrived]) ready(piece);
  }
  return absl::OkStatus();
}

template <typename Exchange>
absl::Status ModelBase::InHost(Floats x, int64_t n, bool read, bool write, Exchange exchange) {
  if (float* const values = backend_->InHost(x); values != nullptr) {
    RETURN_IF_ERROR(backend_->Synchronize(*compute_));
    return exchange(absl::MakeSpan(values, static_cast<size_t>(n)));
  }
  // The staging memory's last upload is done before anything new is written there: one stream, and it is waited for.
  if (n > staging_floats_) {
    RETURN_IF_ERROR(backend_->Synchronize(*compute_));
    ASSIGN_OR_RETURN(staging_, backend_->AllocateHost(n * kFloat));
    staging_floats_ = n;
  }
  float* const values = static_cast<float*>(staging_.get());
  if (read) backend_->Download(*compute_, x.buffer, x.first * kFloat, n * kFloat, values);
  RETURN_IF_ERROR(backend_->Synchronize(*compute_));
  RETURN_IF_ERROR(exchange(absl::MakeSpan(values, static_cast<size_t>(n))));
  if (write) backend_->Upload(*compute_, values, x.buffer, x.first * kFloat, n * kFloat);
  return absl::OkStatus();
}

absl::Status ModelBase::SumOverRanks(Collectives& ranks, Floats x, int64_t n) {
  return InHost(x, n, true, true, [&](absl::Span<float> values) { return ranks.AllReduce(values); });
}

absl::Status ModelBase::ScatterSumOverRanks(Collectives& ranks, Floats x, int64_t n, int64_t row) {
  return InHost(x, n, true, true, [&](absl::Span<float> values) { return ranks.ReduceScatter(values, row); });
}

absl::Status ModelBase::GatherFromRanks(Collectives& ranks, Floats x, int64_t n, int64_t row) {
  return InHost(x, n, true, true, [&](absl::Span<float> values) { return ranks.AllGather(values, row); });
}

absl::Status ModelBase::SendTo(PeerGroup& ranks, uint32_t rank, Floats x, int64_t n) {
  return InHost(x, n, true, false, [&](absl::Span<float> values) { return ranks.Send(rank, values); });
}

absl::Status ModelBase::ReceiveFrom(PeerGroup& ranks, uint32_t rank, Floats x, int64_t n) {
  return InHost(x, n, false, true, [&](absl::Span<float> values) { return ranks.Receive(rank, values); });
}

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const v1::ModelSpec& spec, Backend* backend, const ModelPart& part) {
  ASSIGN_OR_RETURN(ParameterSpace space, MakeParameterSpace(spec));
  RETURN_IF_ERROR(CheckMesh(spec, part.mesh));
  switch (spec.kind_case()) {
    case v1::ModelSpec::kGpt2:
      return MakeGpt2(spec, std::move(space), backend, part);
    case v1::ModelSpec::kMlp:
    case v1::ModelSpec::kSoftmax:
    case v1::ModelSpec::kLogistic:
      return MakeClassifier(spec, std::move(space), backend, part);
    default:
      return absl::InvalidArgumentError("model: expected gpt2, mlp, softmax or logistic, found none");
  }
}

}  // namespace sluice
