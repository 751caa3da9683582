// submit, watch, cancel, checkpoint, validate.
#include <unistd.h>

#include <filesystem>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/spec_loading.h"
#include "client/text_table.h"
#include "common/job_spec.h"
#include "common/mesh.h"
#include "common/mesh_costs.h"
#include "common/model_layout.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// Follows the job to its end, prints that, and gives the exit code.
int FollowToEnd(SchedulerClient* client, const std::string& job, ProgressPrinter* printer,
                const ClientEnvironment& environment) {
  std::string id = job;
  const auto status = client->Watch(job, [&](const v1::JobStatus& update) {
    id = update.job_id();
    printer->Update(update, absl::Now());
  });
  printer->Finish();
  if (status.ok()) return PrintEnd(*status, environment);
  if (absl::IsCancelled(status.status()) && environment.interrupt->count() > 0) {
    *environment.err << "sluice: detached; " << id << " goes on (sluice watch " << id << ", sluice cancel " << id << ")"
                     << std::endl;
    return kExitInterrupted;
  }
  return Report(status.status(), environment);
}

std::string NewRequestId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x-%d", random(), random(), getpid());
}

bool IsFolder(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

absl::StatusOr<v1::SubmitJobRequest> MakeRequest(const Args& args, SchedulerClient* client) {
  v1::SubmitJobRequest request;
  SpecSource source;
  source.path = args.argument(0);
  source.sets = args.List("set");
  source.name = args.String("name");
  const std::string resume = args.String("resume"), init = args.String("init");
  if (!resume.empty() && !init.empty()) {
    return absl::InvalidArgumentError("--resume and --init exclude each other: a resume has its parameters already");
  }
  if (source.path.empty() && resume.empty()) {
    return absl::InvalidArgumentError(
        "submit needs a SPEC; without one --resume JOB|DIR goes on with the job's own, as --set changes it");
  }
  v1::JobSpec before;  // of the job that is resumed
  if (!init.empty()) {
    source.init.emplace().set_path(init);
  } else if (IsFolder(resume)) {
    ASSIGN_OR_RETURN(*source.init.emplace().mutable_path(), CheckpointFolder(resume));
    source.init->set_resume(true);
    if (source.path.empty()) {
      ASSIGN_OR_RETURN(before, SpecOfCheckpoint(source.init->path()));
    }
  } else if (!resume.empty()) {
    if (resume.find('/') != std::string::npos) {
      return absl::NotFoundError(absl::StrCat("--resume ", resume, ": no such folder, and no job's id"));
    }
    source.init.emplace();  // the scheduler knows the job's checkpoint
    request.set_resume_job(resume);
    if (source.path.empty()) {
      ASSIGN_OR_RETURN(const v1::JobStatus job, client->GetJob(resume));
      before = ToGoOnWith(job.spec());
    }
  }
  if (source.path.empty()) source.base = &before;
  ASSIGN_OR_RETURN(*request.mutable_spec(), LoadSpec(source, DataPaths::kOfCluster));
  request.set_request_id(NewRequestId());
  return request;
}

// What each rank of a replica holds and says in a round (docs/parallel.md).
void PrintRanks(const v1::JobSpec& spec, const ParameterSpace& space, std::ostream* out) {
  const Mesh mesh = MeshOf(spec.parallel());
  const RoundWork work = RoundWorkOf(spec);
  *out << MeshText(mesh) << ", " << mesh.ranks() << " workers; of a replica, in a round of " << work.rows
       << " samples:\n";
  std::vector<std::vector<std::string>> rows = {
      {"STAGE", "TENSOR", "LAYERS", "PARAMETERS", "BYTES", "PUSHED", "COLLECTIVES", "BYTES", "MESSAGES", "BYTES"}};
  const std::vector<RankCosts> costs = CostsOf(spec.model(), space, mesh, work);
  for (uint32_t rank = 0; rank < costs.size(); ++rank) {
    const RankCosts& c = costs[rank];
    const Mesh::Place at = mesh.place(rank);
    rows.push_back({absl::StrCat(at.stage), absl::StrCat(at.tensor),
                    absl::StrCat(c.layers.begin, " to ", c.layers.end - 1), absl::StrCat(c.held),
                    ShortNumber(8.0 * static_cast<double>(c.held)), ShortNumber(4.0 * static_cast<double>(c.pushed)),
                    absl::StrCat(c.tensor_operations()), ShortNumber(static_cast<double>(c.tensor_bytes)),
                    absl::StrCat(c.sent), ShortNumber(static_cast<double>(c.sent_bytes))});
  }
  PrintTable(rows, out);
}

}  // namespace

int RunSubmit(const Args& args, const ClientEnvironment& environment) {
  ProgressPrinter printer(environment.out, environment.out_is_terminal, environment.columns);
  auto client = Connect(args, environment, &printer);
  if (!client.ok()) return Report(client.status(), environment);
  const auto request = MakeRequest(args, client->get());
  if (!request.ok()) return Report(request.status(), environment);
  const auto response = (*client)->Submit(*request);
  if (!response.ok()) return Report(response.status(), environment);
  *environment.out << response->job_id() << std::endl;
  if (args.Bool("follow")) return FollowToEnd(client->get(), response->job_id(), &printer, environment);
  for (const std::string& warning : response->warnings()) *environment.err << "warning: " << warning << std::endl;
  return kExitOk;
}

int RunWatch(const Args& args, const ClientEnvironment& environment) {
  ProgressPrinter printer(environment.out, environment.out_is_terminal, environment.columns);
  auto client = Connect(args, environment, &printer);
  if (!client.ok()) return Report(client.status(), environment);
  return FollowToEnd(client->get(), args.argument(0, "latest"), &printer, environment);
}

int RunCancel(const Args& args, const ClientEnvironment& environment) {
  auto client = Connect(args, environment);
  if (!client.ok()) return Report(client.status(), environment);
  const auto status = (*client)->Cancel(args.argument(0), args.Bool("checkpoint"));
  if (!status.ok()) return Report(status.status(), environment);
  *environment.out << status->job_id() << " " << StateName(status->state()) << " at round " << status->rounds_done()
                   << "/" << status->rounds() << std::endl;
  if (args.Bool("checkpoint") && status->has_last_checkpoint()) {
    *environment.out << "checkpoint " << status->last_checkpoint().directory() << std::endl;
  }
  return kExitOk;
}

int RunCheckpoint(const Args& args, const ClientEnvironment& environment) {
  auto client = Connect(args, environment);
  if (!client.ok()) return Report(client.status(), environment);
  const auto checkpoint = (*client)->Checkpoint(args.argument(0));
  if (!checkpoint.ok()) return Report(checkpoint.status(), environment);
  *environment.out << checkpoint->directory() << std::endl;
  return kExitOk;
}

int RunValidate(const Args& args, const ClientEnvironment& environment) {
  SpecSource source;
  source.path = args.argument(0);
  source.sets = args.List("set");
  source.name = args.String("name");
  const auto spec = LoadSpec(source, DataPaths::kOfCluster);
  if (!spec.ok()) return Report(spec.status(), environment);
  if (args.Bool("print")) {
    *environment.out << JobSpecToYaml(*spec) << std::flush;
    return kExitOk;
  }
  const auto space = MakeParameterSpace(spec->model());
  if (!space.ok()) return Report(space.status(), environment);
  *environment.out << args.argument(0) << ": ok, " << space->size() << " parameters" << std::endl;
  if (MeshOf(spec->parallel()).ranks_of_replica() > 1) PrintRanks(*spec, *space, environment.out);
  return kExitOk;
}

}  // namespace sluice
