#include "scheduler/scheduler_node.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/frame.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr absl::Duration kFlushEvery = absl::Milliseconds(200);     // history to disk
constexpr absl::Duration kProgressEvery = absl::Milliseconds(100);  // to a watcher
constexpr absl::Duration kLongestNap = absl::Milliseconds(500);     // so that a set clock is noticed

bool Final(v1::JobState state) { return state == v1::SUCCEEDED || state == v1::FAILED || state == v1::CANCELLED; }

SchedulerCoreOptions CoreOptions(const SchedulerOptions& options) {
  return {options.lease, options.gather, options.checkpoint_root, options.rules};
}

}  // namespace

class SchedulerNode::SessionHandler : public StreamHandler {
 public:
  SessionHandler(SchedulerNode* node, SessionId session) : node_(node), session_(session) {}
  void OnMessage(grpc::ByteBuffer message) override { node_->OnMessage(session_, message); }
  void OnClosed(const absl::Status&) override { node_->OnClosed(session_); }

 private:
  SchedulerNode* const node_;
  const SessionId session_;
};

// --------------------------------------------------------------------------------------------------- start and end
SchedulerNode::SchedulerNode(const SchedulerOptions& options)
    : options_(options), core_(CoreOptions(options), this), metrics_(options.store) {}

absl::StatusOr<std::unique_ptr<SchedulerNode>> SchedulerNode::Start(const SchedulerOptions& options) {
  ASSIGN_OR_RETURN(std::vector<v1::StoredJob> rows, options.store->LoadJobs());
  for (v1::StoredJob& row : rows) {
    v1::JobStatus& status = *row.mutable_status();
    if (Final(status.state())) continue;
    // What the row does not say to the last round, the history does.
    ASSIGN_OR_RETURN(const v1::GetHistoryResponse history, options.store->LoadHistory(status.job_id()));
    for (const v1::RoundRecord& record : history.records()) {
      if (record.timeline() != status.timeline()) continue;
      const v1::RoundRecord& last = record.evaluation() ? status.last_evaluation() : status.last_train();
      if (last.timeline() == record.timeline() && last.round() > record.round()) continue;
      *(record.evaluation() ? status.mutable_last_evaluation() : status.mutable_last_train()) = record;
      if (!record.evaluation()) status.set_rounds_done(std::max(status.rounds_done(), record.round() + 1));
    }
  }
  auto node = std::unique_ptr<SchedulerNode>(new SchedulerNode(options));
  {
    absl::MutexLock lock(&node->mutex_);
    node->core_.Restore(std::move(rows), options.clock->Now());
  }
  node->timer_ = std::thread([n = node.get()] { n->TimerThread(); });
  node->publisher_ = std::thread([n = node.get()] { n->PublisherThread(); });
  return node;
}

SchedulerNode::~SchedulerNode() { Stop(); }

void SchedulerNode::Stop() {
  std::map<SessionId, std::shared_ptr<ByteStream>> streams;
  std::vector<CheckpointWaiter> waiters;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    ending_ = true;
    streams.swap(streams_);
    waiters.swap(checkpoint_waiters_);
    watchers_.clear();
  }
  timer_.join();
  publisher_.join();
  FlushHistory();
  for (auto& [session, stream] : streams) stream->Close(absl::UnavailableError("the scheduler ends"));
  for (CheckpointWaiter& waiter : waiters) waiter.done(absl::UnavailableError("the scheduler ends"));
}

absl::Status SchedulerNode::health() const {
  absl::MutexLock lock(&mutex_);
  return broken_;
}

absl::Status SchedulerNode::Usable() const {
  if (!broken_.ok()) return absl::UnavailableError(absl::StrCat("the scheduler's state: ", broken_.message()));
  return ending_ ? absl::UnavailableError("the scheduler ends") : absl::OkStatus();
}

void SchedulerNode::Break(const absl::Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  LOG_ERROR("the scheduler's state cannot be written any more: {}; it stops deciding and must be restarted",
            status.ToString());
  Wake();
}

// --------------------------------------------------------------------------------------------------------- sessions
Acceptor SchedulerNode::session_acceptor() {
  return
      [this](std::shared_ptr<ByteStream> stream, const std::string& peer) { return Accept(std::move(stream), peer); };
}

std::shared_ptr<StreamHandler> SchedulerNode::Accept(std::shared_ptr<ByteStream> stream, const std::string& peer) {
  absl::MutexLock lock(&mutex_);
  if (ending_ || !broken_.ok()) {
    stream->Close(absl::UnavailableError("the scheduler ends"));
    return nullptr;
  }
  const SessionId session = ++last_session_;
  LOG_DEBUG("session {} from {}", session, peer);
  streams_[session] = std::move(stream);
  return std::make_shared<SessionHandler>(this, session);
}

