#include "client/commands.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/client/fake_scheduler.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

class CommandsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(folder_ / "text.txt") << "some text to learn";
    std::ofstream(folder_ / "job.yaml") << "name: job\n"
                                           "model: {gpt2: {layers: 1, heads: 1, width: 8, context: 4}}\n"
                                           "data: {text: {path: "
                                        << (folder_ / "text.txt").string()
                                        << "}}\n"
                                           "train: {rounds: 10, batch: 2}\n"
                                           "optimizer: {sgd: {learning_rate: 0.1}}\n";
  }
  int Run(std::vector<std::string> words, const std::string& scheduler = "") {
    out_.str("");
    err_.str("");
    ClientEnvironment environment;
    environment.out = &out_;
    environment.err = &err_;
    environment.getenv = [&](const std::string& name) { return name == "SLUICE_SCHEDULER" ? scheduler : ""; };
    environment.program_folder = folder_.string();
    environment.interrupt = &interrupt_;
    return RunClient(words, environment);
  }
  std::string spec() const { return (folder_ / "job.yaml").string(); }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
  std::ostringstream out_, err_;
  Interrupt interrupt_;
};

testing::AssertionResult Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

v1::JobStatus Status(v1::JobState state, uint64_t done = 10) {
  v1::JobStatus status;
  status.set_job_id("job-1");
  status.set_state(state);
  status.set_rounds(10);
  status.set_rounds_done(done);
  return status;
}

// A port at which nobody listens: bound, not listening, so that nobody else gets it.
class DeadPort {
 public:
  DeadPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port_ = ntohs(at.sin_port);
  }
  ~DeadPort() { close(socket_); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int socket_, port_ = 0;
};

TEST_F(CommandsTest, UsageErrors) {
  EXPECT_EQ(Run({}), kExitUsage);
  EXPECT_EQ(Run({"statsu"}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "did you mean status?"));
  EXPECT_EQ(Run({"submit"}), kExitUsage);
  EXPECT_EQ(Run({"list", "--jsn"}), kExitUsage);
  EXPECT_EQ(Run({"watch", "--scheduler", "a:b"}), kExitUsage);
  EXPECT_EQ(Run({"help", "sumbit"}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "did you mean submit?"));
  EXPECT_EQ(Run({"local"}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "a spec is expected: sluice local SPEC; or data alone"));
}

TEST_F(CommandsTest, LocalDataWithoutASpec) {
  const struct {
    std::vector<std::string> words;
    std::string error;
  } cases[] = {
      {{"local", "--csv", "a.csv"}, "--csv needs --label"},
      {{"local", "--label", "y"}, "--label needs --csv"},
      {{"local", "--images", "a"}, "--images needs --labels"},
      {{"local", "--labels", "a"}, "--labels needs --images"},
      {{"local", "spec.yaml", "--csv", "a.csv", "--label", "y"}, "exclude each other"},
      {{"local", "--text", "t", "--images", "a", "--labels", "b"}, "exclude each other"},
      {{"local", "--csv", "absent.csv", "--label", "y"}, "absent.csv: cannot be read"},
      {{"local", "--images", "absent", "--labels", "b"}, "absent: cannot be read"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(Run(c.words), kExitUsage);
    EXPECT_TRUE(Has(err_.str(), c.error)) << c.words[1];
  }
}

TEST_F(CommandsTest, HelpAndVersion) {
  EXPECT_EQ(Run({"--version"}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "sluice 0."));
  EXPECT_EQ(Run({"help"}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "Exit codes"));
  EXPECT_EQ(Run({"submit", "--help"}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "usage: sluice submit"));
  EXPECT_EQ(Run({"help", "export"}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "usage: sluice export"));
  EXPECT_TRUE(err_.str().empty());
}

TEST_F(CommandsTest, Validate) {
  EXPECT_EQ(Run({"validate", spec()}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "ok, "));
  EXPECT_EQ(Run({"validate", spec(), "--print", "--set", "train.rounds=500"}), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "rounds: 500"));
  EXPECT_TRUE(Has(out_.str(), "vocabulary: 256"));
  EXPECT_EQ(Run({"validate", spec(), "--set", "train.batch=0"}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "train.batch"));
  EXPECT_EQ(Run({"validate", spec(), "--set", "copies=2"}), kExitUsage);
  EXPECT_EQ(Run({"validate", "absent.yaml"}), kExitUsage);
}

