// Every shard that one server holds of one job, as a state machine: no threads, clock, gRPC or data. Events go in as
// method calls, what is to be done comes out through ShardActions. docs/protocol.md states the rules; ServerJob
// (server_job.h) is the shell that runs it in a process, the simulation runs the same code with hashes as values.
//
//   push -> counted by (round, contributor, chunk) -> AddContribution ... FinishSum -> OnSum
//        -> VERDICT: all chunks of a shard -> norm report -> verdict holder -> verdict -> Apply -> Serve to subscribers
//        -> STREAM:  Apply at once
//   async (shard_core_async.cc): push -> ApplyContribution at once, which answers its sender; positions are leased by
//   the verdict holder's lease book (lease_book.h)
//
// Data work on one chunk is done in the order of the calls (a chunk belongs to a lane), so the core's versions run
// ahead of it: a version exists as soon as Apply was called.
#ifndef SLUICE_SERVER_SHARD_CORE_H_
#define SLUICE_SERVER_SHARD_CORE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/layout.h"
#include "common/position_set.h"
#include "common/protocol_rules.h"
#include "server/hold_book.h"
#include "server/lease_book.h"
#include "server/round_times.h"
#include "server/verdict.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/scheduler.pb.h"
#include "sluice/v1/shard.pb.h"

namespace sluice {

// What a contribution carries; the core never looks into it. `pinned_bytes`: memory of the server that holding it
// costs.
class Contribution {
 public:
  explicit Contribution(uint64_t pinned_bytes = 0) : pinned_bytes(pinned_bytes) {}
  virtual ~Contribution() = default;
  const uint64_t pinned_bytes;
};
using ContributionRef = std::shared_ptr<const Contribution>;

// What the sum of one chunk's contributions came to.
struct SumResult {
  bool finite = true;
  std::vector<uint32_t> nonfinite_contributors;     // slots
  std::vector<std::pair<uint64_t, double>> blocks;  // whole norm blocks: index, sum of squares
  std::vector<v1::NormFragment> fragments;          // parts of blocks that the chunk's borders cut
};

// Async: how one contribution changes its chunk.
struct ContributionUpdate {
  uint64_t version = 0;      // before it: updates made
  uint64_t round = 0;        // positions consumed by the chunk / batch: of the learning rate
  double rate_scale = 1;     // for staleness
  float gradient_scale = 0;  // of the contribution's sums
};

// What comes out. Calls are made inside the core's event methods, in the order in which they must take effect; an
// action must not call back into the core (answers are later events).
class ShardActions {
 public:
  virtual ~ShardActions() = default;

  // --- data work; FIFO per chunk
  // Make the chunk from the plan's checkpoint, its init folder or initial values, as `version`.
  virtual void LoadChunk(const std::shared_ptr<const Layout>& layout, uint64_t chunk, uint64_t version) = 0;
  virtual void DropChunk(uint64_t chunk) = 0;
  // `contributor` is the slot in the chunk's sum (Layout::slot). Null: an empty contribution, absent from the sum.
  virtual void AddContribution(uint64_t chunk, uint32_t contributor, uint32_t contributors, ContributionRef value) = 0;
  virtual void DiscardSum(uint64_t chunk) = 0;
  // All contributions are there: answered by OnSum with the same generation and round. `contributors` may have all been
  // empty.
  virtual void FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) = 0;
  // value(round + 1) = update(value(round), sum, verdict); value(round) becomes the previous one. A skip keeps the
  // value. With skip_nonfinite a sum that is not finite keeps it too (STREAM).
  virtual void Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) = 0;
  virtual void DropPrevious(uint64_t chunk) = 0;  // only with rules.kept_version off
  virtual void Serve(StreamId stream, uint64_t chunk, uint64_t version) = 0;
  // What the plan's checkpoint holds as this contributor's residual of the chunk goes to the stream.
  virtual void ServeResidual(StreamId stream, uint64_t chunk, uint32_t contributor) {}
  // Write value and slots of the chunk, now at `version`, into the shard's file of that checkpoint.
  // `cut` (async only): which contributions the chunk then holds.
  virtual void Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version,
                        const v1::ChunkCut& cut) = 0;
  // Open snapshots belong to a timeline that ended.
  virtual void AbandonSnapshots() = 0;
  // Async: value(version + 1) = update(value(version), value) unless the contribution is null or not finite; then
  // Answer(stream, answer), with `nonfinite` set where it was not.
  virtual void ApplyContribution(StreamId stream, const v1::ChunkHeader& answer, const ContributionUpdate& update,
                                 ContributionRef value) = 0;
  // Async: the chunk's value at version answer.round, the newest, goes to the stream under this header.
  virtual void Answer(StreamId stream, const v1::ChunkHeader& answer) = 0;

  // --- messages
  virtual void SendNorm(const v1::Member& holder, const v1::NormReport& report) = 0;
  virtual void SendVerdict(const v1::NodeId& primary, const v1::VerdictNotice& notice) = 0;
  virtual void SendToScheduler(const v1::NodeMessage& message) = 0;
  virtual void SendLease(StreamId stream, const v1::Lease& lease) = 0;
  // Ends a worker's stream: Refusal, then the status. The core knows it no more.
  virtual void CloseStream(StreamId stream, const absl::Status& status) = 0;
  // There is no room to hold the stream's contribution: dropped. Its worker is told when to push it again.
  virtual void Decline(StreamId stream, uint64_t chunk, uint64_t round) = 0;
  virtual void AskAgain(StreamId stream, uint64_t chunk, uint64_t round) = 0;
};

