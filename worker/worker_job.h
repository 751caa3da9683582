// One job on one worker: the shell that feeds the round core with what streams and train loop say, and carries out what
// it decides. Threads: the train thread runs Run; the transport's threads bring commits; the session's thread brings
// plans.
//
// mutex_ guards the core and is held for decisions only. Parameters are written outside of it by the thread that
// brought the commit (or, for a value that was kept, by the train thread). The core hands out an install only when
// nobody reads the chunk in its round any more, lets the next round read it (ParametersNeeded) only when the install
// has been reported back, and starts no new generation before every install handed out has been reported back: so a
// write meets neither the model's reads nor a write of another generation.
//
// Contributions in another encoding than float32 are encoded outside of it too, by the train thread when their gradient
// is ready, and then pushed by whichever thread was told to push them.
#ifndef SLUICE_WORKER_WORKER_JOB_H_
#define SLUICE_WORKER_WORKER_JOB_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/buffer_pool.h"
#include "common/clock.h"
#include "common/layout.h"
#include "common/protocol_rules.h"
#include "common/transport.h"
#include "sluice/v1/scheduler.pb.h"
#include "worker/backend/backend.h"
#include "worker/data/dataset.h"
#include "worker/model/model.h"
#include "worker/parallel/timed_group.h"
#include "worker/peer_mail.h"
#include "worker/ps_client.h"
#include "worker/push_encoder.h"
#include "worker/round_clock.h"
#include "worker/round_core.h"
#include "worker/train_loop.h"
#include "worker/worker_hooks.h"

namespace sluice {

struct WorkerJobOptions {
  v1::NodeId node;
  ProtocolRules rules;
  Transport* transport = nullptr;
  Clock* clock = nullptr;
  WorkerHooks* hooks = nullptr;  // may be null
  bool shared_memory = false;    // with servers of this host
  // To the scheduler; never blocks.
  std::function<void(const v1::NodeMessage&)> send;
  // Called on the train thread, once.
  std::function<absl::StatusOr<std::shared_ptr<const Dataset>>(const v1::JobSpec&)> open_dataset;
  std::function<absl::StatusOr<std::unique_ptr<Model>>(const v1::JobSpec&, const ModelPart&)> make_model;
};

// Thread-safe.
class WorkerJob : private RoundActions, private Rounds, private PsClient::Events {
 public:
  // `layout` names options.node as rank `rank`. Of other plans the job takes those that give it the same part of a
  // replica (SamePart).
  WorkerJob(const WorkerJobOptions& options, std::shared_ptr<const Layout> layout, uint32_t rank);
  ~WorkerJob() override;

  // Opens data set and model, then trains until End; frees all of it. Blocks; call once. Failures go to the scheduler
  // as NodeProblem, and Run still waits for End.
  void Run();

  // Whether the rank computes the part of the model that this one does.
  bool SamePart(const Layout& layout, uint32_t rank) const;
  // A newer plan; never blocks.
  void OnPlan(std::shared_ptr<const Layout> layout, uint32_t rank);
  // The job has ended, or does not want this node any more; never blocks.
  void End();
  // After Welcome: says again what the scheduler may have missed.
  void Repeat();

  const std::string& id() const { return id_; }
  bool ended() const;
  uint64_t generation() const;  // of the newest plan
  // With the other ranks of the replica; never null.
  const std::shared_ptr<PeerMail>& mail() const { return mail_; }

  // As host leader (peer_stream.h). A member's stream, whose memory is mapped here; the job closes it when its
  // generation is over. ABORTED: it is; PERMISSION_DENIED: not a member of this rank's host sum.
  absl::Status AddMember(const v1::StreamHello& hello, std::shared_ptr<ByteStream> stream);
  void RemoveMember(uint32_t contributor, const ByteStream* stream);
  // Pushes of a frame; an error closes the stream.
  absl::Status OnContributions(const v1::StreamHello& hello, const ParsedFrame& frame);
  // Its memory cannot be shared: the scheduler is told.
  void OnMemberFailed(const v1::StreamHello& hello, const absl::Status& status);

 private:
  struct InstallOrder {
    uint64_t generation, chunk, version;
    std::shared_ptr<const CommitValue> value;
    bool residual = false;
  };
  // Encode what header.chunk's gradient has become, or push what was encoded.
  struct PushOrder {
    bool encode = false;
    uint64_t generation = 0;
    size_t server = 0;
    v1::ChunkHeader header;
    uint64_t number = 0;  // the encoder's: of the round, in async of the lease
  };
  struct MadeSum {
    uint64_t generation, chunk, round;
    std::shared_ptr<float[]> values;
    std::vector<uint32_t> nonfinite;
  };
  struct MemberStream {
    uint64_t generation = 0;
    std::shared_ptr<ByteStream> stream;
  };

  struct Orders {
    std::vector<InstallOrder> installs;
    std::vector<PushOrder> pushes;
    std::vector<HostSum> sums;
  };

