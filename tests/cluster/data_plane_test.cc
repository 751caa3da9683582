// Real servers and workers under plans that the test makes itself, without a scheduler: what the data plane does alone.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/clock.h"
#include "common/inprocess_transport.h"
#include "common/job_spec.h"
#include "common/layout.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "server/server_node.h"
#include "worker/worker_node.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// Sessions of all nodes; sends what the test says and keeps what comes.
class ScriptedScheduler {
 public:
  explicit ScriptedScheduler(InProcessNetwork* network)
      : listener_(*network->Listen("scheduler",
                                   {{Plane::kSession, [this](std::shared_ptr<ByteStream> stream, const std::string&) {
                                       return std::make_shared<Handler>(this, std::move(stream));
                                     }}})) {}

  bool AwaitNodes(size_t nodes) {
    return Await([this, nodes]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return streams_.size() == nodes; });
  }
  // Every shard is at the last version in this generation, and the last version was evaluated.
  bool AwaitEnd(const Layout& layout) {
    return Await([this, &layout]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return progress_[layout.generation()].size() == layout.plan().shards() &&
             evaluations_[layout.generation()].count(layout.rounds()) > 0;
    });
  }
  bool AwaitRound(uint64_t round) {
    return Await([this, round]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return losses_.count(round) > 0; });
  }
  bool AwaitFences(size_t reports) {
    return Await([this, reports]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return fences_.size() == reports; });
  }
  void SendAll(const v1::SchedulerMessage& message) {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, stream] : streams_) stream->Write(EncodeMessage(message));
  }
  std::vector<v1::FenceReport> TakeFences() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(fences_, {});
  }
  std::map<std::string, v1::NodeId> nodes() {
    absl::MutexLock lock(&mutex_);
    return nodes_;
  }
  std::map<uint64_t, double> losses() {
    absl::MutexLock lock(&mutex_);
    return losses_;
  }
  std::string problem() {
    absl::MutexLock lock(&mutex_);
    return problem_;
  }

 private:
  struct Handler : StreamHandler {
    Handler(ScriptedScheduler* o, std::shared_ptr<ByteStream> s) : owner(o), stream(std::move(s)) {}
    void OnMessage(grpc::ByteBuffer buffer) override {
      v1::NodeMessage message;
      CHECK(DecodeMessage(buffer, &message));
      absl::MutexLock lock(&owner->mutex_);
      if (message.has_register_()) {
        owner->nodes_[message.register_().node().name()] = message.register_().node();
        owner->streams_[message.register_().node().name()] = stream;
        v1::SchedulerMessage welcome;
        welcome.mutable_welcome()->set_lease_ms(60000);
        stream->Write(EncodeMessage(welcome));
      } else if (message.has_shard_progress()) {
        owner->progress_[message.shard_progress().generation()].insert(message.shard_progress().shard());
      } else if (message.has_round_record()) {
        const v1::RoundRecord& record = message.round_record();
        if (record.evaluation()) {
          owner->evaluations_[record.generation()].insert(record.round());
        } else {
          owner->losses_[record.round()] = record.loss();
        }
      } else if (message.has_fence_report()) {
        owner->fences_.push_back(message.fence_report());
      } else if (message.has_problem()) {
        owner->problem_ = message.problem().message();
      }
    }
    void OnClosed(const absl::Status&) override {
      absl::MutexLock lock(&owner->mutex_);
      std::erase_if(owner->streams_, [this](const auto& entry) { return entry.second == stream; });
      stream = nullptr;
    }
    ScriptedScheduler* const owner;
    std::shared_ptr<ByteStream> stream;
  };

  template <typename Condition>
  bool Await(Condition condition) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return condition() || !problem_.empty(); };
    return mutex_.AwaitWithTimeout(absl::Condition(&ready), kPatience) && problem_.empty();
  }

  absl::Mutex mutex_;
  std::map<std::string, v1::NodeId> nodes_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<ByteStream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::set<uint32_t>> progress_ ABSL_GUARDED_BY(mutex_);     // by generation: shards
  std::map<uint64_t, std::set<uint64_t>> evaluations_ ABSL_GUARDED_BY(mutex_);  // by generation: versions
  std::map<uint64_t, double> losses_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::FenceReport> fences_ ABSL_GUARDED_BY(mutex_);
  std::string problem_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Listener> listener_;
};

class DataPlaneTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "sluice-plane-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    std::ofstream rows(folder_ + "/rows.jsonl");
    for (int row = 0; row < 40; ++row) {
      rows << "[";
      for (int i = 0; i < 2 + row % 7; ++i) rows << (i ? "," : "") << (row * 7 + i * 3) % 32;
      rows << "]\n";
    }
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  v1::JobSpec Spec(uint32_t workers, uint64_t rounds, bool clip) const {
    v1::JobSpec spec;
    v1::Gpt2Spec* gpt = spec.mutable_model()->mutable_gpt2();
    gpt->set_layers(1);
    gpt->set_heads(2);
    gpt->set_width(16);
    gpt->set_context(16);
    gpt->set_vocabulary(32);
    spec.mutable_data()->mutable_rows()->set_path(folder_ + "/rows.jsonl");
    spec.mutable_train()->set_rounds(rounds);
    spec.mutable_train()->set_batch(6);
    spec.mutable_train()->set_eval_every(3);
    spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    if (clip) {
      spec.mutable_optimizer()->set_clip_norm(0.5);
    } else {
      spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
    }
    spec.mutable_parallel()->set_data(workers);
    FillDefaults(&spec);
    return spec;
  }

  // Everything that runs, for one job.
  struct Nodes {
    InProcessNetwork network;
    RealClock clock;
    ScriptedScheduler scheduler;
    std::vector<std::unique_ptr<Transport>> transports;
    std::vector<std::unique_ptr<ServerNode>> servers;
    std::vector<std::unique_ptr<Listener>> listeners;
    std::vector<std::unique_ptr<WorkerNode>> workers;

    Nodes(uint32_t server_count, uint32_t worker_count, const InProcessOptions& options, const std::string& folder)
        : network(options), scheduler(&network) {
      for (uint32_t i = 0; i < server_count; ++i) {
        ServerOptions server;
        server.node = MakeNodeId("server", absl::StrCat("server-", i));
        server.address = server.node.name();
        server.scheduler = "scheduler";
        server.checkpoint_root = folder;
        transports.push_back(network.MakeTransport(server.address));
        server.transport = transports.back().get();
        servers.push_back(ServerNode::Start(server));
        listeners.push_back(*network.Listen(server.address, {{Plane::kParameter, servers.back()->parameter_acceptor()},
                                                             {Plane::kShard, servers.back()->shard_acceptor()}}));
      }
      for (uint32_t i = 0; i < worker_count; ++i) {
        WorkerOptions worker;
        worker.node = MakeNodeId("worker", absl::StrCat("worker-", i));
        worker.scheduler = "scheduler";
        transports.push_back(network.MakeTransport(worker.node.name()));
        worker.transport = transports.back().get();
        worker.clock = &clock;
        workers.push_back(*WorkerNode::Start(worker));
      }
      EXPECT_TRUE(scheduler.AwaitNodes(server_count + worker_count));
    }
    ~Nodes() {
      workers.clear();
      listeners.clear();
      servers.clear();
      transports.clear();
    }

    std::shared_ptr<const Layout> MakeLayout(const v1::JobSpec& spec, uint64_t generation, uint64_t start,
                                             const v1::Verdict* verdict, uint64_t chunk_elements) {
      const std::map<std::string, v1::NodeId> nodes = scheduler.nodes();
      v1::Plan plan;
      plan.set_job_id("job-1");
      plan.set_generation(generation);
      plan.set_timeline(1);
      plan.set_start(start);
      if (verdict != nullptr) *plan.mutable_verdict() = *verdict;
      const uint64_t parameters = MakeParameterSpace(spec.model())->size();
      plan.set_chunk_elements(chunk_elements);
      plan.set_norm_block(NormBlockElements(parameters));
      plan.set_shards(ShardCount(parameters, chunk_elements, static_cast<uint32_t>(servers.size())));
      for (uint32_t k = 0; k < plan.shards(); ++k) {
        v1::Member* member = plan.add_chains()->add_members();
        *member->mutable_node() = nodes.at(absl::StrCat("server-", k % servers.size()));
        member->set_address(member->node().name());
        member->set_since(1);
      }
      for (uint32_t d = 0; d < workers.size(); ++d) {
        v1::Rank* rank = plan.add_ranks();
        rank->set_data(d);
        *rank->mutable_node() = nodes.at(absl::StrCat("worker-", d));
      }
      plan.set_discipline(NeedsVerdict(spec) ? v1::Plan::VERDICT : v1::Plan::STREAM);
      *plan.mutable_spec() = spec;
      plan.set_hash(PlanHash(plan));
      return *Layout::Make(plan);
    }
    void Publish(const Layout& layout) {
      v1::SchedulerMessage message;
      *message.mutable_plan() = layout.plan();
      scheduler.SendAll(message);
    }
    // Fences generation `to` and returns the plan that goes on from there.
    std::shared_ptr<const Layout> Transition(const v1::JobSpec& spec, uint64_t to, uint64_t chunk_elements) {
      v1::SchedulerMessage message;
      message.mutable_fence()->set_job_id("job-1");
      message.mutable_fence()->set_generation(to);
      scheduler.SendAll(message);
      EXPECT_TRUE(scheduler.AwaitFences(servers.size())) << scheduler.problem();
      uint64_t start = UINT64_MAX;
      std::vector<v1::Verdict> verdicts;
      for (const v1::FenceReport& report : scheduler.TakeFences()) {
        EXPECT_EQ(report.plan_generation(), to - 1);
        for (const v1::ShardReport& shard : report.shards()) {
          start = std::min(start, shard.min_version());
          verdicts.insert(verdicts.end(), shard.verdicts().begin(), shard.verdicts().end());
        }
      }
      const v1::Verdict* verdict = nullptr;
      for (const v1::Verdict& each : verdicts) {
        if (each.round() == start) verdict = &each;
      }
      return MakeLayout(spec, to, start, verdict, chunk_elements);
    }
    std::vector<float> Parameters(const Layout& layout) {
      std::vector<float> values(layout.space().size());
      for (const auto& server : servers) {
        const std::shared_ptr<ServerJob> job = server->FindJob("job-1");
        for (const uint64_t chunk : job->Chunks()) {
          absl::StatusOr<FetchedChunk> found = absl::UnknownError("");
          absl::Notification done;
          job->Fetch(&done, chunk, layout.rounds(), [&](absl::StatusOr<FetchedChunk> value) {
            found = std::move(value);
            done.Notify();
          });
          EXPECT_TRUE(done.WaitForNotificationWithTimeout(kPatience));
          EXPECT_TRUE(found.ok()) << found.status();
          const Range range = layout.table().range(chunk);
          std::memcpy(values.data() + range.begin, found->value.data.get(), range.size() * sizeof(float));
        }
      }
      return values;
    }
  };

  std::string folder_;
};

