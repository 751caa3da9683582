// What each rank of a replica holds, and what a round costs it in messages: the arithmetic of docs/parallel.md as a
// pure function of model, degrees and samples.
#ifndef SLUICE_COMMON_MESH_COSTS_H_
#define SLUICE_COMMON_MESH_COSTS_H_

#include <cstdint>
#include <vector>

#include "common/mesh.h"
#include "common/model_layout.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

// A replica's part of a round.
struct RoundWork {
  uint64_t rows = 0;          // samples; of gpt2 each as long as the context
  uint64_t microbatches = 1;  // that are not empty
  v1::ParallelSpec::Schedule schedule = v1::ParallelSpec::ONE_F_ONE_B;
  bool recompute = false;
};
// Of the first replica, which has the most rows. `spec`: valid.
RoundWork RoundWorkOf(const v1::JobSpec& spec);

// Arrays are float32; N: positions of a microbatch (rows x context), C: width.
struct RankCosts {
  Range layers;         // of its stage
  uint64_t held = 0;    // elements of its view: 4 bytes of parameters and 4 of gradients each
  uint64_t pushed = 0;  // elements that it pushes for each round, at most `held`
  // With the other tensor ranks of its stage, over arrays [N, C]: all-reduces, or with sequence parallelism
  // reduce-scatters and all-gathers.
  uint64_t sums = 0, scatters = 0, gathers = 0;
  uint64_t loss_gathers = 0;  // all-gathers of [T, N, 4]
  // Bytes of the arrays of all of these, an all-reduce's twice: in a ring a rank sends (T-1)/T of them
  // (docs/collectives.md).
  uint64_t tensor_bytes = 0;
  // To the stages before and behind: activations and their gradients, [N, C], with sequence parallelism its own rows.
  uint64_t sent = 0, sent_bytes = 0;

  uint64_t tensor_operations() const { return sums + scatters + gathers + loss_gathers; }
};

// Of a training round, by rank of a replica, [stage * T + tensor]. The mesh has been checked.
std::vector<RankCosts> CostsOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh,
                               const RoundWork& work);

}  // namespace sluice

#endif  // SLUICE_COMMON_MESH_COSTS_H_
