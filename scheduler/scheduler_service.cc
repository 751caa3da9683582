#include "scheduler/scheduler_service.h"

#include <optional>
#include <utility>

#include "common/grpc_transport.h"
#include "common/rpc.h"
#include "sluice/v1/scheduler.grpc.pb.h"

namespace sluice {
namespace {

class WatchReactor;

// One WatchJob call, shared by its reactor and the node's watcher. Whoever sets `busy_` owns the right to start the
// next operation on the reactor; the reactor lives until it is finished by its owner.
class Watch : public std::enable_shared_from_this<Watch> {
 public:
  explicit Watch(WatchReactor* reactor) : reactor_(reactor) {}
  void OnStatus(const v1::JobStatus& status);
  void OnWritten(bool ok);
  void OnCancelled();

 private:
  void Next();  // with busy_ owned

  WatchReactor* const reactor_;
  absl::Mutex mutex_;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // an operation is under way, or the call is finished
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::JobStatus> next_ ABSL_GUARDED_BY(mutex_);  // only the newest
  bool last_ ABSL_GUARDED_BY(mutex_) = false;                  // what is being written is the last one
  v1::JobStatus writing_;                                      // of the owner of busy_
};

class WatchReactor final : public grpc::ServerWriteReactor<v1::JobStatus> {
 public:
  WatchReactor(SchedulerNode* node, const std::string& job_id) : node_(node), watch_(std::make_shared<Watch>(this)) {
    auto number = node->Watch(job_id, [watch = watch_](const v1::JobStatus& status) { watch->OnStatus(status); });
    if (number.ok()) {
      number_ = *number;
    } else {
      Finish(ToGrpc(number.status()));
    }
  }
  void OnWriteDone(bool ok) override { watch_->OnWritten(ok); }
  void OnCancel() override {
    node_->Unwatch(number_);
    if (number_ != 0) watch_->OnCancelled();
  }
  void OnDone() override {
    node_->Unwatch(number_);
    delete this;
  }

 private:
  SchedulerNode* const node_;
  const std::shared_ptr<Watch> watch_;
  uint64_t number_ = 0;  // 0: refused
};

bool Final(v1::JobState state) { return state == v1::SUCCEEDED || state == v1::FAILED || state == v1::CANCELLED; }

void Watch::OnStatus(const v1::JobStatus& status) {
  {
    absl::MutexLock lock(&mutex_);
    next_ = status;
    if (busy_) return;
    busy_ = true;
  }
  Next();
}

void Watch::OnWritten(bool ok) {
  bool finish = false;
  {
    absl::MutexLock lock(&mutex_);
    finish = !ok || last_ || cancelled_;
    if (!finish && !next_.has_value()) {
      busy_ = false;
      return;
    }
  }
  if (finish) {
    reactor_->Finish(ok ? grpc::Status::OK : grpc::Status::CANCELLED);
  } else {
    Next();
  }
}

void Watch::OnCancelled() {
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (busy_) return;  // OnWritten finishes
    busy_ = true;
  }
  reactor_->Finish(grpc::Status::CANCELLED);
}

void Watch::Next() {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = *std::exchange(next_, std::nullopt);
    last_ = Final(writing_.state());
  }
  reactor_->StartWrite(&writing_);
}

using WithSession = v1::SchedulerService::WithRawCallbackMethod_Session<v1::SchedulerService::Service>;
using WithWatch = v1::SchedulerService::WithCallbackMethod_WatchJob<WithSession>;
using WithCheckpoint = v1::SchedulerService::WithCallbackMethod_CheckpointJob<WithWatch>;

template <typename Response>
grpc::Status Answer(absl::StatusOr<Response> result, Response* response) {
  if (!result.ok()) return ToGrpc(result.status());
  *response = *std::move(result);
  return grpc::Status::OK;
}

class SchedulerServiceImpl final : public WithCheckpoint {
 public:
  explicit SchedulerServiceImpl(SchedulerNode* node) : node_(node), acceptor_(node->session_acceptor()) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }
  grpc::ServerWriteReactor<v1::JobStatus>* WatchJob(grpc::CallbackServerContext*,
                                                    const v1::GetJobRequest* request) override {
    return new WatchReactor(node_, request->job_id());
  }
  grpc::ServerUnaryReactor* CheckpointJob(grpc::CallbackServerContext* context, const v1::GetJobRequest* request,
                                          v1::CheckpointJobResponse* response) override {
    // A client that went away changes nothing: the call is kept until the node answers.
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    node_->Checkpoint(request->job_id(), [reactor, response](absl::StatusOr<v1::CheckpointRef> result) {
      if (result.ok()) *response->mutable_checkpoint() = *result;
      reactor->Finish(ToGrpc(result.status()));
    });
    return reactor;
  }
  grpc::Status SubmitJob(grpc::ServerContext*, const v1::SubmitJobRequest* request,
                         v1::SubmitJobResponse* response) override {
    return Answer(node_->Submit(*request), response);
  }
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobStatus* response) override {
    return Answer(node_->Get(request->job_id()), response);
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest*, v1::ListJobsResponse* response) override {
    *response = node_->List();
    return grpc::Status::OK;
  }
  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* request, v1::JobStatus* response) override {
    return Answer(node_->Cancel(request->job_id(), request->checkpoint_first()), response);
  }
  grpc::Status GetHistory(grpc::ServerContext*, const v1::GetHistoryRequest* request,
                          v1::GetHistoryResponse* response) override {
    return Answer(node_->History(request->job_id()), response);
  }
  grpc::Status GetCluster(grpc::ServerContext*, const v1::GetClusterRequest*,
                          v1::GetClusterResponse* response) override {
    *response = node_->Cluster();
    return grpc::Status::OK;
  }

 private:
  SchedulerNode* const node_;
  const Acceptor acceptor_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSchedulerService(SchedulerNode* node) {
  return std::make_unique<SchedulerServiceImpl>(node);
}

}  // namespace sluice
