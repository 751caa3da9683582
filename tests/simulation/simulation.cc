#include "tests/simulation/simulation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "tests/simulation/sim_scheduler.h"
#include "tests/simulation/sim_server.h"
#include "tests/simulation/sim_worker.h"

namespace sluice {
namespace {

constexpr uint64_t kMaxEvents = 60000;

}  // namespace

uint64_t InitialValue(uint64_t chunk) { return Mix(chunk, 1); }

SimConfig SimConfig::Draw(uint64_t seed) {
  std::mt19937_64 rng(seed * 7919 + 1);
  auto below = [&rng](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(rng); };
  SimConfig c;
  c.seed = seed;
  c.replicas = 1 + below(4);
  c.servers = 1 + below(4);
  c.standbys = below(3);
  v1::JobSpec& spec = c.spec;
  spec.set_name("sim");
  spec.mutable_model()->mutable_mlp()->set_inputs(1 + below(5));
  spec.mutable_model()->mutable_mlp()->set_classes(2 + below(2));
  spec.mutable_data()->mutable_idx()->set_images("images");
  spec.mutable_data()->mutable_idx()->set_labels("labels");
  spec.mutable_train()->set_rounds(2 + below(5));
  spec.mutable_train()->set_batch(16);
  spec.mutable_train()->set_eval_every(1 + below(4));
  spec.mutable_optimizer()->mutable_sgd()->set_learning_rate(.1);
  if (below(3) > 0) {
    spec.mutable_optimizer()->set_clip_norm(.5);
  } else {
    spec.mutable_train()->set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  }
  spec.mutable_parallel()->set_data(c.replicas);
  spec.mutable_parallel()->set_chunk_elements(1 + below(6));
  spec.mutable_checkpoint()->set_every_rounds(1 + below(3));
  FillDefaults(&spec);
  c.faults = below(20) == 0 ? 0 : 1 + below(6);
  for (uint64_t i = below(3); i > 0; --i) c.nonfinite.insert({below(spec.train().rounds()), below(c.replicas)});
  c.workers_per_host = 1 + Mix(seed, 91) % 5;
  c.server_on_host = Mix(seed, 92) % 3 == 0;
  if (Mix(seed, 93) % 8 == 0) c.shares_nothing = absl::StrCat("worker-", Mix(seed, 94) % c.replicas);
  spec.mutable_transfer()->set_host_sum(Mix(seed, 95) % 3 == 0 ? v1::TransferSpec::ON : v1::TransferSpec::AUTO);
  if (below(3) > 0) c.hold_bytes = 4 * below(12);  // room for next to nothing
  return c;
}

std::string SimConfig::HostOf(const std::string& node) const {
  const size_t number = node.rfind('-') + 1;
  if (node.starts_with("worker-")) return absl::StrCat("host-", std::stoul(node.substr(number)) / workers_per_host);
  return server_on_host && node == "server-0" ? "host-0" : node;
}

uint64_t TreeHash(uint32_t contributors, const std::map<uint32_t, uint64_t>& hashes) {
  std::vector<std::optional<uint64_t>> level(contributors);
  for (const auto& [contributor, hash] : hashes) level[contributor] = hash;
  while (level.size() > 1) {
    std::vector<std::optional<uint64_t>> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      const std::optional<uint64_t> a = level[i], b = i + 1 < level.size() ? level[i + 1] : std::nullopt;
      next.push_back(a && b ? Mix(*a, *b) : a ? a : b);
    }
    level.swap(next);
  }
  return level[0].value_or(11);
}

SimConfig SimConfig::DrawAsync(uint64_t seed) {
  SimConfig c = Draw(seed);
  v1::TrainSpec& train = *c.spec.mutable_train();
  train.set_mode(v1::TrainSpec::ASYNC);
  c.spec.mutable_transfer()->set_host_sum(v1::TransferSpec::AUTO);
  train.set_nonfinite(v1::TrainSpec::SKIP_CHUNK);
  train.set_batch(static_cast<uint32_t>(1 + Mix(seed, 77) % 9));
  c.spec.mutable_optimizer()->set_clip_norm(Mix(seed, 78) % 3 == 0 ? .5 : 0);
  FillDefaults(&c.spec);
  std::set<std::pair<uint64_t, uint32_t>> nonfinite;
  for (const auto& [round, contributor] : c.nonfinite) nonfinite.insert({round, std::min(contributor, 1u)});
  c.nonfinite = nonfinite;
  return c;
}

