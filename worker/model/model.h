// A model on one rank: forward, backward, evaluation over a Backend. Knows nothing of servers or rounds.
#ifndef SLUICE_WORKER_MODEL_MODEL_H_
#define SLUICE_WORKER_MODEL_MODEL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/layout.h"
#include "common/mesh.h"
#include "common/model_layout.h"
#include "common/shared_memory.h"
#include "sluice/v1/job.pb.h"
#include "worker/backend/backend.h"
#include "worker/data/dataset.h"
#include "worker/model/parameter_memory.h"
#include "worker/parallel/collectives.h"
#include "worker/parallel/pipeline_schedule.h"

namespace sluice {

struct LossSum {
  double loss = 0;     // sum over targets, nats
  double count = 0;    // targets
  double correct = 0;  // argmax equals the target
};

// Elements of the space whose gradient is final for this round; the values are in the gradient buffer's host image
// (see Model::gradients) when it is called.
using GradientSink = std::function<void(Range)>;

// Called in forward order before the first use of these elements in a pass; returns when they are in the host image.
// An error ends the pass with it. Empty: all of them are there.
using ParameterGate = std::function<absl::Status(Range)>;

// Not thread-safe; one thread drives it. Parameters and gradients are float32 over the whole space [0, P).
class Model {
 public:
  virtual ~Model() = default;
  virtual const ParameterSpace& space() const = 0;

  // Host images of parameters and gradients, P floats each, 64-byte aligned, allocated by the model (pinned where the
  // backend can; the very memory that kernels use where the backend computes in host memory).
  // The owner writes parameters between rounds, or until the gate has let the pass through to them, and announces what
  // it writes with ParametersChanged.
  virtual float* parameters() = 0;
  // Where the model can compute from values that lie in a server's memory: the owner puts them there by this, in the
  // window of their version; parameters() is then the window of even versions, and each pass reads that of UseVersion.
  // Null: there is only parameters().
  virtual ParameterMemory* parameter_memory() { return nullptr; }
  // Passes from now on compute from this version of the parameters, which is also the round that dropout's masks are
  // made for. Before the first call: 0.
  virtual void UseVersion(uint64_t version) {}
  virtual const float* gradients() const = 0;
  // Device memory that passes so far have needed beside parameters and gradients. 0: not known.
  virtual int64_t activation_bytes() const { return 0; }
  // Keeps the gradients' memory alive for a transport that still holds slices of it.
  virtual std::shared_ptr<const void> gradient_owner() const = 0;
  // The memory of gradients() as other processes of this host may map it; null: they may not.
  virtual std::shared_ptr<const SharedRegion> gradient_region() const { return nullptr; }
  // Elements of parameters() were (or, behind the gate, will be) replaced since the last call: brought to the device
  // before the next use.
  virtual void ParametersChanged(Range range) = 0;

  // Gradients of the *sum* of the losses of all microbatches, in order, accumulated, with dropout where the model has
  // it (whose masks follow from ModelPart::seed, the version and Batch::first_position); `ready` is called in backward
  // order as soon as a range is final (during the last microbatch). Gradients are first written when `needed` has let
  // the pass through to all parameters. With no target at all: loss 0, gradients untouched, neither `needed` nor
  // `ready` called. CANCELLED as soon as *cancel is seen (checked between layers).
  virtual absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                                  const GradientSink& ready, const std::atomic<bool>* cancel) = 0;
  // Without dropout, as NextLogits.
  virtual absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>* cancel) = 0;
  // In place of a pass that has nothing to compute: returns when all ranks of the replica have called it, as they would
  // have waited for each other in the pass.
  virtual absl::Status Meet() { return absl::OkStatus(); }
  // Whole token models: logits of the last position, [vocabulary]. UNIMPLEMENTED for others.
  virtual absl::StatusOr<std::vector<float>> NextLogits(const std::vector<int32_t>& tokens) = 0;
};

// What of a model one rank computes, and with whom. Ranks of a replica are given the same batches and make the same
// calls at about the same time. An error of one of them leaves the others waiting until their groups break.
struct ModelPart {
  Mesh mesh = {};
  Mesh::Place place = {};
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  bool recompute = false;  // gpt2: see TrainSpec.recompute
  uint64_t seed = 0;       // gpt2: of dropout's masks; TrainSpec.seed
  // Both outlive the model. Null where the degree is 1.
  PeerGroup* tensor = nullptr;  // the tensor ranks of the place's stage, in their order
  PeerGroup* stages = nullptr;  // the stages' ranks with the place's tensor rank, in their order
};

// The backend must outlive the model. A part reads and writes the rank's view of the space only (common/mesh.h); memory
// elsewhere is not touched. Sums are the last stage's, the same on each of its tensor ranks; other stages have zeros.
// INVALID_ARGUMENT: CheckMesh.
absl::StatusOr<std::unique_ptr<Model>> MakeModel(const v1::ModelSpec& spec, Backend* backend,
                                                 const ModelPart& part = {});

}  // namespace sluice

#endif  // SLUICE_WORKER_MODEL_MODEL_H_