void SchedulerNode::OnMessage(SessionId session, const grpc::ByteBuffer& buffer) {
  v1::NodeMessage message;
  const bool legal = DecodeMessage(buffer, &message);
  absl::MutexLock lock(&mutex_);
  if (ending_ || !broken_.ok() || streams_.count(session) == 0) return;
  if (!legal) {
    CloseSession(session, absl::InvalidArgumentError("expected a NodeMessage, found bytes that are none"));
    core_.OnSessionClosed(session, options_.clock->Now());
    return;
  }
  core_.OnMessage(session, message, options_.clock->Now());
  Wake();
}

void SchedulerNode::OnClosed(SessionId session) {
  std::shared_ptr<ByteStream> dropped;
  absl::MutexLock lock(&mutex_);
  if (const auto found = streams_.find(session); found != streams_.end()) {
    dropped = std::move(found->second);
    streams_.erase(found);
  }
  if (ending_ || !broken_.ok()) return;
  core_.OnSessionClosed(session, options_.clock->Now());
  Wake();
}

void SchedulerNode::Send(SessionId session, const v1::SchedulerMessage& message) {
  mutex_.AssertHeld();
  if (!broken_.ok()) return;
  if (const auto found = streams_.find(session); found != streams_.end()) found->second->Write(EncodeMessage(message));
}

void SchedulerNode::CloseSession(SessionId session, const absl::Status& status) {
  mutex_.AssertHeld();
  const auto found = streams_.find(session);
  if (found == streams_.end()) return;
  LOG_WARN("session {} closed: {}", session, status.ToString());
  found->second->Close(status);
  streams_.erase(found);
}

// ---------------------------------------------------------------------------------------------------------- storing
void SchedulerNode::Persist(const v1::StoredJob& row) {
  mutex_.AssertHeld();
  if (!broken_.ok()) return;
  if (const absl::Status status = options_.store->PutJob(row); !status.ok()) Break(status);
}

void SchedulerNode::Record(const std::string& job_id, const v1::RoundRecord& record) {
  mutex_.AssertHeld();
  HistoryEntry& entry = history_.emplace_back();
  entry.job_id = job_id;
  entry.record = record;
  entry.has_record = true;
  flush_at_ = std::min(flush_at_, options_.clock->Now() + kFlushEvery);
}

void SchedulerNode::Event(const std::string& job_id, const v1::JobEvent& event) {
  mutex_.AssertHeld();
  LOG_INFO("{}: {}", job_id, event.text());
  HistoryEntry& entry = history_.emplace_back();
  entry.job_id = job_id;
  entry.event = event;
  flush_at_ = std::min(flush_at_, options_.clock->Now() + kFlushEvery);
}

void SchedulerNode::FlushHistory() {
  absl::MutexLock order(&history_mutex_);
  std::vector<HistoryEntry> entries;
  {
    absl::MutexLock lock(&mutex_);
    entries.swap(history_);
    flush_at_ = absl::InfiniteFuture();
    if (!broken_.ok()) return;
  }
  if (entries.empty()) return;
  if (const absl::Status status = metrics_.Add(std::move(entries)); !status.ok()) {
    absl::MutexLock lock(&mutex_);
    Break(status);
  }
}

// --------------------------------------------------------------------------------------------------------- publisher
void SchedulerNode::PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) {
  mutex_.AssertHeld();
  tasks_.push_back({manifest.job_id(), base, manifest, {}});
}

void SchedulerNode::RemoveCheckpoints(const std::vector<std::string>& folders) {
  mutex_.AssertHeld();
  tasks_.push_back({"", "", std::nullopt, folders});
}

void SchedulerNode::PublisherThread() {
  for (;;) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &SchedulerNode::PublisherAwake));
      if (ending_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      if (!broken_.ok()) continue;
    }
    for (const std::string& folder : task.remove) {
      if (const absl::Status removed = RemoveCheckpoint(folder); !removed.ok()) {
        LOG_WARN("could not remove {}: {}", folder, removed.ToString());
      }
    }
    if (!task.manifest.has_value()) continue;
    const absl::StatusOr<std::string> result = sluice::PublishCheckpoint(task.base, *task.manifest);
    absl::MutexLock lock(&mutex_);
    if (ending_ || !broken_.ok()) continue;
    core_.OnPublished(task.job_id, task.manifest->timeline(), task.manifest->version(), result, options_.clock->Now());
    Wake();
  }
}

