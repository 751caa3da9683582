#include "client/rpc.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/rpc.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr absl::Duration kAnswerLimit = absl::Seconds(10);  // of calls that are answered at once
constexpr absl::Duration kCheckpointLimit = absl::Minutes(10);

}  // namespace

SchedulerClient::SchedulerClient(Options options)
    : options_(std::move(options)), stub_(v1::SchedulerService::NewStub(MakeChannel(options_.address))) {}

absl::Status SchedulerClient::Unreachable(const grpc::Status& status) const {
  return absl::UnavailableError(
      absl::StrCat("no scheduler at ", options_.address, " (from ", options_.address_source, ") within ",
                   absl::FormatDuration(options_.timeout), ": ", status.error_message(),
                   "; is sluice-scheduler running? --scheduler HOST:PORT or SLUICE_SCHEDULER names another one"));
}

absl::Status SchedulerClient::Retry(const std::function<grpc::Status(grpc::ClientContext*, bool*)>& attempt,
                                    absl::Duration limit) {
  absl::Time deadline = absl::Now() + options_.timeout;
  absl::Duration pause = absl::Milliseconds(100);
  bool told = false;
  while (true) {
    grpc::ClientContext context;
    // A first try at least, even with no time to reach the scheduler.
    const absl::Duration first = std::max(deadline - absl::Now(), absl::Milliseconds(100));
    context.set_deadline(absl::ToChronoTime(absl::Now() + (limit > kAnswerLimit ? limit : std::min(limit, first))));
    grpc::Status status;
    bool answered = false;
    {
      const auto handle = options_.interrupt->OnNotify(seen_interrupts_, [&context] { context.TryCancel(); });
      status = attempt(&context, &answered);
    }
    if (status.ok()) break;
    if (options_.interrupt->count() > seen_interrupts_) return absl::CancelledError("interrupted");
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return absl::UnavailableError(
          absl::StrCat("what listens at ", options_.address, " (from ", options_.address_source,
                       ") is not a Sluice scheduler of this version: ", status.error_message()));
    }
    const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    if (late && limit > kAnswerLimit) return FromGrpc(status);
    if (!late && status.error_code() != grpc::StatusCode::UNAVAILABLE) return FromGrpc(status);
    if (answered) {
      deadline = absl::Now() + options_.timeout;
      pause = absl::Milliseconds(100);
    }
    if (absl::Now() + pause >= deadline) return Unreachable(status);
    if (!told && options_.notice != nullptr) {
      options_.notice(absl::StrCat("the scheduler at ", options_.address, " cannot be reached (",
                                   status.error_message(), "); trying again for ",
                                   absl::FormatDuration(options_.timeout)));
    }
    told = true;
    if (options_.interrupt->WaitFor(pause, seen_interrupts_)) return absl::CancelledError("interrupted");
    pause = std::min(pause * 2, absl::Seconds(1));
  }
  return absl::OkStatus();
}

template <typename Request, typename Response>
absl::StatusOr<Response> SchedulerClient::Call(Method<Request, Response> method, const Request& request,
                                               absl::Duration limit) {
  Response response;
  RETURN_IF_ERROR(Retry(
      [&](grpc::ClientContext* context, bool*) {
        response.Clear();
        return (stub_.get()->*method)(context, request, &response);
      },
      limit));
  return response;
}

absl::StatusOr<v1::SubmitJobResponse> SchedulerClient::Submit(const v1::SubmitJobRequest& request) {
  return Call(&v1::SchedulerService::Stub::SubmitJob, request, kAnswerLimit);
}

absl::StatusOr<v1::JobStatus> SchedulerClient::GetJob(const std::string& job) {
  v1::GetJobRequest request;
  request.set_job_id(job);
  return Call(&v1::SchedulerService::Stub::GetJob, request, kAnswerLimit);
}

absl::StatusOr<v1::ListJobsResponse> SchedulerClient::ListJobs() {
  return Call(&v1::SchedulerService::Stub::ListJobs, v1::ListJobsRequest(), kAnswerLimit);
}

absl::StatusOr<v1::JobStatus> SchedulerClient::Cancel(const std::string& job, bool checkpoint_first) {
  v1::CancelJobRequest request;
  request.set_job_id(job);
  request.set_checkpoint_first(checkpoint_first);
  ASSIGN_OR_RETURN(v1::JobStatus status, Call(&v1::SchedulerService::Stub::CancelJob, request, kAnswerLimit));
  // The order is taken at once, the checkpoint takes some rounds.
  if (HasEnded(status.state())) return status;
  return Watch(
      status.job_id(), [](const v1::JobStatus&) {}, kCheckpointLimit);
}

absl::StatusOr<v1::CheckpointRef> SchedulerClient::Checkpoint(const std::string& job) {
  v1::GetJobRequest request;
  request.set_job_id(job);
  ASSIGN_OR_RETURN(v1::CheckpointJobResponse response,
                   Call(&v1::SchedulerService::Stub::CheckpointJob, request, kCheckpointLimit));
  return std::move(*response.mutable_checkpoint());
}

absl::StatusOr<v1::GetHistoryResponse> SchedulerClient::History(const std::string& job) {
  v1::GetHistoryRequest request;
  request.set_job_id(job);
  return Call(&v1::SchedulerService::Stub::GetHistory, request, kAnswerLimit);
}

absl::StatusOr<v1::GetClusterResponse> SchedulerClient::Cluster() {
  return Call(&v1::SchedulerService::Stub::GetCluster, v1::GetClusterRequest(), kAnswerLimit);
}

absl::StatusOr<v1::JobStatus> SchedulerClient::Watch(const std::string& job,
                                                     const std::function<void(const v1::JobStatus&)>& update,
                                                     absl::Duration limit) {
  v1::JobStatus last;
  v1::GetJobRequest request;
  request.set_job_id(job);
  RETURN_IF_ERROR(Retry(
      [&](grpc::ClientContext* context, bool* answered) {
        auto reader = stub_->WatchJob(context, request);
        v1::JobStatus status;
        while (reader->Read(&status)) {
          *answered = true;
          request.set_job_id(status.job_id());  // "latest" stays the same job
          last = status;
          update(status);
        }
        grpc::Status end = reader->Finish();
        // A stream that ends before the job does was cut off by a scheduler that ends in order.
        if (end.ok() && !HasEnded(last.state())) {
          return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the scheduler ended the stream");
        }
        return end;
      },
      limit));
  return last;
}

bool HasEnded(v1::JobState state) { return state == v1::SUCCEEDED || state == v1::FAILED || state == v1::CANCELLED; }

std::string StateName(v1::JobState state) { return absl::AsciiStrToLower(v1::JobState_Name(state)); }

}  // namespace sluice
