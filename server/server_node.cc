#include "server/server_node.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/frame.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "server/commit_queue.h"

namespace sluice {
namespace {

constexpr size_t kMaxPlanlessJobs = 64;  // jobs that only a worker's hello speaks of

absl::Status CheckVersion(uint32_t version) {
  if (version == kProtocolVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("protocol version ", version, " meets ", kProtocolVersion, "; run one build on all nodes"));
}

absl::Status TooManyJobs(const std::string& job_id) {
  return absl::ResourceExhaustedError(absl::StrCat("job ", job_id, " is not here, and ", kMaxPlanlessJobs,
                                                   " others without a plan are waited for already"));
}

// A chunk twice in one frame is no worker's way; its second copy would be dropped in silence.
absl::Status CheckChunksOnce(const v1::ChunkFrame& frame) {
  if (frame.header_size() < 2) return absl::OkStatus();
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t, bool>> named;
  named.reserve(static_cast<size_t>(frame.header_size()));
  for (const v1::ChunkHeader& h : frame.header()) named.emplace_back(h.chunk(), h.round(), h.position(), h.residual());
  std::sort(named.begin(), named.end());
  const auto twice = std::adjacent_find(named.begin(), named.end());
  if (twice == named.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("chunk ", std::get<0>(*twice), " comes twice in one frame"));
}

}  // namespace

// Closes a stream that says nothing for too long after it was opened. Thread-safe.
class ServerNode::HelloTimer : public std::enable_shared_from_this<HelloTimer> {
 public:
  HelloTimer(std::weak_ptr<ByteStream> stream, std::string peer) : stream_(std::move(stream)), peer_(std::move(peer)) {}

  void Start(absl::Duration patience) {
    alarm_.Set(absl::ToChronoTime(absl::Now() + patience), [weak = weak_from_this(), patience](bool fired) {
      const std::shared_ptr<HelloTimer> self = weak.lock();
      if (!fired || self == nullptr || self->decided_.exchange(true)) return;
      const absl::Status status = absl::DeadlineExceededError(
          absl::StrCat("no hello within ", absl::FormatDuration(patience), " after the stream was opened"));
      LOG_WARN("stream of unknown ({}): {}", self->peer_, status.ToString());
      if (const std::shared_ptr<ByteStream> stream = self->stream_.lock()) stream->Close(status);
    });
  }
  // Hello came, or the stream ended. False where the stream has been closed for want of it.
  bool Stop() {
    if (std::exchange(stopped_, true)) return true;
    const bool in_time = !decided_.exchange(true);
    alarm_.Cancel();
    return in_time;
  }

 private:
  const std::weak_ptr<ByteStream> stream_;
  const std::string peer_;
  std::atomic<bool> decided_{false};
  bool stopped_ = false;  // the stream's events alone
  grpc::Alarm alarm_;
};

// A worker's end. Frames of one stream come one at a time.
class ServerNode::WorkerStream : public StreamHandler {
 public:
  WorkerStream(ServerNode* node, std::shared_ptr<ByteStream> stream, std::string peer)
      : node_(node), id_(node->next_stream_++), stream_(std::move(stream)), peer_(std::move(peer)) {
    timer_->Start(node->options_.hello_patience);
  }

  void OnMessage(grpc::ByteBuffer buffer) override {
    absl::Status status = Handle(std::move(buffer));
    if (status.ok() || closed_) return;
    closed_ = true;
    if (absl::IsCancelled(status)) return;  // closed by the job: a new generation, or its end
    // A stream of an older generation is part of every transition; anything else is somebody's fault.
    if (absl::IsAborted(status)) {
      LOG_INFO("stream of {} ({}), job {}: {}", who_, peer_, job_id_, status.ToString());
    } else {
      LOG_WARN("stream of {} ({}), job {}: {}", who_, peer_, job_id_, status.ToString());
    }
    v1::ChunkFrame refusal;
    refusal.mutable_refusal()->set_code(static_cast<int>(status.code()));
    refusal.mutable_refusal()->set_message(std::string(status.message()));
    refusal.mutable_refusal()->set_generation(generation_);
    stream_->Write(EncodeFrame(refusal, {}));
    stream_->Close(status);
  }

  void OnWritten() override {
    std::shared_ptr<CommitQueue> queue;
    {
      absl::MutexLock lock(&mutex_);
      queue = queue_;
    }
    if (queue != nullptr) queue->OnWritten();
  }

  void OnClosed(const absl::Status&) override {
    timer_->Stop();
    if (job_ != nullptr) job_->RemoveStream(id_);
    job_ = nullptr;
  }

