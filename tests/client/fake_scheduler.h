// A SchedulerService in this process whose answers the test sets, at a port of the system's choice.
#ifndef SLUICE_TESTS_CLIENT_FAKE_SCHEDULER_H_
#define SLUICE_TESTS_CLIENT_FAKE_SCHEDULER_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "sluice/v1/scheduler.grpc.pb.h"

namespace sluice {

class FakeScheduler : public v1::SchedulerService::Service {
 public:
  template <typename Request, typename Response>
  using Handler = std::function<grpc::Status(const Request&, Response*)>;

  // Port 0: any.
  explicit FakeScheduler(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeScheduler() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int port() const { return port_; }

  // Set before the first call. Without one: NOT_FOUND.
  Handler<v1::SubmitJobRequest, v1::SubmitJobResponse> submit;
  Handler<v1::GetJobRequest, v1::JobStatus> get;
  Handler<v1::CancelJobRequest, v1::JobStatus> cancel;
  Handler<v1::GetJobRequest, v1::CheckpointJobResponse> checkpoint;
  Handler<v1::GetHistoryRequest, v1::GetHistoryResponse> history;
  Handler<v1::ListJobsRequest, v1::ListJobsResponse> list;
  Handler<v1::GetClusterRequest, v1::GetClusterResponse> cluster;
  std::function<grpc::Status(grpc::ServerContext*, const v1::GetJobRequest&, grpc::ServerWriter<v1::JobStatus>*)> watch;

  grpc::Status SubmitJob(grpc::ServerContext*, const v1::SubmitJobRequest* q, v1::SubmitJobResponse* r) override {
    return Answer(submit, *q, r);
  }
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* q, v1::JobStatus* r) override {
    return Answer(get, *q, r);
  }
  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* q, v1::JobStatus* r) override {
    return Answer(cancel, *q, r);
  }
  grpc::Status CheckpointJob(grpc::ServerContext*, const v1::GetJobRequest* q, v1::CheckpointJobResponse* r) override {
    return Answer(checkpoint, *q, r);
  }
  grpc::Status GetHistory(grpc::ServerContext*, const v1::GetHistoryRequest* q, v1::GetHistoryResponse* r) override {
    return Answer(history, *q, r);
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* q, v1::ListJobsResponse* r) override {
    return Answer(list, *q, r);
  }
  grpc::Status GetCluster(grpc::ServerContext*, const v1::GetClusterRequest* q, v1::GetClusterResponse* r) override {
    return Answer(cluster, *q, r);
  }
  grpc::Status WatchJob(grpc::ServerContext* context, const v1::GetJobRequest* q,
                        grpc::ServerWriter<v1::JobStatus>* writer) override {
    return watch ? watch(context, *q, writer) : grpc::Status(grpc::StatusCode::NOT_FOUND, "no job " + q->job_id());
  }

 private:
  template <typename Request, typename Response>
  static grpc::Status Answer(const Handler<Request, Response>& handler, const Request& request, Response* response) {
    return handler ? handler(request, response) : grpc::Status(grpc::StatusCode::NOT_FOUND, "no such thing");
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_CLIENT_FAKE_SCHEDULER_H_
