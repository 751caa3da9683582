// One job on one server: the shell around ShardCore. Holds the core under a lock, runs its data work on lanes, owns the
// workers' streams, the link to the verdict holder and the open snapshots.
//
// Order of locks: mutex_ first, then those of queues and lanes; lanes never hold theirs while they call in here.
#ifndef SLUICE_SERVER_SERVER_JOB_H_
#define SLUICE_SERVER_SERVER_JOB_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/clock.h"
#include "common/protocol_rules.h"
#include "common/transport.h"
#include "server/chunk_store.h"
#include "server/commit_queue.h"
#include "server/lanes.h"
#include "server/shard_core.h"
#include "server/stream_memory.h"

namespace sluice {

// What Fetch came to.
struct FetchedChunk {
  uint64_t generation = 0, version = 0;
  ChunkValue value;
};

struct ServerJobOptions {
  std::string job_id;
  v1::NodeId self;
  std::string checkpoint_root;
  std::string data_root;  // spec.init.path is resolved under it; empty: as it is
  ProtocolRules rules;
  Lanes* lanes = nullptr;
  Lanes* background = nullptr;  // lane 0: finishing snapshots, lane 1: reopening links
  Transport* transport = nullptr;
  Clock* clock = nullptr;
  bool shared_memory = false;            // with workers of this host
  std::shared_ptr<HoldBudget> hold;      // null: no limit
  std::shared_ptr<StreamMemory> memory;  // null: no limit
  std::function<void(const v1::NodeMessage&)> to_scheduler;
};

// Thread-safe. Shared: streams and lane work hold it.
class ServerJob : public std::enable_shared_from_this<ServerJob>, private ShardActions {
 public:
  explicit ServerJob(ServerJobOptions options);
  ~ServerJob() override;

  // ---- scheduler
  void OnPlan(std::shared_ptr<const Layout> layout);
  void OnFence(uint64_t generation);
  void OnCheckpointOrder(const v1::CheckpointOrder& order);
  void OnSchedulerConnected();
  // The job has ended: closes streams, drops all data.
  void End();

  // ---- streams
  // Takes over an accepted worker stream whose hello has been read; returns what is to hear of the stream's OnWritten.
  // A status: the stream should be closed with it.
  absl::StatusOr<std::shared_ptr<CommitQueue>> AddStream(StreamId id, std::shared_ptr<ByteStream> stream,
                                                         std::shared_ptr<SharedFrames> frames,
                                                         const v1::StreamHello& hello);
  absl::Status OnFrame(StreamId id, ParsedFrame frame);
  void RemoveStream(StreamId id);
  // An accepted link from another server's primary.
  void AddPeer(const v1::NodeId& node, std::shared_ptr<ByteStream> stream);
  void RemovePeer(const v1::NodeId& node, const ByteStream* stream);
  void OnShardMessage(const v1::ShardMessage& message, const v1::NodeId& from);

  // ---- pull and plan for stock clients
  std::shared_ptr<const Layout> layout() const;
  uint64_t generation() const;
  // One chunk that this server holds, at a version, once that has come; without a version: the newest. `done` is called
  // once, on a lane, with none of the job's locks held. NOT_FOUND the job has ended, OUT_OF_RANGE a version that is
  // gone, CANCELLED by CancelFetch. `who` names the fetch and has one at a time.
  using FetchDone = std::function<void(absl::StatusOr<FetchedChunk>)>;
  void Fetch(const void* who, uint64_t chunk, std::optional<uint64_t> version, FetchDone done);
  // Of a fetch that still waits; any other goes on.
  void CancelFetch(const void* who);
  std::vector<uint64_t> Chunks() const;
  size_t mapped_bytes() const;
  uint64_t declines() const;                                                       // of contributions, so far
  const std::shared_ptr<StreamMemory>& memory() const { return options_.memory; }  // may be null
  std::string Describe() const;

 private:
  struct Snapshot;
  class HolderLink;
  class PushReceipts;
  struct Waiting {
    uint64_t chunk;
    std::optional<uint64_t> version;
    FetchDone done;
  };
  struct WorkerStream {
    std::shared_ptr<ByteStream> stream;
    std::shared_ptr<PushReceipts> receipts;
    std::shared_ptr<SharedFrames> frames;
    bool offered = false;  // the memory of store_
    std::shared_ptr<CommitQueue> queue;
    std::string who;  // for people
    v1::StreamHello hello;
    uint64_t unread_frames = 0;  // that came while something waited to be read by the client and nothing was
    uint64_t written = 0;        // queue->written() when the last one came
    v1::Later later;             // to be said
  };

