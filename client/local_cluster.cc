#include "client/local_cluster.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kQuickDeath = absl::Seconds(10);
constexpr int kGiveUpAfter = 5;  // quick deaths in a row
constexpr absl::Duration kPortInterval = absl::Milliseconds(10);

}  // namespace

LocalCluster::LocalCluster(Options options) : options_(std::move(options)) {}

LocalCluster::~LocalCluster() {
  Stop();
  if (wake_ >= 0) close(wake_);
}

absl::Status LocalCluster::Prepare() const {
  for (const char* role : {"scheduler", "server", "worker"}) {
    const std::string program = absl::StrCat(options_.binaries, "/sluice-", role);
    if (access(program.c_str(), X_OK) != 0) {
      return absl::NotFoundError(absl::StrCat(program, ": cannot be run: ", strerror(errno),
                                              "; the daemons are expected beside the sluice program"));
    }
  }
  for (const char* folder : {"logs", "state", "checkpoints", "ports"}) {
    std::error_code error;
    fs::create_directories(fs::path(options_.run_folder) / folder, error);
    if (error) {
      return absl::FailedPreconditionError(
          absl::StrCat(options_.run_folder, "/", folder, ": cannot be made: ", error.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(Options options, Interrupt* interrupt) {
  std::unique_ptr<LocalCluster> cluster(new LocalCluster(std::move(options)));
  RETURN_IF_ERROR(cluster->Prepare());
  cluster->wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (cluster->wake_ < 0) return absl::InternalError(absl::StrCat("eventfd: ", strerror(errno)));
  cluster->thread_ = std::thread([c = cluster.get()] { c->Run(); });
  const absl::Time deadline = absl::Now() + cluster->options_.start_limit;
  LocalCluster* c = cluster.get();
  while (true) {
    {
      absl::MutexLock lock(&c->mutex_);
      const auto ready = [c]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(c->mutex_) {
        return c->published_port_ != 0 || !c->status_.ok();
      };
      if (c->mutex_.AwaitWithTimeout(absl::Condition(&ready), absl::Milliseconds(50))) {
        RETURN_IF_ERROR(c->status_);
        c->scheduler_address_ = absl::StrCat("127.0.0.1:", c->published_port_);
        break;
      }
    }
    if (interrupt->count() > 0) return absl::CancelledError("interrupted");
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("the scheduler was not ready within ",
                                                      absl::FormatDuration(c->options_.start_limit), "; see ",
                                                      c->options_.run_folder, "/logs/scheduler.log"));
    }
  }
  return cluster;
}

absl::Status LocalCluster::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

bool LocalCluster::stopping() const {
  absl::MutexLock lock(&mutex_);
  return stop_;
}

void LocalCluster::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  if (wake_ >= 0 && write(wake_, &one, sizeof(one)) < 0) {
    // The counter is full: the thread is woken already.
  }
  if (thread_.joinable()) thread_.join();
}

LocalCluster::Daemon LocalCluster::MakeDaemon(const std::string& role, int index, std::vector<std::string> args) const {
  Daemon daemon;
  daemon.name = index < 0 ? role : absl::StrCat(role, "-", index);
  daemon.program = absl::StrCat(options_.binaries, "/sluice-", role);
  daemon.log = absl::StrCat(options_.run_folder, "/logs/", daemon.name, ".log");
  daemon.args = std::move(args);
  daemon.args.push_back(absl::StrCat("--name=", daemon.name));
  daemon.args.push_back(absl::StrCat("--port_file=", options_.run_folder, "/ports/", daemon.name));
  return daemon;
}

void LocalCluster::AddNodes() {
  const std::string scheduler = absl::StrCat("--scheduler=127.0.0.1:", port_);
  for (int i = 0; i < options_.servers; ++i) {
    daemons_.push_back(std::make_unique<Daemon>(MakeDaemon(
        "server", i,
        {"--listen=127.0.0.1:0", scheduler, absl::StrCat("--checkpoint_root=", options_.run_folder, "/checkpoints")})));
  }
  for (int i = 0; i < options_.workers; ++i) {
    daemons_.push_back(std::make_unique<Daemon>(
        MakeDaemon("worker", i,
                   {"--listen=127.0.0.1:0", scheduler, absl::StrCat("--data_cache=", options_.data_cache),
                    absl::StrCat("--threads=", options_.threads), absl::StrCat("--device=", options_.device)})));
  }
}

int LocalCluster::ReadPort() const {
  std::ifstream in(absl::StrCat(options_.run_folder, "/ports/scheduler"));
  int port = 0;
  return in >> port ? port : 0;
}

void LocalCluster::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = status;
  }
  if (options_.failed != nullptr) options_.failed();
}