Cluster::Cluster(const SimConfig& config, const ProtocolRules& rules, const SimResult* reference, bool trace)
    : world(reference == nullptr ? config.seed ^ 0x5EED : config.seed, trace),
      config(config),
      rules(rules),
      reference(reference) {}

Cluster::~Cluster() {
  for (const std::weak_ptr<Link>& weak : links) {
    if (const std::shared_ptr<Link> link = weak.lock()) link->ForgetHandlers();
  }
}

void Cluster::Fail(const std::string& what) { throw Violation{what}; }

// --------------------------------------------------------------------------------------------------------- nodes

std::shared_ptr<Link> Cluster::Connect(LifeRef a, LifeRef b) {
  auto link = std::make_shared<Link>(&world, std::move(a), std::move(b));
  std::erase_if(links, [](const std::weak_ptr<Link>& l) { return l.expired(); });
  links.push_back(link);
  return link;
}

SimNode* Cluster::FindLive(const v1::NodeId& id) {
  auto it = nodes.find(id.name());
  if (it == nodes.end() || it->second.incarnation != id.incarnation() || !it->second.life->up) return nullptr;
  return &it->second;
}

void Cluster::Start(const std::string& name, bool server) {
  SimNode& node = nodes[name];
  if (node.life != nullptr && node.life->up) return;
  node.name = name;
  node.server = server;
  node.incarnation = absl::ToUnixMicros(world.now()) + 1;
  node.life = std::make_shared<Life>();
  v1::NodeId id;
  id.set_name(name);
  id.set_incarnation(node.incarnation);
  node.as_server = server ? std::make_shared<SimServer>(this, id, node.life) : nullptr;
  node.as_worker = server ? nullptr : std::make_shared<SimWorker>(this, id, node.life);
  world.Log("START " + name);
  OpenSession(name);
  // A heartbeat every third of the lease, for as long as it lives.
  auto beat = std::make_shared<std::function<void()>>();
  *beat = [this, name, life = node.life, weak = std::weak_ptr<std::function<void()>>(beat)] {
    v1::NodeMessage message;
    message.mutable_heartbeat();
    SendToScheduler(nodes[name], message);
    if (auto again = weak.lock()) world.After(absl::Milliseconds(40), life, [again] { (*again)(); });
  };
  world.After(absl::Milliseconds(40), node.life, [beat] { (*beat)(); });
}

void Cluster::OpenSession(const std::string& name) {
  SimNode& node = nodes[name];
  node.session = nullptr;
  world.After(world.Delay(), node.life, [this, name, life = node.life] {
    SimNode& n = nodes[name];
    if (scheduler_life == nullptr || !scheduler_life->up) {
      world.After(absl::Milliseconds(20), life, [this, name] { OpenSession(name); });
      return;
    }
    std::shared_ptr<Link> link = Connect(scheduler_life, life);  // a: scheduler, b: node
    n.session = link;
    auto to_node = [server = n.as_server, worker = n.as_worker](const v1::SchedulerMessage& m) {
      if (server != nullptr) server->OnSchedulerMessage(m);
      if (worker != nullptr) worker->OnSchedulerMessage(m);
    };
    auto session = std::make_shared<SessionId>(0);
    link->on_b_closed = [this, name, link] {
      if (nodes[name].session == link) OpenSession(name);
    };
    link->on_a_closed = [s = scheduler, session] {
      if (*session != 0) s->OnClosed(*session);
    };
    v1::NodeMessage message;
    *message.mutable_register_() = n.server ? n.as_server->MakeRegister() : n.as_worker->MakeRegister();
    link->ToA([s = scheduler, session, link, to_node, message] {
      *session = s->AddSession(link, to_node);
      s->OnMessage(*session, message);
    });
    session_numbers_[link.get()] = session;
  });
}

void Cluster::SendToScheduler(SimNode& node, const v1::NodeMessage& message) {
  if (node.session == nullptr) return;
  auto it = session_numbers_.find(node.session.get());
  if (it == session_numbers_.end()) return;
  node.session->ToA([s = scheduler, session = it->second, message] {
    if (*session != 0) s->OnMessage(*session, message);
  });
}