TEST_F(DataPlaneTest, LayoutChangesNoBit) {
  for (const bool clip : {true, false}) {
    for (const uint32_t workers : {1u, 2u, 3u}) {
      std::vector<float> expected;
      for (const uint32_t servers : {1u, 2u, 3u}) {
        for (const uint64_t chunk_elements : {uint64_t{1} << 18, uint64_t{997}}) {
          SCOPED_TRACE(absl::StrCat(workers, " workers, ", servers, " servers, chunks of ", chunk_elements,
                                    clip ? ", clip" : ""));
          Nodes nodes(servers, workers, {.delay_seed = servers, .max_delay = absl::Microseconds(200)}, folder_);
          const auto layout = nodes.MakeLayout(Spec(workers, 8, clip), 1, 0, nullptr, chunk_elements);
          nodes.Publish(*layout);
          ASSERT_TRUE(nodes.scheduler.AwaitEnd(*layout)) << nodes.scheduler.problem();
          const std::vector<float> values = nodes.Parameters(*layout);
          if (expected.empty()) expected = values;
          ASSERT_EQ(values, expected);
          const std::map<uint64_t, double> losses = nodes.scheduler.losses();
          ASSERT_EQ(losses.size(), 8u);
          EXPECT_LT(losses.at(7), losses.at(0)) << "it learns";
        }
      }
    }
  }
}