TEST_F(CommandsTest, ValidateSaysWhatARankHolds) {
  const std::vector<std::string> validate = {
      "validate", spec(), "--set", "model.gpt2.heads=2", "--set", "model.gpt2.layers=2", "--set", "parallel.tensor=2"};
  EXPECT_EQ(Run(validate), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "parallel.data 1 x pipeline 1 x tensor 2, 2 workers; of a replica, in a round of 2"));
  EXPECT_TRUE(Has(out_.str(), "STAGE  TENSOR  LAYERS  PARAMETERS"));
  EXPECT_TRUE(Has(out_.str(), "\n0      1       0 to 1"));
  std::vector<std::string> wrong = validate;
  wrong.back() = "parallel.tensor=4";
  EXPECT_EQ(Run(wrong), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "parallel.tensor: found 4; it must divide the model's 2 attention heads"));
  EXPECT_EQ(Run({"validate", spec()}), kExitOk);
  EXPECT_FALSE(Has(out_.str(), "STAGE"));
}

// The job's own spec, changed by --set, where no other is given.
TEST_F(CommandsTest, ResumeNeedsNoSpec) {
  FakeScheduler scheduler;
  v1::SubmitJobRequest submitted;
  scheduler.get = [&](const v1::GetJobRequest& request, v1::JobStatus* response) {
    *response = Status(v1::SUCCEEDED, 4);
    EXPECT_EQ(request.job_id(), "job-1");
    v1::JobSpec& spec = *response->mutable_spec();
    spec.set_name("job");
    spec.mutable_model()->mutable_gpt2()->set_layers(2);
    spec.mutable_model()->mutable_gpt2()->set_heads(2);
    spec.mutable_model()->mutable_gpt2()->set_width(8);
    spec.mutable_model()->mutable_gpt2()->set_context(4);
    spec.mutable_data()->mutable_text()->set_path("elsewhere.txt");
    spec.mutable_train()->set_rounds(10);
    spec.mutable_train()->set_batch(2);
    spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1);
    spec.mutable_checkpoint()->set_directory("job-1");
    spec.mutable_init()->set_path("/before/t1-v2");
    spec.mutable_init()->set_resume(true);
    return grpc::Status::OK;
  };
  scheduler.submit = [&](const v1::SubmitJobRequest& request, v1::SubmitJobResponse* response) {
    submitted = request;
    response->set_job_id("job-2");
    return grpc::Status::OK;
  };
  ASSERT_EQ(Run({"submit", "--resume", "job-1", "--set", "parallel.tensor=2", "--set", "train.rounds=20"},
                scheduler.address()),
            kExitOk)
      << err_.str();
  EXPECT_EQ(submitted.resume_job(), "job-1");
  EXPECT_FALSE(submitted.spec().has_init());
  EXPECT_EQ(submitted.spec().checkpoint().directory(), "") << "a folder of its own";
  EXPECT_EQ(submitted.spec().parallel().tensor(), 2u);
  EXPECT_EQ(submitted.spec().train().rounds(), 20u);
  EXPECT_EQ(submitted.spec().data().text().path(), "elsewhere.txt");
  EXPECT_EQ(Run({"submit", "--resume", "job-1", "--set", "parallel.tensor=3"}, scheduler.address()), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "parallel.tensor: found 3; it must divide the model's 2 attention heads"));
  EXPECT_EQ(Run({"submit"}, scheduler.address()), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "submit needs a SPEC; without one --resume JOB|DIR goes on with the job's own"));
}

