// list, status, logs: what the scheduler knows, as text or JSON.
#include <google/protobuf/util/json_util.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/text_table.h"
#include "common/mesh.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

std::string TimeText(double unix_seconds) {
  if (unix_seconds <= 0) return "-";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::UnixEpoch() + absl::Seconds(unix_seconds), absl::LocalTimeZone());
}

std::string Age(double unix_seconds) {
  return unix_seconds <= 0 ? "-" : ShortDuration(absl::Now() - (absl::UnixEpoch() + absl::Seconds(unix_seconds)));
}

std::string Loss(bool has, const v1::RoundRecord& record) { return has ? absl::StrFormat("%.4f", record.loss()) : "-"; }

void PrintJobs(const v1::ListJobsResponse& jobs, std::ostream* out) {
  std::vector<std::vector<std::string>> rows = {{"JOB", "STATE", "ROUND", "LOSS", "VALIDATION", "AGE", "MESSAGE"}};
  for (const v1::JobStatus& job : jobs.jobs()) {
    rows.push_back({job.job_id(), StateName(job.state()), absl::StrCat(job.rounds_done(), "/", job.rounds()),
                    Loss(job.has_last_train(), job.last_train()),
                    Loss(job.has_last_evaluation(), job.last_evaluation()), Age(job.created_unix_seconds()),
                    job.message().substr(0, job.message().find('\n'))});
  }
  PrintTable(rows, out);
}

void PrintCluster(const v1::GetClusterResponse& cluster, std::ostream* out) {
  std::vector<std::vector<std::string>> rows = {{"NODE", "ROLE", "ADDRESS", "JOB", "MEMORY", "PROFILE"}};
  for (const v1::NodeStatus& node : cluster.nodes()) {
    rows.push_back({node.node().name(), node.role() == v1::SERVER ? "server" : "worker", node.address(),
                    node.job_id().empty() ? "-" : node.job_id(),
                    node.memory_limit() == 0 ? "-" : absl::StrCat(node.memory_limit()),
                    node.numeric_profile().empty() ? "-" : node.numeric_profile()});
  }
  PrintTable(rows, out);
  for (const std::string& warning : cluster.warnings()) *out << "warning: " << warning << "\n";
}

void PrintJob(const v1::JobStatus& job, std::ostream* out) {
  std::vector<std::vector<std::string>> rows = {{"job", job.job_id()}, {"state", StateName(job.state())}};
  const auto add = [&rows](const std::string& name, const std::string& value) { rows.push_back({name, value}); };
  if (!job.message().empty()) add("message", job.message());
  add("progress", ProgressText(job));
  if (const std::string text = RoundTimeText(job); !text.empty()) add("round time", text);
  add("parameters", absl::StrCat(job.parameters()));
  add("created", TimeText(job.created_unix_seconds()));
  add("started", TimeText(job.started_unix_seconds()));
  if (job.ended_unix_seconds() > 0) add("ended", TimeText(job.ended_unix_seconds()));
  if (job.has_last_checkpoint()) {
    add("checkpoint",
        absl::StrCat(job.last_checkpoint().directory(), " (round ", job.last_checkpoint().version(), ")"));
  }
  add("generation", absl::StrCat(job.generation(), ", ", job.recoveries(), " recoveries, ", job.rewinds(), " rewinds"));
  add("exactness", job.has_exact_until_round()
                       ? absl::StrCat("bits of an undisturbed run up to round ", job.exact_until_round())
                       : "bits of an undisturbed run");
  const Mesh mesh = MeshOf(job.plan().spec().parallel());
  if (mesh.ranks_of_replica() > 1) add("mesh", absl::StrCat(MeshText(mesh), ", ", mesh.ranks(), " workers"));
  for (int i = 0; i < job.plan().ranks_size(); ++i) {
    const v1::Rank& rank = job.plan().ranks(i);
    const bool timed = job.plan().ranks_size() > 1 && i < job.rank_times_size();
    const std::string time = timed ? RoundTimeText(job, job.rank_times(i)) : "";
    add(mesh.ranks_of_replica() == 1 ? absl::StrCat("replica ", rank.data())
                                     : absl::StrCat("rank ", i, ": replica ", rank.data(), ", stage ", rank.pipeline(),
                                                    ", tensor ", rank.tensor()),
        absl::StrCat(rank.node().name(), " at ", rank.address(), ", ", rank.numeric_profile(), time.empty() ? "" : "; ",
                     time));
  }
  for (const v1::HostSumStatus& sum : job.host_sums()) {
    const bool all = sum.shards() == job.plan().shards() || job.plan().shards() == 0;
    add("host sum", absl::StrCat("replicas ", sum.first(), " to ", sum.first() + sum.ranks() - 1, " push as one",
                                 all ? "" : absl::StrCat(", of ", sum.shards(), " of ", job.plan().shards(), " shards"),
                                 " (host ", sum.host_id(), ")"));
  }
  for (const std::string& warning : job.warnings()) add("warning", warning);
  PrintTable(rows, out);
}

}  // namespace

