// The rounds of one rank as a state machine: no threads, clock, gRPC or memory. Events go in as method calls, what is
// to be done comes out through RoundActions. docs/protocol.md states the rules; WorkerJob (worker_job.h) is the shell
// that runs it in a process, the simulation runs the same code with hashes as values. Of the chunks it knows those of
// the rank's view, which are all of them where a replica is one rank; it pushes for those that the plan says.
//
//   plan -> [stop what is under way] -> streams, subscribe -> every chunk at version r in place
//        -> evaluate r, where it is due -> compute round r: gradients become ready, are pushed -> report
//        -> round r+1: its forward reads a range as soon as InPlace says that its commits have arrived and are in place
//        ... until version `rounds`; then stay until the job ends.
//
// The next round is handed out at once when a round has been computed (where no evaluation comes first), so that its
// samples are prepared and its first layers computed while commits still arrive. Nothing of round r+1 leaves before
// every chunk is at r+1: a gradient is first written after the whole forward.
//
// In async (round_core_async.cc) a lease of positions takes the place of the round:
//
//   plan -> newest version of every chunk pulled -> ask for a lease
//        -> positions: compute, push as gradients become ready; each chunk's commit answers this rank alone -> ask
//        again
//        -> an evaluation: pull the newest of every chunk, evaluate -> ask again ... until the job ends.
//
// A commit of r+1 may replace a chunk's parameters as soon as this rank has issued its own push of that chunk for round
// r (its backward is past them); until then the value is kept. Contributions are pushed again on every opening of a
// stream until their commit is seen. A new generation drops everything of the open round and starts from plan.start,
// but nothing of it is subscribed or installed before the computing under way has stopped and installs handed out have
// been made: parameters of two generations never meet in one buffer.
//
// Where the push encoding keeps a residual (error feedback), this rank's part of the checkpoint of version V is the
// residual between its last contribution to round V-1 and its first one to V. It is pushed as soon as every chunk is
// at V, and again like a contribution until the chunk's commit of V+1 is seen; on a stream it stands before the
// contribution to V, so that no chunk gets to V+1 before its residuals at V have arrived.
#ifndef SLUICE_WORKER_ROUND_CORE_H_
#define SLUICE_WORKER_ROUND_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/layout.h"
#include "common/protocol_rules.h"
#include "sluice/v1/parameter.pb.h"
#include "worker/host_sum_core.h"

namespace sluice {

// A chunk's value as it came from a server; the core never looks into it.
class CommitValue {
 public:
  virtual ~CommitValue() = default;
};

// Who this rank has a stream to: primary or tail of some shard, or the host leader that adds up this rank's
// contributions.
struct ServerEnd {
  v1::NodeId node;
  std::string address;
  bool leader = false;  // a worker's PeerService
};

// What comes out. Calls are made inside the core's event methods, in the order in which they must take effect; an
// action must not call back into the core (answers are later events).
class RoundActions {
 public:
  virtual ~RoundActions() = default;

  // Keep a stream to each server open until CloseStreams, reopening it when it breaks. Every opening is told by
  // OnStreamUp, every break by OnStreamDown. `server` below is an index into `servers`.
  virtual void OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) = 0;
  virtual void CloseStreams() = 0;

  // On an open stream only.
  virtual void Subscribe(size_t server, const v1::Subscribe& subscribe) = 0;
  // The chunk's gradient of the round (async: of the lease that lies in it) is final: its contribution can be made.
  // Before it is pushed for the first time.
  virtual void Encode(uint64_t chunk, uint64_t round) {}
  // The contribution to header.chunk; header.elements 0: an empty one. It must stay readable until its commit is seen
  // or the generation ends, that is, until the next AllInPlace (async: StartCompute).
  // With header.contributors the sum that SumOnHost made, likewise.
  virtual void Push(size_t server, const v1::ChunkHeader& header) = 0;
  virtual void Report(size_t server, const v1::RoundReport& report) = 0;
  // Async.
  virtual void Ask(size_t server, const v1::LeaseRequest& request) = 0;

  // Put the value in place as `version` of the chunk, then OnInstalled with the same arguments, whatever happens in
  // between.
  virtual void Install(uint64_t generation, uint64_t chunk, uint64_t version,
                       std::shared_ptr<const CommitValue> value) = 0;

  // Not in async: every chunk is at `version`. Contributions to rounds before it are committed.
  virtual void AllInPlace(uint64_t version) = 0;

  // As host leader: add up, then OnHostSum, whatever happens in between. The own gradient of the chunk stays as it is
  // until then.
  virtual void SumOnHost(HostSum sum) {}