TEST_F(CommandsTest, StatusNamesRanksByTheirPlaceInTheMesh) {
  FakeScheduler scheduler;
  scheduler.get = [](const v1::GetJobRequest&, v1::JobStatus* response) {
    *response = Status(v1::RUNNING, 4);
    v1::Plan& plan = *response->mutable_plan();
    plan.mutable_spec()->mutable_parallel()->set_pipeline(2);
    for (uint32_t stage = 0; stage < 2; ++stage) {
      v1::Rank& rank = *plan.add_ranks();
      rank.set_pipeline(stage);
      rank.mutable_node()->set_name("worker-" + std::to_string(stage));
      rank.set_address("h:1");
      rank.set_numeric_profile("p");
      v1::RoundTime& time = *response->add_rank_times();
      time.set_total(0.04);
      time.set_compute(stage == 0 ? 0.04 : 0.02);
      time.set_exposed(stage == 0 ? 0 : 0.02);
    }
    return grpc::Status::OK;
  };
  ASSERT_EQ(Run({"status", "job-1"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "parallel.data 1 x pipeline 2 x tensor 1, 2 workers"));
  EXPECT_TRUE(Has(out_.str(), "rank 0: replica 0, stage 0, tensor 0  worker-0 at h:1, p; 40 ms: compute 100%"));
  EXPECT_TRUE(Has(out_.str(), "rank 1: replica 0, stage 1, tensor 0  worker-1 at h:1, p; 40 ms: compute 50%"));
}

TEST_F(CommandsTest, NobodyListens) {
  const DeadPort port;
  EXPECT_EQ(Run({"list", "--timeout", "0.3"}, port.address()), kExitUnreachable);
  EXPECT_TRUE(Has(err_.str(), port.address() + " cannot be reached"));
  EXPECT_TRUE(Has(err_.str(), "trying again for 300ms"));
  EXPECT_TRUE(Has(err_.str(), "no scheduler at " + port.address() + " (from SLUICE_SCHEDULER)"));
}

TEST_F(CommandsTest, SubmitHandsTheFilledInSpecOver) {
  FakeScheduler scheduler;
  v1::SubmitJobRequest seen;
  scheduler.submit = [&](const v1::SubmitJobRequest& request, v1::SubmitJobResponse* response) {
    seen = request;
    response->set_job_id("job-7");
    response->add_warnings("copies: 1");
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run({"submit", spec(), "--name", "other", "--set=train.batch=3", "--resume", "job-3"}, scheduler.address()),
            kExitOk);
  EXPECT_EQ(out_.str(), "job-7\n");
  EXPECT_TRUE(Has(err_.str(), "warning: copies: 1"));
  EXPECT_EQ(seen.spec().name(), "other");
  EXPECT_EQ(seen.spec().train().batch(), 3u);
  EXPECT_EQ(seen.spec().model().gpt2().vocabulary(), 256u);
  EXPECT_EQ(seen.resume_job(), "job-3");
  EXPECT_FALSE(seen.spec().has_init());
  EXPECT_FALSE(seen.request_id().empty());
  EXPECT_EQ(Run({"submit", spec(), "--init", "not/here"}, scheduler.address()), kExitOk);  // the servers' folder
  EXPECT_EQ(seen.spec().init().path(), "not/here");
  EXPECT_FALSE(seen.spec().init().resume());
  EXPECT_EQ(Run({"submit", spec(), "--init", folder_.string()}, scheduler.address()), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "init.path: no GPT-2 folder (no config.json)"));
  EXPECT_EQ(Run({"submit", spec(), "--init", "x", "--resume", "y"}, scheduler.address()), kExitUsage);
  EXPECT_EQ(Run({"submit", spec(), "--resume", "no/such/folder"}, scheduler.address()), kExitUsage);
}