void Cluster::Kill(const std::string& name) {
  SimNode& node = nodes[name];
  if (!node.life->up) return;
  world.Log("KILL " + name);
  node.life->up = false;
  node.session = nullptr;
  for (const std::weak_ptr<Link>& weak : links) {
    std::shared_ptr<Link> link = weak.lock();
    if (link != nullptr && (link->a() == node.life || link->b() == node.life))
      link->Break(/*graceful=*/world.Chance(.4));
  }
  world.After(absl::Milliseconds(5 + world.Random() * 150), nullptr,
              [this, name, server = node.server] { Start(name, server); });
}

void Cluster::StartScheduler() {
  world.Log("START scheduler");
  scheduler_life = std::make_shared<Life>();
  scheduler = std::make_shared<SimScheduler>(this, scheduler_life);
  scheduler->Restore();
}

void Cluster::KillScheduler() {
  if (!scheduler_life->up) return;
  world.Log("KILL scheduler");
  scheduler_life->up = false;
  for (const std::weak_ptr<Link>& weak : links) {
    std::shared_ptr<Link> link = weak.lock();
    if (link != nullptr && link->a() == scheduler_life) link->Break(/*graceful=*/world.Chance(.4));
  }
  world.After(absl::Milliseconds(5 + world.Random() * 150), nullptr, [this] { StartScheduler(); });
}

// -------------------------------------------------------------------------------------------------------- faults

std::vector<std::string> Cluster::Live(bool servers) const {
  std::vector<std::string> out;
  for (const auto& [name, node] : nodes) {
    if (node.server == servers && node.life->up) out.push_back(name);
  }
  return out;
}

void Cluster::PlanFaults() {
  const double span = 40 + 25.0 * config.spec.train().rounds();
  const double burst = world.Random() * span;
  for (int i = 0; i < config.faults; ++i) {
    const double at = world.Chance(.5) ? burst + world.Random() * 20 : world.Random() * span;
    world.After(absl::Milliseconds(at), nullptr, [this] { Fault(); });
  }
}

void Cluster::Fault() {
  if (finished) return;
  ++result.faults;
  // Faults love the middle of a recovery.
  if (config.faults > 1 && result.faults < 12 && world.Chance(.3)) {
    world.After(absl::Milliseconds(world.Random() * (world.Chance(.5) ? 15 : 150)), nullptr, [this] { Fault(); });
  }
  const std::vector<std::string> servers = Live(true), workers = Live(false);
  switch (world.Below(8)) {
    case 0:
    case 1:
      if (!workers.empty()) Kill(workers[world.Below(workers.size())]);
      break;
    case 2:
      if (!servers.empty()) Kill(servers[world.Below(servers.size())]);
      break;
    case 3:
      KillScheduler();
      break;
    case 4: {  // everything at once
      if (!world.Chance(.3)) break;
      for (const std::string& name : servers) Kill(name);
      for (const std::string& name : workers) Kill(name);
      KillScheduler();
      break;
    }
    case 5: {  // a connection breaks
      std::vector<std::shared_ptr<Link>> open;
      for (const std::weak_ptr<Link>& weak : links) {
        if (std::shared_ptr<Link> link = weak.lock(); link != nullptr && link->open()) open.push_back(link);
      }
      if (open.empty()) break;
      world.Log("BREAK");
      open[world.Below(open.size())]->Break(/*graceful=*/world.Chance(.3));
      break;
    }
    case 6: {  // silence, shorter or longer than the lease
      std::vector<std::shared_ptr<Link>> open;
      for (const std::weak_ptr<Link>& weak : links) {
        if (std::shared_ptr<Link> link = weak.lock(); link != nullptr && link->open()) open.push_back(link);
      }
      if (open.empty()) break;
      world.Log("SILENCE");
      open[world.Below(open.size())]->Freeze(world.now() + absl::Milliseconds(world.Random() * 300));
      break;
    }
    case 7: {  // a node is stopped for a while: all its connections are silent
      std::vector<std::string> all = servers;
      all.insert(all.end(), workers.begin(), workers.end());
      if (all.empty()) break;
      const std::string name = all[world.Below(all.size())];
      world.Log("STOP " + name);
      const absl::Time until = world.now() + absl::Milliseconds(world.Random() * 300);
      for (const std::weak_ptr<Link>& weak : links) {
        std::shared_ptr<Link> link = weak.lock();
        if (link != nullptr && (link->a() == nodes[name].life || link->b() == nodes[name].life)) link->Freeze(until);
      }
      break;
    }
  }
}