// ------------------------------------------------------------------------------------------------------------ timer
void SchedulerNode::Tick() {
  absl::MutexLock lock(&mutex_);
  if (!ending_ && broken_.ok()) core_.OnTimer(options_.clock->Now());
  Wake();
}

absl::Time SchedulerNode::NextWake() const {
  absl::Time next = std::min(core_.NextDeadline(), flush_at_);
  for (const auto& [number, watcher] : watchers_) {
    if (watcher.pending) next = std::min(next, watcher.next);
  }
  return next;
}

void SchedulerNode::TimerThread() {
  bool told = false;
  for (;;) {
    std::vector<std::function<void()>> calls;
    bool flush = false;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Duration nap = std::clamp(NextWake() - options_.clock->Now(), absl::ZeroDuration(), kLongestNap);
      mutex_.AwaitWithTimeout(absl::Condition(this, &SchedulerNode::TimerAwake), nap);
      if (ending_) return;
      wake_ = false;
      const absl::Time now = options_.clock->Now();
      if (broken_.ok() && now >= core_.NextDeadline()) core_.OnTimer(now);
      flush = now >= flush_at_;
      calls = DueCalls(now);
      if (!broken_.ok() && !told) {
        told = true;
        if (options_.on_broken) calls.push_back([this, status = broken_] { options_.on_broken(status); });
      }
    }
    if (flush) FlushHistory();
    for (const auto& call : calls) call();
  }
}

// --------------------------------------------------------------------------------------------------------- watchers
void SchedulerNode::JobChanged(const std::string& job_id) {
  mutex_.AssertHeld();
  for (auto& [number, watcher] : watchers_) {
    if (watcher.job_id == job_id) watcher.pending = true;
  }
  Wake();
}

std::vector<std::function<void()>> SchedulerNode::DueCalls(absl::Time now) {
  std::vector<std::function<void()>> calls;
  for (auto at = watchers_.begin(); at != watchers_.end();) {
    Watcher& watcher = at->second;
    const JobEntry* const job = core_.job(watcher.job_id);
    // Progress waits its turn; another state does not.
    if (!watcher.pending || job == nullptr || (job->state() == watcher.told && now < watcher.next)) {
      ++at;
      continue;
    }
    watcher.pending = false;
    watcher.told = job->state();
    watcher.next = now + kProgressEvery;
    calls.push_back([call = watcher.on_status, status = core_.Status(*job, false)] { call(status); });
    at = Final(job->state()) ? watchers_.erase(at) : std::next(at);
  }
  std::erase_if(checkpoint_waiters_, [&](CheckpointWaiter& waiter) {
    mutex_.AssertHeld();
    const JobEntry* const job = core_.job(waiter.job_id);
    const v1::CheckpointRef& ref = job->row.status().last_checkpoint();
    absl::StatusOr<v1::CheckpointRef> answer = ref;
    if (std::make_pair(ref.timeline(), ref.version()) <= std::make_pair(waiter.timeline, waiter.version)) {
      if (job->ended()) {
        answer = absl::AbortedError(absl::StrCat("job ", waiter.job_id, " ended before the checkpoint was published"));
      } else if (!job->row.order()) {
        answer =
            absl::AbortedError(job->order_failure.empty() ? "the checkpoint was not published" : job->order_failure);
      } else {
        return false;
      }
    }
    calls.push_back([done = std::move(waiter.done), answer] { done(answer); });
    return true;
  });
  return calls;
}

absl::StatusOr<uint64_t> SchedulerNode::Watch(const std::string& job_id, OnStatus on_status) {
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(Usable());
  ASSIGN_OR_RETURN(const std::string id, core_.Find(job_id));
  Watcher& watcher = watchers_[++last_watch_];
  watcher.job_id = id;
  watcher.on_status = std::move(on_status);
  Wake();
  return last_watch_;
}

void SchedulerNode::Unwatch(uint64_t watch) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(watch);
}

void SchedulerNode::Checkpoint(const std::string& job_id, CheckpointDone done) {
  absl::Status failed;
  {
    absl::MutexLock lock(&mutex_);
    absl::StatusOr<std::string> id = Usable().ok() ? core_.Find(job_id) : absl::StatusOr<std::string>(Usable());
    if (id.ok()) {
      const v1::JobStatus& status = core_.job(*id)->row.status();
      const v1::CheckpointRef& last = status.last_checkpoint();
      // Newer than what is published and than what is committed already; the last version is newer than none.
      const uint64_t floor = std::min(status.rounds_done(), status.rounds() - std::min<uint64_t>(1, status.rounds()));
      CheckpointWaiter waiter{*id, status.timeline(), floor, std::move(done)};
      if (std::make_pair(last.timeline(), last.version()) > std::make_pair(waiter.timeline, waiter.version)) {
        checkpoint_waiters_.push_back(std::move(waiter));  // there is nothing newer to write
      } else if (failed = core_.OrderCheckpoint(*id, options_.clock->Now()); failed.ok()) {
        checkpoint_waiters_.push_back(std::move(waiter));
      } else {
        done = std::move(waiter.done);
      }
    } else {
      failed = id.status();
    }
    Wake();
  }
  if (!failed.ok()) done(failed);
}

