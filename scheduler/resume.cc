#include "scheduler/resume.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "common/layout.h"
#include "common/mesh.h"
#include "common/status_macros.h"
#include "common/wire_format.h"
#include "scheduler/placement.h"

namespace sluice {
namespace {

std::string Count(uint64_t n, const char* what) { return absl::StrCat(n, " ", what, n == 1 ? "" : "s"); }

void InexactFrom(uint64_t version, v1::JobStatus* status) {
  status->set_exact_until_round(
      std::min(version, status->has_exact_until_round() ? status->exact_until_round() : UINT64_MAX));
}

// Async: a checkpoint's chunks have seen different positions unless nothing was under way.
absl::Status CheckLedger(const v1::JobSpec& spec, uint64_t parameters, const ResumeFrom& from) {
  const uint64_t forced = spec.parallel().chunk_elements();
  const uint64_t chunk_elements = forced > 0 ? forced : DefaultChunkElements(parameters);
  const v1::CheckpointManifest& manifest = from.manifest;
  const bool async = spec.train().mode() == v1::TrainSpec::ASYNC;
  const uint64_t batch = manifest.spec().train().batch();
  bool cuts = false, even = true;
  for (const v1::CheckpointFile& file : manifest.files()) {
    for (const v1::ChunkCut& cut : file.cuts()) {
      cuts = true;
      even &=
          cut.applied_size() == 1 && cut.applied(0).begin() == 0 && cut.applied(0).end() == manifest.version() * batch;
    }
  }
  if ((async || cuts) && spec.train().batch() != batch) {
    return absl::FailedPreconditionError(absl::StrCat(
        "train.batch: found ", spec.train().batch(), ", but ", from.directory, " counts its positions in rounds of ",
        batch, "; set train.batch to that, or init without resume (parameters only)"));
  }
  if (even || (async && chunk_elements == manifest.chunk_elements())) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      async ? "parallel.chunk_elements" : "train.mode", ": ", from.directory,
      " was written while contributions of an async job were under way: its chunks have seen different positions; ",
      async ? absl::StrCat("keep chunks of ", manifest.chunk_elements(), " elements")
            : "resume it with train.mode async",
      ", resume from the job's last version, or init without resume (parameters only)"));
}

// The first field in which the models differ as functions of their parameters.
absl::Status CheckModel(const v1::ModelSpec& model, const v1::ModelSpec& held, const ResumeFrom& from) {
  const auto differs = [&](const std::string& path, const auto& found, const auto& expected) {
    if (found == expected) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(path, ": found ", found, ", but ", from.directory, " is of ",
                                                      expected, "; a job that resumes keeps its model"));
  };
  const auto kind = [](const v1::ModelSpec& m) {
    return m.has_gpt2() ? std::string("gpt2") : ClassifierSizesOf(m).value_or(ClassifierSizes()).kind;
  };
  RETURN_IF_ERROR(differs("model", kind(model), kind(held)));
  if (model.has_gpt2()) {
    const v1::Gpt2Spec &a = model.gpt2(), &b = held.gpt2();
    RETURN_IF_ERROR(differs("model.gpt2.layers", a.layers(), b.layers()));
    RETURN_IF_ERROR(differs("model.gpt2.heads", a.heads(), b.heads()));
    RETURN_IF_ERROR(differs("model.gpt2.width", a.width(), b.width()));
    RETURN_IF_ERROR(differs("model.gpt2.context", a.context(), b.context()));
    return differs("model.gpt2.vocabulary", a.vocabulary(), b.vocabulary());
  }
  const ClassifierSizes a = *ClassifierSizesOf(model), b = *ClassifierSizesOf(held);
  const std::string path = absl::StrCat("model.", a.kind);
  RETURN_IF_ERROR(differs(path + ".inputs", a.inputs, b.inputs));
  RETURN_IF_ERROR(differs(path + ".classes", a.classes, b.classes));
  const auto widths = [](const v1::ModelSpec& m) {
    return absl::StrCat("[", absl::StrJoin(m.mlp().hidden(), ", "), "]");
  };
  return differs(path + ".hidden", widths(model), widths(held));
}

}  // namespace

