// The daemons and `sluice local` as real processes: kill -9 changes no bit, wrong ports and folders get clear errors,
// garbage on a port disturbs nobody, Ctrl-C leaves nothing behind and says how to go on.
//
// What is drawn follows from SLUICE_SEED (1), which is printed.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "tests/cluster/in_process_cluster.h"
#include "tests/cluster/process_cluster.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kRounds = 400;  // enough for what happens between two messages about progress, 100 ms apart

uint64_t Seed() {
  uint64_t seed = 1;
  const char* given = std::getenv("SLUICE_SEED");
  if (given != nullptr && !absl::SimpleAtoi(given, &seed)) ADD_FAILURE() << "not a number: SLUICE_SEED=" << given;
  return seed;
}

class ProcessesTest : public ::testing::Test {
 protected:
  ProcessesTest() : random_(Seed()) {
    std::printf("SLUICE_SEED=%llu\n", static_cast<unsigned long long>(Seed()));
    std::string text;
    for (int line = 0; line < 300; ++line) absl::StrAppend(&text, "line ", line, " is ", line * line % 97, "\n");
    Spill(folder_ / "text.txt", text);
  }

  v1::JobSpec Spec(uint64_t rounds) const {
    v1::JobSpec spec;
    spec.set_name("small");
    v1::Gpt2Spec* gpt = spec.mutable_model()->mutable_gpt2();
    gpt->set_layers(1);
    gpt->set_heads(2);
    gpt->set_width(48);
    gpt->set_context(32);
    gpt->set_vocabulary(256);
    spec.mutable_data()->mutable_text()->set_path(folder_ / "text.txt");
    spec.mutable_train()->set_rounds(rounds);
    spec.mutable_train()->set_batch(16);
    spec.mutable_train()->set_eval_every(rounds / 4);
    spec.mutable_train()->set_eval_samples(8);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    spec.mutable_optimizer()->set_clip_norm(1);
    spec.mutable_parallel()->set_data(2);
    spec.mutable_parallel()->set_chunk_elements(9973);
    spec.mutable_checkpoint()->set_every_rounds(rounds / 8);
    return spec;
  }

  static uint64_t HashOfCheckpoint(const std::string& folder) {
    const auto reader = CheckpointReader::Open(folder, /*verify=*/true);
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (!reader.ok()) return 0;
    std::vector<float> values((*reader)->manifest().parameters());
    EXPECT_TRUE((*reader)->Read("value", 0, absl::MakeSpan(values)).ok());
    return HashOf(values);
  }

  // Of the job's parameters once it has ended; 0 and a failure where it did not succeed.
  static uint64_t HashAtEnd(const ProcessCluster& cluster, const std::string& job, v1::JobStatus* end = nullptr) {
    const absl::StatusOr<v1::JobStatus> status = cluster.AwaitEnd(job);
    EXPECT_TRUE(status.ok()) << status.status();
    if (!status.ok()) return 0;
    EXPECT_EQ(status->state(), v1::SUCCEEDED) << status->message();
    EXPECT_EQ(status->last_checkpoint().version(), status->rounds());
    if (end != nullptr) *end = *status;
    return HashOfCheckpoint(status->last_checkpoint().directory());
  }

  uint64_t Draw(uint64_t below) { return random_() % below; }

  TemporaryFolder folder_;
  std::mt19937_64 random_;
};