int RunList(const Args& args, const ClientEnvironment& environment) {
  auto client = Connect(args, environment);
  if (!client.ok()) return Report(client.status(), environment);
  const auto jobs = (*client)->ListJobs();
  if (!jobs.ok()) return Report(jobs.status(), environment);
  if (args.Bool("json")) {
    *environment.out << ToJson(*jobs) << std::flush;
  } else {
    PrintJobs(*jobs, environment.out);
  }
  return kExitOk;
}

int RunStatus(const Args& args, const ClientEnvironment& environment) {
  auto client = Connect(args, environment);
  if (!client.ok()) return Report(client.status(), environment);
  if (!args.arguments().empty()) {
    const auto job = (*client)->GetJob(args.argument(0));
    if (!job.ok()) return Report(job.status(), environment);
    if (args.Bool("json")) {
      *environment.out << ToJson(*job) << std::flush;
    } else {
      PrintJob(*job, environment.out);
    }
    return kExitOk;
  }
  const auto cluster = (*client)->Cluster();
  if (!cluster.ok()) return Report(cluster.status(), environment);
  if (args.Bool("json")) {
    *environment.out << ToJson(*cluster) << std::flush;
    return kExitOk;
  }
  const auto jobs = (*client)->ListJobs();
  if (!jobs.ok()) return Report(jobs.status(), environment);
  PrintCluster(*cluster, environment.out);
  *environment.out << "\n";
  PrintJobs(*jobs, environment.out);
  return kExitOk;
}

int RunLogs(const Args& args, const ClientEnvironment& environment) {
  auto client = Connect(args, environment);
  if (!client.ok()) return Report(client.status(), environment);
  const auto history = (*client)->History(args.argument(0, "latest"));
  if (!history.ok()) return Report(history.status(), environment);
  if (args.Bool("json")) {
    *environment.out << ToJson(*history) << std::flush;
    return kExitOk;
  }
  for (const v1::JobEvent& event : history->events()) {
    *environment.out << TimeText(event.unix_seconds()) << "  " << event.text() << "\n";
  }
  std::vector<std::vector<std::string>> rows = {{"ROUND", "KIND", "LOSS", "ACCURACY", "NORM", "RATE", "SECONDS",
                                                 "COMPUTE", "EXPOSED", "OTHERS", "VERDICT", "STAGES", "TENSOR", ""}};
  for (const v1::RoundRecord& record : history->records()) {
    std::string note = record.skipped() ? "skipped" : "";
    for (uint32_t contributor : record.nonfinite_contributors())
      absl::StrAppend(&note, " non-finite from rank ", contributor);
    const bool training = !record.evaluation();
    const auto part = [&record](float (v1::RankTime::*seconds)() const) -> std::string {  // mean over ranks
      double sum = 0;
      for (const v1::RankTime& time : record.times()) sum += (time.*seconds)();
      return record.times().empty() ? "-" : absl::StrFormat("%.4f", sum / record.times_size());
    };
    rows.push_back({absl::StrCat(record.round()), training ? "training" : "validation",
                    absl::StrFormat("%.5f", record.loss()), absl::StrFormat("%.4f", record.accuracy()),
                    training ? absl::StrFormat("%.4f", record.gradient_norm()) : "-",
                    training ? absl::StrFormat("%.6g", record.learning_rate()) : "-",
                    training ? absl::StrFormat("%.4f", record.seconds()) : "-", part(&v1::RankTime::compute),
                    part(&v1::RankTime::exposed), part(&v1::RankTime::others), part(&v1::RankTime::verdict),
                    part(&v1::RankTime::pipeline), part(&v1::RankTime::tensor), note});
  }
  PrintTable(rows, environment.out);
  return kExitOk;
}

}  // namespace sluice
