// SchedulerNode behind its gRPC service on a free port, with nodes that speak through common/session.h.
#include "scheduler/scheduler_node.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/checkpoint.h"
#include "common/file.h"
#include "common/grpc_transport.h"
#include "common/layout.h"
#include "common/rpc.h"
#include "common/session.h"
#include "scheduler/scheduler_service.h"
#include "sluice/v1/scheduler.grpc.pb.h"
#include "tests/common/temporary_folder.h"
#include "tests/scheduler/core_fixture.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);  // of a wait that normally takes milliseconds

// A node that registers, keeps what it hears and says what the test wants.
class FakeNode {
 public:
  FakeNode(Transport* transport, const std::string& scheduler, v1::NodeRole role, const std::string& name,
           uint64_t incarnation = 1, uint32_t version = kProtocolVersion) {
    id_.set_name(name);
    id_.set_incarnation(incarnation);
    Session::Callbacks callbacks;
    callbacks.make_register = [this, role, version] {
      v1::Register reg;
      reg.set_protocol_version(version);
      reg.set_role(role);
      *reg.mutable_node() = id_;
      reg.set_address("127.0.0.1:1");
      absl::MutexLock lock(&mutex_);
      for (const auto& message : heard_) {
        if (!message.has_plan()) continue;
        v1::JobGeneration* job = reg.add_jobs();
        job->set_job_id(message.plan().job_id());
        job->set_generation(message.plan().generation());
      }
      return reg;
    };
    callbacks.on_message = [this](const v1::SchedulerMessage& message) {
      absl::MutexLock lock(&mutex_);
      heard_.push_back(message);
    };
    callbacks.on_refused = [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      refused_ = status;
    };
    session_ = Session::Start(transport, scheduler, std::move(callbacks));
  }
  void Say(const v1::NodeMessage& message) { session_->Send(message); }
  // Waits for the n-th message of this kind.
  v1::SchedulerMessage Await(v1::SchedulerMessage::KindCase kind, int n = 1) {
    v1::SchedulerMessage found;
    const auto there = [&]() {
      mutex_.AssertHeld();
      int count = 0;
      for (const auto& message : heard_) {
        if (message.kind_case() != kind || ++count < n) continue;
        found = message;
        return true;
      }
      return false;
    };
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), kPatience)) << id_.name() << " kind " << kind;
    return found;
  }
  absl::Status AwaitRefused() {
    absl::MutexLock lock(&mutex_);
    const auto there = [this]() {
      mutex_.AssertHeld();
      return !refused_.ok();
    };
    mutex_.AwaitWithTimeout(absl::Condition(&there), kPatience);
    return refused_;
  }
  const v1::NodeId& id() const { return id_; }

 private:
  v1::NodeId id_;
  absl::Mutex mutex_;
  std::vector<v1::SchedulerMessage> heard_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Session> session_;
};