TEST_F(CommandsTest, ARetriedSubmissionKeepsItsRequestId) {
  FakeScheduler scheduler;
  std::vector<std::string> ids;
  scheduler.submit = [&](const v1::SubmitJobRequest& request, v1::SubmitJobResponse* response) {
    ids.push_back(request.request_id());
    if (ids.size() < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "starting");
    response->set_job_id("job-1");
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run({"submit", spec()}, scheduler.address()), kExitOk);
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_EQ(ids[1], ids[2]);
  EXPECT_TRUE(Has(err_.str(), "cannot be reached (starting)"));
  EXPECT_EQ(Run({"submit", spec()}, scheduler.address()), kExitOk);
  EXPECT_NE(ids[3], ids[0]) << "two submissions are two jobs";
}

TEST_F(CommandsTest, RefusedSubmissionIsAUsageError) {
  FakeScheduler scheduler;
  scheduler.submit = [](const v1::SubmitJobRequest&, v1::SubmitJobResponse*) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "needs 5 GB, servers have 4");
  };
  EXPECT_EQ(Run({"submit", spec()}, scheduler.address()), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "needs 5 GB"));
  EXPECT_TRUE(out_.str().empty());
}

TEST_F(CommandsTest, WatchEndsWithTheJobsExitCode) {
  const std::vector<std::pair<v1::JobState, int>> ends = {
      {v1::SUCCEEDED, kExitOk}, {v1::FAILED, kExitJobFailed}, {v1::CANCELLED, kExitCancelled}};
  for (const auto& [state, code] : ends) {
    FakeScheduler scheduler;
    scheduler.watch = [state = state](grpc::ServerContext*, const v1::GetJobRequest&,
                                      grpc::ServerWriter<v1::JobStatus>* writer) {
      writer->Write(Status(v1::RUNNING, 3));
      v1::JobStatus end = Status(state);
      end.set_message("the cause");
      end.mutable_last_evaluation()->set_loss(1.25);
      writer->Write(end);
      return grpc::Status::OK;
    };
    EXPECT_EQ(Run({"watch"}, scheduler.address()), code);
    EXPECT_TRUE(Has(out_.str(), "round 3/10"));
    if (state == v1::SUCCEEDED) {
      EXPECT_TRUE(Has(out_.str(), "job-1 succeeded: 10 rounds\nvalidation loss 1.2500"));
    } else {
      EXPECT_TRUE(Has(err_.str(), "the cause"));
    }
  }
}

TEST_F(CommandsTest, SubmitAndFollow) {
  FakeScheduler scheduler;
  scheduler.submit = [](const v1::SubmitJobRequest&, v1::SubmitJobResponse* response) {
    response->set_job_id("job-1");
    return grpc::Status::OK;
  };
  scheduler.watch = [](grpc::ServerContext*, const v1::GetJobRequest& request,
                       grpc::ServerWriter<v1::JobStatus>* writer) {
    EXPECT_EQ(request.job_id(), "job-1");
    writer->Write(Status(v1::FAILED));
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run({"submit", "-f", spec()}, scheduler.address()), kExitJobFailed);
  EXPECT_EQ(out_.str().rfind("job-1\n", 0), 0u);
}

TEST_F(CommandsTest, WatchOutlivesARestartOfTheScheduler) {
  auto first = std::make_unique<FakeScheduler>();
  const int port = first->port();
  absl::Notification watching;
  first->watch = [&](grpc::ServerContext* context, const v1::GetJobRequest&,
                     grpc::ServerWriter<v1::JobStatus>* writer) {
    writer->Write(Status(v1::RUNNING, 3));
    watching.Notify();
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "going down");
  };
  std::thread restart([&] {
    watching.WaitForNotification();
    first.reset();
    first = std::make_unique<FakeScheduler>(port);
    first->watch = [](grpc::ServerContext*, const v1::GetJobRequest& request,
                      grpc::ServerWriter<v1::JobStatus>* writer) {
      EXPECT_EQ(request.job_id(), "job-1") << "'latest' must stay the job that was watched";
      writer->Write(Status(v1::SUCCEEDED));
      return grpc::Status::OK;
    };
  });
  EXPECT_EQ(Run({"watch", "latest", "--timeout", "60"}, "127.0.0.1:" + std::to_string(port)), kExitOk);
  restart.join();
}

