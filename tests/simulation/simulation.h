// A whole cluster on simulated time: the real SchedulerCore, ShardCore and RoundCore with hashes as values.
//
// value(chunk, v+1) = H(value(chunk, v), tree of the contributions, verdict), and a contribution hashes every parameter
// its rank used: one wrong version, one contribution counted twice or one wrong verdict anywhere changes the final
// hashes. They must equal those of the undisturbed run of the same job, in which every worker pushes for itself.
#ifndef SLUICE_TESTS_SIMULATION_SIMULATION_H_
#define SLUICE_TESTS_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/layout.h"
#include "common/position_set.h"
#include "common/protocol_rules.h"
#include "sluice/v1/checkpoint.pb.h"
#include "sluice/v1/scheduler.pb.h"
#include "sluice/v1/state.pb.h"
#include "tests/simulation/sim_world.h"

namespace sluice {

// What a seed decides.
struct SimConfig {
  uint64_t seed = 0;
  uint32_t replicas = 1, servers = 1, standbys = 0;
  v1::JobSpec spec;
  int faults = 0;
  uint64_t hold_bytes = 1 << 20;  // of each server: so many bytes of contributions may wait for others
  std::set<std::pair<uint64_t, uint32_t>> nonfinite;  // (round, contributor)
  uint32_t workers_per_host = 1;
  bool server_on_host = false;  // server-0 runs where worker-0 does
  std::string shares_nothing;   // a worker whose memory others cannot map, as they find out

  static SimConfig Draw(uint64_t seed);
  // The same cluster with train.mode async: `nonfinite` then names (round, 0: the round's first lease, 1: the others).
  static SimConfig DrawAsync(uint64_t seed);
  std::string HostOf(const std::string& node) const;
};

struct SimResult {
  std::string failure;  // empty: fine
  uint64_t events = 0;
  int faults = 0, generations = 0, rewinds = 0;
  int host_sums = 0;  // that were made
  uint64_t declines = 0;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> values;  // (chunk, version) -> hash, of the last timeline's applies
};

// `reference`: values of the undisturbed run, or null where this is it (no faults are made then).
SimResult RunSimulation(const SimConfig& config, const ProtocolRules& rules, const SimResult* reference, bool trace);

// Undisturbed, then disturbed, compared. In async the bits differ from run to run; there every value counts what was
// applied to it, and must come to the number of leases whatever died.
SimResult RunSeed(uint64_t seed, const ProtocolRules& rules, bool trace, bool async = false);

class SimServer;
class SimWorker;
class SimScheduler;

struct SimCheckpoint {
  std::map<uint64_t, uint64_t> values;    // chunk -> hash
  std::map<uint64_t, PositionSet> seen;   // async: by chunk, as the data has it
  std::map<uint64_t, v1::ChunkCut> cuts;  // async: by chunk, as the core says it
  bool published = false;
};

// Names a process over its lives; the scheduler's is "scheduler".
struct SimNode {
  std::string name;
  bool server = false;
  uint64_t incarnation = 0;
  LifeRef life;
  std::shared_ptr<SimServer> as_server;
  std::shared_ptr<SimWorker> as_worker;
  std::shared_ptr<Link> session;
};

// What the nodes share: the world, the disk, the observers.
class Cluster {
 public:
  Cluster(const SimConfig& config, const ProtocolRules& rules, const SimResult* reference, bool trace);
  ~Cluster();
  SimResult Run();

  World world;
  const SimConfig config;
  const ProtocolRules rules;
  const SimResult* const reference;
  SimResult result;

  std::map<std::string, SimNode> nodes;
  std::map<std::pair<uint64_t, uint64_t>, SimCheckpoint> storage;  // (timeline, version)
  std::map<uint64_t, v1::StoredJob> disk;                          // the scheduler's rows
  std::shared_ptr<SimScheduler> scheduler;
  LifeRef scheduler_life;
  std::vector<std::weak_ptr<Link>> links;
  bool finished = false;
  uint64_t next_stream = 1;

  // The node now running under the name and incarnation, or null.
  SimNode* FindLive(const v1::NodeId& id);
  std::shared_ptr<Link> Connect(LifeRef a, LifeRef b);
  void OpenSession(const std::string& name);
  void SendToScheduler(SimNode& node, const v1::NodeMessage& message);

  // Observations; throw Violation.
  void SawApply(const v1::NodeId& server, uint64_t timeline, uint64_t chunk, uint64_t version, uint64_t value);
  void SawVerdict(uint64_t timeline, const v1::Verdict& verdict);
  void SawPlan(const v1::Plan& plan);
  void SawInstalled(uint64_t generation, uint64_t chunk, uint64_t version, uint64_t value);
  void CheckVersions();
  // Async: targets of the lease that begins at this position, and whether its gradient is finite.
  bool async() const { return config.spec.train().mode() == v1::TrainSpec::ASYNC; }
  double LeaseCount(uint64_t position) const { return Mix(position, 5) % 7 == 0 ? 0 : 1 + Mix(position, 6) % 5; }
  bool LeaseFinite(uint64_t position) const;
  // What every chunk's value comes to: leases that are neither empty nor refused.
  uint64_t ExpectedCount() const;
  void CheckCheckpoint(const v1::CheckpointManifest& manifest, const SimCheckpoint& checkpoint);
  [[noreturn]] void Fail(const std::string& what);

 private:
  void Start(const std::string& name, bool server);
  void Kill(const std::string& name);
  void KillScheduler();
  void StartScheduler();
  void PlanFaults();
  void Fault();
  std::vector<std::string> Live(bool servers) const;
  void CheckCounts();

  std::map<uint64_t, uint64_t> plan_hashes_;                       // generation -> hash
  std::map<std::pair<uint64_t, uint64_t>, std::string> verdicts_;  // (timeline, round)
  std::map<const Link*, std::shared_ptr<uint64_t>>
      session_numbers_;  // session number at the scheduler, 0 until registered
  v1::Plan newest_plan_;
};

uint64_t InitialValue(uint64_t chunk);

// Of contributions by index, in the shape of the sum's tree; absent ones pass the other through. None: 11.
uint64_t TreeHash(uint32_t contributors, const std::map<uint32_t, uint64_t>& hashes);

}  // namespace sluice

#endif  // SLUICE_TESTS_SIMULATION_SIMULATION_H_
