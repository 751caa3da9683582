#include "tests/cluster/process_cluster.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kLook = absl::Milliseconds(5);  // how often what has no event of its own is looked at

int ReadPort(const std::string& path) {
  std::ifstream in(path);
  int port = 0;
  return in >> port ? port : 0;
}

}  // namespace

// ---------------------------------------------------------------- programs
absl::StatusOr<Program> Program::Start(const std::string& program, const std::vector<std::string>& args,
                                       const std::string& log_path) {
  Program started;
  started.log_path_ = log_path;
  const bool path = program.find('/') != std::string::npos;
  ASSIGN_OR_RETURN(started.process_,
                   ChildProcess::Start(path ? program : absl::StrCat(SLUICE_BIN_DIR, "/", program), args, log_path));
  return started;
}

std::string Program::Output() const { return Slurp(log_path_); }

void Program::Poll(absl::Duration time) {
  pollfd end = {process_.descriptor(), POLLIN, 0};
  poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(time, absl::Milliseconds(1)))));
  if (std::string how = process_.Reap(); !how.empty()) end_ = std::move(how);
}

bool Program::AwaitWhileRunning(const std::function<bool()>& condition, absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (!condition()) {
    if (!running() || absl::Now() > deadline) return false;
    Poll(kLook);
  }
  return true;
}

std::string Program::AwaitEnd(absl::Duration patience) {
  if (running()) Poll(patience);
  if (!running()) return end_;
  Signal(SIGKILL);
  Poll(absl::Seconds(60));
  return "still running";
}

std::vector<std::string> ProcessesNaming(const std::string& text) {
  std::vector<std::string> found;
  std::error_code error;  // processes may end meanwhile
  for (fs::directory_iterator it("/proc", error), end; !error && it != end; it.increment(error)) {
    const std::string pid = it->path().filename();
    if (!std::all_of(pid.begin(), pid.end(), [](unsigned char c) { return std::isdigit(c); })) continue;
    std::string line = Slurp(it->path() / "cmdline");
    std::replace(line.begin(), line.end(), '\0', ' ');
    if (absl::StrContains(line, text)) found.push_back(absl::StrCat(pid, ": ", line));
  }
  return found;
}

// ---------------------------------------------------------------- daemons
ProcessCluster::ProcessCluster(std::string folder, std::map<std::string, std::string> hosts)
    : folder_(std::move(folder)), state_folder_(folder_ + "/state"), hosts_(std::move(hosts)) {}

absl::StatusOr<std::unique_ptr<ProcessCluster>> ProcessCluster::Start(const std::string& folder, int servers,
                                                                      int workers,
                                                                      const std::map<std::string, std::string>& hosts) {
  std::unique_ptr<ProcessCluster> cluster(new ProcessCluster(folder, hosts));
  RETURN_IF_ERROR(cluster->StartDaemon("scheduler"));
  for (int i = 0; i < servers; ++i) RETURN_IF_ERROR(cluster->StartDaemon(absl::StrCat("server-", i)));
  for (int i = 0; i < workers; ++i) RETURN_IF_ERROR(cluster->StartDaemon(absl::StrCat("worker-", i)));
  return cluster;
}

absl::Status ProcessCluster::StartDaemon(const std::string& name) {
  const std::string role = name.substr(0, name.find('-'));
  const std::string port_file = absl::StrCat(folder_, "/", name, ".port");
  std::vector<std::string> args = {"--name=" + name, "--port_file=" + port_file};
  const auto scheduler = ports_.find("scheduler");
  if (role == "scheduler") {
    args.push_back(absl::StrCat("--listen=127.0.0.1:", scheduler != ports_.end() ? scheduler->second : 0));
    args.push_back("--state_dir=" + state_folder_);
    args.push_back("--lease_ms=10000");  // a loaded machine makes nobody look dead; who is dead is told by connections
  } else {
    args.push_back("--listen=127.0.0.1:0");
    args.push_back(absl::StrCat("--scheduler=127.0.0.1:", port("scheduler")));
  }
  args.push_back(role == "worker" ? "--threads=1" : absl::StrCat("--checkpoint_root=", folder_, "/checkpoints"));
  if (const auto host = hosts_.find(name); host != hosts_.end()) args.push_back("--host_id=" + host->second);
  std::error_code ignored;
  fs::remove(port_file, ignored);
  ASSIGN_OR_RETURN(daemons_[name], Program::Start("sluice-" + role, args, absl::StrCat(folder_, "/", name, ".log")));
  Program& daemon = daemons_[name];
  if (!daemon.AwaitWhileRunning([&] { return ReadPort(port_file) != 0; })) {
    return absl::InternalError(absl::StrCat(name, " did not start:\n", daemon.Output()));
  }
  ports_[name] = ReadPort(port_file);
  return absl::OkStatus();
}

void ProcessCluster::Kill(const std::string& name) {
  Program& daemon = daemons_.at(name);
  daemon.Signal(SIGKILL);
  daemon.AwaitEnd();
}

std::vector<std::string> ProcessCluster::names() const {
  std::vector<std::string> names;
  for (const auto& [name, daemon] : daemons_) names.push_back(name);
  return names;
}

// ---------------------------------------------------------------- jobs
SchedulerClient ProcessCluster::MakeClient(Interrupt* interrupt) const {
  SchedulerClient::Options options;
  options.address = absl::StrCat("127.0.0.1:", port("scheduler"));
  options.address_source = "the test";
  options.interrupt = interrupt;
  return SchedulerClient(std::move(options));
}

absl::StatusOr<std::string> ProcessCluster::Submit(const v1::JobSpec& spec) const {
  Interrupt interrupt;
  v1::SubmitJobRequest request;
  *request.mutable_spec() = spec;
  ASSIGN_OR_RETURN(const v1::SubmitJobResponse response, MakeClient(&interrupt).Submit(request));
  return response.job_id();
}

absl::StatusOr<v1::JobStatus> ProcessCluster::Await(const std::string& job,
                                                    const std::function<bool(const v1::JobStatus&)>& until,
                                                    absl::Duration patience) const {
  Interrupt interrupt;
  v1::JobStatus seen;
  bool done = false;
  const absl::StatusOr<v1::JobStatus> end = MakeClient(&interrupt)
                                                .Watch(
                                                    job,
                                                    [&](const v1::JobStatus& status) {
                                                      if (done) return;
                                                      seen = status;
                                                      done = until(status);
                                                      if (done) interrupt.Notify();
                                                    },
                                                    patience);
  if (done) return seen;
  if (end.ok()) return end;
  return absl::Status(end.status().code(),
                      absl::StrCat(std::string(end.status().message()), "; last seen: ", seen.ShortDebugString()));
}

absl::StatusOr<v1::JobStatus> ProcessCluster::AwaitEnd(const std::string& job) const {
  return Await(job, [](const v1::JobStatus& status) { return HasEnded(status.state()); });
}

absl::StatusOr<v1::JobStatus> ProcessCluster::AwaitRounds(const std::string& job, uint64_t rounds) const {
  return Await(job, [rounds](const v1::JobStatus& status) { return status.rounds_done() >= rounds; });
}

absl::StatusOr<v1::GetClusterResponse> ProcessCluster::Nodes() const {
  Interrupt interrupt;
  return MakeClient(&interrupt).Cluster();
}

}  // namespace sluice