// With any pair of wire formats: a round that is computed again pushes the very same bytes, and what an encoding left
// out is counted once.
TEST_F(DataPlaneTest, GenerationsInTheMiddleOfRoundsChangeNoBit) {
  std::vector<std::vector<float>> seen;
  for (const char* transfer :
       {"{}", "{}", "{push: {bf16: {}}, pull: {bf16: {}}}", "{push: {f16: {}}}", "{push: {int8: {}}}",
        "{push: {top_k: {density: 0.05, warmup_rounds: 10}}, pull: {bf16: {}}}",
        "{push: {top_k: {density: 0.05}, error_feedback: false}}"}) {
    SCOPED_TRACE(transfer);
    const bool clip = seen.size() != 1;
    v1::JobSpec spec = Spec(2, 30, clip);
    ASSERT_TRUE(SetSpecField(&spec, absl::StrCat("transfer=", transfer)).ok());
    FillDefaults(&spec);
    ASSERT_TRUE(ValidateJobSpec(spec).ok()) << ValidateJobSpec(spec);
    std::vector<float> expected;
    for (const bool disturbed : {false, true}) {
      Nodes nodes(2, 2, {.delay_seed = 5, .max_delay = absl::Microseconds(500)}, folder_);
      auto layout = nodes.MakeLayout(spec, 1, 0, nullptr, 997);
      nodes.Publish(*layout);
      for (uint64_t round = 1; disturbed && round < 29; round += 3) {
        ASSERT_TRUE(nodes.scheduler.AwaitRound(round)) << nodes.scheduler.problem();
        if (round % 2 == 0) nodes.network.Break("worker-1", "server-0");
        if (round % 4 == 0) nodes.network.Break("server-1", "server-0");
        layout = nodes.Transition(spec, layout->generation() + 1, 997);
        nodes.Publish(*layout);
      }
      ASSERT_TRUE(nodes.scheduler.AwaitEnd(*layout)) << nodes.scheduler.problem();
      const std::vector<float> values = nodes.Parameters(*layout);
      if (expected.empty()) expected = values;
      EXPECT_EQ(values, expected) << (clip ? "VERDICT" : "STREAM");
      const std::map<uint64_t, double> losses = nodes.scheduler.losses();
      EXPECT_LT(losses.at(29), losses.at(0)) << "it learns";
    }
    for (const std::vector<float>& other : seen) EXPECT_NE(expected, other) << "the format changes something";
    seen.push_back(expected);
  }
}

TEST_F(DataPlaneTest, FormatsGiveTheSameBitsInEveryLayout) {
  // Blocks of int8 count from a chunk's beginning, top_k chooses within a chunk: those fix the chunk size.
  for (const auto& [transfer, chunks] :
       {std::pair{"{push: {bf16: {}}, pull: {bf16: {}}}", std::vector<uint64_t>{1 << 18, 997, 512}},
        std::pair{"{push: {f16: {}}}", std::vector<uint64_t>{1 << 18, 997}},
        std::pair{"{push: {int8: {}}, pull: {bf16: {}}}", std::vector<uint64_t>{1 << 18, 512}},
        std::pair{"{push: {top_k: {density: 0.1, warmup_rounds: 4}}}", std::vector<uint64_t>{1024}}}) {
    v1::JobSpec spec = Spec(2, 8, true);
    ASSERT_TRUE(SetSpecField(&spec, absl::StrCat("transfer=", transfer)).ok());
    FillDefaults(&spec);
    std::vector<float> expected;
    for (const uint32_t servers : {1u, 2u, 3u}) {
      for (const uint64_t chunk_elements : chunks) {
        SCOPED_TRACE(absl::StrCat(transfer, ", ", servers, " servers, chunks of ", chunk_elements));
        Nodes nodes(servers, 2, {.delay_seed = servers, .max_delay = absl::Microseconds(200)}, folder_);
        const auto layout = nodes.MakeLayout(spec, 1, 0, nullptr, chunk_elements);
        nodes.Publish(*layout);
        ASSERT_TRUE(nodes.scheduler.AwaitEnd(*layout)) << nodes.scheduler.problem();
        const std::vector<float> values = nodes.Parameters(*layout);
        if (expected.empty()) expected = values;
        ASSERT_EQ(values, expected);
      }
    }
  }
}

}  // namespace
}  // namespace sluice