class SchedulerNodeTest : public testing::Test {
 protected:
  void SetUp() override { Begin(0); }
  void TearDown() override {
    nodes_.clear();
    End();
  }
  void Begin(int port) {
    SchedulerOptions options;
    options.store = &store_;
    options.clock = &clock_;
    options.checkpoint_root = folder_ / "checkpoints";
    options.gather = absl::Milliseconds(20);
    options.on_broken = [this](const absl::Status&) { broken_.Notify(); };
    auto node = SchedulerNode::Start(options);
    ASSERT_TRUE(node.ok()) << node.status();
    node_ = *std::move(node);
    service_ = MakeSchedulerService(node_.get());
    GrpcServerOptions listen;
    listen.listen = {"127.0.0.1", port};
    auto server = GrpcServer::Start(listen, {service_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::SchedulerService::NewStub(MakeChannel(server_->address()));
  }
  void End() {
    if (node_ == nullptr) return;
    node_->Stop();
    server_->Shutdown();
    server_ = nullptr;
    service_ = nullptr;
    node_ = nullptr;
  }
  FakeNode& Node(v1::NodeRole role, const std::string& name, uint64_t incarnation = 1,
                 uint32_t version = kProtocolVersion) {
    nodes_.push_back(std::make_unique<FakeNode>(&transport_, server_->address(), role, name, incarnation, version));
    return *nodes_.back();
  }
  std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return context;
  }
  std::string Submit(const v1::JobSpec& spec) {
    v1::SubmitJobRequest request;
    *request.mutable_spec() = spec;
    v1::SubmitJobResponse response;
    const grpc::Status status = stub_->SubmitJob(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.job_id();
  }
  v1::GetJobRequest Job(const std::string& id) {
    v1::GetJobRequest request;
    request.set_job_id(id);
    return request;
  }
  // Waits until it holds of the job's status.
  void AwaitStatus(const std::string& job, std::function<bool(const v1::JobStatus&)> holds) {
    auto reached = std::make_shared<absl::Notification>();
    const auto watch = node_->Watch(job, [reached, holds](const v1::JobStatus& status) {
      if (holds(status) && !reached->HasBeenNotified()) reached->Notify();
    });
    ASSERT_TRUE(watch.ok()) << watch.status();
    EXPECT_TRUE(reached->WaitForNotificationWithTimeout(kPatience)) << node_->Get(job)->ShortDebugString();
    node_->Unwatch(*watch);
  }
  v1::NodeMessage Record(const v1::Plan& plan, uint64_t round, bool evaluation = false) {
    v1::NodeMessage message;
    v1::RoundRecord& record = *message.mutable_round_record();
    record.set_job_id(plan.job_id());
    record.set_generation(plan.generation());
    record.set_timeline(plan.timeline());
    record.set_round(round);
    record.set_count(8);
    record.set_loss(1.0 / static_cast<double>(round + 1));
    record.set_evaluation(evaluation);
    return message;
  }
  // Writes real files, as a server would, and tells of them.
  void WriteSnapshot(FakeNode& server, const v1::Plan& plan, uint64_t version) {
    const std::string staging =
        folder_ / "checkpoints/" + plan.job_id() + "/" + StagingFolderName(plan.timeline(), version);
    const ChunkTable table(23, plan.chunk_elements(), plan.shards());
    for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
      std::vector<ShardFileWriter::Piece> pieces;
      for (const uint64_t c : table.chunks_of(shard)) {
        for (const char* slot : {"value", "m", "v"})
          pieces.push_back({slot, table.range(c).begin, table.range(c).size()});
      }
      auto writer = ShardFileWriter::Create(staging + "/" + ShardFileName(shard, plan.shards()), pieces);
      ASSERT_TRUE(writer.ok()) << writer.status();
      for (const auto& piece : pieces) {
        ASSERT_TRUE((*writer)->Write(piece.slot, piece.first, std::vector<float>(piece.elements, 1.0f)).ok());
      }
      const auto file = (*writer)->Finish();
      ASSERT_TRUE(file.ok()) << file.status();
      v1::NodeMessage message;
      v1::SnapshotDone& done = *message.mutable_snapshot_done();
      done.set_job_id(plan.job_id());
      done.set_timeline(plan.timeline());
      done.set_version(version);
      done.set_shard(shard);
      *done.mutable_file() = *file;
      server.Say(message);
    }
  }
  void Finish(FakeNode& server, const v1::Plan& plan) {
    for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
      v1::NodeMessage message;
      v1::ShardProgress& progress = *message.mutable_shard_progress();
      progress.set_job_id(plan.job_id());
      progress.set_generation(plan.generation());
      progress.set_shard(shard);
      progress.set_version(10);
      server.Say(message);
    }
    server.Say(Record(plan, 10, true));
    WriteSnapshot(server, plan, 10);
  }

  TemporaryFolder folder_;
  MemoryStore store_;
  RealClock clock_;
  absl::Notification broken_;
  GrpcTransport transport_;
  std::unique_ptr<SchedulerNode> node_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::SchedulerService::Stub> stub_;
  std::vector<std::unique_ptr<FakeNode>> nodes_;
};

