#include "server/server_job.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/frame.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace sluice {
namespace {

constexpr absl::Duration kFirstLinkDelay = absl::Milliseconds(20), kLastLinkDelay = absl::Seconds(1);
constexpr absl::Duration kAccuseAfter = absl::Seconds(1);

}  // namespace

// The opened end of the stream to the verdict holder.
class ServerJob::HolderLink : public StreamHandler {
 public:
  HolderLink(std::weak_ptr<ServerJob> job, v1::Member holder) : job_(std::move(job)), holder_(std::move(holder)) {}

  const v1::Member& holder() const { return holder_; }
  std::shared_ptr<ByteStream> stream;  // set by the job, under its lock

  void OnMessage(grpc::ByteBuffer buffer) override {
    v1::ShardMessage message;
    std::shared_ptr<ServerJob> job = job_.lock();
    if (job == nullptr || !DecodeMessage(buffer, &message)) return;
    job->OnHolderLinkAlive(this);
    job->OnShardMessage(message, holder_.node());
  }
  void OnClosed(const absl::Status& status) override {
    if (std::shared_ptr<ServerJob> job = job_.lock()) job->OnHolderLinkClosed(this, status);
  }

 private:
  const std::weak_ptr<ServerJob> job_;
  const v1::Member holder_;
};

ServerJob::ServerJob(ServerJobOptions options)
    : options_(std::move(options)), core_(options_.job_id, options_.self, options_.rules, this, options_.hold) {}

ServerJob::~ServerJob() = default;

// ---------------------------------------------------------------------------------------------------- scheduler

void ServerJob::OnPlan(std::shared_ptr<const Layout> layout) {
  bool fresh;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || !core_.Accepts(*layout)) return;
    const std::shared_ptr<const Layout> old = core_.layout();
    fresh = old == nullptr || old->plan().timeline() != layout->plan().timeline();
  }
  // Plans come one at a time; reading files must not hold up streams and lanes.
  absl::StatusOr<std::shared_ptr<const ChunkSource>> source = nullptr;
  if (fresh) source = ChunkSource::Open(*layout, options_.data_root, options_.checkpoint_root);
  absl::MutexLock lock(&mutex_);
  if (ended_ || !core_.Accepts(*layout)) return;  // ended or fenced meanwhile
  if (fresh) {
    // A new timeline loads everything anew.
    // In async nobody waits for a reader before a value's memory is used again.
    store_ = std::make_shared<ChunkStore>(layout, options_.shared_memory && !layout->async());
    source_ = source.ok() ? *source : nullptr;
    if (!source.ok()) Problem(source.status(), layout->generation());
  }
  core_.SetTime(options_.clock->Now());
  core_.OnPlan(std::move(layout), source_ != nullptr ? source_->Cuts() : std::vector<v1::ChunkCut>());
  for (auto& [id, stream] : streams_) {
    OfferMemory(&stream);
    if (!stream.hello.residuals() && stream.hello.generation() == core_.generation()) {
      ResidualsAbsent(stream.hello.contributor());
    }
  }
  ResidualsLost();
  link_delay_ = absl::ZeroDuration();
  OpenHolderLink();
  AfterEvent();
  plan_changed_.SignalAll();
}

void ServerJob::OnFence(uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  if (!ended_) core_.OnFence(generation);
}

void ServerJob::OnCheckpointOrder(const v1::CheckpointOrder& order) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  core_.OnCheckpointOrder(order);
  if (!core_.ordered().contains(order.version())) return;  // it was passed
  for (auto& [id, stream] : streams_) AnnounceCheckpoint(stream, order.version());
}

void ServerJob::OnSchedulerConnected() {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  core_.OnSchedulerConnected();
  for (const v1::NodeMessage& message : snapshots_done_) options_.to_scheduler(message);
}

void ServerJob::End() {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(ended_, true)) return;
  for (auto& [id, stream] : streams_) stream.stream->Close(absl::OkStatus());
  streams_.clear();
  core_.OnEnd();
  for (auto& [node, stream] : peers_) stream->Close(absl::OkStatus());
  peers_.clear();
  if (holder_link_ != nullptr && holder_link_->stream != nullptr) holder_link_->stream->Close(absl::OkStatus());
  holder_link_ = nullptr;
  snapshots_.clear();
  AfterEvent();
  store_ = nullptr;
  source_ = nullptr;
  plan_changed_.SignalAll();
  options_.background->Post(0, [] { malloc_trim(0); });
}

