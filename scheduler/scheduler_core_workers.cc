// Which workers the ranks of a job need, get and wait for.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/mesh.h"
#include "common/mesh_rules.h"
#include "common/wire_format.h"
#include "scheduler/scheduler_core.h"

namespace sluice {
namespace {

std::string Count(uint64_t n, const char* what) { return absl::StrCat(n, " ", what, n == 1 ? "" : "s"); }

WorkerSlot SlotOf(const KnownNode& node) {
  return {node.info.node(),         node.info.address(),      node.info.host_id(),     node.info.numeric_profile(),
          node.info.sums_on_host(), node.info.memory_limit(), node.info.serves_peers()};
}

// Ranks of a replica send each other mail.
bool Takes(const v1::JobSpec& spec, const v1::Register& worker) {
  return MeshOf(spec.parallel()).ranks_of_replica() == 1 || worker.serves_peers();
}

uint64_t Most(const std::vector<uint64_t>& bytes) {
  return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
}

// "23 parameters x 8 bytes (parameter 4 + gradient 4) = 184 bytes, activations not counted".
std::string Arithmetic(const v1::JobSpec& spec, uint64_t bytes) {
  const uint64_t each = ErrorFeedback(spec) ? 12 : 8;
  return absl::StrCat(bytes / each, " parameters x ", each, " bytes (", RankBytesText(spec), ") = ", bytes,
                      " bytes, activations not counted");
}

// The next larger degree under which no rank holds more than `limit` bytes; 0: none, or none among the nearest.
uint32_t LargerDegree(v1::JobSpec spec, void (v1::ParallelSpec::*set)(uint32_t), uint32_t degree, uint64_t limit) {
  for (uint32_t value = degree + 1; value <= degree + 256; ++value) {
    (spec.mutable_parallel()->*set)(value);
    if (!CheckMesh(spec.model(), MeshOf(spec.parallel())).ok()) continue;
    if (Most(RankBytes(spec)) <= limit) return value;
  }
  return 0;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ who is idle
std::vector<const KnownNode*> SchedulerCore::IdleWorkers() const {
  std::set<NodeKey> busy;
  for (const auto& [sequence, job] : jobs_) {
    if (!job.started() || job.ended()) continue;
    for (const v1::Rank& rank : job.plan().ranks()) {
      if (const NodeKey key = KeyOf(rank.node()); job.lost.count(key) == 0) busy.insert(key);
    }
  }
  std::vector<const KnownNode*> idle;
  for (const auto& [key, node] : nodes_) {
    if (node.info.role() == v1::WORKER && node.session != 0 && busy.count(key) == 0) idle.push_back(&node);
  }
  std::sort(idle.begin(), idle.end(), [](const auto* a, const auto* b) { return a->order < b->order; });
  return idle;
}

std::vector<WorkerSlot> SchedulerCore::IdleWorkerSlots(const v1::JobSpec& spec) const {
  std::vector<WorkerSlot> slots;
  for (const KnownNode* node : IdleWorkers()) {
    if (Takes(spec, node->info)) slots.push_back(SlotOf(*node));
  }
  return slots;
}

std::vector<WorkerSlot> SchedulerCore::AllWorkerSlots(const v1::JobSpec& spec) const {
  std::vector<WorkerSlot> slots;
  for (const auto& [key, node] : nodes_) {
    if (node.info.role() == v1::WORKER && Takes(spec, node.info)) slots.push_back(SlotOf(node));
  }
  return slots;
}

void SchedulerCore::ClaimWorkers(const JobEntry& job) {
  for (auto& [sequence, other] : jobs_) {
    if (&other == &job || !other.started() || other.ended()) continue;
    bool changed = false;
    for (const v1::Rank& rank : other.plan().ranks()) {
      const bool taken = std::any_of(job.plan().ranks().begin(), job.plan().ranks().end(),
                                     [&](const v1::Rank& r) { return SameNode(r.node(), rank.node()); });
      if (!taken || std::any_of(other.row.lost().begin(), other.row.lost().end(),
                                [&](const v1::NodeId& node) { return SameNode(node, rank.node()); })) {
        continue;
      }
      *other.row.add_lost() = rank.node();
      changed = true;
    }
    if (changed) actions_->Persist(other.row);
  }
}

// --------------------------------------------------------------------------------------------------- what is needed
absl::Status SchedulerCore::CheckWorkerMemory(const v1::JobSpec& spec) const {
  const std::vector<WorkerSlot> workers = AllWorkerSlots(spec);
  const uint64_t need = Most(RankBytes(spec));
  uint64_t limit = 0;
  for (const WorkerSlot& worker : workers) {
    if (Holds(worker, need)) return absl::OkStatus();
    limit = std::max(limit, worker.memory_limit);
  }
  if (workers.empty()) return absl::OkStatus();
  const Mesh mesh = MeshOf(spec.parallel());
  const uint32_t tensor = LargerDegree(spec, &v1::ParallelSpec::set_tensor, mesh.tensor, limit);
  const uint32_t pipeline = tensor > 0 ? 0 : LargerDegree(spec, &v1::ParallelSpec::set_pipeline, mesh.pipeline, limit);
  const std::string what =
      absl::StrCat("with ", MeshText(mesh), " a rank holds up to ", Arithmetic(spec, need), "; the --memory_limit of ",
                   Count(workers.size(), "registered worker"), " is at most ", limit, " bytes; ");
  const std::string raise = "start workers with a larger --memory_limit";
  if (tensor > 0) {
    return absl::ResourceExhaustedError(absl::StrCat("parallel.tensor: found ", mesh.tensor, "; ", what,
                                                     "the nearest value allowed is ", tensor, ", or ", raise));
  }
  if (pipeline > 0) {
    return absl::ResourceExhaustedError(absl::StrCat("parallel.pipeline: found ", mesh.pipeline, "; ", what,
                                                     "the nearest value allowed is ", pipeline, ", or ", raise));
  }
  return absl::ResourceExhaustedError(absl::StrCat("model: ", what, raise, ", or take a smaller model"));
}

std::string SchedulerCore::WorkersLacking(const v1::JobSpec& spec) const {
  const std::string lacking = TooFewWorkers(spec.model(), MeshOf(spec.parallel()), AllWorkerSlots(spec).size());
  return lacking.empty() ? "" : absl::StrCat(lacking, "; the job waits in the queue until there are enough");
}

std::string SchedulerCore::WaitsForWorkers(const JobEntry& job, const std::vector<WorkerSlot>& idle,
                                           size_t servers) const {
  const Mesh mesh = MeshOf(job.spec().parallel());
  const bool several = mesh.ranks_of_replica() > 1;
  if (idle.size() < mesh.ranks() || servers == 0) {
    return absl::StrCat("waiting for ", Count(mesh.ranks(), "worker"), several ? ", " : "",
                        several ? MeshText(mesh) : "", " (", idle.size(), " idle of ",
                        AllWorkerSlots(job.spec()).size(), ") and 1 server (", servers, ")");
  }
  if (const uint64_t held = RanksHeld(job.spec().parallel(), job.rank_bytes, idle); held < mesh.ranks()) {
    return absl::StrCat("waiting for workers with a larger --memory_limit: a rank holds up to ",
                        Arithmetic(job.spec(), Most(job.rank_bytes)), "; ", held, " of ", Count(mesh.ranks(), "rank"),
                        " find one among ", Count(idle.size(), "idle worker"));
  }
  return "";
}

// ------------------------------------------------------------------------------------------------------ replacements
Vacancy SchedulerCore::VacancyOf(const JobEntry& job, uint32_t rank) const {
  Vacancy vacancy;
  const auto at = static_cast<int>(rank);
  vacancy.numeric_profile =
      at < job.row.numeric_profiles_size() ? job.row.numeric_profiles(at) : job.plan().ranks(at).numeric_profile();
  vacancy.allow_other_profile = !job.spec().has_allow_profile_change() || job.spec().allow_profile_change();
  if (!job.rank_bytes.empty()) vacancy.bytes = job.rank_bytes[rank % job.rank_bytes.size()];
  const auto add = [&](uint32_t neighbour) {
    const auto host = static_cast<int>(neighbour);
    if (host < job.row.hosts_size() && !job.row.hosts(host).empty()) vacancy.hosts.push_back(job.row.hosts(host));
  };
  add(rank);
  const Mesh mesh = MeshOf(job.spec().parallel());
  if (mesh.ranks_of_replica() == 1) return vacancy;
  const uint32_t stage = rank / mesh.tensor * mesh.tensor,
                 replica = rank / mesh.ranks_of_replica() * mesh.ranks_of_replica();
  for (uint32_t i = 0; i < mesh.tensor; ++i) add(stage + i);
  for (uint32_t i = 0; i < mesh.ranks_of_replica(); ++i) add(replica + i);
  return vacancy;
}

std::vector<v1::Rank> SchedulerCore::NextRanks(const JobEntry& job, bool* has_gap) const {
  *has_gap = false;
  std::vector<v1::Rank> ranks(job.plan().ranks().begin(), job.plan().ranks().end());
  // Who held a rank of this job before takes it again where it can: its data and model are open already.
  std::vector<WorkerSlot> idle, others;
  for (WorkerSlot& worker : IdleWorkerSlots(job.spec())) {
    (job.lost.count(KeyOf(worker.node)) > 0 ? idle : others).push_back(worker);
  }
  idle.insert(idle.end(), others.begin(), others.end());
  std::vector<bool> filled(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    const NodeKey key = KeyOf(ranks[i].node());
    // And the same one: with error feedback its residual belongs to that rank's samples.
    const auto back =
        std::find_if(idle.begin(), idle.end(), [&](const WorkerSlot& worker) { return KeyOf(worker.node) == key; });
    filled[i] = back != idle.end() || (job.lost.count(key) == 0 && Here(key));
    if (back != idle.end()) idle.erase(back);
  }
  // The largest first: who can hold it can hold the others too, so nobody takes a place that another one needs.
  std::vector<uint32_t> vacant;
  for (uint32_t i = 0; i < ranks.size(); ++i) {
    if (!filled[i]) vacant.push_back(i);
  }
  const auto bytes = [&](uint32_t i) { return job.rank_bytes.empty() ? 0 : job.rank_bytes[i % job.rank_bytes.size()]; };
  std::stable_sort(vacant.begin(), vacant.end(), [&](uint32_t a, uint32_t b) { return bytes(a) > bytes(b); });
  for (const uint32_t i : vacant) {
    const int chosen = ChooseReplacement(VacancyOf(job, i), idle);
    if (chosen < 0) {
      *has_gap = true;
      continue;
    }
    Assign(idle[static_cast<size_t>(chosen)], &ranks[i]);
    idle.erase(idle.begin() + chosen);
  }
  for (v1::Rank& rank : ranks) {
    const bool alone = std::any_of(job.row.push_alone().begin(), job.row.push_alone().end(),
                                   [&](const v1::NodeId& node) { return SameNode(node, rank.node()); });
    if (alone) rank.clear_host_id();
  }
  return ranks;
}

std::string SchedulerCore::GapText(const JobEntry& job, const std::vector<v1::Rank>& ranks) const {
  const Mesh mesh = MeshOf(job.spec().parallel());
  const std::vector<WorkerSlot> idle = IdleWorkerSlots(job.spec());
  size_t have = 0, small = 0;
  std::string missing, memory;
  for (uint32_t i = 0; i < ranks.size(); ++i) {
    const NodeKey key = KeyOf(ranks[i].node());
    if (job.lost.count(key) == 0 && Here(key)) {
      ++have;
      continue;
    }
    const Vacancy vacancy = VacancyOf(job, i);
    const auto lacks = static_cast<size_t>(std::count_if(
        idle.begin(), idle.end(), [&](const WorkerSlot& worker) { return !Holds(worker, vacancy.bytes); }));
    if (lacks > small) {
      small = lacks;
      memory = absl::StrCat("; ", Count(lacks, "idle worker"), " may hold less than the ", vacancy.bytes,
                            " bytes of rank ", i, " (--memory_limit)");
    }
    const Mesh::Place place = mesh.place(i);
    if (mesh.ranks_of_replica() > 1 && missing.empty()) {
      missing = absl::StrCat("; missing is rank ", i, ", replica ", place.data, ", stage ", place.stage, ", tensor ",
                             place.tensor);
    }
  }
  return absl::StrCat("waiting for a worker: has ", have, " of ", ranks.size(), missing, memory);
}

void SchedulerCore::NoteHosts(JobEntry& job) const {
  job.row.clear_hosts();
  for (const v1::Rank& rank : job.plan().ranks()) {
    const auto known = nodes_.find(KeyOf(rank.node()));
    job.row.add_hosts(known == nodes_.end() ? std::string() : known->second.info.host_id());
  }
}

}  // namespace sluice