TEST_F(SchedulerNodeTest, AJobFromSubmissionToItsEnd) {
  const std::string job = Submit(SmallSpec(1));
  EXPECT_EQ(job, "small-1");
  auto watch_context = Context();
  auto reader = stub_->WatchJob(watch_context.get(), Job("latest"));
  v1::JobStatus status;
  ASSERT_TRUE(reader->Read(&status));
  EXPECT_EQ(status.state(), v1::QUEUED);

  FakeNode& server = Node(v1::SERVER, "s0");
  FakeNode& worker = Node(v1::WORKER, "w0");
  const v1::Plan plan = server.Await(v1::SchedulerMessage::kPlan).plan();
  EXPECT_EQ(worker.Await(v1::SchedulerMessage::kPlan).plan().hash(), plan.hash());
  EXPECT_EQ(server.Await(v1::SchedulerMessage::kWelcome).welcome().lease_ms(), 2000u);
  for (uint64_t round = 0; round < 10; ++round) server.Say(Record(plan, round));
  Finish(server, plan);
  worker.Await(v1::SchedulerMessage::kEndJob);

  std::vector<v1::JobState> states;
  do {
    if (states.empty() || states.back() != status.state()) states.push_back(status.state());
  } while (reader->Read(&status));
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(states.front(), v1::QUEUED);
  EXPECT_EQ(states.back(), v1::SUCCEEDED);
  EXPECT_EQ(status.rounds_done(), 10u);
  EXPECT_TRUE(CheckpointReader::Open(status.last_checkpoint().directory(), true).ok());

  v1::GetHistoryResponse history;
  ASSERT_TRUE(stub_
                  ->GetHistory(
                      Context().get(),
                      [&] {
                        v1::GetHistoryRequest request;
                        request.set_job_id("small");
                        return request;
                      }(),
                      &history)
                  .ok());
  EXPECT_EQ(history.records_size(), 11);
  EXPECT_GE(history.events_size(), 3);

  // A second job goes on from its checkpoint; without more rounds there is nothing to do.
  v1::SubmitJobRequest request;
  request.set_resume_job("small-1");
  v1::SubmitJobResponse response;
  grpc::Status again = stub_->SubmitJob(Context().get(), request, &response);
  EXPECT_EQ(again.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << again.error_message();
  *request.mutable_spec() = SmallSpec(1);
  request.mutable_spec()->mutable_train()->set_rounds(20);
  again = stub_->SubmitJob(Context().get(), request, &response);
  ASSERT_TRUE(again.ok()) << again.error_message();
  EXPECT_EQ(response.spec().init().path(), status.last_checkpoint().directory());
  EXPECT_EQ(worker.Await(v1::SchedulerMessage::kPlan, 2).plan().start(), 10u);
}

TEST_F(SchedulerNodeTest, ListGetCancelAndErrors) {
  const std::string job = Submit(SmallSpec(2));
  v1::ListJobsResponse list;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), v1::ListJobsRequest(), &list).ok());
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_FALSE(list.jobs(0).has_spec());
  EXPECT_EQ(list.jobs(0).message(), "waiting for 2 workers (0 idle of 0) and 1 server (0)");
  v1::JobStatus status;
  EXPECT_EQ(stub_->GetJob(Context().get(), Job("nope"), &status).error_code(), grpc::StatusCode::NOT_FOUND);
  ASSERT_TRUE(stub_->GetJob(Context().get(), Job("sm"), &status).ok());
  EXPECT_EQ(status.spec().train().rounds(), 10u);
  v1::CheckpointJobResponse checkpoint;
  EXPECT_EQ(stub_->CheckpointJob(Context().get(), Job(job), &checkpoint).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  auto context = Context();
  auto reader = stub_->WatchJob(context.get(), Job("nope"));
  EXPECT_FALSE(reader->Read(&status));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  v1::CancelJobRequest cancel;
  cancel.set_job_id(job);
  ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &status).ok());
  EXPECT_EQ(status.state(), v1::CANCELLED);
}