  // Runs one event of the core under the lock, then encodes, makes the installs and host sums that it (and those they
  // lead to) handed out and lets pushes go.
  template <typename Event>
  void Deliver(Event event) ABSL_LOCKS_EXCLUDED(mutex_) {
    Orders orders;
    {
      absl::MutexLock lock(&mutex_);
      event(core_);
      orders = TakeOrders();
    }
    Carry(std::move(orders));
  }
  Orders TakeOrders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Carry(Orders orders) ABSL_LOCKS_EXCLUDED(mutex_);
  void PushEncoded(const std::vector<PushOrder>& orders) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status OpenAndTrain();
  PeerMailOptions MailOptions();
  ModelPart Part();
  void Problem(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  MadeSum MakeSum(const HostSum& sum) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the stream is the one to the host leader.
  bool IsLeader(uint64_t generation, size_t server) const ABSL_LOCKS_EXCLUDED(mutex_);
  void HostSumFailed(const v1::NodeId& node, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // RoundActions: called by the core, under mutex_.
  void OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseStreams() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Subscribe(size_t server, const v1::Subscribe& subscribe) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Encode(uint64_t chunk, uint64_t round) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Push(size_t server, const v1::ChunkHeader& header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool BeginResidual(const std::shared_ptr<const Layout>& layout, uint32_t rank) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void InstallResidual(uint64_t generation, uint64_t chunk, std::shared_ptr<const CommitValue> value) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepResidual(uint64_t version) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PushResidual(size_t server, const v1::ChunkHeader& header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Report(size_t server, const v1::RoundReport& report) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Ask(size_t server, const v1::LeaseRequest& request) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Install(uint64_t generation, uint64_t chunk, uint64_t version, std::shared_ptr<const CommitValue> value) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SumOnHost(HostSum sum) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AllInPlace(uint64_t version) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartCompute(uint64_t generation, uint64_t round) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartEvaluation(uint64_t generation, uint64_t version) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelWork() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetWork(Work::Kind kind, uint64_t generation, uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Rounds: called by the train loop.
  Work Next() override;
  absl::Status ParametersNeeded(const Work& work, Range range) override;
  void Begin(const Work& work, double count) override;
  void GradientReady(const Work& work, Range range) override;
  void Done(const Work& work, const LossSum& sum, double seconds) override;
  void Stopped(const Work& work) override;

  // PsClient::Events.
  void OnStreamUp(uint64_t generation, size_t server) override;
  void OnStreamDown(uint64_t generation, size_t server, const absl::Status& status) override;
  void OnCheckpoint(uint64_t generation, size_t server, uint64_t version) override;
  absl::Status OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) override;
  absl::Status OnLease(uint64_t generation, size_t server, const v1::Lease& lease) override;
  absl::Status OnLater(uint64_t generation, size_t server, const v1::Later& later) override;
  void OnPushesTaken() override;
  void OnUnreachable(uint64_t generation, size_t server, const absl::Status& status) override;
  void OnRefused(uint64_t generation, size_t server, const absl::Status& status) override;

  // Of the mail.
  void OnPeerUnreachable(uint64_t generation, const MailPeer& peer, const absl::Status& status);
  void OnPeerRefused(uint64_t generation, const MailPeer& peer, const absl::Status& status);
  void Accuse(uint64_t generation, const v1::NodeId& node, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Async: of the mean gradient; only where the job clips by it.
  double GradientNorm(double count) const;
  void CallPushHooks(const Work& work) ABSL_LOCKS_EXCLUDED(mutex_);

  const WorkerJobOptions options_;
  const std::string id_;
  const ChunkTable table_;        // the same in every generation, as
  const uint64_t view_elements_;  // that the rank holds, and
  const bool clips_alone_;        // async with clipping: each contribution by its own norm
  const Mesh::Place place_;       // of the first plan; the stage and the tensor rank do not change

  // Set by the train thread before the core sees its first plan, constant until the client has stopped.
  std::shared_ptr<const Dataset> data_;
  std::unique_ptr<Model> model_;
  const std::shared_ptr<BufferPool> sum_pool_ = BufferPool::Make();
  std::optional<TimedGroup> tensor_, stages_;  // over mail_, where the degrees are greater than 1; the train thread's

  std::atomic<bool> cancel_ = false;  // of the work under way
  PushEncoder encoder_;

  mutable absl::Mutex mutex_;
  RoundCore core_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Layout> layout_ ABSL_GUARDED_BY(mutex_);  // newest plan
  uint32_t rank_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = false;  // data set and model are there: plans go to the core
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  RoundClock times_ ABSL_GUARDED_BY(mutex_);
  std::optional<Work> work_ ABSL_GUARDED_BY(mutex_);  // for Next
  uint64_t gradients_left_ = 0;                       // of the train thread's round: elements to become ready
  std::vector<InstallOrder> installs_ ABSL_GUARDED_BY(mutex_);
  std::vector<PushOrder> push_orders_ ABSL_GUARDED_BY(mutex_);
  std::vector<BorrowedBytes> kept_residual_ ABSL_GUARDED_BY(mutex_);  // [chunks] or none
  uint64_t kept_version_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<HostSum> sums_ ABSL_GUARDED_BY(mutex_);                 // to be made
  std::map<uint64_t, MadeSum> made_ ABSL_GUARDED_BY(mutex_);          // by chunk, until all chunks are past its round
  std::map<uint32_t, MemberStream> members_ ABSL_GUARDED_BY(mutex_);  // by contributor
  std::vector<uint64_t> pushed_ ABSL_GUARDED_BY(mutex_);              // for the hooks
  std::optional<v1::NodeMessage> problem_ ABSL_GUARDED_BY(mutex_);

  const std::shared_ptr<PeerMail> mail_;
  PsClient client_;  // its threads use the members above
};

}  // namespace sluice

#endif  // SLUICE_WORKER_WORKER_JOB_H_
