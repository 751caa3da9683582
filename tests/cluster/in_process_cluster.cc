#include "tests/cluster/in_process_cluster.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/checkpoint.h"
#include "common/log.h"
#include "common/node_identity.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

std::string NodeName(const char* role, int i) { return absl::StrCat(role, "-", i); }

bool Ended(const v1::JobStatus& status) {
  return status.state() == v1::SUCCEEDED || status.state() == v1::FAILED || status.state() == v1::CANCELLED;
}

std::string MakeTemporaryFolder() {
  std::string path = (std::filesystem::temp_directory_path() / "sluice-cluster-XXXXXX").string();
  CHECK(mkdtemp(path.data()) != nullptr, "mkdtemp {}", path);
  return path;
}

}  // namespace

InProcessCluster::InProcessCluster(const ClusterOptions& options)
    : options_(options),
      checkpoint_root_(options.checkpoint_root.empty() ? MakeTemporaryFolder() : options.checkpoint_root),
      network_(options.network) {
  StartScheduler();
  for (int i = 0; i < options.servers; ++i) StartServer(i);
  for (int i = 0; i < options.workers; ++i) StartWorker(i);
}

InProcessCluster::~InProcessCluster() {
  for (size_t i = 0; i < workers_.size(); ++i) KillWorker(static_cast<int>(i));
  for (size_t i = 0; i < servers_.size(); ++i) KillServer(static_cast<int>(i));
  KillScheduler();
  std::error_code ignored;
  if (options_.checkpoint_root.empty()) std::filesystem::remove_all(checkpoint_root_, ignored);
}

// ---------------------------------------------------------------- lives
std::string InProcessCluster::HostOf(const std::string& node) const {
  const auto host = options_.hosts.find(node);
  return host == options_.hosts.end() ? "host-" + node : host->second;
}

void InProcessCluster::StartScheduler() {
  CHECK(scheduler_.node == nullptr, "the scheduler runs");
  network_.Revive("scheduler");
  SchedulerOptions options;
  options.store = &store_;
  options.clock = &clock_;
  options.checkpoint_root = checkpoint_root_;
  options.lease = options_.lease;
  options.gather = options_.gather;
  options.rules = options_.rules;
  absl::StatusOr<std::unique_ptr<SchedulerNode>> node = SchedulerNode::Start(options);
  CHECK(node.ok(), "{}", node.status().ToString());
  scheduler_.node = *std::move(node);
  auto listener = network_.Listen("scheduler", {{Plane::kSession, scheduler_.node->session_acceptor()}});
  CHECK(listener.ok(), "{}", listener.status().ToString());
  scheduler_.listener = *std::move(listener);
}

void InProcessCluster::KillScheduler() {
  network_.Kill("scheduler");
  scheduler_.listener = nullptr;
  scheduler_.node = nullptr;
}

void InProcessCluster::StartServer(int i) {
  if (servers_.size() <= static_cast<size_t>(i)) servers_.resize(static_cast<size_t>(i) + 1);
  ServerSlot& slot = servers_[static_cast<size_t>(i)];
  CHECK(slot.node == nullptr, "server {} runs", i);
  const std::string name = NodeName("server", i);
  network_.Revive(name);
  slot.transport = network_.MakeTransport(name);
  ServerOptions options;
  options.node = MakeNodeId("server", name);
  options.host_id = HostOf(name);
  options.address = name;
  options.scheduler = "scheduler";
  options.checkpoint_root = checkpoint_root_;
  options.memory_limit = options_.memory_limit;
  options.hold_memory = options_.hold_memory;
  options.stream_memory = options_.stream_memory;
  options.lanes = options_.lanes;
  options.shared_memory = options_.shared_memory;
  options.rules = options_.rules;
  options.transport = slot.transport.get();
  slot.node = ServerNode::Start(options);
  auto listener = network_.Listen(
      name, {{Plane::kParameter, slot.node->parameter_acceptor()}, {Plane::kShard, slot.node->shard_acceptor()}});
  CHECK(listener.ok(), "{}", listener.status().ToString());
  slot.listener = *std::move(listener);
}

void InProcessCluster::KillServer(int i) {
  ServerSlot& slot = servers_.at(static_cast<size_t>(i));
  network_.Kill(NodeName("server", i));
  slot.listener = nullptr;
  slot.node = nullptr;
  slot.transport = nullptr;
}