TEST_F(SchedulerNodeTest, ResumeFromAFolderThatIsNotThere) {
  v1::SubmitJobRequest request;
  *request.mutable_spec() = SmallSpec(1);
  request.mutable_spec()->mutable_init()->set_path("/nowhere/t1-v4");
  request.mutable_spec()->mutable_init()->set_resume(true);
  v1::SubmitJobResponse response;
  const grpc::Status status = stub_->SubmitJob(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_NE(status.error_message().find("/nowhere/t1-v4"), std::string::npos) << status.error_message();
  request.mutable_spec()->clear_init();
  request.set_resume_job("latest");
  EXPECT_EQ(stub_->SubmitJob(Context().get(), request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(SchedulerNodeTest, ACheckpointOnDemandAnswersOnceItIsPublished) {
  FakeNode& server = Node(v1::SERVER, "s0");
  Node(v1::WORKER, "w0");
  const std::string job = Submit(SmallSpec(1));
  const v1::Plan plan = server.Await(v1::SchedulerMessage::kPlan).plan();
  server.Say(Record(plan, 0));
  absl::Notification answered;
  absl::StatusOr<v1::CheckpointRef> answer = absl::UnknownError("");
  AwaitStatus(job, [](const v1::JobStatus& status) { return status.rounds_done() == 1; });
  node_->Checkpoint(job, [&](absl::StatusOr<v1::CheckpointRef> result) {
    answer = std::move(result);
    answered.Notify();
  });
  const uint64_t version = server.Await(v1::SchedulerMessage::kCheckpoint).checkpoint().version();
  EXPECT_EQ(version, 3u);
  WriteSnapshot(server, plan, version);
  ASSERT_TRUE(answered.WaitForNotificationWithTimeout(kPatience));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->version(), version);
  EXPECT_TRUE(PathExists(answer->directory() + "/manifest.json"));
}

TEST_F(SchedulerNodeTest, AWatcherThatGoesAwayIsForgotten) {
  Submit(SmallSpec(1));
  for (int i = 0; i < 20; ++i) {
    auto context = Context();
    auto reader = stub_->WatchJob(context.get(), Job("latest"));
    v1::JobStatus status;
    ASSERT_TRUE(reader->Read(&status));
    context->TryCancel();
    EXPECT_FALSE(reader->Finish().ok());
  }
}

TEST_F(SchedulerNodeTest, NodesThatAreRefused) {
  FakeNode& old = Node(v1::WORKER, "w0", 1, kProtocolVersion + 1);
  const absl::Status status = old.AwaitRefused();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  FakeNode& first = Node(v1::WORKER, "w1", 10);
  first.Await(v1::SchedulerMessage::kWelcome);
  FakeNode& second = Node(v1::WORKER, "w1", 11);
  second.Await(v1::SchedulerMessage::kWelcome);
  EXPECT_EQ(first.AwaitRefused().code(), absl::StatusCode::kAborted);
  v1::GetClusterResponse cluster;
  ASSERT_TRUE(stub_->GetCluster(Context().get(), v1::GetClusterRequest(), &cluster).ok());
  ASSERT_EQ(cluster.nodes_size(), 1);
  EXPECT_EQ(cluster.nodes(0).node().incarnation(), 11u);
}

TEST_F(SchedulerNodeTest, NodesComeBackAfterTheSchedulersRestart) {
  FakeNode& server = Node(v1::SERVER, "s0");
  FakeNode& worker = Node(v1::WORKER, "w0");
  const std::string job = Submit(SmallSpec(1));
  const v1::Plan plan = worker.Await(v1::SchedulerMessage::kPlan).plan();
  server.Await(v1::SchedulerMessage::kPlan);
  server.Say(Record(plan, 0));
  AwaitStatus(job, [](const v1::JobStatus& status) { return status.rounds_done() == 1; });
  const int port = server_->port();
  End();
  EXPECT_EQ(store_.LoadJobs()->at(0).status().state(), v1::RUNNING) << "its end is nobody's death";
  Begin(port);
  server.Await(v1::SchedulerMessage::kWelcome, 2);
  worker.Await(v1::SchedulerMessage::kWelcome, 2);
  EXPECT_EQ(node_->Get(job)->rounds_done(), 1u);
  for (uint64_t round = 1; round < 10; ++round) server.Say(Record(plan, round));
  Finish(server, plan);
  worker.Await(v1::SchedulerMessage::kEndJob);
  EXPECT_EQ(node_->Get(job)->state(), v1::SUCCEEDED);
  EXPECT_EQ(node_->Get(job)->generation(), 1u);
}

TEST_F(SchedulerNodeTest, AFullDiskStopsItLoudly) {
  store_.FailWrites(absl::ResourceExhaustedError("disk is full"));
  v1::SubmitJobRequest request;
  *request.mutable_spec() = SmallSpec(1);
  v1::SubmitJobResponse response;
  const grpc::Status status = stub_->SubmitJob(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_NE(status.error_message().find("disk is full"), std::string::npos) << status.error_message();
  EXPECT_TRUE(broken_.WaitForNotificationWithTimeout(kPatience));
  EXPECT_EQ(node_->health().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(SchedulerNodeTest, GarbageOnASessionDisturbsNobody) {
  FakeNode& worker = Node(v1::WORKER, "w0");
  worker.Await(v1::SchedulerMessage::kWelcome);
  class Closed : public StreamHandler {
   public:
    void OnMessage(grpc::ByteBuffer) override {}
    void OnClosed(const absl::Status& s) override {
      status = s;
      closed.Notify();
    }
    absl::Status status;
    absl::Notification closed;
  };
  auto handler = std::make_shared<Closed>();
  auto stream = transport_.Open(server_->address(), Plane::kSession, handler);
  const grpc::Slice slice(std::string(100, '\xff'));
  stream->Write(grpc::ByteBuffer(&slice, 1));
  ASSERT_TRUE(handler->closed.WaitForNotificationWithTimeout(kPatience));
  EXPECT_EQ(handler->status.code(), absl::StatusCode::kInvalidArgument) << handler->status;
  EXPECT_EQ(node_->Cluster().nodes_size(), 1);
}

}  // namespace
}  // namespace sluice