TEST_F(ProcessesTest, EndWithTheSameBitsAfterKill9) {
  auto started = ProcessCluster::Start(folder_.path(), 2, 2);
  ASSERT_TRUE(started.ok()) << started.status();
  ProcessCluster& cluster = **started;
  const v1::JobSpec spec = Spec(kRounds);
  absl::StatusOr<std::string> job = cluster.Submit(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const uint64_t undisturbed = HashAtEnd(cluster, *job);
  ASSERT_NE(undisturbed, 0u);

  for (const std::string role : {"worker", "server", "scheduler"}) {
    SCOPED_TRACE(role);
    job = cluster.Submit(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    for (const uint64_t begin : {uint64_t{1}, kRounds / 3}) {
      const uint64_t round = begin + Draw(kRounds / 4);
      const std::string victim = role == "scheduler" ? role : absl::StrCat(role, "-", Draw(2));
      const absl::StatusOr<v1::JobStatus> status = cluster.AwaitRounds(*job, round);
      ASSERT_TRUE(status.ok()) << status.status();
      ASSERT_FALSE(HasEnded(status->state())) << "it ended before round " << round << " was heard of";
      cluster.Kill(victim);
      const absl::Status again = cluster.StartDaemon(victim);
      ASSERT_TRUE(again.ok()) << again;
    }
    v1::JobStatus end;
    EXPECT_EQ(HashAtEnd(cluster, *job, &end), undisturbed);
    EXPECT_FALSE(end.has_exact_until_round());
    EXPECT_EQ(end.recoveries() > 0, role != "scheduler") << end.recoveries();
    EXPECT_EQ(end.rewinds() > 0, role == "server") << end.rewinds();
  }
}

TEST_F(ProcessesTest, GarbageOnAPortDisturbsNobody) {
  auto started = ProcessCluster::Start(folder_.path(), 2, 2);
  ASSERT_TRUE(started.ok()) << started.status();
  ProcessCluster& cluster = **started;
  absl::StatusOr<std::string> job = cluster.Submit(Spec(kRounds));
  ASSERT_TRUE(job.ok()) << job.status();
  const uint64_t undisturbed = HashAtEnd(cluster, *job);

  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  std::string noise(65536, 0);
  for (char& c : noise) c = static_cast<char>(Draw(256));
  const std::vector<std::string> payloads = {
      "",
      "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
      noise,
      preface + noise,
      preface + std::string("\xff\xff\xff\x00\x00\x00\x00\x00\x01", 9),  // a frame of 16 MiB that does not come
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),   // the beginning of TLS
      std::string(4096, '\0'),
      preface.substr(0, 10),
  };
  std::vector<int> kept;
  const absl::Cleanup close_kept = [&] {
    for (const int fd : kept) close(fd);
  };
  job = cluster.Submit(Spec(kRounds));
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE(cluster.AwaitRounds(*job, 1).ok());
  for (const std::string& name : cluster.names()) {
    for (const std::string& payload : payloads) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      ASSERT_GE(fd, 0);
      kept.push_back(fd);
      sockaddr_in to = {};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<uint16_t>(cluster.port(name)));
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      ASSERT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0) << name;
      // The daemon may close before it has taken everything.
      (void)send(fd, payload.data(), payload.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (Draw(2) == 0) continue;  // stays open and silent until the end
      const linger reset = {1, 0};
      if (Draw(2) == 0) setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      close(fd);
      kept.pop_back();
    }
  }
  v1::JobStatus end;
  EXPECT_EQ(HashAtEnd(cluster, *job, &end), undisturbed);
  EXPECT_EQ(end.recoveries(), 0u) << end.message();
  for (const std::string& name : cluster.names()) {
    cluster.daemon(name).AwaitWhileRunning([] { return true; });
    EXPECT_TRUE(cluster.daemon(name).running()) << name << "\n" << cluster.daemon(name).Output();
  }
  const auto nodes = cluster.Nodes();
  ASSERT_TRUE(nodes.ok()) << nodes.status();
  EXPECT_EQ(nodes->nodes_size(), 4);
}

TEST_F(ProcessesTest, ASecondSchedulerOnTheStateFolderIsRefused) {
  auto started = ProcessCluster::Start(folder_.path(), 0, 0);
  ASSERT_TRUE(started.ok()) << started.status();
  ProcessCluster& cluster = **started;
  absl::StatusOr<Program> second = Program::Start(
      "sluice-scheduler", {"--listen=127.0.0.1:0", "--state_dir=" + cluster.state_folder()}, folder_ / "second.log");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->AwaitEnd(), "exit code 1");
  EXPECT_THAT(second->Output(),
              HasSubstr(absl::StrCat("the state folder ", fs::canonical(cluster.state_folder()).string(),
                                     " is in use by the scheduler with process id ", cluster.daemon("scheduler").pid(),
                                     "; end that one")));
  EXPECT_TRUE(cluster.Nodes().ok()) << "the first one goes on";
  cluster.Kill("scheduler");
  EXPECT_TRUE(cluster.StartDaemon("scheduler").ok()) << "the lock ends with its process";
}

