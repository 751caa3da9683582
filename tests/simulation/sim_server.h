// A server in the simulation: the real ShardCore over hashes; data work is done later, in order for each chunk.
#ifndef SLUICE_TESTS_SIMULATION_SIM_SERVER_H_
#define SLUICE_TESTS_SIMULATION_SIM_SERVER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/shard_core.h"
#include "tests/simulation/simulation.h"

namespace sluice {

struct HashContribution : Contribution {
  HashContribution(uint64_t h, bool f, uint64_t bytes) : Contribution(bytes), hash(h), finite(f) {}
  uint64_t hash;
  bool finite;
};

// In an async job a chunk's value counts the contributions that changed it, and `seen` says which leases those (and the
// empty and refused ones) were: kept by the data, not by the core.

class SimServer : public ShardActions, public std::enable_shared_from_this<SimServer> {
 public:
  SimServer(Cluster* cluster, v1::NodeId id, LifeRef life);

  const v1::NodeId& id() const { return id_; }
  ShardCore& core() { return core_; }
  void OnSchedulerMessage(const v1::SchedulerMessage& message);
  v1::Register MakeRegister() const;

  // A worker's stream arrives; `commit` carries values back, `close` ends it at the worker.
  using CommitSink = std::function<void(const v1::ChunkHeader&, uint64_t value)>;
  using LeaseSink = std::function<void(const v1::Lease&)>;
  using LaterSink = std::function<void(const v1::Later&)>;
  void AddStream(StreamId id, const v1::StreamHello& hello, std::shared_ptr<Link> link, CommitSink commit,
                 LeaseSink lease, LaterSink later);
  void OnPush(StreamId id, const v1::ChunkHeader& header, uint64_t hash, bool finite);
  void OnSubscribe(StreamId id, const v1::Subscribe& subscribe);
  void OnReport(StreamId id, const v1::RoundReport& report);
  void OnLeaseRequest(StreamId id, const v1::LeaseRequest& request);

 private:
  struct Data {
    uint64_t version = 0, value = 0, previous = 0;
    bool has_previous = false;
    PositionSet seen;                          // async
    std::map<uint32_t, HashContribution> sum;  // by contributor; absent ones left out
    absl::Time busy_until = absl::InfinitePast();
  };
  struct OpenStream {
    std::shared_ptr<Link> link;
    CommitSink commit;
    LeaseSink lease;
    LaterSink later;
  };
  using OpenSnapshot = SimCheckpoint;

  void LoadChunk(const std::shared_ptr<const Layout>& layout, uint64_t chunk, uint64_t version) override;
  void DropChunk(uint64_t chunk) override;
  void AddContribution(uint64_t chunk, uint32_t contributor, uint32_t contributors, ContributionRef value) override;
  void DiscardSum(uint64_t chunk) override;
  void FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) override;
  void Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) override;
  void DropPrevious(uint64_t chunk) override;
  void Serve(StreamId stream, uint64_t chunk, uint64_t version) override;
  void Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version, const v1::ChunkCut& cut) override;
  void AbandonSnapshots() override { snapshots_.clear(); }
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

  static uint64_t HashOf(const Data& data, uint32_t contributors);
  // Runs on the chunk's lane: later, after everything posted for it before.
  void OnLane(uint64_t chunk, std::function<void(Data*)> work);
  void Handled(StreamId id, const absl::Status& status);
  void OpenHolderLink();

  Cluster* const cluster_;
  const v1::NodeId id_;
  const LifeRef life_;
  ShardCore core_;
  std::map<uint64_t, Data> data_;
  std::map<StreamId, OpenStream> streams_;
  std::map<std::pair<uint32_t, std::pair<uint64_t, uint64_t>>, OpenSnapshot> snapshots_;
  std::vector<v1::NodeMessage> done_;  // said again on every session
  v1::NodeId holder_;
  std::shared_ptr<Link> holder_link_;
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<Link>> peers_;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SIMULATION_SIM_SERVER_H_
