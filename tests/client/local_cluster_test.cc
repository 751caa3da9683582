// The supervision of `sluice local` with shell scripts in the daemons' places.
#include "client/local_cluster.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

namespace sluice {
namespace {

namespace fs = std::filesystem;

class LocalClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "sluice-local-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    // Every daemon tells its name and process id through a pipe; the scheduler also writes a port.
    ASSERT_EQ(mkfifo((folder_ / "births").c_str(), 0600), 0);
    births_ = open((folder_ / "births").c_str(), O_RDWR | O_CLOEXEC);  // both ways: it never ends
    ASSERT_GE(births_, 0);
    const std::string head =
        "#!/bin/sh\nfor a in \"$@\"; do case $a in --name=*) n=${a#--name=};; --port_file=*) p=${a#--port_file=};; "
        "esac; done\n"
        "echo \"$@\" >>" +
        (folder_ / "calls").string() + "\n";
    Script("scheduler", head + "echo 4321 >$p.part; mv $p.part $p\n" + Birth("$n") + "exec sleep 1000\n");
    Script("server", head + Birth("$n") + "exec sleep 1000\n");
    Script("worker", head + Birth("$n") + "exec sleep 1000\n");
  }
  void TearDown() override {
    close(births_);
    fs::remove_all(folder_);
  }

  std::string Birth(const std::string& name) const {
    return "echo \"" + name + " $$\" >" + (folder_ / "births").string() + "\n";
  }

  void Script(const std::string& role, const std::string& text) const {
    const std::string path = (folder_ / ("sluice-" + role)).string();
    std::ofstream(path) << text;
    chmod(path.c_str(), 0755);
  }
  LocalCluster::Options Options() {
    LocalCluster::Options options;
    options.binaries = folder_.string();
    options.run_folder = (folder_ / "run").string();
    options.servers = 2;
    options.workers = 2;
    options.notice = [this](const std::string& text) {
      absl::MutexLock lock(&mutex_);
      notices_.push_back(text);
    };
    options.failed = [this] {
      absl::MutexLock lock(&mutex_);
      failed_ = true;
    };
    return options;
  }
  // The newest process that runs as `name`, another one than `before`; 0 if none comes in time.
  pid_t Pid(const std::string& name, pid_t before = 0) {
    while (pids_[name] == before) {
      pollfd fd = {births_, POLLIN, 0};
      if (poll(&fd, 1, 60'000) != 1) return 0;
      std::string line;
      for (char c; read(births_, &c, 1) == 1 && c != '\n';) line.push_back(c);
      std::istringstream words(line);
      std::string who;
      pid_t pid = 0;
      if (words >> who >> pid) pids_[who] = pid;
    }
    return pids_[name];
  }
  static bool Alive(pid_t pid) { return kill(pid, 0) == 0 || errno != ESRCH; }
  std::string Calls() const {
    std::ostringstream text;
    text << std::ifstream(folder_ / "calls").rdbuf();
    return text.str();
  }
  bool WaitForFailure() {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&failed_), absl::Seconds(60));
  }

