#include "worker/train_loop.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace sluice {

Range TrainPositions(const v1::TrainSpec& train, uint64_t round, uint32_t d, uint32_t replicas) {
  const Range slots = ReplicaSlots(train.batch(), d, replicas);
  const uint64_t first = round * train.batch();
  return {first + slots.begin, first + slots.end};
}

uint64_t EvaluationSamples(const v1::TrainSpec& train, uint64_t held_out) {
  return train.eval_samples() == 0 ? held_out : std::min(train.eval_samples(), held_out);
}

TrainLoop::TrainLoop(std::string job_id, const v1::JobSpec& spec, const Dataset* data, Model* model, Rounds* rounds,
                     Clock* clock, WorkerHooks* hooks)
    : job_id_(std::move(job_id)),
      spec_(spec),
      data_(data),
      model_(model),
      rounds_(rounds),
      clock_(clock),
      hooks_(hooks) {}

absl::Status TrainLoop::Run() {
  for (;;) {
    const Work work = rounds_->Next();
    if (work.kind == Work::kEnd) return absl::OkStatus();
    model_->UseVersion(work.round);
    model_->ParametersChanged({0, model_->space().size()});

    const absl::Time start = clock_->Now();
    const absl::StatusOr<LossSum> sum = work.kind == Work::kTrain ? Train(work) : Evaluate(work);
    if (sum.ok()) {
      rounds_->Done(work, *sum, absl::ToDoubleSeconds(clock_->Now() - start));
      continue;
    }
    const bool cancelled = absl::IsCancelled(sum.status()) && *work.cancel;
    rounds_->Stopped(work);
    if (!cancelled) return sum.status();
  }
}

absl::StatusOr<LossSum> TrainLoop::Train(const Work& work) {
  if (hooks_ != nullptr) hooks_->BeforeCompute(job_id_, work.generation, work.round);
  std::vector<Batch> microbatches;
  double count = 0;
  const uint32_t parts = std::max(spec_.parallel().microbatches(), 1u);
  for (uint32_t m = 0; m < parts; ++m) {
    const Range positions = MicrobatchSlots(work.positions, m, parts);
    if (positions.size() == 0) continue;
    Batch batch = data_->Train(positions);
    if (batch.count == 0) continue;  // nothing to predict: adds nothing
    batch.first_position = positions.begin;
    count += static_cast<double>(batch.count);
    microbatches.push_back(std::move(batch));
  }
  if (count == 0) {
    // Nobody may be ahead of a version: empty contributions too wait until this replica has all of it.
    RETURN_IF_ERROR(rounds_->ParametersNeeded(work, {0, model_->space().size()}));
    RETURN_IF_ERROR(model_->Meet());
    rounds_->Begin(work, count);  // they leave
    return LossSum();
  }
  rounds_->Begin(work, count);
  return model_->ForwardBackward(
      microbatches, [this, &work](Range range) { return rounds_->ParametersNeeded(work, range); },
      [this, &work](Range range) { rounds_->GradientReady(work, range); }, work.cancel);
}

absl::StatusOr<LossSum> TrainLoop::Evaluate(const Work& work) {
  if (hooks_ != nullptr) hooks_->BeforeEvaluation(job_id_, work.generation, work.round);
  const Range samples =
      ReplicaSlots(EvaluationSamples(spec_.train(), data_->eval_samples()), work.replica, work.replicas);
  // As many samples at once as in training, which fit the memory.
  const Range slots = ReplicaSlots(spec_.train().batch(), 0, work.replicas);
  const uint64_t rows =
      std::max<uint64_t>(1, MicrobatchSlots(slots, 0, std::max(spec_.parallel().microbatches(), 1u)).size());
  LossSum total;
  bool met = false;
  for (uint64_t first = samples.begin; first < samples.end; first += rows) {
    if (*work.cancel) return absl::CancelledError("the generation ended");
    const Batch batch = data_->Evaluation({first, std::min(first + rows, samples.end)});
    if (batch.count == 0) continue;
    ASSIGN_OR_RETURN(const LossSum sum, model_->Evaluate(batch, work.cancel));
    met = true;
    total.loss += sum.loss;
    total.count += sum.count;
    total.correct += sum.correct;
  }
  if (!met) RETURN_IF_ERROR(model_->Meet());  // nobody says a version evaluated that others do not have
  return total;
}

}  // namespace sluice
