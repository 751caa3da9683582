// A scheduler, servers and workers as processes on loopback, supervised: one that dies unexpectedly is started again.
#ifndef SLUICE_CLIENT_LOCAL_CLUSTER_H_
#define SLUICE_CLIENT_LOCAL_CLUSTER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/interrupt.h"
#include "client/process.h"

namespace sluice {

// Thread-safe. A thread of its own starts, watches and ends the children; they die with it (PR_SET_PDEATHSIG) even
// where this process is killed.
class LocalCluster {
 public:
  struct Options {
    std::string binaries;    // folder of sluice-scheduler, sluice-server, sluice-worker
    std::string run_folder;  // absolute; logs/, state/, checkpoints/ and ports/ are made in it
    int servers = 1, workers = 1;
    int threads = 1;  // of each worker
    std::string device = "cpu";
    std::string data_cache;  // the workers' --data_cache
    // A daemon died and was started again. On the cluster's thread.
    std::function<void(const std::string&)> notice;
    // The cluster gave up (status() says why). On the cluster's thread.
    std::function<void()> failed;
    absl::Duration start_limit = absl::Seconds(30);
    absl::Duration stop_limit = absl::Seconds(5);  // from SIGTERM to SIGKILL
  };

  // Blocks until the scheduler answers at its port (its daemons may still be starting). Errors: NOT_FOUND without the
  // binaries; INTERNAL with the last lines of its log where it ended; DEADLINE_EXCEEDED; CANCELLED by the interrupt.
  static absl::StatusOr<std::unique_ptr<LocalCluster>> Start(Options options, Interrupt* interrupt);
  ~LocalCluster();

  const std::string& scheduler_address() const { return scheduler_address_; }
  // Not ok once a daemon kept dying and the cluster gave up.
  absl::Status status() const;
  // Ends all children: SIGTERM, then SIGKILL. Returns when none is left. Again: nothing.
  void Stop();

 private:
  struct Daemon {
    std::string name, program, log;
    std::vector<std::string> args;
    ChildProcess process;
    absl::Time started = absl::InfinitePast();
    absl::Time start_at = absl::InfinitePast();  // not running: when to start it
    int quick_deaths = 0;                        // in a row, each soon after its start
  };

  explicit LocalCluster(Options options);
  void Run();  // the thread
  absl::Status Prepare() const;
  Daemon MakeDaemon(const std::string& role, int index, std::vector<std::string> args) const;
  void AddNodes();
  void StartDaemon(Daemon* daemon);
  void Buried(Daemon* daemon, const std::string& cause);
  void Fail(const absl::Status& status);
  // 0 until the scheduler has written it.
  int ReadPort() const;
  // Blocks until a child ended, Stop was called or the time has come.
  void Wait(absl::Duration time) const;
  void EndChildren();
  bool stopping() const;

  const Options options_;
  int wake_ = -1;                  // eventfd
  std::string scheduler_address_;  // written before Start returns

  // Of the thread alone.
  std::vector<std::unique_ptr<Daemon>> daemons_;
  int port_ = 0;

  mutable absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  int published_port_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace sluice

#endif  // SLUICE_CLIENT_LOCAL_CLUSTER_H_