TEST_F(ProcessesTest, APortInUseIsAClearError) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(fd, 0);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length), 0);
  const std::string address = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
  for (const std::string role : {"scheduler", "server", "worker"}) {
    SCOPED_TRACE(role);
    std::vector<std::string> args = {"--listen=" + address, "--port_file=" + (folder_ / "port")};
    if (role == "scheduler") args.push_back("--state_dir=" + (folder_ / "state"));
    if (role == "worker") args.push_back("--threads=1");
    absl::StatusOr<Program> daemon = Program::Start("sluice-" + role, args, folder_ / (role + ".log"));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    EXPECT_THAT(daemon->AwaitEnd(), AnyOf(Eq("exit code 1"), Eq("exit code 2")));
    EXPECT_THAT(daemon->Output(), HasSubstr("cannot listen at " + address + ": the port is in use"));
    EXPECT_FALSE(fs::exists(folder_ / "port"));
  }
}

// ---------------------------------------------------------------- sluice local
class LocalTest : public ProcessesTest {
 protected:
  static constexpr uint64_t kLocalRounds = 160;

  LocalTest() { Spill(folder_ / "spec.yaml", JobSpecToYaml(Spec(kLocalRounds))); }

  std::string runs() const { return folder_ / "runs"; }
  std::string run_folder() const { return runs() + "/small-1"; }

  std::string Checkpoint(uint64_t version, const std::string& stage = "") const {
    return absl::StrCat(run_folder(), "/checkpoints/small-1/", stage, "t1-v", version);
  }

  absl::StatusOr<Program> StartLocal() const {
    return Program::Start("sluice",
                          {"local", folder_ / "spec.yaml", "--runs=" + runs(), "--servers=2", "--threads=1",
                           "--no_export", "--sample_bytes=0"},
                          folder_ / "local.log");
  }

  // Command lines of everything that runs here, under whatever spelling of the folder.
  std::vector<std::string> Left() const { return ProcessesNaming(fs::path(folder_.path()).filename()); }

