#include "scheduler/placement.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/mesh.h"
#include "common/wire_format.h"

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

// Workers by host, each host's in the order of their names; how a mesh is dealt to them (see placement.h).
class Hosts {
 public:
  explicit Hosts(std::vector<WorkerSlot> workers) {
    std::sort(workers.begin(), workers.end(), HostOrder);
    for (auto at = workers.rbegin(); at != workers.rend(); ++at) free_[at->host_id].push_back(std::move(*at));
  }

  // The host that has at least `n` workers left: the one with the fewest of them, or the most; null: none.
  const std::string* Least(size_t n) const {
    return Best(n, [](size_t a, size_t b) { return a < b; });
  }
  const std::string* Most(size_t n) const {
    return Best(n, [](size_t a, size_t b) { return a > b; });
  }
  bool Has(const std::string& host, size_t n) const {
    const auto found = free_.find(host);
    return found != free_.end() && found->second.size() >= n;
  }
  // From the host up to `n` workers to the end of `to`.
  void Take(const std::string& host, size_t n, std::vector<WorkerSlot>* to) {
    std::vector<WorkerSlot>& free = free_.at(host);
    for (; n > 0 && !free.empty(); --n) {
      to->push_back(std::move(free.back()));
      free.pop_back();
    }
  }

 private:
  template <typename Better>
  const std::string* Best(size_t n, Better better) const {
    const std::string* best = nullptr;
    for (const auto& [host, free] : free_) {
      if (free.size() >= n && (best == nullptr || better(free.size(), free_.at(*best).size()))) best = &host;
    }
    return best;
  }

  std::map<std::string, std::vector<WorkerSlot>> free_;  // the next one to be taken last
};

// At least as many workers as ranks.
std::vector<WorkerSlot> DealMesh(const Mesh& mesh, std::vector<WorkerSlot> workers) {
  Hosts hosts(std::move(workers));
  std::vector<WorkerSlot> gang;
  const size_t replica = mesh.ranks_of_replica();
  uint32_t whole = 0;
  for (const std::string* host; whole < mesh.data && (host = hosts.Least(replica)) != nullptr; ++whole) {
    hosts.Take(*host, replica, &gang);
  }
  for (uint32_t d = whole; d < mesh.data; ++d) {
    std::string near;
    for (uint32_t stage = 0; stage < mesh.pipeline; ++stage) {
      if (!near.empty() && hosts.Has(near, mesh.tensor)) {
        hosts.Take(near, mesh.tensor, &gang);
        continue;
      }
      const size_t end = gang.size() + mesh.tensor;
      while (gang.size() < end) {
        const std::string* host = hosts.Most(end - gang.size());
        if (host == nullptr) host = hosts.Most(1);  // no host has room for what is left of the stage
        near = *host;
        hosts.Take(near, end - gang.size(), &gang);
      }
    }
  }
  return gang;
}

uint64_t LimitOf(const WorkerSlot& worker) { return worker.memory_limit == 0 ? UINT64_MAX : worker.memory_limit; }