void ServerJob::Problem(const absl::Status& status, uint64_t generation) {
  LOG_ERROR("job {}: {}", options_.job_id, status.ToString());
  v1::NodeMessage message;
  v1::NodeProblem* problem = message.mutable_problem();
  problem->set_job_id(options_.job_id);
  problem->set_generation(generation);
  problem->set_code(static_cast<int>(status.code()));
  problem->set_message(absl::StrCat("server ", options_.self.name(), ": ", status.message()));
  options_.to_scheduler(message);
}

// ------------------------------------------------------------------------------------------------------ servers

void ServerJob::AddPeer(const v1::NodeId& node, std::shared_ptr<ByteStream> stream) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return stream->Close(absl::OkStatus());
  peers_[{node.name(), node.incarnation()}] = std::move(stream);
}

void ServerJob::RemovePeer(const v1::NodeId& node, const ByteStream* stream) {
  absl::MutexLock lock(&mutex_);
  auto it = peers_.find({node.name(), node.incarnation()});
  if (it != peers_.end() && it->second.get() == stream) peers_.erase(it);
}

void ServerJob::OnShardMessage(const v1::ShardMessage& message, const v1::NodeId& from) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  core_.SetTime(options_.clock->Now());
  if (message.has_norm()) {
    absl::Status status = core_.OnNorm(message.norm(), from);
    if (!status.ok()) LOG_WARN("job {}: norm from {}: {}", options_.job_id, from.name(), status.ToString());
  }
  if (message.has_verdict()) {
    const std::shared_ptr<const Layout>& layout = core_.layout();
    if (layout != nullptr && SameNode(layout->primary(0).node(), from)) {
      core_.OnVerdict(message.verdict());
    } else {
      LOG_WARN("job {}: a verdict from {}, which is not the verdict holder; dropped", options_.job_id, from.name());
    }
  }
  AfterEvent();
}

void ServerJob::OpenHolderLink() {
  if (core_.layout() == nullptr || core_.is_holder()) {
    if (holder_link_ != nullptr && holder_link_->stream != nullptr) holder_link_->stream->Close(absl::OkStatus());
    holder_link_ = nullptr;
    return;
  }
  const v1::Member& holder = core_.layout()->primary(0);
  if (holder_link_ != nullptr && SameNode(holder_link_->holder().node(), holder.node())) return;
  if (holder_link_ != nullptr && holder_link_->stream != nullptr) holder_link_->stream->Close(absl::OkStatus());
  holder_link_ = std::make_shared<HolderLink>(weak_from_this(), holder);
  holder_link_->stream = options_.transport->Open(holder.address(), Plane::kShard, holder_link_);
  v1::ShardMessage hello;
  hello.mutable_hello()->set_protocol_version(kProtocolVersion);
  hello.mutable_hello()->set_job_id(options_.job_id);
  *hello.mutable_hello()->mutable_node() = options_.self;
  holder_link_->stream->Write(EncodeMessage(hello));
  core_.OnHolderConnected();
}

void ServerJob::OnHolderLinkClosed(const HolderLink* link, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (ended_ || holder_link_.get() != link) return;
  const absl::Time now = options_.clock->Now();
  if (link_failing_since_ == absl::InfiniteFuture()) {
    link_failing_since_ = now;
  } else if (now - link_failing_since_ >= kAccuseAfter) {
    link_failing_since_ = now;
    v1::NodeMessage message;
    v1::PeerAccusation* accusation = message.mutable_accusation();
    accusation->set_job_id(options_.job_id);
    accusation->set_generation(core_.generation());
    *accusation->mutable_peer() = link->holder().node();
    accusation->set_message(absl::StrCat("server ", options_.self.name(), " cannot reach the verdict holder at ",
                                         link->holder().address(), ": ", status.ToString()));
    options_.to_scheduler(message);
  }
  holder_link_ = nullptr;
  link_delay_ = std::clamp(link_delay_ * 2, kFirstLinkDelay, kLastLinkDelay);
  // The holder may be dead: then a new generation names another one, and this ends.
  options_.background->Post(1, [weak = weak_from_this()] {
    std::shared_ptr<ServerJob> job = weak.lock();
    if (job == nullptr) return;
    absl::MutexLock lock(&job->mutex_);
    const absl::Time until = absl::Now() + job->link_delay_;
    // A plan or the end cuts it short.
    while (!job->ended_ && job->holder_link_ == nullptr && !job->plan_changed_.WaitWithDeadline(&job->mutex_, until)) {
    }
    if (!job->ended_) job->OpenHolderLink();
  });
}

void ServerJob::OnHolderLinkAlive(const HolderLink* link) {
  absl::MutexLock lock(&mutex_);
  if (holder_link_.get() != link) return;
  link_delay_ = absl::ZeroDuration();
  link_failing_since_ = absl::InfiniteFuture();
}

// -------------------------------------------------------------------------------------------------- ShardActions

