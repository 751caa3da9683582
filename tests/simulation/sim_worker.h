// A worker in the simulation: the real RoundCore; parameters are hashes, computing takes simulated time.
#ifndef SLUICE_TESTS_SIMULATION_SIM_WORKER_H_
#define SLUICE_TESTS_SIMULATION_SIM_WORKER_H_

#include <map>
#include <memory>
#include <vector>

#include "tests/simulation/simulation.h"
#include "worker/round_core.h"

namespace sluice {

class SimWorker : public RoundActions, public std::enable_shared_from_this<SimWorker> {
 public:
  SimWorker(Cluster* cluster, v1::NodeId id, LifeRef life);

  const v1::NodeId& id() const { return id_; }
  void OnSchedulerMessage(const v1::SchedulerMessage& message);
  v1::Register MakeRegister() const;
  std::string Describe() const { return core_->Describe(); }

  // As host leader: a member's stream arrives, contributes.
  void AddMember(const v1::StreamHello& hello, const std::shared_ptr<Link>& link);
  void OnContribution(const v1::ChunkHeader& header, const std::shared_ptr<SimWorker>& member);

 private:
  struct HashValue : CommitValue {
    explicit HashValue(uint64_t h) : hash(h) {}
    uint64_t hash;
  };
  // The member's memory, read when the sum is made.
  struct Member : MemberValue {
    std::shared_ptr<SimWorker> worker;
    uint64_t chunk = 0;
    uint32_t rank = 0;
  };
  struct Stream {
    std::shared_ptr<Link> link;
    SimNode* server = nullptr;
    uint64_t id = 0;
    bool up = false;
  };
  struct Work {
    std::shared_ptr<RoundCore> core;
    uint64_t generation = 0, round = 0;
    bool evaluation = false, cancelled = false;
    uint64_t hash = 0;            // of all parameters used, so far
    uint64_t read = 0;            // chunks that the forward has read
    std::vector<uint64_t> order;  // chunks whose gradients are still to come
    std::vector<uint64_t> bases;  // async: versions computed from, by chunk
  };

  void OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) override;
  void CloseStreams() override;
  void Subscribe(size_t server, const v1::Subscribe& subscribe) override;
  void Push(size_t server, const v1::ChunkHeader& header) override;
  void Report(size_t server, const v1::RoundReport& report) override;
  void Ask(size_t server, const v1::LeaseRequest& request) override;
  void Install(uint64_t generation, uint64_t chunk, uint64_t version,
               std::shared_ptr<const CommitValue> value) override;
  void SumOnHost(HostSum sum) override;
  void AllInPlace(uint64_t version) override;
  void StartCompute(uint64_t generation, uint64_t round) override;
  void StartEvaluation(uint64_t generation, uint64_t version) override;
  void CancelWork() override;

  void OpenStream(uint64_t generation, size_t server);
  void Begin(uint64_t generation, uint64_t round, bool evaluation);
  void Forward(const std::shared_ptr<Work>& work);
  void Continue(const std::shared_ptr<Work>& work);
  double Count(uint64_t round) const;
  double CountOf(uint64_t round, uint32_t rank) const;
  uint64_t GradientHash(uint64_t chunk, uint32_t rank) const { return Mix(gradient_hash_, chunk, rank); }

  Cluster* const cluster_;
  const v1::NodeId id_;
  const LifeRef life_;
  std::shared_ptr<RoundCore> core_;  // a new one for an assignment after the end of an earlier one
  std::shared_ptr<const Layout> layout_;
  std::vector<ServerEnd> servers_;
  std::vector<Stream> streams_;
  uint64_t streams_generation_ = 0;
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> parameters_;  // chunk -> (version, hash): the one buffer
  std::shared_ptr<Work> work_;
  uint64_t gradient_hash_ = 0;  // of the last computed round: what pushes carry
  uint64_t gradient_round_ = 0;
  std::map<uint64_t, uint64_t> made_;  // host sums by chunk
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SIMULATION_SIM_WORKER_H_