// ---------------------------------------------------------------------------------------------------- invariants

void Cluster::SawApply(const v1::NodeId& server, uint64_t timeline, uint64_t chunk, uint64_t version, uint64_t value) {
  if (reference != nullptr) {
    auto want = reference->values.find({chunk, version});
    if (want == reference->values.end() || want->second != value) {
      Fail(absl::StrCat("chunk ", chunk, " version ", version, " on ", server.name(), ": other bits than undisturbed"));
    }
  }
  result.values[{chunk, version}] = value;
  (void)timeline;
}

void Cluster::SawVerdict(uint64_t timeline, const v1::Verdict& verdict) {
  const auto [it, fresh] = verdicts_.try_emplace({timeline, verdict.round()}, verdict.SerializeAsString());
  if (!fresh && it->second != verdict.SerializeAsString())
    Fail(absl::StrCat("round ", verdict.round(), " has two verdicts"));
}

void Cluster::SawPlan(const v1::Plan& plan) {
  const auto [it, fresh] = plan_hashes_.try_emplace(plan.generation(), plan.hash());
  if (!fresh && it->second != plan.hash()) Fail(absl::StrCat("generation ", plan.generation(), " names two plans"));
  if (!fresh) return;
  if (plan.generation() < newest_plan_.generation())
    Fail(absl::StrCat("generation ", plan.generation(), " after a newer one"));
  ++result.generations;
  if (newest_plan_.generation() != 0 && plan.timeline() != newest_plan_.timeline()) ++result.rewinds;
  if (newest_plan_.generation() != 0 && plan.timeline() == newest_plan_.timeline() &&
      plan.start() < newest_plan_.start()) {
    Fail("start falls without a rewind");
  }
  newest_plan_ = plan;
  world.Log(absl::StrCat("PLAN generation ", plan.generation(), " timeline ", plan.timeline(), " start ", plan.start(),
                         plan.has_verdict() ? " with a verdict" : ""));
}

void Cluster::SawInstalled(uint64_t generation, uint64_t chunk, uint64_t version, uint64_t value) {
  // No worker holds a version that the servers of the plan lack (while nobody is in between two generations).
  if (generation != newest_plan_.generation()) return;
  const v1::Member& tail = newest_plan_.chains(chunk % newest_plan_.shards()).members(0);
  SimNode* node = FindLive(tail.node());
  if (node == nullptr || node->as_server->core().generation() != generation) return;
  if (!node->as_server->core().holds(chunk) || node->as_server->core().version(chunk) < version) {
    Fail(absl::StrCat("a worker holds chunk ", chunk, " version ", version, ", the server less"));
  }
  (void)value;
}

bool Cluster::LeaseFinite(uint64_t position) const {
  const uint64_t batch = config.spec.train().batch();
  return !config.nonfinite.contains({position / batch, position % batch == 0 ? 0 : 1});
}

uint64_t Cluster::ExpectedCount() const {
  const uint64_t batch = config.spec.train().batch();
  uint64_t count = 0;
  for (uint64_t r = 0; r < config.spec.train().rounds(); ++r) {
    for (uint32_t d = 0; d < config.replicas; ++d) {
      const Range part = ReplicaSlots(batch, d, config.replicas);
      const uint64_t position = r * batch + part.begin;
      count += part.size() > 0 && LeaseFinite(position) && LeaseCount(position) > 0;
    }
  }
  return count;
}

void Cluster::CheckCounts() {
  const uint64_t rounds = config.spec.train().rounds();
  for (auto at = storage.rbegin(); at != storage.rend(); ++at) {
    if (at->first.second != rounds || !at->second.published) continue;
    for (const auto& [chunk, value] : at->second.values) {
      const PositionSet all(Range{0, rounds * config.spec.train().batch()});
      if (!(at->second.seen.at(chunk) == all)) Fail(absl::StrCat("chunk ", chunk, " has not seen every position"));
      if (value == ExpectedCount()) continue;
      Fail(absl::StrCat("chunk ", chunk, " counts ", value, " contributions, expected ", ExpectedCount()));
    }
    return;
  }
  Fail("ended without a checkpoint of its last version");
}