TEST_F(CommandsTest, CtrlCDetachesFromAWatch) {
  FakeScheduler scheduler;
  absl::Notification detached;
  scheduler.watch = [&](grpc::ServerContext* context, const v1::GetJobRequest&,
                        grpc::ServerWriter<v1::JobStatus>* writer) {
    writer->Write(Status(v1::RUNNING, 3));
    interrupt_.Notify();
    detached.WaitForNotification();  // the client leaves although nothing comes
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run({"watch", "job-1"}, scheduler.address()), kExitInterrupted);
  detached.Notify();
  EXPECT_TRUE(Has(err_.str(), "detached; job-1 goes on"));
}

TEST_F(CommandsTest, CtrlCWhileTheSchedulerIsSought) {
  const DeadPort port;
  std::thread notify([&] { interrupt_.Notify(); });
  EXPECT_EQ(Run({"watch", "job-1", "--timeout", "600"}, port.address()), kExitInterrupted);
  notify.join();
}

TEST_F(CommandsTest, UnknownJob) {
  FakeScheduler scheduler;
  for (const char* command : {"watch", "status", "cancel", "checkpoint", "logs", "sample"}) {
    EXPECT_EQ(Run({command, "nope"}, scheduler.address()), kExitUsage) << command;
  }
  EXPECT_EQ(Run({"export", "nope", (folder_ / "out").string()}, scheduler.address()), kExitUsage);
}