  fs::path folder_;
  int births_ = -1;
  std::map<std::string, pid_t> pids_;
  Interrupt interrupt_;
  absl::Mutex mutex_;
  std::vector<std::string> notices_ ABSL_GUARDED_BY(mutex_);
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(LocalClusterTest, StartsAllAndEndsAll) {
  auto cluster = LocalCluster::Start(Options(), &interrupt_);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ((*cluster)->scheduler_address(), "127.0.0.1:4321");
  std::vector<pid_t> pids;
  for (const char* name : {"scheduler", "server-0", "server-1", "worker-0", "worker-1"}) {
    pids.push_back(Pid(name));
    ASSERT_NE(pids.back(), 0) << name;
    EXPECT_EQ(getpgid(pids.back()), pids.back()) << "shares the terminal's Ctrl-C";
  }
  (*cluster)->Stop();
  for (pid_t pid : pids) EXPECT_FALSE(Alive(pid));
  (*cluster)->Stop();
  EXPECT_TRUE((*cluster)->status().ok());
  EXPECT_NE(Calls().find("--scheduler=127.0.0.1:4321"), std::string::npos);
  EXPECT_NE(Calls().find("--threads=1 --device=cpu --name=worker-1"), std::string::npos);
}

TEST_F(LocalClusterTest, StartsAgainWhatDies) {
  auto cluster = LocalCluster::Start(Options(), &interrupt_);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const pid_t worker = Pid("worker-1"), scheduler = Pid("scheduler");
  ASSERT_NE(worker, 0);
  kill(worker, SIGKILL);
  const pid_t again = Pid("worker-1", worker);
  EXPECT_NE(again, 0);
  kill(scheduler, SIGKILL);
  EXPECT_NE(Pid("scheduler", scheduler), 0);
  (*cluster)->Stop();
  EXPECT_FALSE(Alive(again));
  EXPECT_NE(Calls().find("--listen=127.0.0.1:4321"), std::string::npos) << "the scheduler keeps its port";
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(notices_.size(), 2u);
  EXPECT_NE(notices_[0].find("worker-1 ended (signal 9"), std::string::npos);
}

TEST_F(LocalClusterTest, GivesUpOnADaemonThatKeepsDying) {
  Script("worker", "#!/bin/sh\necho no such device >&2\nexit 3\n");
  auto cluster = LocalCluster::Start(Options(), &interrupt_);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_TRUE(WaitForFailure());
  const std::string message((*cluster)->status().message());
  EXPECT_NE(message.find("keeps ending: exit code 3"), std::string::npos) << message;
  EXPECT_NE(message.find("no such device"), std::string::npos) << message;
  const pid_t server = Pid("server-0");
  (*cluster)->Stop();
  EXPECT_FALSE(Alive(server));
}

TEST_F(LocalClusterTest, ASchedulerThatDoesNotStart) {
  Script("scheduler", "#!/bin/sh\necho state folder in use >&2\nexit 1\n");
  auto cluster = LocalCluster::Start(Options(), &interrupt_);
  ASSERT_FALSE(cluster.ok());
  EXPECT_NE(std::string(cluster.status().message()).find("state folder in use"), std::string::npos) << cluster.status();
}

TEST_F(LocalClusterTest, ASchedulerThatHangs) {
  Script("scheduler", "#!/bin/sh\nexec sleep 1000\n");
  auto options = Options();
  options.start_limit = absl::Milliseconds(200);
  EXPECT_EQ(LocalCluster::Start(options, &interrupt_).status().code(), absl::StatusCode::kDeadlineExceeded);
  interrupt_.Notify();
  options.start_limit = absl::Seconds(100);
  EXPECT_EQ(LocalCluster::Start(options, &interrupt_).status().code(), absl::StatusCode::kCancelled);
}

TEST_F(LocalClusterTest, KillsWhatIgnoresTheRequestToEnd) {
  Script("server", "#!/bin/sh\ntrap '' TERM\n" + Birth("stubborn") + "while :; do sleep 1; done\n");
  auto options = Options();
  options.servers = 1;
  options.stop_limit = absl::Milliseconds(200);
  auto cluster = LocalCluster::Start(options, &interrupt_);
  ASSERT_TRUE(cluster.ok());
  const pid_t pid = Pid("stubborn");
  ASSERT_NE(pid, 0);
  (*cluster)->Stop();
  EXPECT_FALSE(Alive(pid));
}

TEST_F(LocalClusterTest, ProgramsThatAreNotThere) {
  auto options = Options();
  options.binaries = (folder_ / "nowhere").string();
  EXPECT_EQ(LocalCluster::Start(options, &interrupt_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ChildProcess::Start("/no/such/program", {}, (folder_ / "log").string()).ok());
  EXPECT_FALSE(ChildProcess::Start("/bin/true", {}, "/no/such/folder/log").ok());
}

}  // namespace
}  // namespace sluice