void Cluster::CheckVersions() {
  if (async()) return;
  uint64_t low = UINT64_MAX, high = 0;
  for (auto& [name, node] : nodes) {
    if (!node.server || !node.life->up) continue;
    ShardCore& core = node.as_server->core();
    if (core.generation() != newest_plan_.generation() || core.layout() == nullptr) continue;
    for (uint64_t c = 0; c < core.layout()->table().chunks(); ++c) {
      if (!core.holds(c)) continue;
      low = std::min(low, core.version(c));
      high = std::max(high, core.version(c));
    }
  }
  if (low != UINT64_MAX && high > low + 1) Fail(absl::StrCat("versions ", low, " and ", high, " at once"));
}

void Cluster::CheckCheckpoint(const v1::CheckpointManifest& manifest, const SimCheckpoint& checkpoint) {
  for (uint64_t c = 0; c < (manifest.parameters() + manifest.chunk_elements() - 1) / manifest.chunk_elements(); ++c) {
    auto it = checkpoint.values.find(c);
    if (it == checkpoint.values.end())
      Fail(absl::StrCat("checkpoint of version ", manifest.version(), " lacks chunk ", c));
    if (async()) {
      // The ledger of the chunk and its value are of one instant.
      const PositionSet& seen = checkpoint.seen.at(c);
      if (!(AppliedOf(checkpoint.cuts.at(c)) == seen) ||
          seen.size() / config.spec.train().batch() != manifest.version()) {
        Fail(absl::StrCat("checkpoint of version ", manifest.version(), ": chunk ", c, " and its ledger differ"));
      }
      continue;
    }
    auto applied = result.values.find({c, manifest.version()});
    if (applied == result.values.end() || applied->second != it->second) Fail("a checkpoint is not a cut of the run");
  }
}

// ----------------------------------------------------------------------------------------------------------- run

SimResult Cluster::Run() {
  try {
    StartScheduler();
    for (uint32_t i = 0; i < config.servers; ++i) Start(absl::StrCat("server-", i), true);
    for (uint32_t i = 0; i < config.replicas + config.standbys; ++i) Start(absl::StrCat("worker-", i), false);
    scheduler->Submit(config.spec);
    if (reference != nullptr) PlanFaults();
    while (!finished && world.Step()) {
      CheckVersions();
      if (world.events() > kMaxEvents) {
        std::string who;
        for (auto& [name, node] : nodes) {
          if (!node.life->up) continue;
          absl::StrAppend(&who, "\n  ", name, ": ",
                          node.server ? node.as_server->core().Describe() : node.as_worker->Describe());
        }
        Fail(absl::StrCat("no end in sight: state ", scheduler->state(), " ", scheduler->message(), who));
      }
    }
    if (scheduler->state() != v1::SUCCEEDED) Fail("the job failed: " + scheduler->message());
    if (async()) {
      CheckCounts();
    } else if (reference != nullptr) {
      for (const auto& [key, value] : reference->values) {
        if (key.second == config.spec.train().rounds() && result.values.count(key) == 0)
          Fail("ended without its last version");
      }
    }
  } catch (const Violation& v) {
    result.failure = v.what;
    world.Log("VIOLATION " + v.what);
  }
  result.events = world.events();
  return result;
}

SimResult RunSimulation(const SimConfig& config, const ProtocolRules& rules, const SimResult* reference, bool trace) {
  return Cluster(config, rules, reference, trace).Run();
}

SimResult RunSeed(uint64_t seed, const ProtocolRules& rules, bool trace, bool async) {
  const SimConfig config = async ? SimConfig::DrawAsync(seed) : SimConfig::Draw(seed);
  SimConfig alone = config;
  alone.spec.mutable_transfer()->set_host_sum(v1::TransferSpec::OFF);
  SimResult undisturbed = RunSimulation(alone, ProtocolRules(), nullptr, false);
  if (!undisturbed.failure.empty()) {
    undisturbed.failure = "undisturbed: " + undisturbed.failure;
    return undisturbed;
  }
  return RunSimulation(config, rules, &undisturbed, trace);
}

}  // namespace sluice