TEST_F(CommandsTest, StatusAndLogsAsJsonAndText) {
  FakeScheduler scheduler;
  scheduler.get = [](const v1::GetJobRequest& request, v1::JobStatus* response) {
    *response = Status(v1::RUNNING, 4);
    response->mutable_last_evaluation()->set_loss(1.5);
    response->mutable_last_checkpoint()->set_directory("/c/t1-v4");
    return grpc::Status::OK;
  };
  scheduler.history = [](const v1::GetHistoryRequest&, v1::GetHistoryResponse* response) {
    v1::RoundRecord* record = response->add_records();
    record->set_round(3);
    record->set_loss(2.5);
    record->set_skipped(true);
    record->add_nonfinite_contributors(1);
    v1::JobEvent* event = response->add_events();
    event->set_unix_seconds(1e9);
    event->set_text("worker-1 joined");
    return grpc::Status::OK;
  };
  ASSERT_EQ(Run({"status", "job-1", "--json"}, scheduler.address()), kExitOk);
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json["state"], "RUNNING");
  EXPECT_EQ(json["rounds_done"], "4");
  EXPECT_EQ(json["last_evaluation"]["loss"], 1.5);
  ASSERT_EQ(Run({"status", "job-1"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "running"));
  EXPECT_TRUE(Has(out_.str(), "/c/t1-v4"));
  ASSERT_EQ(Run({"logs", "job-1"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "worker-1 joined"));
  EXPECT_TRUE(Has(out_.str(), "2.50000"));
  EXPECT_TRUE(Has(out_.str(), "skipped non-finite from rank 1"));
  ASSERT_EQ(Run({"logs", "job-1", "--json"}, scheduler.address()), kExitOk);
  EXPECT_EQ(nlohmann::json::parse(out_.str())["records"][0]["loss"], 2.5);
}

TEST_F(CommandsTest, ListClusterCancelCheckpoint) {
  FakeScheduler scheduler;
  scheduler.list = [](const v1::ListJobsRequest&, v1::ListJobsResponse* response) {
    *response->add_jobs() = Status(v1::QUEUED, 0);
    response->mutable_jobs(0)->set_message("waits for a worker");
    return grpc::Status::OK;
  };
  scheduler.cluster = [](const v1::GetClusterRequest&, v1::GetClusterResponse* response) {
    response->add_nodes()->mutable_node()->set_name("worker-9");
    response->add_warnings("one host");
    return grpc::Status::OK;
  };
  bool checkpoint_first = false;
  scheduler.cancel = [&](const v1::CancelJobRequest& request, v1::JobStatus* response) {
    checkpoint_first = request.checkpoint_first();
    *response = Status(v1::RUNNING, 4);
    return grpc::Status::OK;
  };
  // The scheduler takes the order; the job ends once the checkpoint is published.
  scheduler.watch = [](grpc::ServerContext*, const v1::GetJobRequest&, grpc::ServerWriter<v1::JobStatus>* writer) {
    v1::JobStatus end = Status(v1::CANCELLED, 5);
    end.mutable_last_checkpoint()->set_directory("/c/t1-v5");
    writer->Write(end);
    return grpc::Status::OK;
  };
  scheduler.checkpoint = [](const v1::GetJobRequest&, v1::CheckpointJobResponse* response) {
    response->mutable_checkpoint()->set_directory("/c/t1-v5");
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run({"list"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "job-1  queued  0/10"));
  EXPECT_TRUE(Has(out_.str(), "waits for a worker"));
  EXPECT_EQ(Run({"status"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(Has(out_.str(), "worker-9"));
  EXPECT_TRUE(Has(out_.str(), "one host"));
  EXPECT_EQ(Run({"cancel", "job-1", "--checkpoint"}, scheduler.address()), kExitOk);
  EXPECT_TRUE(checkpoint_first);
  EXPECT_TRUE(Has(out_.str(), "job-1 cancelled at round 5/10\ncheckpoint /c/t1-v5"));
  EXPECT_EQ(Run({"checkpoint", "job-1"}, scheduler.address()), kExitOk);
  EXPECT_EQ(out_.str(), "/c/t1-v5\n");
}

TEST_F(CommandsTest, LocalWithoutItsDaemons) {
  const std::string runs = (folder_ / "runs").string();
  EXPECT_EQ(Run({"local", spec(), "--runs", runs}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "sluice-scheduler: cannot be run"));
  EXPECT_TRUE(fs::exists(folder_ / "runs/job-1/spec.yaml"));
  EXPECT_EQ(Run({"local", spec(), "--runs", runs, "--set", "parallel.data=3", "--workers", "2"}), kExitUsage);
  EXPECT_TRUE(
      Has(err_.str(),
          "parallel.data: found 3; parallel.data 3 x pipeline 1 x tensor 1 = 3 workers, there are 2; the nearest value "
          "allowed is 2, or raise --workers to 3"));
  // A gang is as large as the mesh; --workers without parallel.data makes replicas of what there is.
  EXPECT_EQ(Run({"local", spec(), "--runs", runs, "--set", "model.gpt2={layers: 2, heads: 4, width: 8, context: 4}",
                 "--set", "parallel={tensor: 4, pipeline: 2}", "--workers", "5"}),
            kExitUsage);
  EXPECT_TRUE(Has(err_.str(),
                  "parallel.tensor: found 4; parallel.data 1 x pipeline 2 x tensor 4 = 8 workers, there are 5; the "
                  "nearest value allowed is 2, or raise --workers to 8"));
  EXPECT_EQ(Run({"local", spec(), "--runs", runs, "--set", "model.gpt2={layers: 2, heads: 4, width: 8, context: 4}",
                 "--set", "parallel.tensor=2", "--workers", "5"}),
            kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "sluice-scheduler: cannot be run"));
  std::ifstream kept(folder_ / "runs/job-2/spec.yaml");
  EXPECT_TRUE(Has(std::string(std::istreambuf_iterator<char>(kept), {}), "data: 2")) << "5 workers, 2 a replica";
  EXPECT_EQ(Run({"local", spec(), "--runs", runs, "--resume", folder_.string()}), kExitUsage);
  EXPECT_TRUE(Has(err_.str(), "no published checkpoint"));
}

}  // namespace
}  // namespace sluice