 private:
  absl::Status Handle(grpc::ByteBuffer buffer) {
    if (closed_) return absl::OkStatus();
    if (!timer_->Stop()) return absl::CancelledError("hello came too late");
    ASSIGN_OR_RETURN(ParsedFrame frame, frames_->Parse(std::move(buffer)));
    if (v1::ChunkFrame answer; frames_->OnFrame(frame.control, node_->options_.shared_memory, &answer)) {
      stream_->Write(EncodeFrame(answer, {}));
    }
    if (job_ == nullptr) {
      if (!frame.control.has_hello())
        return absl::InvalidArgumentError("the first message of a stream must carry hello");
      const v1::StreamHello& hello = frame.control.hello();
      RETURN_IF_ERROR(CheckVersion(hello.protocol_version()));
      who_ = absl::StrCat(hello.node().name(), " contributor ", hello.contributor());
      job_id_ = hello.job_id();
      std::shared_ptr<ServerJob> job = node_->FindOrMakeJob(job_id_, /*by_scheduler=*/false);
      if (job == nullptr) return TooManyJobs(job_id_);
      auto queue = job->AddStream(id_, stream_, frames_, hello);
      if (!queue.ok()) {
        generation_ = job->generation();
        return queue.status();
      }
      job_ = std::move(job);
      {
        absl::MutexLock lock(&mutex_);
        queue_ = *queue;
      }
      (*queue)->OnWritten();  // what may have come before
    }
    absl::Status status = CheckChunksOnce(frame.control);
    if (status.ok()) status = job_->OnFrame(id_, std::move(frame));
    if (!status.ok()) generation_ = job_->generation();
    return status;
  }

  ServerNode* const node_;
  const StreamId id_;
  const std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<SharedFrames> frames_ = std::make_shared<SharedFrames>();
  const std::string peer_;
  const std::shared_ptr<HelloTimer> timer_ = std::make_shared<HelloTimer>(stream_, peer_);
  std::string who_ = "unknown", job_id_ = "unknown";
  std::shared_ptr<ServerJob> job_;
  uint64_t generation_ = 0;  // the job's when a refusal came up; 0: not known
  bool closed_ = false;
  absl::Mutex mutex_;
  std::shared_ptr<CommitQueue> queue_ ABSL_GUARDED_BY(mutex_);
};

// Another server's link to this one as verdict holder.
class ServerNode::PeerStream : public StreamHandler {
 public:
  PeerStream(ServerNode* node, std::shared_ptr<ByteStream> stream, const std::string& peer)
      : node_(node), stream_(std::move(stream)), timer_(std::make_shared<HelloTimer>(stream_, peer)) {
    timer_->Start(node->options_.hello_patience);
  }

  void OnMessage(grpc::ByteBuffer buffer) override {
    if (!timer_->Stop()) return;
    v1::ShardMessage message;
    if (!DecodeMessage(buffer, &message)) {
      return stream_->Close(absl::InvalidArgumentError("not a ShardMessage"));
    }
    if (job_ == nullptr) {
      if (!message.has_hello()) return stream_->Close(absl::InvalidArgumentError("the first message must be hello"));
      if (absl::Status status = CheckVersion(message.hello().protocol_version()); !status.ok())
        return stream_->Close(status);
      job_ = node_->FindOrMakeJob(message.hello().job_id(), /*by_scheduler=*/false);
      if (job_ == nullptr) return stream_->Close(TooManyJobs(message.hello().job_id()));
      peer_ = message.hello().node();
      job_->AddPeer(peer_, stream_);
      stream_->Write(EncodeMessage(v1::ShardMessage()));  // a sign of life
      return;
    }
    job_->OnShardMessage(message, peer_);
  }

  void OnClosed(const absl::Status&) override {
    timer_->Stop();
    if (job_ != nullptr) job_->RemovePeer(peer_, stream_.get());
    job_ = nullptr;
  }