absl::Status CheckResume(const v1::JobSpec& spec, uint64_t parameters, const ResumeFrom& from) {
  const v1::CheckpointManifest& manifest = from.manifest;
  if (manifest.spec().has_model()) RETURN_IF_ERROR(CheckModel(spec.model(), manifest.spec().model(), from));
  if (manifest.parameters() != parameters) {
    return absl::FailedPreconditionError(absl::StrCat("init.path: ", from.directory, " holds ", manifest.parameters(),
                                                      " parameters, the model has ", parameters,
                                                      "; give the model of job ", manifest.job_id()));
  }
  for (const std::string& slot : OptimizerSlots(spec.optimizer())) {
    if (std::find(manifest.slots().begin(), manifest.slots().end(), slot) == manifest.slots().end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("init.path: ", from.directory, " has no optimizer state \"", slot, "\" but \"",
                       absl::StrJoin(manifest.slots(), "\", \""),
                       "\"; use the same optimizer, or init without resume (parameters only)"));
    }
  }
  if (manifest.version() >= spec.train().rounds()) {
    return absl::FailedPreconditionError(absl::StrCat("init.path: ", from.directory, " has seen ", manifest.version(),
                                                      " rounds already and train.rounds is ", spec.train().rounds(),
                                                      "; ask for more rounds"));
  }
  return CheckLedger(spec, parameters, from);
}

void ResumeResiduals(const ResumeFrom& from, const v1::JobSpec& spec, v1::CheckpointRef* begins,
                     v1::JobStatus* status) {
  const v1::CheckpointManifest& manifest = from.manifest;
  const auto keeps = [](const v1::JobSpec& s) { return ErrorFeedback(s) && s.train().mode() != v1::TrainSpec::ASYNC; };
  const uint32_t held = ResidualRanks(manifest), ranks = static_cast<uint32_t>(GangSize(spec.parallel()));
  if (manifest.has_exact_until_round()) status->set_exact_until_round(manifest.exact_until_round());
  if (keeps(spec)) begins->set_residuals(held);
  if (keeps(spec) && held > 0 && held != ranks) {
    status->add_warnings(absl::StrCat("what was left out of the gradients of ", Count(held, "rank"), " goes on with ",
                                      Count(ranks, "rank"), ": rank i's with rank i mod ", ranks));
  }
  const bool dropped = held > 0 && !keeps(spec), absent = held == 0 && ErrorFeedback(manifest.spec());
  if (!dropped && !absent) return;
  const auto async = [](const v1::JobSpec& s) { return s.train().mode() == v1::TrainSpec::ASYNC; };
  if (!async(spec)) InexactFrom(manifest.version(), status);
  const char* const why =
      absent ? (async(manifest.spec()) ? "checkpoints of async jobs do not hold it"
                                       : "the checkpoint does not hold it (an earlier version of Sluice wrote it)")
             : (async(spec) ? "an async job begins without" : "this job pushes without error feedback");
  status->add_warnings(absl::StrCat("what ", EncodingName(PushEncoding(manifest.spec())),
                                    " had left out of the gradients of ", from.directory, " is dropped: ", why));
}

void ResumeLayout(const ResumeFrom& from, const v1::JobSpec& spec, v1::JobStatus* status) {
  const v1::CheckpointManifest& manifest = from.manifest;
  if (!manifest.spec().has_model()) return;  // it does not say how it was trained
  const Mesh found = MeshOf(spec.parallel()), held = MeshOf(manifest.spec().parallel());
  std::vector<std::string> changes;
  const auto compare = [&](const char* path, uint64_t now, uint64_t then) {
    if (now != then) changes.push_back(absl::StrCat(path, " ", then, " to ", now));
  };
  compare("parallel.data", found.data, held.data);
  compare("parallel.tensor", found.tensor, held.tensor);
  compare("parallel.pipeline", found.pipeline, held.pipeline);
  compare("parallel.microbatches", std::max(1u, spec.parallel().microbatches()),
          std::max(1u, manifest.spec().parallel().microbatches()));
  compare("parallel.sequence_parallel", found.sequence_parallel, held.sequence_parallel);
  if (!changes.empty()) {
    status->add_warnings(absl::StrCat("goes on in another layout, ", absl::StrJoin(changes, ", "),
                                      ": sums are taken in another order from round ", manifest.version(), " on"));
    if (spec.train().mode() != v1::TrainSpec::ASYNC) InexactFrom(manifest.version(), status);
  }
  if (spec.train().batch() != manifest.spec().train().batch()) {
    status->add_warnings(absl::StrCat("train.batch ", manifest.spec().train().batch(), " to ", spec.train().batch(),
                                      ": the data goes on at position ", manifest.version() * spec.train().batch(),
                                      ", the checkpoint had come to ", manifest.data_position()));
  }
}

}  // namespace sluice
