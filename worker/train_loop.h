// The page to read: what a worker does all day.
//
//   join, pull   Rounds::Next returns with a round once the one before has been computed
//   batch        the positions that the round owns, this replica's slots of them, cut into microbatches
//   forward      Model::ForwardBackward waits at Rounds::ParametersNeeded for each layer's parameters
//   backward     gradient ranges leave through Rounds::GradientReady as they become final
//   commits      arrive meanwhile and replace the parameters chunk by chunk (worker_job.h), first layers first
//
// The same loop serves every model and every source of data. It knows nothing of servers, streams or generations: when
// a generation ends, its cancel flag is set and the next work is of the new one.
#ifndef SLUICE_WORKER_TRAIN_LOOP_H_
#define SLUICE_WORKER_TRAIN_LOOP_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/layout.h"
#include "sluice/v1/job.pb.h"
#include "worker/data/dataset.h"
#include "worker/model/model.h"
#include "worker/worker_hooks.h"

namespace sluice {

// One piece of work for one rank.
struct Work {
  enum Kind { kEnd, kTrain, kEvaluate };
  Kind kind = kEnd;
  uint64_t generation = 0;
  uint64_t round = 0;    // kTrain: the round; kEvaluate: the version
  uint32_t replica = 0;  // d of `replicas`; async, kEvaluate: the slice
  uint32_t replicas = 1;
  Range positions;  // kTrain: of the data order, this replica's of the round, or (async) the lease
  const std::atomic<bool>* cancel = nullptr;
};

// What the loop sees of the rest of the system. Every work that Next gave is answered by exactly one of Done and
// Stopped.
class Rounds {
 public:
  virtual ~Rounds() = default;
  // Blocks until there is something to do; kEnd: the job has ended. For kEvaluate the model's parameters then hold
  // version work.round whole and nobody writes them; for kTrain they come to hold it, see ParametersNeeded.
  virtual Work Next() = 0;
  // kTrain: blocks until these elements of the model's parameters are at version work.round; then nobody writes them
  // before GradientReady names the range (or, with `count` 0, before Begin). CANCELLED when the work is not wanted any
  // more.
  virtual absl::Status ParametersNeeded(const Work& work, Range range) = 0;
  // kTrain: the work's samples hold `count` targets. With 0 all parameters are in place, and no gradient follows; else
  // they are when the first gradient is ready.
  virtual void Begin(const Work& work, double count) = 0;
  virtual void GradientReady(const Work& work, Range range) = 0;
  // `seconds` since Next returned, waits in ParametersNeeded included.
  virtual void Done(const Work& work, const LossSum& sum, double seconds) = 0;
  // It was cancelled, or failed.
  virtual void Stopped(const Work& work) = 0;
};

// Constant after construction but for the model; one thread.
class TrainLoop {
 public:
  // All arguments outlive the loop; `spec` is filled in; hooks may be null.
  TrainLoop(std::string job_id, const v1::JobSpec& spec, const Dataset* data, Model* model, Rounds* rounds,
            Clock* clock, WorkerHooks* hooks);

  // Runs until the job ends (OK) or model or data fail.
  absl::Status Run();

 private:
  absl::StatusOr<LossSum> Train(const Work& work);
  absl::StatusOr<LossSum> Evaluate(const Work& work);

  const std::string job_id_;
  const v1::JobSpec& spec_;
  const Dataset* const data_;
  Model* const model_;
  Rounds* const rounds_;
  Clock* const clock_;
  WorkerHooks* const hooks_;
};

// Positions of the data order that replica d computes in round r. Pure.
Range TrainPositions(const v1::TrainSpec& train, uint64_t round, uint32_t d, uint32_t replicas);
// Held-out samples that one evaluation looks at, all replicas together. Pure.
uint64_t EvaluationSamples(const v1::TrainSpec& train, uint64_t held_out);

}  // namespace sluice

#endif  // SLUICE_WORKER_TRAIN_LOOP_H_