  // ShardActions; all called inside core_'s events, with mutex_ held.
  void LoadChunk(const std::shared_ptr<const Layout>& layout, uint64_t chunk, uint64_t version) override;
  void DropChunk(uint64_t chunk) override;
  void AddContribution(uint64_t chunk, uint32_t contributor, uint32_t contributors, ContributionRef value) override;
  void DiscardSum(uint64_t chunk) override;
  void FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) override;
  void Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) override;
  void DropPrevious(uint64_t chunk) override;
  void Serve(StreamId stream, uint64_t chunk, uint64_t version) override;
  void ServeResidual(StreamId stream, uint64_t chunk, uint32_t contributor) override;
  void Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version, const v1::ChunkCut& cut) override;
  void AbandonSnapshots() override;
  void SendNorm(const v1::Member& holder, const v1::NormReport& report) override;
  void SendVerdict(const v1::NodeId& primary, const v1::VerdictNotice& notice) override;
  void SendToScheduler(const v1::NodeMessage& message) override;
  void ApplyContribution(StreamId stream, const v1::ChunkHeader& answer, const ContributionUpdate& update,
                         ContributionRef value) override;
  void Answer(StreamId stream, const v1::ChunkHeader& answer) override;
  void SendLease(StreamId stream, const v1::Lease& lease) override;
  void CloseStream(StreamId stream, const absl::Status& status) override;
  void Decline(StreamId stream, uint64_t chunk, uint64_t round) override;
  void AskAgain(StreamId stream, uint64_t chunk, uint64_t round) override;

  absl::Status HandleFrame(StreamId id, const v1::ChunkFrame& control, std::vector<Payload> payloads,
                           const std::shared_ptr<const void>& receipt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void SendAnswer(Lanes* lanes, ChunkStore& store, const std::shared_ptr<CommitQueue>& queue,
                         const v1::ChunkHeader& answer, std::shared_ptr<const void> receipt = nullptr);
  void Problem(const absl::Status& status, uint64_t generation);
  void OpenHolderLink() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED where the client pushes on and on without reading.
  absl::Status CheckUnread(WorkerStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Later* LaterOf(StreamId stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayLater() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: to wait for.
  bool TryFetch(const Waiting& fetch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FlushServed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After each event of the core that may have made a version or found room.
  void AfterEvent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseUnread(StreamId id);
  void OfferMemory(WorkerStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnHolderLinkClosed(const HolderLink* link, const absl::Status& status);
  void OnHolderLinkAlive(const HolderLink* link);
  void FinishSnapshot(std::shared_ptr<struct Snapshot> snapshot);
  void SnapshotDone(const std::shared_ptr<struct Snapshot>& snapshot, v1::SnapshotDone done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<struct Snapshot> MakeSnapshot(uint32_t shard, uint64_t timeline, uint64_t version)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Residuals for checkpoints: server_job_snapshot.cc.
  absl::Status OnResidual(StreamId id, const v1::ChunkHeader& header, Payload payload,
                          std::shared_ptr<const void> receipt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnnounceCheckpoint(const WorkerStream& stream, uint64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The contributor keeps none: zeros in all open snapshots.
  void ResidualsAbsent(uint32_t contributor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Snapshots that lack some, and will not get them as all contributors are past the version, fail.
  void ResidualsLost() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SaveResidual(const std::shared_ptr<struct Snapshot>& snapshot, uint64_t chunk, uint32_t contributor,
                    Payload values, std::shared_ptr<const void> receipt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ServerJobOptions options_;

  mutable absl::Mutex mutex_;
  ShardCore core_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<ChunkStore> store_ ABSL_GUARDED_BY(mutex_);  // made with the first plan of a timeline's layout
  std::shared_ptr<const ChunkSource> source_ ABSL_GUARDED_BY(mutex_);
  absl::Status source_status_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamId, WorkerStream> streams_ ABSL_GUARDED_BY(mutex_);
  // Queues that the present event serves on, with the lanes that do it.
  std::map<std::shared_ptr<CommitQueue>, std::set<uint64_t>> served_ ABSL_GUARDED_BY(mutex_);
  std::set<StreamId> later_ ABSL_GUARDED_BY(mutex_);  // whose `later` says something
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<ByteStream>> peers_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<HolderLink> holder_link_ ABSL_GUARDED_BY(mutex_);
  absl::Duration link_delay_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();  // before the next opening
  absl::Time link_failing_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::map<std::pair<uint32_t, uint64_t>, std::shared_ptr<struct Snapshot>> snapshots_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::NodeMessage> snapshots_done_ ABSL_GUARDED_BY(mutex_);  // said again on every new session
  std::map<const void*, Waiting> fetches_ ABSL_GUARDED_BY(mutex_);
  absl::CondVar plan_changed_;  // or the end
};

}  // namespace sluice

#endif  // SLUICE_SERVER_SERVER_JOB_H_