// Not thread-safe.
class ShardCore {
 public:
  // `hold`: what contributions may pin while they wait for a neighbour, shared with other jobs; null: no limit.
  ShardCore(std::string job_id, v1::NodeId self, const ProtocolRules& rules, ShardActions* actions,
            std::shared_ptr<HoldBudget> hold = nullptr);

  // The time of the events that follow, for `seconds` of round records. Without it they stay 0.
  void SetTime(absl::Time now) { now_ = now; }

  // ------------------------------------------------------------------ events: scheduler
  // Whether OnPlan would take the plan: newer than what is held and not older than a fence.
  bool Accepts(const Layout& layout) const;
  // Ignored unless Accepts. `cuts` (async): those of plan.checkpoint, by chunk; needed where a timeline begins.
  void OnPlan(std::shared_ptr<const Layout> layout, const std::vector<v1::ChunkCut>& cuts = {});
  void OnFence(uint64_t generation);
  void OnCheckpointOrder(const v1::CheckpointOrder& order);
  // A new session: says again what the scheduler may have missed: the newest round records and the progress of shards.
  void OnSchedulerConnected();

  // ------------------------------------------------------------------ events: workers
  // First message of a stream; a generation that is not here yet parks the stream's messages until its plan. Errors
  // (the stream should be closed with them): ABORTED an older generation, INVALID_ARGUMENT or OUT_OF_RANGE outside the
  // plan, PERMISSION_DENIED a rank that belongs to another node, FAILED_PRECONDITION a round that is not open yet,
  // RESOURCE_EXHAUSTED too much parked.
  absl::Status OnHello(StreamId stream, const v1::StreamHello& hello);
  // One chunk of a pushed frame. `payload_bytes` is what the frame holds for it.
  absl::Status OnPush(StreamId stream, const v1::ChunkHeader& header, ContributionRef value, uint64_t payload_bytes);
  // A contributor's residual for the checkpoint of version header.round. Whether it is of the present generation.
  absl::StatusOr<bool> OnResidual(StreamId stream, const v1::ChunkHeader& header, uint64_t payload_bytes) const;
  absl::Status OnSubscribe(StreamId stream, const v1::Subscribe& subscribe);
  absl::Status OnReport(StreamId stream, const v1::RoundReport& report);
  absl::Status OnLeaseRequest(StreamId stream, const v1::LeaseRequest& request);
  void OnStreamClosed(StreamId stream);
  // The job has ended; nothing may follow.
  void OnEnd() { hold_.Clear(); }

  // ------------------------------------------------------------------ events: servers and lanes
  absl::Status OnNorm(const v1::NormReport& report, const v1::NodeId& from);
  void OnVerdict(const v1::VerdictNotice& notice);
  // The way to the verdict holder opened (again): open norms are sent again.
  void OnHolderConnected();
  void OnSum(uint64_t chunk, uint64_t generation, uint64_t round, SumResult result);

  // ------------------------------------------------------------------ state
  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  uint64_t generation() const { return layout_ ? layout_->generation() : 0; }
  bool holds(uint64_t chunk) const { return chunks_.contains(chunk); }
  // Async: contributions that the chunk has had.
  uint64_t version(uint64_t chunk) const { return chunks_.at(chunk).version; }
  const PositionSet& applied(uint64_t chunk) const { return chunks_.at(chunk).applied; }
  // The lease book; null unless this is the verdict holder of an async job.
  const LeaseBook* book() const { return book_.get(); }
  bool has_previous(uint64_t chunk) const { return chunks_.at(chunk).has_previous; }
  const std::set<uint64_t>& ordered() const { return ordered_; }  // versions of checkpoints; some may be past
  const HoldBook& hold() const { return hold_; }
  bool is_holder() const { return layout_ && SameNode(layout_->primary(0).node(), self_); }
  // "job kjv-1 generation 2: round 17: waits for shard 3 report of contributor 1".
  std::string Describe() const;

 private:
  struct Subscriber {
    StreamId stream;
    uint64_t want;  // next version to send
  };
  struct Chunk {
    uint32_t shard = 0;
    uint64_t version = 0;
    bool has_previous = false;
    std::vector<bool> held;  // by slot, for round `version`
    uint32_t held_count = 0;
    std::vector<double> counts;  // targets of the held contributions, by slot, each replica's once
    bool sum_posted = false;
    std::optional<SumResult> sum;
    std::vector<Subscriber> subscribers;
    PositionSet applied;  // async
  };
  struct Shard {
    uint64_t since = 0;
    std::vector<uint64_t> chunks;
    std::map<uint64_t, v1::Verdict> verdicts;  // of rounds >= version - 1
    uint64_t summed = 0;                       // chunks whose sum of the open round is in
    bool norm_sent = false;
    bool progress_sent = false;
  };
  struct PushMessage {
    v1::ChunkHeader header;
    ContributionRef value;
    uint64_t payload_bytes;
  };
  using StreamMessage = std::variant<PushMessage, v1::Subscribe, v1::RoundReport, v1::LeaseRequest>;
  struct Stream {
    v1::StreamHello hello;
    bool parked = false;
    std::deque<StreamMessage> waiting;
    uint64_t waiting_bytes = 0;  // payload
  };