// The ranks of the gang and what each holds, most first.
std::vector<std::pair<uint64_t, uint32_t>> ByBytes(const Mesh& mesh, const std::vector<uint64_t>& bytes) {
  std::vector<std::pair<uint64_t, uint32_t>> ranks;
  for (uint32_t rank = 0; rank < mesh.ranks(); ++rank) ranks.emplace_back(bytes[rank % bytes.size()], rank);
  std::sort(ranks.begin(), ranks.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  return ranks;
}

// Workers that hold the most before others.
void SortByLimit(std::vector<WorkerSlot>& workers) {
  std::sort(workers.begin(), workers.end(), [](const WorkerSlot& a, const WorkerSlot& b) {
    return LimitOf(a) != LimitOf(b) ? LimitOf(a) > LimitOf(b) : HostOrder(a, b);
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
  const Mesh mesh = MeshOf(parallel);
  return uint64_t{mesh.data} * mesh.pipeline * mesh.tensor;
}

uint64_t BytesPerParameter(const v1::JobSpec& spec) {
  return 4 * (2 + OptimizerSlots(spec.optimizer()).size() + (NeedsVerdict(spec) ? 1 : 0));
}

std::vector<uint64_t> RankBytes(const v1::JobSpec& spec) {
  const auto space = MakeParameterSpace(spec.model());
  if (!space.ok()) return {};
  std::vector<uint64_t> bytes = ViewElements(spec.model(), *space, MeshOf(spec.parallel()));
  for (uint64_t& rank : bytes) rank *= ErrorFeedback(spec) ? 12 : 8;
  return bytes;
}

std::string RankBytesText(const v1::JobSpec& spec) {
  return absl::StrCat("parameter 4 + gradient 4", ErrorFeedback(spec) ? " + error feedback 4" : "");
}

uint64_t RanksHeld(const v1::ParallelSpec& parallel, const std::vector<uint64_t>& bytes,
                   const std::vector<WorkerSlot>& workers) {
  const Mesh mesh = MeshOf(parallel);
  if (bytes.empty()) return std::min<uint64_t>(mesh.ranks(), workers.size());
  std::vector<WorkerSlot> by_limit = workers;
  SortByLimit(by_limit);
  std::reverse(by_limit.begin(), by_limit.end());
  // The smallest rank to the worker with the least memory that holds it, and so on.
  auto ranks = ByBytes(mesh, bytes);
  uint64_t held = 0;
  for (const WorkerSlot& worker : by_limit) {
    if (ranks.empty()) break;
    if (!Holds(worker, ranks.back().first)) continue;
    ranks.pop_back();
    ++held;
  }
  return held;
}

std::string BytesPerParameterText(const v1::JobSpec& spec) {
  std::string text = "value 4 + previous value 4";
  for (const std::string& slot : OptimizerSlots(spec.optimizer())) absl::StrAppend(&text, " + ", slot, " 4");
  if (NeedsVerdict(spec)) absl::StrAppend(&text, " + sums 4");
  return text;
}

uint64_t ShardElements(const ChunkTable& table, uint32_t shard) {
  uint64_t elements = 0;
  for (const uint64_t chunk : table.chunks_of(shard)) elements += table.range(chunk).size();
  return elements;
}

namespace {

// The gang where all workers of `idle` hold any rank.
std::vector<WorkerSlot> AnyGang(const Mesh& mesh, std::vector<WorkerSlot> idle) {
  const uint64_t gang = mesh.ranks();
  SortForGang(idle, gang);
  if (mesh.ranks_of_replica() == 1) {
    idle.resize(gang);
    SortByHost(idle);
    return idle;
  }
  const std::string profile = idle[0].numeric_profile;
  const auto others = std::find_if(idle.begin(), idle.end(),
                                   [&](const WorkerSlot& worker) { return worker.numeric_profile != profile; });
  const auto of_profile = static_cast<uint64_t>(others - idle.begin());
  idle.resize(std::max(gang, of_profile));  // all of the profile to choose hosts from, or a mixture
  return DealMesh(mesh, std::move(idle));
}

}  // namespace

absl::StatusOr<std::vector<v1::Rank>> PlaceRanks(const v1::ParallelSpec& parallel, std::vector<WorkerSlot> idle,
                                                 const std::vector<uint64_t>& bytes) {
  const Mesh mesh = MeshOf(parallel);
  const uint64_t gang = GangSize(parallel);
  if (idle.size() < gang) {
    return absl::ResourceExhaustedError(absl::StrCat("needs ", gang, " workers, ", idle.size(), " are idle"));
  }
  const uint64_t most = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  std::vector<WorkerSlot> roomy;
  std::copy_if(idle.begin(), idle.end(), std::back_inserter(roomy),
               [&](const WorkerSlot& worker) { return Holds(worker, most); });
  std::vector<WorkerSlot> placed;
  if (roomy.size() >= gang) {
    placed = AnyGang(mesh, std::move(roomy));
  } else {
    // The k-th largest rank to the worker with the k-th most memory: if that does not do, nothing does.
    SortByLimit(idle);
    placed.resize(gang);
    const auto ranks = ByBytes(mesh, bytes);
    for (uint64_t k = 0; k < gang; ++k) {
      if (!Holds(idle[k], ranks[k].first)) {
        const uint64_t held = RanksHeld(parallel, bytes, idle);
        return absl::ResourceExhaustedError(absl::StrCat("of ", gang, " ranks, the largest of ", most, " bytes, ", held,
                                                         " find an idle worker whose --memory_limit holds them"));
      }
      placed[ranks[k].second] = std::move(idle[k]);
    }
  }
  std::vector<v1::Rank> ranks;
  for (uint32_t i = 0; i < gang; ++i) {
    v1::Rank& rank = ranks.emplace_back();
    const Mesh::Place place = mesh.place(i);
    rank.set_tensor(place.tensor);
    rank.set_pipeline(place.stage);
    rank.set_data(place.data);
    Assign(placed[i], &rank);
  }
  return ranks;
}

void Assign(const WorkerSlot& worker, v1::Rank* rank) {
  *rank->mutable_node() = worker.node;
  rank->set_address(worker.address);
  rank->set_numeric_profile(worker.numeric_profile);
  rank->set_host_id(worker.sums_on_host ? worker.host_id : std::string());
}

int ChooseReplacement(const Vacancy& vacancy, const std::vector<WorkerSlot>& idle) {
  const auto distance = [&](const WorkerSlot& worker) {
    const auto host = worker.host_id.empty() ? vacancy.hosts.end()
                                             : std::find(vacancy.hosts.begin(), vacancy.hosts.end(), worker.host_id);
    return std::make_tuple(worker.numeric_profile != vacancy.numeric_profile, host - vacancy.hosts.begin());
  };
  int best = -1;
  for (size_t i = 0; i < idle.size(); ++i) {
    if (!Holds(idle[i], vacancy.bytes)) continue;
    if (idle[i].numeric_profile != vacancy.numeric_profile && !vacancy.allow_other_profile) continue;
    if (best < 0 || distance(idle[i]) < distance(idle[static_cast<size_t>(best)])) best = static_cast<int>(i);
  }
  return best;
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
