#include "common/mesh_costs.h"

#include <algorithm>

#include "common/layout.h"

namespace sluice {
namespace {

// Elements of what goes from layer `layer` to the next for one row.
uint64_t RowBehind(const v1::ModelSpec& model, uint64_t layer) {
  if (model.has_gpt2()) return uint64_t{model.gpt2().context()} * model.gpt2().width();
  return model.mlp().hidden(static_cast<int>(layer));
}

// Layers whose attention is computed, and summed, once more by a backward pass of one microbatch: the last one is still
// there where backward follows its forward at once.
uint64_t LayersAgain(uint64_t layers, uint32_t stage, const Mesh& mesh, const RoundWork& work) {
  if (!work.recompute || layers == 0) return 0;
  const bool at_once = work.microbatches == 1 || work.schedule == v1::ParallelSpec::SEQUENTIAL ||
                       (work.schedule == v1::ParallelSpec::ONE_F_ONE_B && stage + 1 == mesh.pipeline);
  return at_once ? layers - 1 : layers;
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
    if (mesh.tensor > 1) {
      const uint64_t row = uint64_t{model.gpt2().context()};
      // Forward: after attention and after the second half of each layer, and of the embedding. Backward: the gradients
      // of both halves' inputs, and of the head's.
      const uint64_t sums = 4 * rank.layers.size() + first + last + LayersAgain(rank.layers.size(), stage, mesh, work);
      rank.sums = sums * work.microbatches;
      rank.sum_bytes = sums * work.rows * row * model.gpt2().width() * 4;
      rank.gathers = last ? work.microbatches : 0;
      rank.gather_bytes = last ? uint64_t{mesh.tensor} * work.rows * row * 4 * 4 : 0;
    }
    if (!last) {
      rank.sent += work.microbatches;
      rank.sent_bytes += work.rows * RowBehind(model, rank.layers.end - 1) * 4;
    }
    if (!first) {
      rank.sent += work.microbatches;
      rank.sent_bytes += work.rows * RowBehind(model, rank.layers.begin - 1) * 4;
    }
  }
  for (const Segment& segment : SegmentsOf(model, space, mesh)) {
    for (const uint32_t contributor : segment.contributors) ranks[contributor].pushed += segment.range.size();
  }
  return ranks;
}

}  // namespace sluice
