// The scheduler as the client sees it: calls that are tried again while it cannot be reached, with a message and a
// deadline.
#ifndef SLUICE_CLIENT_RPC_H_
#define SLUICE_CLIENT_RPC_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/interrupt.h"
#include "sluice/v1/scheduler.grpc.pb.h"

namespace sluice {

// Not thread-safe. Errors are the scheduler's own, and
//   UNAVAILABLE: not reached within the time; says where it was looked for and what to do
//   CANCELLED:   the interrupt's count passed `seen_interrupts`
class SchedulerClient {
 public:
  struct Options {
    std::string address;                         // HOST:PORT
    std::string address_source;                  // where the address comes from, for messages: "--scheduler"
    absl::Duration timeout = absl::Seconds(30);  // to reach it, counted anew after every answer
    std::function<void(const std::string&)>
        notice;                      // told once when the scheduler cannot be reached and when it is back
    Interrupt* interrupt = nullptr;  // must outlive the client
  };
  explicit SchedulerClient(Options options);

  // Interrupts up to this count no longer end calls (0 at first).
  void set_seen_interrupts(int count) { seen_interrupts_ = count; }

  absl::StatusOr<v1::SubmitJobResponse> Submit(const v1::SubmitJobRequest& request);
  absl::StatusOr<v1::JobStatus> GetJob(const std::string& job);
  absl::StatusOr<v1::ListJobsResponse> ListJobs();
  // With `checkpoint_first` it returns once a checkpoint is published and the job has ended, at most after ten minutes.
  absl::StatusOr<v1::JobStatus> Cancel(const std::string& job, bool checkpoint_first);
  // Waits until it is published, at most ten minutes.
  absl::StatusOr<v1::CheckpointRef> Checkpoint(const std::string& job);
  absl::StatusOr<v1::GetHistoryResponse> History(const std::string& job);
  absl::StatusOr<v1::GetClusterResponse> Cluster();
  // Calls update(status) for every message until the job has ended; the last status. Survives restarts of the
  // scheduler.
  // DEADLINE_EXCEEDED: the job goes on after `limit`.
  absl::StatusOr<v1::JobStatus> Watch(const std::string& job, const std::function<void(const v1::JobStatus&)>& update,
                                      absl::Duration limit = absl::Hours(24 * 365));

 private:
  template <typename Request, typename Response>
  using Method = grpc::Status (v1::SchedulerService::Stub::*)(grpc::ClientContext*, const Request&, Response*);
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(Method<Request, Response> method, const Request& request, absl::Duration limit);

  // Tries until something other than "not reached" comes out. `attempt` gets a fresh context and whether it got an
  // answer from the scheduler is told by `*answered`.
  absl::Status Retry(const std::function<grpc::Status(grpc::ClientContext*, bool* answered)>& attempt,
                     absl::Duration limit);
  absl::Status Unreachable(const grpc::Status& status) const;

  const Options options_;
  std::unique_ptr<v1::SchedulerService::Stub> stub_;
  int seen_interrupts_ = 0;
};

bool HasEnded(v1::JobState state);
// "running"
std::string StateName(v1::JobState state);

}  // namespace sluice

#endif  // SLUICE_CLIENT_RPC_H_