 private:
  ServerNode* const node_;
  const std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<HelloTimer> timer_;
  std::shared_ptr<ServerJob> job_;
  v1::NodeId peer_;
};

std::unique_ptr<ServerNode> ServerNode::Start(const ServerOptions& options) {
  std::unique_ptr<ServerNode> node(new ServerNode(options));
  // Answers to what comes at once wait until there is a session to send them on.
  absl::MutexLock lock(&node->session_mutex_);
  node->session_owner_ =
      Session::Start(options.transport, options.scheduler,
                     {.make_register = [n = node.get()] { return n->MakeRegister(); },
                      .on_message = [n = node.get()](const v1::SchedulerMessage& message) { n->OnMessage(message); },
                      .on_refused = options.on_refused});
  node->session_ = node->session_owner_.get();
  return node;
}

ServerNode::ServerNode(const ServerOptions& options)
    : options_(WithClock(options)),
      hold_(options.hold_memory == 0 ? nullptr : std::make_shared<HoldBudget>(options.hold_memory)),
      memory_(options.stream_memory == 0 ? nullptr : std::make_shared<StreamMemory>(options.stream_memory)),
      lanes_(options.lanes),
      background_(2) {}

ServerOptions ServerNode::WithClock(ServerOptions options) {
  if (options.clock == nullptr) options.clock = &real_clock_;
  return options;
}

ServerNode::~ServerNode() {
  {
    absl::MutexLock lock(&session_mutex_);
    session_ = nullptr;
  }
  session_owner_ = nullptr;
  std::map<std::string, std::shared_ptr<ServerJob>> jobs;
  {
    absl::MutexLock lock(&mutex_);
    jobs.swap(jobs_);
  }
  for (auto& [id, job] : jobs) job->End();
  lanes_.Drain();
  background_.Drain();
}

void ServerNode::Send(const v1::NodeMessage& message) {
  absl::MutexLock lock(&session_mutex_);
  if (session_ != nullptr) session_->Send(message);
}

void ServerNode::Leave() {
  v1::NodeMessage message;
  message.mutable_leaving();
  Send(message);
}

v1::Register ServerNode::MakeRegister() const {
  v1::Register r;
  r.set_protocol_version(kProtocolVersion);
  r.set_build_id(kVersion);
  r.set_role(v1::SERVER);
  *r.mutable_node() = options_.node;
  r.set_host_id(options_.host_id);
  r.set_address(options_.address);
  r.set_memory_limit(options_.memory_limit);
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, job] : jobs_) {
    const uint64_t generation = job->generation();
    if (generation == 0) continue;  // waits for its plan
    v1::JobGeneration* g = r.add_jobs();
    g->set_job_id(id);
    g->set_generation(generation);
  }
  return r;
}

void ServerNode::OnMessage(const v1::SchedulerMessage& message) {
  switch (message.kind_case()) {
    case v1::SchedulerMessage::kWelcome: {
      std::map<std::string, std::shared_ptr<ServerJob>> jobs;
      {
        absl::MutexLock lock(&mutex_);
        jobs = jobs_;
      }
      for (auto& [id, job] : jobs) job->OnSchedulerConnected();
      break;
    }
    case v1::SchedulerMessage::kPlan:
      OnPlan(message.plan());
      break;
    case v1::SchedulerMessage::kFence:
      FindOrMakeJob(message.fence().job_id(), /*by_scheduler=*/true)->OnFence(message.fence().generation());
      break;
    case v1::SchedulerMessage::kCheckpoint:
      if (auto job = FindJob(message.checkpoint().job_id())) job->OnCheckpointOrder(message.checkpoint());
      break;
    case v1::SchedulerMessage::kEndJob: {
      std::shared_ptr<ServerJob> job;
      {
        absl::MutexLock lock(&mutex_);
        auto it = jobs_.find(message.end_job().job_id());
        if (it == jobs_.end()) return;
        job = it->second;
        jobs_.erase(it);
        reserved_.erase(message.end_job().job_id());
      }
      job->End();
      LOG_INFO("job {} ended", message.end_job().job_id());
      break;
    }
    default:
      break;
  }
}

void ServerNode::OnPlan(const v1::Plan& plan) {
  auto fail = [&](const absl::Status& status) {
    v1::NodeMessage message;
    v1::NodeProblem* problem = message.mutable_problem();
    problem->set_job_id(plan.job_id());
    problem->set_generation(plan.generation());
    problem->set_code(static_cast<int>(status.code()));
    problem->set_message(absl::StrCat("server ", options_.node.name(), ": ", status.message()));
    Send(message);
  };
  absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(plan);
  if (!layout.ok()) return fail(layout.status());
  uint64_t elements = 0;
  for (uint64_t c = 0; c < (*layout)->table().chunks(); ++c) {
    if ((*layout)->IsMember((*layout)->table().shard(c), options_.node)) elements += (*layout)->table().range(c).size();
  }
  const uint64_t each = ChunkStore::BytesPerElement(plan.spec()), need = elements * each;
  if (options_.memory_limit > 0) {
    absl::MutexLock lock(&mutex_);
    uint64_t others = 0;
    for (const auto& [id, bytes] : reserved_) others += id == plan.job_id() ? 0 : bytes;
    if (others + need > options_.memory_limit) {
      return fail(absl::ResourceExhaustedError(absl::StrCat("job ", plan.job_id(), " needs ", elements, " elements x ",
                                                            each, " bytes = ", need, " bytes here, other jobs hold ",
                                                            others, ", the limit is ", options_.memory_limit,
                                                            "; add servers or raise --memory_limit")));
    }
    reserved_[plan.job_id()] = need;
  }
  LOG_INFO("job {} generation {} timeline {} start {}: {} of {} elements here", plan.job_id(), plan.generation(),
           plan.timeline(), plan.start(), elements, (*layout)->space().size());
  FindOrMakeJob(plan.job_id(), /*by_scheduler=*/true)->OnPlan(*std::move(layout));
}