  bool Fenced() const { return rules_.fencing && fence_ > generation(); }
  absl::StatusOr<Stream*> Admit(StreamId stream, uint64_t generation);
  absl::Status CheckHello(const v1::StreamHello& hello) const;
  absl::Status CheckPush(const Stream& stream, const v1::ChunkHeader& header, uint64_t payload_bytes) const;
  // Chunk and contributor.
  absl::Status CheckPlace(const Stream& stream, const v1::ChunkHeader& header) const;
  absl::Status Park(Stream* stream, StreamMessage message, uint64_t payload_bytes);
  absl::Status Replay(StreamId id);
  absl::Status CheckSpan(const v1::ChunkHeader& header) const;
  absl::Status CheckRound(const v1::ChunkHeader& header) const;
  bool Hold(StreamId stream, const v1::ChunkHeader& header, const ContributionRef& value);
  void AskAgain(const std::vector<HoldBook::Ask>& asks);
  absl::Status Replay(StreamId id, StreamMessage message);
  void MakeShards(uint64_t old_timeline, const std::vector<v1::ChunkCut>& cuts);
  // Rounds that the chunk has seen.
  uint64_t RoundOf(const Chunk& chunk) const;
  // ---- shard_core_async.cc
  bool async() const { return layout_ && layout_->async(); }
  void MakeBook(bool new_timeline, const std::vector<v1::ChunkCut>& cuts);
  absl::Status OnContribution(StreamId stream, const v1::ChunkHeader& header, ContributionRef value);
  v1::ChunkHeader AnswerOf(uint64_t chunk) const;
  absl::Status CheckLease(const v1::ChunkHeader& header) const;
  void SayBook();
  // ----
  void ForgetRound(Chunk* chunk, uint32_t contributors);
  void ChunkComplete(uint64_t index, Chunk* chunk);
  void TryNorm(uint32_t shard);
  void SendNormOf(uint32_t shard);
  void ApplyShards(const std::vector<uint32_t>& shards, const v1::Verdict& verdict);
  void ApplyChunk(uint64_t index, Chunk* chunk, const v1::Verdict& verdict, bool skip_nonfinite);
  void Progress(uint32_t shard);
  void TryDecide(uint64_t round);
  void TryRecord(uint64_t round);
  // STREAM: a chunk's sum came out.
  void OnStreamSum(uint32_t shard, uint64_t round, const SumResult& result);
  void NoteNonfinite(const v1::NormReport& report);
  void SendRecord(v1::NodeMessage message);
  void Problem(const absl::Status& status);
  uint64_t NewestOfShard0() const;
  void Record(uint64_t round, const RoundTally& tally, const v1::Verdict* verdict);
  void Evaluated(uint64_t version, const RoundTally& tally);
  v1::FenceReport MakeFenceReport() const;
  RoundTally* Tally(std::map<uint64_t, RoundTally>* tallies, uint64_t round);

  const std::string job_id_;
  const v1::NodeId self_;
  const ProtocolRules rules_;
  ShardActions* const actions_;

  std::shared_ptr<const Layout> layout_;
  uint64_t fence_ = 0;
  std::map<uint32_t, Shard> shards_;
  std::map<uint64_t, Chunk> chunks_;
  std::map<StreamId, Stream> streams_;
  HoldBook hold_;               // the open round's
  std::set<uint64_t> ordered_;  // versions of ordered checkpoints
  std::deque<std::pair<v1::NormReport, v1::NodeId>> parked_norms_;

  // Verdict holder's state.
  RoundTimes times_;
  std::map<uint64_t, RoundTally> training_, evaluation_;
  std::map<uint64_t, v1::Verdict> decided_;
  uint64_t recorded_ = 0;                                 // rounds below it have a record (STREAM)
  std::map<uint64_t, uint64_t> stream_sums_;              // STREAM: round -> chunks of shard 0 whose sums came out
  std::map<uint64_t, std::set<uint32_t>> stream_faults_;  // STREAM: round -> contributors of sums that are not finite
  std::unique_ptr<LeaseBook> book_;                       // async
  std::deque<v1::NodeMessage> records_;                   // the newest of this timeline, in the order of sending

  // STREAM, not the holder: what it was told of sums that are not finite, newest last.
  std::deque<v1::NormReport> faults_told_;
  absl::Time now_ = absl::InfinitePast(), recorded_at_ = absl::InfinitePast();
};

}  // namespace sluice

#endif  // SLUICE_SERVER_SHARD_CORE_H_