  // The folder that "checkpoint FOLDER" names.
  static std::string CheckpointIn(const std::string& output) {
    std::string folder;
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(output, '\n'))) {
      if (line.rfind("checkpoint ", 0) == 0) folder = line.substr(11);
    }
    return folder;
  }
  // The command under "To resume:" or "to start again:".
  static std::string ResumeLine(const std::string& output) {
    std::string line;
    for (const std::string& each : std::vector<std::string>(absl::StrSplit(output, '\n'))) {
      if (each.rfind("    ", 0) == 0) line = each.substr(4);
    }
    return line;
  }

  // The bits of the run that nobody disturbed.
  uint64_t Undisturbed() {
    static uint64_t hash = 0;  // for all tests of this process
    if (hash != 0) return hash;
    auto local = StartLocal();
    EXPECT_TRUE(local.ok()) << local.status();
    if (!local.ok()) return 0;
    EXPECT_EQ(local->AwaitEnd(), "exit code 0") << local->Output();
    EXPECT_THAT(Left(), IsEmpty());
    hash = HashOfCheckpoint(CheckpointIn(local->Output()));
    return hash;
  }

  void Forget() const {
    std::error_code ignored;
    fs::remove_all(runs(), ignored);
    fs::remove(folder_ / "local.log", ignored);
  }

  // Ctrl-C once `moment` holds of the output so far; then resumes as it is told to. `complete`: it may be too late for
  // that. Where it must not be, a run that was through before the signal came (a machine may be that busy) is repeated.
  void InterruptAndResume(const std::function<bool(const std::string& output)>& moment, bool complete = false,
                          int signals = 1) {
    const uint64_t expected = Undisturbed();
    ASSERT_NE(expected, 0u);
    std::string output;
    for (int tries = 1;; ++tries) {
      Forget();
      auto local = StartLocal();
      ASSERT_TRUE(local.ok()) << local.status();
      ASSERT_TRUE(local->AwaitWhileRunning([&] { return moment(local->Output()); })) << local->Output();
      for (int i = 0; i < signals; ++i) local->Signal(SIGINT);
      const std::string end = local->AwaitEnd();
      EXPECT_THAT(Left(), IsEmpty());
      output = local->Output();
      if (end != "exit code 0") {
        ASSERT_EQ(end, "exit code 130") << output;
        EXPECT_THAT(output, HasSubstr("every process has ended"));
      }
      if (CheckpointIn(output).empty()) break;
      EXPECT_EQ(HashOfCheckpoint(CheckpointIn(output)), expected) << output;
      if (complete) return;
      ASSERT_LT(tries, 5) << "training is too short for this test\n" << output;
    }
    const std::string line = ResumeLine(output);
    ASSERT_THAT(line, HasSubstr("sluice local ")) << output;
    auto resumed = Program::Start("/bin/sh", {"-c", "exec " + line}, folder_ / "resumed.log");
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    ASSERT_EQ(resumed->AwaitEnd(), "exit code 0") << line << "\n" << resumed->Output();
    EXPECT_EQ(HashOfCheckpoint(CheckpointIn(resumed->Output())), expected) << line;
    EXPECT_THAT(Left(), IsEmpty());
  }
};

bool Contains(const std::string& output, const std::string& text) { return output.find(text) != std::string::npos; }

TEST_F(LocalTest, InterruptedWhileItStarts) {
  InterruptAndResume([&](const std::string&) { return fs::exists(run_folder()); });
}

TEST_F(LocalTest, InterruptedWhileItsDaemonsStart) {
  InterruptAndResume([](const std::string& output) { return Contains(output, "started a scheduler"); });
}

TEST_F(LocalTest, InterruptedWhileItTrains) {
  const uint64_t version = kLocalRounds / 8 * (1 + Draw(3));
  InterruptAndResume([&](const std::string&) { return fs::exists(Checkpoint(version)); });
}

TEST_F(LocalTest, InterruptedTwiceWhileItTrains) {
  InterruptAndResume([&](const std::string&) { return fs::exists(Checkpoint(kLocalRounds / 8)); }, false, 2);
}

TEST_F(LocalTest, InterruptedWhileItMakesItsLastCheckpoint) {
  InterruptAndResume(
      [&](const std::string&) {
        return fs::exists(Checkpoint(kLocalRounds, "staging-")) || fs::exists(Checkpoint(kLocalRounds));
      },
      /*complete=*/true);
}

TEST_F(LocalTest, InterruptedAtItsEnd) {
  InterruptAndResume([](const std::string& output) { return Contains(output, "succeeded"); }, /*complete=*/true);
}

TEST_F(LocalTest, KilledItLeavesNothingBehind) {
  auto local = StartLocal();
  ASSERT_TRUE(local.ok()) << local.status();
  ASSERT_TRUE(local->AwaitWhileRunning([&] { return fs::exists(Checkpoint(kLocalRounds / 8)); })) << local->Output();
  ASSERT_EQ(Left().size(), 6u);  // itself, the scheduler, 2 servers, 2 workers
  local->Signal(SIGKILL);
  EXPECT_EQ(local->AwaitEnd(), "signal 9 (Killed)");
  // The kernel ends the daemons; this process waits for something that lives longer.
  auto clock = Program::Start("/bin/sleep", {"60"}, folder_ / "sleep.log");
  ASSERT_TRUE(clock.ok()) << clock.status();
  EXPECT_TRUE(clock->AwaitWhileRunning([&] { return Left().empty(); }));
}

}  // namespace
}  // namespace sluice