std::shared_ptr<ServerJob> ServerNode::FindJob(const std::string& job_id) const {
  absl::MutexLock lock(&mutex_);
  auto it = jobs_.find(job_id);
  return it == jobs_.end() ? nullptr : it->second;
}

std::shared_ptr<ServerJob> ServerNode::FindOrMakeJob(const std::string& job_id, bool by_scheduler) {
  absl::MutexLock lock(&mutex_);
  auto it = jobs_.find(job_id);
  if (it != jobs_.end()) return it->second;
  // A worker may have its plan before this server has: its messages wait. Names that no plan ever speaks of stay few.
  size_t planless = 0;
  for (auto i = jobs_.begin(); i != jobs_.end();) {
    if (i->second->generation() == 0 && i->second.use_count() == 1) {
      i = jobs_.erase(i);
    } else {
      planless += i->second->generation() == 0;
      ++i;
    }
  }
  if (planless >= kMaxPlanlessJobs && !by_scheduler) return nullptr;
  auto job = std::make_shared<ServerJob>(ServerJobOptions{
      .job_id = job_id,
      .self = options_.node,
      .checkpoint_root = options_.checkpoint_root,
      .data_root = options_.data_root,
      .rules = options_.rules,
      .lanes = &lanes_,
      .background = &background_,
      .transport = options_.transport,
      .clock = options_.clock,
      .shared_memory = options_.shared_memory,
      .hold = hold_,
      .memory = memory_,
      .to_scheduler = [this](const v1::NodeMessage& message) { Send(message); },
  });
  jobs_[job_id] = job;
  return job;
}

Acceptor ServerNode::parameter_acceptor() {
  return [this](std::shared_ptr<ByteStream> stream, const std::string& peer) {
    return std::make_shared<WorkerStream>(this, std::move(stream), peer);
  };
}

Acceptor ServerNode::shard_acceptor() {
  return [this](std::shared_ptr<ByteStream> stream, const std::string& peer) {
    return std::make_shared<PeerStream>(this, std::move(stream), peer);
  };
}

absl::StatusOr<v1::GetPlanResponse> ServerNode::GetPlan(const v1::GetPlanRequest& request) const {
  std::shared_ptr<ServerJob> job = FindJob(request.job_id());
  std::shared_ptr<const Layout> layout = job == nullptr ? nullptr : job->layout();
  if (layout == nullptr) return absl::NotFoundError(absl::StrCat("job ", request.job_id(), " is not on this server"));
  v1::GetPlanResponse response;
  *response.mutable_plan() = layout->plan();
  for (const Tensor& t : layout->space().tensors()) {
    v1::TensorInfo* info = response.add_tensors();
    info->set_name(t.name);
    info->mutable_shape()->Add(t.shape.begin(), t.shape.end());
    info->set_offset(t.offset);
  }
  for (uint64_t c = 0; c < layout->table().chunks(); ++c) {
    v1::ChunkInfo* info = response.add_chunks();
    info->set_offset(layout->table().range(c).begin);
    info->set_elements(layout->table().range(c).size());
    info->set_shard(layout->table().shard(c));
    info->set_address(layout->primary(layout->table().shard(c)).address());
  }
  const uint32_t ranks = layout->mesh().ranks_of_replica();
  for (uint32_t rank = 0; ranks > 1 && rank < ranks; ++rank) {
    for (const uint64_t c : layout->view(rank)) {
      v1::ChunkInfo* const info = response.mutable_chunks(static_cast<int>(c));
      info->add_holders(rank);
      if (layout->slot(c, rank).has_value()) info->add_contributors(rank);
    }
  }
  return response;
}

}  // namespace sluice
