// ShardCores of several servers connected by hand: every action becomes an entry in a queue that the test empties in
// the order it likes. A chunk's value is one number; its contributions are numbers too.
#ifndef SLUICE_TESTS_SERVER_CORE_RIG_H_
#define SLUICE_TESTS_SERVER_CORE_RIG_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/shard_core.h"
#include "tests/server/server_test_plan.h"

namespace sluice {

struct NumberContribution : Contribution {
  explicit NumberContribution(double v, uint64_t bytes = 0) : Contribution(bytes), value(v) {}
  double value;
};

struct ServedValue {
  StreamId stream;
  uint64_t chunk, version;
  double value;
  bool operator==(const ServedValue&) const = default;
};

class CoreRig {
 public:
  // `hold_bytes`: of each server, what pushes may hold while they wait for others.
  explicit CoreRig(uint32_t servers, const ProtocolRules& rules = {}, uint64_t hold_bytes = INT64_MAX);
  ~CoreRig();

  ShardCore& core(uint32_t server);
  // The plan goes to every server at once. Async: `cuts` of its checkpoint.
  void Plan(const std::shared_ptr<const Layout>& layout, const std::vector<v1::ChunkCut>& cuts = {});

  // Runs what is queued (sums that come out, norms, verdicts), in order, until nothing is left.
  void Run();
  // Takes one queued step at a place of the queue; steps of one chunk's lane stay in order.
  bool RunOne(uint64_t place);
  // Loses the queued messages between servers.
  void DropMessages();
  size_t queued() const { return steps_.size(); }
  // While closed nothing passes between servers: it is lost.
  void set_links_open(bool open) { links_open_ = open; }

  // Stream `contributor + 100 * generation`, opened on first use; the status of whichever call failed.
  absl::Status Push(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor, uint64_t chunk,
                    double value, double count = 2, uint32_t contributors = 0);
  // Async: of the lease [position, position + positions), computed from version `base`.
  absl::Status Contribute(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t chunk, uint64_t position,
                          uint64_t positions, uint64_t base, double value = 1, double count = 1, float scale = 0);
  absl::Status Ask(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t number,
                   const std::optional<v1::RoundReport>& report = std::nullopt);
  absl::Status Empty(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor, uint64_t chunk);
  absl::Status Report(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor, double loss,
                      double count = 2, v1::RoundReport::Kind kind = v1::RoundReport::TRAIN);
  absl::Status Subscribe(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t version);
  absl::Status Hello(uint32_t server, uint64_t generation, uint32_t contributor);
  static StreamId Stream(uint64_t generation, uint32_t contributor) { return contributor + 100 * generation; }

  // What came out so far.
  std::vector<v1::NodeMessage> to_scheduler;
  std::vector<ServedValue> served;
  std::map<std::pair<uint32_t, StreamId>, absl::Status> closed;
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>> snapshots;  // shard, chunk, timeline, version
  std::vector<std::pair<StreamId, v1::ChunkHeader>> answers;                  // async
  std::vector<std::pair<StreamId, v1::Lease>> leases;                         // async
  std::map<std::pair<uint64_t, uint64_t>, v1::ChunkCut> cuts;                 // async: (chunk, version) of snapshots
  std::vector<ContributionUpdate> updates;                                    // async
  std::vector<v1::Verdict> verdicts;                                          // one for each Apply
  int abandoned = 0;
  struct Name {
    StreamId stream;
    uint64_t chunk, round;
    bool operator==(const Name&) const = default;
  };
  std::vector<Name> declined, again;  // contributions

  double value(uint64_t chunk) const { return data_.at(chunk).value; }
  // The records of training rounds, by round; the last one said.
  std::map<uint64_t, v1::RoundRecord> records() const;
  std::vector<v1::FenceReport> fence_reports() const;

 private:
  class Server;
  struct Data {
    uint64_t version = 0;
    double value = 0, previous = 0;
    std::map<uint32_t, double> sum;
  };
  struct Step {
    std::string lane;  // steps with the same name stay in order
    std::function<void()> work;
  };

  std::vector<std::unique_ptr<Server>> servers_;
  std::map<uint64_t, Data> data_;  // by chunk: each is on one server
  std::deque<Step> steps_;
  std::set<std::pair<uint32_t, StreamId>> open_;
  bool links_open_ = true;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SERVER_CORE_RIG_H_