void LocalCluster::StartDaemon(Daemon* daemon) {
  daemon->started = absl::Now();
  auto process = ChildProcess::Start(daemon->program, daemon->args, daemon->log);
  if (!process.ok()) {
    Fail(process.status());
    return;
  }
  daemon->process = *std::move(process);
}

void LocalCluster::Buried(Daemon* daemon, const std::string& cause) {
  const absl::Time now = absl::Now();
  daemon->quick_deaths = now - daemon->started < kQuickDeath ? daemon->quick_deaths + 1 : 1;
  if (port_ == 0 || daemon->quick_deaths >= kGiveUpAfter) {
    Fail(absl::InternalError(absl::StrCat(daemon->name, port_ == 0 ? " ended at its start: " : " keeps ending: ", cause,
                                          "; the end of ", daemon->log, ":\n", LastLines(daemon->log, 8))));
    return;
  }
  // At once the first time, then slower and slower.
  daemon->start_at = now + absl::Milliseconds(100) * ((1 << (daemon->quick_deaths - 1)) - 1);
  if (options_.notice != nullptr)
    options_.notice(absl::StrCat(daemon->name, " ended (", cause, "); starting it again"));
}

void LocalCluster::Wait(absl::Duration time) const {
  std::vector<pollfd> fds = {{wake_, POLLIN, 0}};
  for (const auto& daemon : daemons_) {
    if (daemon->process.running()) fds.push_back({daemon->process.descriptor(), POLLIN, 0});
  }
  const int64_t ms = time == absl::InfiniteDuration() ? -1 : std::max<int64_t>(0, absl::ToInt64Milliseconds(time) + 1);
  poll(fds.data(), fds.size(), static_cast<int>(ms));
}

void LocalCluster::Run() {
  std::error_code ignored;
  fs::remove(fs::path(options_.run_folder) / "ports/scheduler", ignored);
  daemons_.push_back(std::make_unique<Daemon>(
      MakeDaemon("scheduler", -1,
                 {"--listen=127.0.0.1:0", absl::StrCat("--state_dir=", options_.run_folder, "/state"),
                  absl::StrCat("--checkpoint_root=", options_.run_folder, "/checkpoints")})));
  while (!stopping() && status().ok()) {
    absl::Duration wait = port_ == 0 ? kPortInterval : absl::InfiniteDuration();
    for (size_t i = 0; i < daemons_.size(); ++i) {
      Daemon& daemon = *daemons_[i];
      if (daemon.process.running()) {
        const std::string cause = daemon.process.Reap();
        if (!cause.empty()) Buried(&daemon, cause);
      }
      if (daemon.process.running() || !status().ok()) continue;
      const absl::Time now = absl::Now();
      if (now >= daemon.start_at) {
        StartDaemon(&daemon);
      } else {
        wait = std::min(wait, daemon.start_at - now);
      }
    }
    if (port_ == 0 && (port_ = ReadPort()) != 0) {
      // From now on it keeps its port over restarts: the others know it.
      daemons_[0]->args[0] = absl::StrCat("--listen=127.0.0.1:", port_);
      AddNodes();
      absl::MutexLock lock(&mutex_);
      published_port_ = port_;
      wait = absl::ZeroDuration();
    }
    Wait(wait);
  }
  EndChildren();
}

void LocalCluster::EndChildren() {
  const auto left = [this] {
    return std::count_if(daemons_.begin(), daemons_.end(),
                         [](const auto& d) { return d->process.running() && d->process.Reap().empty(); });
  };
  uint64_t drained;
  while (read(wake_, &drained, sizeof(drained)) > 0) {
  }
  for (auto& daemon : daemons_) daemon->process.Signal(SIGTERM);
  const absl::Time deadline = absl::Now() + options_.stop_limit;
  while (left() > 0 && absl::Now() < deadline) Wait(deadline - absl::Now());
  daemons_.clear();  // kills and reaps what is left
}

}  // namespace sluice