  // ---- with error feedback
  // A generation begins, before OpenStreams. Whether the residual is to be fetched from the plan's checkpoint: then
  // InstallResidual of every chunk, each answered by OnResidualInstalled, before a round begins.
  virtual bool BeginResidual(const std::shared_ptr<const Layout>& layout, uint32_t rank) { return false; }
  virtual void InstallResidual(uint64_t generation, uint64_t chunk, std::shared_ptr<const CommitValue> value) {}
  // Nothing is being encoded: the residual as it is now is that of `version`, where it is not kept already. To be kept
  // until AllInPlace of a later one.
  virtual void KeepResidual(uint64_t version) {}
  // The kept one. The shell sets header.elements.
  virtual void PushResidual(size_t server, const v1::ChunkHeader& header) {}

  // In async the core's lease() says which positions, or which slice of the evaluation.
  // Of a round that is computed, parameters may still be on the way: InPlace. An evaluation has all of them.
  // One piece of work at a time; each ends with exactly one of OnComputed, OnEvaluated, OnStopped.
  virtual void StartCompute(uint64_t generation, uint64_t round) = 0;
  virtual void StartEvaluation(uint64_t generation, uint64_t version) = 0;
  // The work under way is not wanted any more: it ends soon, by OnStopped or as it would have.
  virtual void CancelWork() = 0;
};

// Sums of one piece of work.
struct WorkSum {
  double loss = 0;
  double count = 0;
  double correct = 0;
  double seconds = 0;                               // of computing
  double wait_seconds = 0;                          // training: see RoundReport,
  double answer_seconds = 0;                        // the same
  double pipeline_seconds = 0, tensor_seconds = 0;  // the same
  double gradient_norm = 0;                         // async with clipping: of the mean gradient
};

// Not thread-safe.
class RoundCore {
 public:
  enum class Phase { kIdle, kStopping, kPulling, kAsking, kEvaluating, kComputing, kWaiting, kFinished, kEnded };

  RoundCore(const ProtocolRules& rules, RoundActions* actions);

  // ------------------------------------------------------------------ events
  // A plan that names this node as rank `rank`. One that is not newer than the present one is ignored.
  void OnPlan(std::shared_ptr<const Layout> layout, uint32_t rank);
  void OnStreamUp(uint64_t generation, size_t server);
  void OnStreamDown(uint64_t generation, size_t server);
  // Version header.round of a chunk. Of another generation, or one seen already: dropped, OK. INVALID_ARGUMENT or
  // OUT_OF_RANGE: outside the plan or of the protocol; nothing changed, the stream should be closed.
  absl::Status OnCommit(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value);
  void OnInstalled(uint64_t generation, uint64_t chunk, uint64_t version);
  // A residual of the plan's checkpoint, in answer to a subscribe. Errors as OnCommit.
  absl::Status OnResidual(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value);
  void OnResidualInstalled(uint64_t generation, uint64_t chunk);
  // The server will write this version, which it has not reached yet, as a checkpoint.
  void OnCheckpoint(uint64_t generation, size_t server, uint64_t version);
  // Contributions that a server had declined are pushed again; of others nothing.
  absl::Status OnLater(uint64_t generation, const v1::Later& later);
  // Async. Of another generation or request: dropped.
  absl::Status OnLease(const v1::Lease& lease);
  // As host leader (host_sum_core.h): a member opened a stream, contributes; a sum was made, in which the contributions
  // of these ranks held NaN or Inf.
  void OnMember(uint32_t contributor) { host_sum_.OnMember(contributor); }
  absl::Status OnContribution(const v1::ChunkHeader& header, MemberValueRef value);
  void OnHostSum(uint64_t generation, uint64_t chunk, uint64_t round, const std::vector<uint32_t>& nonfinite);
  // The round's samples of this replica hold `count` targets; before the first OnGradientReady. With 0 the empty
  // contributions leave at once and no gradient is expected: then every chunk must be in place.
  void OnBatch(uint64_t generation, uint64_t round, double count);
  // These elements of the gradient are final; every chunk is in place. Ranges of a round are disjoint and cover the
  // view by OnComputed.
  void OnGradientReady(uint64_t generation, uint64_t round, Range range);
  void OnComputed(uint64_t generation, uint64_t round, const WorkSum& sum);
  void OnEvaluated(uint64_t generation, uint64_t version, const WorkSum& sum);
  void OnStopped(uint64_t generation);
  // The job has ended: streams close, work is cancelled, nothing is started any more.
  void OnEnd();

