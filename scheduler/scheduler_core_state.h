// What SchedulerCore remembers: nodes it has heard of in this life, and jobs. Plain data; its rules are in the
// scheduler_core*.cc files.
#ifndef SLUICE_SCHEDULER_SCHEDULER_CORE_STATE_H_
#define SLUICE_SCHEDULER_SCHEDULER_CORE_STATE_H_

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "sluice/v1/checkpoint.pb.h"
#include "sluice/v1/scheduler.pb.h"
#include "sluice/v1/state.pb.h"

namespace sluice {

// One stream from a node; the shell numbers them from 1 and never uses a number twice.
using SessionId = uint64_t;

// One life of one process.
struct NodeKey {
  std::string name;
  uint64_t incarnation = 0;
  auto operator<=>(const NodeKey&) const = default;
};
inline NodeKey KeyOf(const v1::NodeId& node) { return {node.name(), node.incarnation()}; }

// A node that registered and is not taken for dead.
struct KnownNode {
  v1::Register info;
  SessionId session = 0;       // 0: its stream broke (servers only, until their lease has run out)
  absl::Time heard;            // last sign of life
  std::set<std::string> jobs;  // that it may hold: from its registration and the plans sent to it
  uint64_t order = 0;          // of registration
};

// Shard files of one checkpoint as they are reported.
struct SnapshotState {
  std::map<uint32_t, v1::CheckpointFile> files;
  bool publishing = false;
  bool failed = false;
};

using CheckpointKey = std::pair<uint64_t, uint64_t>;  // timeline, version

struct JobEntry {
  v1::StoredJob row;

  // Follows from the spec.
  uint64_t parameters = 0;
  uint64_t chunk_elements = 0;
  std::vector<uint64_t> rank_bytes;  // RankBytes

  // Nodes of the present plan that died since it was published.
  std::set<NodeKey> lost;
  absl::Time trouble_since = absl::InfiniteFuture();  // first death that the present plan has not mended
  std::set<std::string> trouble;                      // who died, for the event

  // A transition under way: generation row.generation, between fence and plan.
  bool transition = false;
  std::set<NodeKey> waiting;  // fenced servers that have not reported
  std::set<NodeKey> fenced;
  std::map<NodeKey, v1::FenceReport> reports;

  // Of the present generation.
  std::set<uint32_t> final_shards;
  bool heard = false;  // a round record or a final shard came in this generation

  std::map<CheckpointKey, SnapshotState> snapshots;
  uint64_t ordered_version = 0;  // 0: none ordered from the servers in this life
  std::string order_failure;     // why the last order came to nothing
  uint64_t order_step = 2;       // rounds ahead; grows when a shard had passed the version

  uint64_t skipped = 0;  // rounds in a row, the newest of them `skipped_last`
  uint64_t skipped_last = 0;
  std::set<std::string> skip_causes;

  struct Pace {
    absl::Time at;
    double count = 0;                   // targets
    v1::RoundTime time;                 // mean
    std::vector<v1::RankTime> ranks{};  // by contributor
  };
  std::deque<Pace> pace;              // of the newest rounds, as their records came
  std::set<std::string> accusations;  // told already, of this generation

  const v1::Plan& plan() const { return row.status().plan(); }
  const v1::JobSpec& spec() const { return row.status().spec(); }
  const std::string& id() const { return row.status().job_id(); }
  v1::JobState state() const { return row.status().state(); }
  bool started() const { return row.status().has_plan(); }
  bool ended() const { return state() == v1::SUCCEEDED || state() == v1::FAILED || state() == v1::CANCELLED; }
};

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_SCHEDULER_CORE_STATE_H_