// ------------------------------------------------------------------------------------------------------ other calls
absl::StatusOr<std::optional<ResumeFrom>> SchedulerNode::ReadResume(v1::SubmitJobRequest* request) {
  v1::JobSpec& spec = *request->mutable_spec();
  if (!request->resume_job().empty()) {
    if (!spec.init().path().empty()) {
      return absl::InvalidArgumentError("give either resume_job or spec.init.path, not both");
    }
    absl::MutexLock lock(&mutex_);
    ASSIGN_OR_RETURN(const std::string id, core_.Find(request->resume_job()));
    const JobEntry& job = *core_.job(id);
    if (!job.row.status().has_last_checkpoint()) {
      return absl::FailedPreconditionError(absl::StrCat("job ", id, " has no published checkpoint to resume from"));
    }
    if (!spec.has_model()) {
      spec = job.spec();
      if (spec.checkpoint().directory() == id) spec.mutable_checkpoint()->clear_directory();
    }
    spec.mutable_init()->set_path(job.row.status().last_checkpoint().directory());
    spec.mutable_init()->set_resume(true);
  }
  if (spec.init().path().empty()) {
    if (spec.init().resume()) return absl::InvalidArgumentError("init.resume: needs init.path, a checkpoint folder");
    return std::optional<ResumeFrom>();
  }
  if (!spec.init().resume()) return std::optional<ResumeFrom>();
  std::string path = spec.init().path();
  if (path.front() != '/') path = absl::StrCat(options_.checkpoint_root, "/", path);
  spec.mutable_init()->set_path(path);
  auto reader = CheckpointReader::Open(path, /*verify=*/false);
  if (!reader.ok()) return Annotate(reader.status(), "init.path");
  TakeTableSchema((*reader)->manifest().spec(), &spec);
  return std::optional<ResumeFrom>(ResumeFrom{path, (*reader)->manifest()});
}

absl::StatusOr<v1::SubmitJobResponse> SchedulerNode::Submit(v1::SubmitJobRequest request) {
  std::optional<ResumeFrom> resume;
  bool known = false;
  {
    absl::MutexLock lock(&mutex_);
    RETURN_IF_ERROR(Usable());
    known = core_.FindRequest(request.request_id()) != nullptr;
  }
  if (!known) {
    ASSIGN_OR_RETURN(resume, ReadResume(&request));
  }
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(Usable());
  auto response = core_.Submit(request, resume, options_.clock->Now());
  Wake();
  RETURN_IF_ERROR(Usable());
  return response;
}

absl::StatusOr<v1::JobStatus> SchedulerNode::Get(const std::string& job_id) {
  absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const std::string id, core_.Find(job_id));
  return core_.Status(*core_.job(id), true);
}

v1::ListJobsResponse SchedulerNode::List() {
  absl::MutexLock lock(&mutex_);
  v1::ListJobsResponse response;
  for (const std::string& id : core_.JobIds()) {
    *response.add_jobs() = core_.Status(*core_.job(id), false);
    response.mutable_jobs(response.jobs_size() - 1)->clear_spec();
  }
  return response;
}

absl::StatusOr<v1::JobStatus> SchedulerNode::Cancel(const std::string& job_id, bool checkpoint_first) {
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(Usable());
  ASSIGN_OR_RETURN(const std::string id, core_.Find(job_id));
  RETURN_IF_ERROR(core_.Cancel(id, checkpoint_first, options_.clock->Now()));
  Wake();
  return core_.Status(*core_.job(id), false);
}

absl::StatusOr<v1::GetHistoryResponse> SchedulerNode::History(const std::string& job_id) {
  std::string id;
  {
    absl::MutexLock lock(&mutex_);
    ASSIGN_OR_RETURN(id, core_.Find(job_id));
  }
  FlushHistory();
  return options_.store->LoadHistory(id);
}

v1::GetClusterResponse SchedulerNode::Cluster() {
  absl::MutexLock lock(&mutex_);
  return core_.Cluster();
}

}  // namespace sluice