  // ------------------------------------------------------------------ state, for shells, tests and messages to people
  Phase phase() const { return phase_; }
  uint64_t generation() const { return layout_ ? layout_->generation() : 0; }  // of the newest plan
  // r: the open round; in async the one that the lease lies in.
  uint64_t round() const { return round_; }
  const v1::Lease& lease() const { return lease_; }  // async: the one under way
  uint64_t leases() const { return leases_; }        // and how many were computed before it, in all generations
  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  uint32_t rank() const { return rank_; }
  const std::vector<ServerEnd>& servers() const { return servers_; }
  bool busy() const { return busy_; }            // a piece of work is under way
  uint64_t summing() const { return summing_; }  // sums handed out and not made yet, of any generation
  // Whether the computing under way may read these elements: their chunks are at the version that it computes from.
  // They stay until the gradient of the chunk has been ready. False when the work is not wanted any more.
  bool InPlace(Range range) const;
  // Version in place, or -1 where none of this generation is.
  int64_t installed(uint64_t chunk) const { return chunks_[chunk].installed; }
  // "job kjv-1 generation 2 rank 1: round 17 waits for 3 of 40 chunks at version 18 (chunk 7 from server-1, ...)".
  std::string Describe() const;

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;
  struct Chunk {
    // Indices into servers_; primary: who the push goes to, maybe the host leader, nobody where this rank does not push
    // for the chunk; tail: nobody where it is not in the view.
    uint32_t primary = kNobody, tail = kNobody;
    int64_t installed = -1;
    uint64_t want = 0;     // lowest version not received yet
    uint64_t unready = 0;  // elements of the gradient still to come
    // Version that the newest own push issued in this generation makes, its round + 1 (async: of this lease); 0: none.
    uint64_t pushed = 0;
    bool answered = false;                    // async: the subscribe or push of now was
    bool lacks_residual = false;              // of the plan's checkpoint, asked for and not received yet
    std::shared_ptr<const CommitValue> kept;  // version round_ + 1, received before the push
  };

  void Step();
  void BeginGeneration();
  void BeginRound();
  void Advance();
  void Settle();
  // Chunks that this rank holds.
  const std::vector<uint64_t>& view() const { return layout_->view(rank_); }
  bool Pushed(const Chunk& chunk) const { return chunk.pushed == round_ + 1; }
  void Issue(uint64_t chunk);
  void SendPush(uint64_t chunk);
  // ---- round_core_residual.cc
  static constexpr size_t kMaxOrdered = 1024;  // of one server, which orders one or two at a time
  bool ResidualWanted(const Chunk& chunk, uint64_t version) const;
  void KeepResidual();
  void SendResidual(uint64_t chunk);
  // ----
  void Sum(std::optional<HostSum> sum);
  void Keep(v1::RoundReport::Kind kind, uint64_t round, const WorkSum& sum);
  void HandOut(uint64_t chunk, uint64_t version, std::shared_ptr<const CommitValue> value);
  // ---- round_core_async.cc
  bool async() const { return layout_->async(); }
  bool clips() const { return layout_->plan().spec().optimizer().clip_norm() > 0; }
  void Pull();  // the newest of every chunk
  void SubscribeMissing(size_t server);
  void AskForLease(const v1::RoundReport* report);
  void BeginLease();
  void EndLease();
  absl::Status OnAnswer(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value);
  // ----
  // Whether the work that an event speaks of is the one that this generation wants.
  bool Current(uint64_t generation, uint64_t round, Phase phase) const;

  const ProtocolRules rules_;
  RoundActions* const actions_;

  std::shared_ptr<const Layout> layout_;
  uint32_t rank_ = 0;
  Phase phase_ = Phase::kIdle;
  uint64_t round_ = 0;
  bool busy_ = false;        // a piece of work is out
  uint64_t installing_ = 0;  // installs handed out and not made yet, of any generation
  uint64_t summing_ = 0;     // the same of host sums
  bool evaluated_ = false;   // version round_, in this generation
  bool computed_ = false;    // round round_
  double count_ = 0;         // targets of round round_
  double count_before_ = 0;  // and of the one before
  uint64_t at_current_ = 0;  // chunks in place at round_ or later
  uint64_t at_next_ = 0;     // chunks in place at round_ + 1

  bool feedback_ = false;                    // residuals are kept
  uint64_t lacking_residual_ = 0;            // chunks that wait for theirs
  uint64_t kept_ = 0;                        // version of the residual that is kept for a checkpoint; 0: none
  std::vector<std::set<uint64_t>> ordered_;  // [servers] versions from `round_` on that are checkpoints by order

  std::vector<ServerEnd> servers_;
  std::vector<bool> up_;  // [servers]
  uint32_t holder_ = 0;   // the verdict holder's index
  std::vector<Chunk> chunks_;
  HostSumCore host_sum_;
  // Async.
  v1::LeaseRequest request_;  // the last one
  v1::Lease lease_;           // its answer
  uint64_t leases_ = 0;
  v1::RoundReport answers_;               // what the commits said of the lease's contributions
  WorkSum sum_;                           // of the lease's computing
  float scale_ = 0;                       // of its contributions, by clipping; 0: not clipped
  std::vector<v1::RoundReport> reports_;  // that may be lost yet: sent again on every opening of the holder's stream
};

}  // namespace sluice

#endif  // SLUICE_WORKER_ROUND_CORE_H_
