#include "common/mesh_costs.h"

#include <algorithm>

#include "common/layout.h"

namespace sluice {
namespace {

// Elements of what tensor rank `tensor` sends over the border behind `layer` in one direction, over all microbatches.
uint64_t Border(const v1::ModelSpec& model, uint64_t layer, const Mesh& mesh, uint32_t tensor, const RoundWork& work) {
  if (!model.has_gpt2()) return work.rows * model.mlp().hidden(static_cast<int>(layer));
  const uint64_t context = model.gpt2().context(), width = model.gpt2().width();
  if (!mesh.sequence_parallel || work.microbatches == 0) return work.rows * context * width;
  const uint64_t rows = work.rows / work.microbatches, larger = work.rows % work.microbatches;
  return (PartOf((rows + 1) * context, mesh.tensor, tensor).size() * larger +
          PartOf(rows * context, mesh.tensor, tensor).size() * (work.microbatches - larger)) *
         width;
}

// Layers whose attention is computed, and summed, once more by a backward pass of one microbatch: the last one is still
// there where backward follows its forward at once.
uint64_t LayersAgain(uint64_t layers, uint32_t stage, const Mesh& mesh, const RoundWork& work) {
  if (!work.recompute || layers == 0) return 0;
  const bool at_once = work.microbatches == 1 || work.schedule == v1::ParallelSpec::SEQUENTIAL ||
                       (work.schedule == v1::ParallelSpec::ONE_F_ONE_B && stage + 1 == mesh.pipeline);
  return at_once ? layers - 1 : layers;
}

void AddTensor(const v1::ModelSpec& model, const Mesh& mesh, const RoundWork& work, uint32_t stage, RankCosts* rank) {
  const bool first = stage == 0, last = stage + 1 == mesh.pipeline;
  const uint64_t layers = rank->layers.size(), again = LayersAgain(layers, stage, mesh, work), m = work.microbatches;
  // Forward: after attention and after the MLP of each layer, and of the embedding. Backward: the gradients of both
  // inputs, and of the head's. Computed again is what leads up to the MLP's second product.
  const uint64_t sums = 4 * layers + first + last;
  if (mesh.sequence_parallel) {
    rank->scatters = m * (sums + again);
    rank->gathers = m * (sums + 2 * again);
  } else {
    rank->sums = m * (sums + again);
  }
  rank->loss_gathers = last ? m : 0;
  const uint64_t positions = work.rows * model.gpt2().context();  // of all microbatches
  const uint64_t passes = mesh.sequence_parallel ? 2 * sums + 3 * again : 2 * (sums + again);
  rank->tensor_bytes = 4 * positions * (passes * model.gpt2().width() + (last ? uint64_t{mesh.tensor} * 4 : 0));
}

}  // namespace

RoundWork RoundWorkOf(const v1::JobSpec& spec) {
  const uint64_t rows = ReplicaSlots(spec.train().batch(), 0, std::max(1u, spec.parallel().data())).size();
  return {.rows = rows,
          .microbatches = std::min<uint64_t>(rows, std::max(1u, spec.parallel().microbatches())),
          .schedule = spec.parallel().schedule(),
          .recompute = spec.train().recompute()};
}

std::vector<RankCosts> CostsOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh,
                               const RoundWork& work) {
  std::vector<RankCosts> ranks(mesh.ranks_of_replica());
  const std::vector<Range> layers = StageLayers(model, mesh.pipeline);
  const std::vector<uint64_t> held = ViewElements(model, space, mesh);
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    const uint32_t stage = mesh.place(r).stage;
    const bool first = stage == 0, last = stage + 1 == mesh.pipeline;
    RankCosts& rank = ranks[r];
    rank.layers = layers[stage];
    rank.held = held[r];
    if (mesh.tensor > 1) AddTensor(model, mesh, work, stage, &rank);
    if (!last) {
      rank.sent += work.microbatches;
      rank.sent_bytes += 4 * Border(model, rank.layers.end - 1, mesh, mesh.place(r).tensor, work);
    }
    if (!first) {
      rank.sent += work.microbatches;
      rank.sent_bytes += 4 * Border(model, rank.layers.begin - 1, mesh, mesh.place(r).tensor, work);
    }
  }
  for (const Segment& segment : SegmentsOf(model, space, mesh)) {
    for (const uint32_t contributor : segment.contributors) ranks[contributor].pushed += segment.range.size();
  }
  return ranks;
}

}  // namespace sluice
