// The ranks of a job and what each of them holds of the parameter space and pushes for. Pure functions of model and
// degrees: scheduler, servers and workers compute the same.
//
// Layers are dealt to the stages of a pipeline in order; within a stage tensors that are cut lie on its tensor ranks by
// rows, the others on all of them. The token embedding of a GPT is its head as well: the first and the last stage both
// hold it, and both push for it.
#ifndef SLUICE_COMMON_MESH_H_
#define SLUICE_COMMON_MESH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/model_layout.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

struct Mesh {
  uint32_t data = 1, pipeline = 1, tensor = 1;  // degrees D, P, T
  // Activations between the tensor-parallel parts lie on the tensor ranks by positions, so that the gradients of what
  // all of them hold are partial sums (Korthikanti et al. 2022, arXiv:2205.05198).
  bool sequence_parallel = false;

  struct Place {
    uint32_t data = 0, stage = 0, tensor = 0;
    bool operator==(const Place&) const = default;
  };
  uint32_t ranks_of_replica() const { return pipeline * tensor; }
  uint32_t ranks() const { return data * pipeline * tensor; }
  // Contributor index, the position in Plan.ranks: by replica, then stage, then tensor rank.
  uint32_t rank(const Place& at) const { return (at.data * pipeline + at.stage) * tensor + at.tensor; }
  Place place(uint32_t rank) const { return {rank / tensor / pipeline, rank / tensor % pipeline, rank % tensor}; }
};

// Degrees that are left out, or 0, count as 1.
Mesh MeshOf(const v1::ParallelSpec& parallel);
// "parallel.data 2 x pipeline 2 x tensor 1": for messages.
std::string MeshText(const Mesh& mesh);

// Whether the model can be cut so. INVALID_ARGUMENT names the field, what limits it and the nearest value that is
// allowed; one line for each degree that is not.
absl::Status CheckMesh(const v1::ModelSpec& model, const Mesh& mesh);

// Part `part` of `parts` of n rows, each as large as another or one row larger, the larger ones first.
Range PartOf(uint64_t n, uint32_t parts, uint32_t part);

// The layers of each stage. `costs`: what a layer takes; `first` and `last`: what the ends take besides (the embedding,
// the head). Each stage gets at least one layer; the costliest one costs as little as possible, and under this bound
// the sum of squares is the smallest; of equals the one whose first stages, which keep the most microbatches, have
// fewer layers. 1 <= stages <= costs.size(). Sums of costs must stay below 2^60.
std::vector<Range> DealLayers(const std::vector<uint64_t>& costs, uint64_t first, uint64_t last, uint32_t stages);
// The same for a model: floating-point operations of a forward pass over one full row (one sample).
std::vector<Range> StageLayers(const v1::ModelSpec& model, uint32_t stages);

// A maximal range of the space that the same ranks of every replica hold, and for which the same of them push.
struct Segment {
  Range range;
  std::vector<uint32_t> contributors;  // ranks within a replica (stage * T + tensor), ascending; at least one
  bool operator==(const Segment&) const = default;
};

// Together the whole space, in order. The mesh has been checked.
std::vector<Segment> SegmentsOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh);
// What a rank of a replica holds: maximal ranges in order, none empty.
std::vector<Range> ViewOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh, uint32_t stage,
                          uint32_t tensor);
// Elements of the views of all ranks of a replica, [stage * T + tensor].
std::vector<uint64_t> ViewElements(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh);

}  // namespace sluice

#endif  // SLUICE_COMMON_MESH_H_
