// What a job's degrees of parallelism ask of the rest of its spec.
#ifndef SLUICE_COMMON_MESH_RULES_H_
#define SLUICE_COMMON_MESH_RULES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/mesh.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

inline constexpr uint64_t kMaxRanks = 16384;  // of a job

// Everything that is wrong with `parallel` and with what stands beside it, each with the field's path. Whether the
// model can be cut so is looked at only where the model itself is `sound`. Pure. `spec`: filled in.
std::vector<std::string> MeshProblems(const v1::JobSpec& spec, bool sound);

// "" where `workers` suffice for the mesh; else which degree does not fit and what does: "parallel.data: found 2;
// parallel.data 2 x pipeline 2 x tensor 1 = 4 workers, there are 3; the nearest value allowed is 1". The mesh has been
// checked.
std::string TooFewWorkers(const v1::ModelSpec& model, const Mesh& mesh, uint64_t workers);

// "" or, where fewer microbatches than stages are to keep the stages busy, how long these have nothing to do. `spec`:
// valid.
std::string IdleStages(const v1::JobSpec& spec);

}  // namespace sluice

#endif  // SLUICE_COMMON_MESH_RULES_H_
