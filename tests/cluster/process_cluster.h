// Real daemons as child processes on loopback, and programs that a test waits for. All of them end with the test,
// however it ends.
#ifndef SLUICE_TESTS_CLUSTER_PROCESS_CLUSTER_H_
#define SLUICE_TESTS_CLUSTER_PROCESS_CLUSTER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/process.h"
#include "client/rpc.h"

namespace sluice {

// A program of this build (or any other) that runs; its output goes to a file.
class Program {
 public:
  // `program`: "sluice-server" means that of this build; what has a slash is a path. Errors as ChildProcess::Start.
  static absl::StatusOr<Program> Start(const std::string& program, const std::vector<std::string>& args,
                                       const std::string& log_path);

  bool running() const { return process_.running(); }
  pid_t pid() const { return process_.pid(); }
  void Signal(int signal) const { process_.Signal(signal); }
  // stdout and stderr so far.
  std::string Output() const;
  // Waits until `condition` holds; false where the program has ended before that or the patience is over.
  bool AwaitWhileRunning(const std::function<bool()>& condition, absl::Duration patience = absl::Seconds(60));
  // "exit code 1", "signal 9 (Killed)"; "still running" where the patience is over: then it is killed.
  std::string AwaitEnd(absl::Duration patience = absl::Seconds(60));

 private:
  // Waits for the end at most so long.
  void Poll(absl::Duration time);

  ChildProcess process_;
  std::string log_path_, end_;
};

// Command lines of the processes that name `text`, a path that is unique to them.
std::vector<std::string> ProcessesNaming(const std::string& text);

// A scheduler, servers and workers called "scheduler", "server-0", ..., "worker-0", ... One thread uses it.
class ProcessCluster {
 public:
  // Starts all of them in `folder`, which outlives them. `hosts`: which host a daemon is to think it is on, by name.
  static absl::StatusOr<std::unique_ptr<ProcessCluster>> Start(const std::string& folder, int servers, int workers,
                                                               const std::map<std::string, std::string>& hosts = {});

  // A new life of this name; the scheduler keeps its port. Returns once it listens.
  absl::Status StartDaemon(const std::string& name);
  // SIGKILL; returns when it is gone.
  void Kill(const std::string& name);

  Program& daemon(const std::string& name) { return daemons_.at(name); }
  std::vector<std::string> names() const;
  int port(const std::string& name) const { return ports_.at(name); }
  const std::string& state_folder() const { return state_folder_; }

  absl::StatusOr<std::string> Submit(const v1::JobSpec& spec) const;
  // As InProcessCluster::Await; survives restarts of the scheduler.
  absl::StatusOr<v1::JobStatus> Await(const std::string& job, const std::function<bool(const v1::JobStatus&)>& until,
                                      absl::Duration patience = absl::Seconds(60)) const;
  absl::StatusOr<v1::JobStatus> AwaitEnd(const std::string& job) const;
  absl::StatusOr<v1::JobStatus> AwaitRounds(const std::string& job, uint64_t rounds) const;
  absl::StatusOr<v1::GetClusterResponse> Nodes() const;

 private:
  ProcessCluster(std::string folder, std::map<std::string, std::string> hosts);
  SchedulerClient MakeClient(Interrupt* interrupt) const;

  const std::string folder_, state_folder_;
  const std::map<std::string, std::string> hosts_;
  std::map<std::string, int> ports_;
  std::map<std::string, Program> daemons_;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_CLUSTER_PROCESS_CLUSTER_H_
