#include "scheduler/placement.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"

namespace sluice {
namespace {

bool HostOrder(const WorkerSlot& a, const WorkerSlot& b) {
  return std::make_tuple(a.host_id, a.node.name(), a.node.incarnation()) <
         std::make_tuple(b.host_id, b.node.name(), b.node.incarnation());
}

// Workers of the numeric profile that most of them have first, so that a gang is of one profile where it can be.
void SortForGang(std::vector<WorkerSlot>& idle, uint64_t gang) {
  std::map<std::string, uint64_t> count;
  for (const WorkerSlot& worker : idle) ++count[worker.numeric_profile];
  const auto rank = [&](const WorkerSlot& worker) {
    const uint64_t n = count.at(worker.numeric_profile);
    // Profiles that hold the whole gang come first, the scarcest of them in front: the others stay whole.
    return std::make_tuple(n < gang, n < gang ? UINT64_MAX - n : n, worker.numeric_profile);
  };
  std::sort(idle.begin(), idle.end(), [&](const WorkerSlot& a, const WorkerSlot& b) {
    const auto ra = rank(a), rb = rank(b);
    return ra != rb ? ra < rb : HostOrder(a, b);
  });
}

// Next to each other what is on one host: large aligned groups of ranks first.
void SortByHost(std::vector<WorkerSlot>& gang) {
  std::map<std::string, uint64_t> count;
  for (const WorkerSlot& worker : gang) ++count[worker.host_id];
  const auto order = [&](const WorkerSlot& worker) {
    const uint64_t n = count.at(worker.host_id);
    return std::make_tuple(UINT64_MAX - (n & (~n + 1)), UINT64_MAX - n);
  };
  std::sort(gang.begin(), gang.end(), [&](const WorkerSlot& a, const WorkerSlot& b) {
    const auto oa = order(a), ob = order(b);
    return oa != ob ? oa < ob : HostOrder(a, b);
  });
}

struct Load {
  const ServerSlot* server;
  uint64_t bytes = 0;  // of this job
};

bool Fits(const Load& load, uint64_t more) {
  const ServerSlot& s = *load.server;
  return s.memory_limit == 0 || (s.memory_used <= s.memory_limit && load.bytes <= s.memory_limit - s.memory_used &&
                                 more <= s.memory_limit - s.memory_used - load.bytes);
}

}  // namespace

uint64_t GangSize(const v1::ParallelSpec& parallel) {
  return uint64_t{std::max(1u, parallel.data())} * std::max(1u, parallel.pipeline()) * std::max(1u, parallel.tensor());
}

uint64_t BytesPerParameter(const v1::JobSpec& spec) {
  return 4 * (2 + OptimizerSlots(spec.optimizer()).size() + (NeedsVerdict(spec) ? 1 : 0));
}

std::string BytesPerParameterText(const v1::JobSpec& spec) {
  std::string text = "value 4 + previous value 4";
  for (const std::string& slot : OptimizerSlots(spec.optimizer())) absl::StrAppend(&text, " + ", slot, " 4");
  if (NeedsVerdict(spec)) absl::StrAppend(&text, " + sums 4");
  return text;
}

uint64_t ShardElements(const ChunkTable& table, uint32_t shard) {
  const uint64_t chunks = table.chunks_of(shard);
  if (chunks == 0) return 0;
  const uint64_t full = table.range(0).size();  // of every chunk but the space's last
  const uint64_t last = shard + (chunks - 1) * table.shards();
  return (chunks - 1) * full + table.range(last).size();
}

absl::StatusOr<std::vector<v1::Rank>> PlaceRanks(const v1::ParallelSpec& parallel, std::vector<WorkerSlot> idle) {
  const uint64_t gang = GangSize(parallel);
  if (idle.size() < gang) {
    return absl::ResourceExhaustedError(absl::StrCat("needs ", gang, " workers, ", idle.size(), " are idle"));
  }
  SortForGang(idle, gang);
  idle.resize(gang);
  SortByHost(idle);
  std::vector<v1::Rank> ranks;
  const uint32_t stages = std::max(1u, parallel.pipeline()), tensor = std::max(1u, parallel.tensor());
  for (uint64_t i = 0; i < gang; ++i) {
    v1::Rank& rank = ranks.emplace_back();
    rank.set_tensor(static_cast<uint32_t>(i % tensor));
    rank.set_pipeline(static_cast<uint32_t>(i / tensor % stages));
    rank.set_data(static_cast<uint32_t>(i / tensor / stages));
    Assign(idle[i], &rank);
  }
  return ranks;
}

void Assign(const WorkerSlot& worker, v1::Rank* rank) {
  *rank->mutable_node() = worker.node;
  rank->set_address(worker.address);
  rank->set_numeric_profile(worker.numeric_profile);
  rank->set_host_id(worker.sums_on_host ? worker.host_id : std::string());
}

int ChooseReplacement(const std::string& numeric_profile, bool allow_other_profile,
                      const std::vector<WorkerSlot>& idle) {
  for (size_t i = 0; i < idle.size(); ++i) {
    if (idle[i].numeric_profile == numeric_profile) return static_cast<int>(i);
  }
  return allow_other_profile && !idle.empty() ? 0 : -1;
}

absl::StatusOr<std::vector<v1::Chain>> PlaceShards(const ChunkTable& table, uint64_t bytes_per_parameter,
                                                   const std::vector<ServerSlot>& servers, uint64_t generation) {
  if (servers.empty()) return absl::UnavailableError("there is no server");
  std::vector<Load> loads;
  for (const ServerSlot& server : servers) loads.push_back({&server});
  // Larger shards first, so that the small ones even out what is left.
  std::vector<std::pair<uint64_t, uint32_t>> order;  // (bytes, shard)
  for (uint32_t shard = 0; shard < table.shards(); ++shard) {
    order.emplace_back(ShardElements(table, shard) * bytes_per_parameter, shard);
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  std::vector<v1::Chain> chains(table.shards());
  for (const auto& [bytes, shard] : order) {
    Load* best = nullptr;
    for (Load& load : loads) {
      if (!Fits(load, bytes)) continue;
      const auto key = [](const Load& l) {
        return std::make_tuple(l.bytes, l.server->memory_used, l.server->node.name(), l.server->node.incarnation());
      };
      if (best == nullptr || key(load) < key(*best)) best = &load;
    }
    if (best == nullptr) {
      std::string there;
      for (const Load& load : loads) {
        absl::StrAppend(&there, there.empty() ? "" : ", ", load.server->node.name(), " ",
                        load.server->memory_limit - std::min(load.server->memory_limit, load.server->memory_used),
                        " of ", load.server->memory_limit);
      }
      return absl::ResourceExhaustedError(
          absl::StrCat("needs ", table.parameters(), " parameters x ", bytes_per_parameter,
                       " bytes = ", table.parameters() * bytes_per_parameter, " bytes on servers in ", table.shards(),
                       " shards; free bytes: ", there, "; start more servers or raise their --memory_limit"));
    }
    best->bytes += bytes;
    v1::Member* member = chains[shard].add_members();
    *member->mutable_node() = best->server->node;
    member->set_address(best->server->address);
    member->set_since(generation);
    member->set_host_id(best->server->host_id);
  }
  return chains;
}

}  // namespace sluice