void ServerJob::LoadChunk(const std::shared_ptr<const Layout>& layout, uint64_t chunk, uint64_t version) {
  mutex_.AssertHeld();
  if (source_ == nullptr) return;  // the problem has been reported
  options_.lanes->Post(chunk, [this, self = shared_from_this(), store = store_, source = source_, chunk, version,
                               generation = layout->generation()] {
    absl::Status status;
    try {
      status = store->Load(*source, chunk, version);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("no memory for chunk ", chunk, " after ", store->mapped_bytes(), " bytes"));
    }
    if (!status.ok()) Problem(status, generation);
  });
}

void ServerJob::DropChunk(uint64_t chunk) {
  mutex_.AssertHeld();
  options_.lanes->Post(chunk, [store = store_, chunk] { store->Drop(chunk); });
}

void ServerJob::AddContribution(uint64_t chunk, uint32_t contributor, uint32_t contributors, ContributionRef value) {
  mutex_.AssertHeld();
  options_.lanes->Post(chunk, [store = store_, chunk, contributor, contributors, value = std::move(value)]() mutable {
    Payload payload;
    SubtreeSum of;
    if (value != nullptr) {
      payload = static_cast<const PayloadContribution*>(value.get())->payload;
      of = static_cast<const PayloadContribution*>(value.get())->of;
    }
    store->Add(chunk, contributor, contributors, std::move(payload), of);
    value.reset();  // moves its sender's window
  });
}

void ServerJob::DiscardSum(uint64_t chunk) {
  mutex_.AssertHeld();
  options_.lanes->Post(chunk, [store = store_, chunk] { store->DiscardSum(chunk); });
}

void ServerJob::FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) {
  mutex_.AssertHeld();
  options_.lanes->Post(chunk, [self = shared_from_this(), store = store_, chunk, generation, round,
                               contributors = core_.layout()->contributors(chunk)] {
    SumResult result = store->Finish(chunk, contributors);
    absl::MutexLock lock(&self->mutex_);
    self->core_.SetTime(self->options_.clock->Now());
    if (self->ended_) return;
    self->core_.OnSum(chunk, generation, round, result);
    self->AfterEvent();
  });
}

void ServerJob::Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) {
  mutex_.AssertHeld();
  options_.lanes->Post(
      chunk, [store = store_, chunk, verdict, skip_nonfinite] { store->Apply(chunk, verdict, skip_nonfinite); });
}

void ServerJob::DropPrevious(uint64_t chunk) {
  mutex_.AssertHeld();
  options_.lanes->Post(chunk, [store = store_, chunk] { store->DropPrevious(chunk); });
}

void ServerJob::Serve(StreamId stream, uint64_t chunk, uint64_t version) {
  mutex_.AssertHeld();
  auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  served_[it->second.queue].insert(chunk % static_cast<uint64_t>(options_.lanes->count()));
  options_.lanes->Post(chunk,
                       [self = shared_from_this(), store = store_, queue = it->second.queue, stream, chunk, version] {
                         absl::StatusOr<WireValue> value = store->GetWire(chunk, version);
                         if (!value.ok()) return;  // could not be loaded: the job fails by the problem reported
                         queue->Add(chunk, version, *std::move(value));
                         if (queue->fell_behind()) self->CloseUnread(stream);
                       });
}

// What one event serves on a stream travels in the same frames, whatever lanes it comes from: the last of them flushes.
void ServerJob::FlushServed() {
  for (const auto& [queue, lanes] : served_) {
    const auto left = std::make_shared<std::atomic<size_t>>(lanes.size());
    for (const uint64_t lane : lanes) {
      options_.lanes->Post(lane, [queue = queue, left] {
        if (left->fetch_sub(1) == 1) queue->Flush();
      });
    }
  }
  served_.clear();
}

void ServerJob::SendNorm(const v1::Member& holder, const v1::NormReport& report) {
  mutex_.AssertHeld();
  // Without a link: said again when it opens.
  if (holder_link_ == nullptr || !SameNode(holder_link_->holder().node(), holder.node())) return;
  v1::ShardMessage message;
  *message.mutable_norm() = report;
  holder_link_->stream->Write(EncodeMessage(message));
}

void ServerJob::SendVerdict(const v1::NodeId& primary, const v1::VerdictNotice& notice) {
  mutex_.AssertHeld();
  auto it = peers_.find({primary.name(), primary.incarnation()});
  if (it == peers_.end()) return;  // it asks again when its link opens
  v1::ShardMessage message;
  *message.mutable_verdict() = notice;
  it->second->Write(EncodeMessage(message));
}

void ServerJob::SendToScheduler(const v1::NodeMessage& message) { options_.to_scheduler(message); }

}  // namespace sluice