void InProcessCluster::StartWorker(int i) {
  if (workers_.size() <= static_cast<size_t>(i)) workers_.resize(static_cast<size_t>(i) + 1);
  WorkerSlot& slot = workers_[static_cast<size_t>(i)];
  CHECK(slot.node == nullptr, "worker {} runs", i);
  const std::string name = NodeName("worker", i);
  network_.Revive(name);
  slot.transport = network_.MakeTransport(name);
  WorkerOptions options;
  options.node = MakeNodeId("worker", name);
  options.host_id = HostOf(name);
  options.address = name;
  options.scheduler = "scheduler";
  options.backend = options_.backend;
  options.shared_memory = options_.shared_memory || !options_.hosts.empty();
  options.serves_peers = true;
  options.memory_limit = options_.worker_memory_limit;
  options.rules = options_.rules;
  options.transport = slot.transport.get();
  options.clock = &clock_;
  options.hooks = options_.hooks;
  absl::StatusOr<std::unique_ptr<WorkerNode>> node = WorkerNode::Start(options);
  CHECK(node.ok(), "{}", node.status().ToString());
  slot.node = *std::move(node);
  Acceptor acceptor = slot.node->peer_acceptor();
  if (!options_.peers_answer) {
    acceptor = [](std::shared_ptr<ByteStream> stream, const std::string&) {
      stream->Close(absl::UnimplementedError("no peer service"));
      return nullptr;
    };
  }
  auto listener =
      network_.Listen(name, {{Plane::kPeer, std::move(acceptor)}, {Plane::kMail, slot.node->mail_acceptor()}});
  CHECK(listener.ok(), "{}", listener.status().ToString());
  slot.listener = *std::move(listener);
}

void InProcessCluster::KillWorker(int i) {
  WorkerSlot& slot = workers_.at(static_cast<size_t>(i));
  network_.Kill(NodeName("worker", i));
  slot.listener = nullptr;
  slot.node = nullptr;
  slot.transport = nullptr;
}

// ---------------------------------------------------------------- jobs
absl::StatusOr<std::string> InProcessCluster::Submit(const v1::JobSpec& spec, const std::string& resume_job) {
  v1::SubmitJobRequest request;
  *request.mutable_spec() = spec;
  request.set_resume_job(resume_job);
  ASSIGN_OR_RETURN(const v1::SubmitJobResponse response, scheduler().Submit(std::move(request)));
  return response.job_id();
}

absl::StatusOr<v1::JobStatus> InProcessCluster::Await(const std::string& job,
                                                      const std::function<bool(const v1::JobStatus&)>& until,
                                                      absl::Duration patience) {
  struct Seen {
    absl::Mutex mutex;
    v1::JobStatus status ABSL_GUARDED_BY(mutex);
    bool done ABSL_GUARDED_BY(mutex) = false;
  };
  auto seen = std::make_shared<Seen>();
  ASSIGN_OR_RETURN(const uint64_t watch, scheduler().Watch(job, [seen, until](const v1::JobStatus& status) {
    absl::MutexLock lock(&seen->mutex);
    if (seen->done) return;
    seen->status = status;
    seen->done = Ended(status) || until(status);
  }));
  absl::StatusOr<v1::JobStatus> result;
  {
    absl::MutexLock lock(&seen->mutex);
    if (seen->mutex.AwaitWithTimeout(absl::Condition(&seen->done), patience)) {
      result = seen->status;
    } else {
      result = absl::DeadlineExceededError(
          absl::StrCat("job ", job, " after ", absl::FormatDuration(patience), ": ", seen->status.ShortDebugString()));
      seen->done = true;  // `until` is not called any more
    }
  }
  scheduler().Unwatch(watch);
  return result;
}

absl::StatusOr<v1::JobStatus> InProcessCluster::AwaitEnd(const std::string& job, absl::Duration patience) {
  return Await(
      job, [](const v1::JobStatus&) { return false; }, patience);
}

absl::StatusOr<v1::JobStatus> InProcessCluster::AwaitRounds(const std::string& job, uint64_t rounds,
                                                            absl::Duration patience) {
  return Await(
      job, [rounds](const v1::JobStatus& status) { return status.rounds_done() >= rounds; }, patience);
}

absl::StatusOr<std::vector<float>> InProcessCluster::Parameters(const v1::JobStatus& status) {
  if (!status.has_last_checkpoint()) {
    return absl::NotFoundError(absl::StrCat("job ", status.job_id(), " has no checkpoint"));
  }
  ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(status.last_checkpoint().directory(), /*verify=*/true));
  std::vector<float> values(reader->manifest().parameters());
  RETURN_IF_ERROR(reader->Read("value", 0, absl::MakeSpan(values)));
  return values;
}

uint64_t HashOf(absl::Span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    hash = (hash ^ bits) * 0x100000001b3;
  }
  return hash;
}

}  // namespace sluice
