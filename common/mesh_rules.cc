#include "common/mesh_rules.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

void Degrees(const v1::ParallelSpec& parallel, std::vector<std::string>* problems) {
  if (parallel.data() < 1 || parallel.data() > 1024) {
    problems->push_back(absl::StrCat("parallel.data: found ", parallel.data(), ", allowed 1 to 1024"));
  }
  for (const auto& [path, found] :
       {std::pair{"parallel.tensor", parallel.tensor()}, std::pair{"parallel.pipeline", parallel.pipeline()}}) {
    if (found == 0) problems->push_back(absl::StrCat(path, ": found 0, allowed 1 or more"));
  }
  const Mesh mesh = MeshOf(parallel);
  const auto ranks = static_cast<unsigned __int128>(mesh.data) * mesh.pipeline * mesh.tensor;
  if (mesh.data > 1024 || ranks <= kMaxRanks) return;
  const uint64_t replica = uint64_t{mesh.pipeline} * mesh.tensor;
  const std::string too_many =
      absl::StrCat(MeshText(mesh), " are more than the ", kMaxRanks, " workers that a job may have; ");
  problems->push_back(replica > kMaxRanks ? absl::StrCat("parallel.tensor: found ", mesh.tensor, "; ", too_many,
                                                         "lower parallel.tensor or parallel.pipeline")
                                          : absl::StrCat("parallel.data: found ", mesh.data, "; ", too_many,
                                                         "the nearest value allowed is ", kMaxRanks / replica));
}

// Of jobs whose replicas have several ranks.
void Beside(const v1::JobSpec& spec, std::vector<std::string>* problems) {
  const Mesh mesh = MeshOf(spec.parallel());
  const std::string degrees = absl::StrCat("parallel.pipeline ", mesh.pipeline, " x tensor ", mesh.tensor);
  if (spec.transfer().host_sum() == v1::TransferSpec::ON) {
    problems->push_back(absl::StrCat(
        "transfer.host_sum: found ON with ", degrees,
        ", where workers of one host push for different parts of the model; leave it out (AUTO, which then adds up "
        "nothing), or set parallel.pipeline and parallel.tensor to 1"));
  }
  if (ErrorFeedback(spec)) {
    const std::string format = absl::AsciiStrToLower(EncodingName(PushEncoding(spec)));
    problems->push_back(absl::StrCat("transfer.push.error_feedback: found true with transfer.push ", format, " and ",
                                     degrees,
                                     ": what a lossy format leaves out is kept for whole replicas only; set it to "
                                     "false, or take transfer.push f32"));
  }
}

}  // namespace

std::vector<std::string> MeshProblems(const v1::JobSpec& spec, bool sound) {
  std::vector<std::string> problems;
  const v1::ParallelSpec& parallel = spec.parallel();
  Degrees(parallel, &problems);
  const Mesh mesh = MeshOf(parallel);
  if (sound) {
    if (const absl::Status cut = CheckMesh(spec.model(), mesh); !cut.ok()) {
      for (const auto line : absl::StrSplit(cut.message(), '\n')) problems.emplace_back(line);
    }
  }
  if (!v1::ParallelSpec::Schedule_IsValid(parallel.schedule()) ||
      parallel.schedule() == v1::ParallelSpec::SCHEDULE_UNSPECIFIED) {
    problems.push_back(absl::StrCat("parallel.schedule: found ", static_cast<int>(parallel.schedule()),
                                    ", allowed one_f_one_b, gpipe, sequential"));
  }
  const uint32_t batch = spec.train().batch();
  if (parallel.microbatches() == 0 || (batch > 0 && parallel.microbatches() > batch)) {
    problems.push_back(
        absl::StrCat("parallel.microbatches: found ", parallel.microbatches(), ", allowed 1 to train.batch, ", batch));
  }
  if (mesh.pipeline > 1 || mesh.tensor > 1) Beside(spec, &problems);
  return problems;
}

std::string TooFewWorkers(const v1::ModelSpec& model, const Mesh& mesh, uint64_t workers) {
  const uint64_t needed = uint64_t{mesh.data} * mesh.pipeline * mesh.tensor;
  if (workers >= needed) return "";
  const auto text = [&](const char* path, uint32_t found, const std::string& nearest) {
    return absl::StrCat(path, ": found ", found, "; ", MeshText(mesh), " = ", needed,
                        needed == 1 ? " worker" : " workers", ", there ", workers == 1 ? "is " : "are ",
                        workers == 0 ? std::string("none") : absl::StrCat(workers), nearest);
  };
  if (workers == 0) return text("parallel.data", mesh.data, "");
  const std::string allowed = "; the nearest value allowed is ";
  if (const uint64_t replicas = workers / mesh.ranks_of_replica(); replicas > 0) {
    return text("parallel.data", mesh.data, absl::StrCat(allowed, replicas));
  }
  const std::string alone = mesh.data > 1 ? " with parallel.data 1" : "";
  if (mesh.pipeline > workers) {
    return text("parallel.pipeline", mesh.pipeline,
                absl::StrCat(allowed, std::max<uint64_t>(1, workers / mesh.tensor), alone,
                             mesh.tensor > workers ? " and parallel.tensor 1" : ""));
  }
  uint64_t tensor = workers / mesh.pipeline;
  while (tensor > 1 && !CheckMesh(model, {.pipeline = mesh.pipeline, .tensor = static_cast<uint32_t>(tensor)}).ok()) {
    --tensor;
  }
  return text("parallel.tensor", mesh.tensor, absl::StrCat(allowed, tensor, alone));
}

std::string IdleStages(const v1::JobSpec& spec) {
  const uint64_t stages = MeshOf(spec.parallel()).pipeline, parts = std::max(1u, spec.parallel().microbatches());
  if (parts >= stages || spec.parallel().schedule() == v1::ParallelSpec::SEQUENTIAL) return "";
  const auto idle = [stages](uint64_t m) { return absl::StrCat(100 * (stages - 1) / (m + stages - 1), " %"); };
  const uint64_t more = std::min<uint64_t>(4 * stages, spec.train().batch() / std::max(1u, spec.parallel().data()));
  return absl::StrCat("parallel.microbatches: ", parts, " with ", stages, " stages: each has nothing to do for ",
                      idle(parts), " of a round",
                      more > parts ? absl::StrCat("; with ", more, " it is ", idle(more)) : std::string(),
                      " (docs/parallel.md)");
}

}  // namespace sluice
