// The scheduler in the simulation: the real SchedulerCore over a disk of rows and simulated sessions.
#ifndef SLUICE_TESTS_SIMULATION_SIM_SCHEDULER_H_
#define SLUICE_TESTS_SIMULATION_SIM_SCHEDULER_H_

#include <functional>
#include <map>
#include <memory>

#include "scheduler/scheduler_core.h"
#include "tests/simulation/simulation.h"

namespace sluice {

class SimScheduler : public SchedulerActions, public std::enable_shared_from_this<SimScheduler> {
 public:
  SimScheduler(Cluster* cluster, LifeRef life);

  void Restore();
  void Submit(const v1::JobSpec& spec);
  // A node's stream arrives.
  SessionId AddSession(std::shared_ptr<Link> link, std::function<void(const v1::SchedulerMessage&)> to_node);
  void OnMessage(SessionId session, const v1::NodeMessage& message);
  void OnClosed(SessionId session);
  v1::JobState state() const;
  std::string message() const;

 private:
  struct Open {
    std::shared_ptr<Link> link;
    std::function<void(const v1::SchedulerMessage&)> to_node;
  };
  void Send(SessionId session, const v1::SchedulerMessage& message) override;
  void CloseSession(SessionId session, const absl::Status& status) override;
  void Persist(const v1::StoredJob& row) override;
  void Record(const std::string&, const v1::RoundRecord&) override {}
  void Event(const std::string& job_id, const v1::JobEvent& event) override;
  void PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) override;
  void RemoveCheckpoints(const std::vector<std::string>& folders) override {}
  void JobChanged(const std::string& job_id) override;
  void ArmTimer();

  Cluster* const cluster_;
  const LifeRef life_;
  SchedulerCore core_;
  std::map<SessionId, Open> sessions_;
  SessionId next_session_ = 1;
  absl::Time armed_ = absl::InfiniteFuture();
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SIMULATION_SIM_SCHEDULER_H_
