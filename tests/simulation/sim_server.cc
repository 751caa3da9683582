#include "tests/simulation/sim_server.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/version.h"

namespace sluice {
namespace {

uint64_t Bits(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return b;
}

}  // namespace

SimServer::SimServer(Cluster* cluster, v1::NodeId id, LifeRef life)
    : cluster_(cluster),
      id_(id),
      life_(std::move(life)),
      core_("sim-1", id, cluster->rules, this, std::make_shared<HoldBudget>(cluster->config.hold_bytes)) {}

void SimServer::OnSchedulerMessage(const v1::SchedulerMessage& message) {
  if (message.has_welcome()) {
    core_.OnSchedulerConnected();
    for (const v1::NodeMessage& done : done_) SendToScheduler(done);
  } else if (message.has_plan()) {
    absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(message.plan());
    if (!layout.ok()) cluster_->Fail(layout.status().ToString());
    std::vector<v1::ChunkCut> cuts;
    if (const v1::Plan& plan = (*layout)->plan(); plan.has_checkpoint()) {
      for (const auto& [chunk, cut] :
           cluster_->storage[{plan.checkpoint().timeline(), plan.checkpoint().version()}].cuts)
        cuts.push_back(cut);
    }
    core_.OnPlan(*layout, cuts);
    OpenHolderLink();
  } else if (message.has_fence()) {
    core_.OnFence(message.fence().generation());
  } else if (message.has_checkpoint()) {
    core_.OnCheckpointOrder(message.checkpoint());
  }
}

v1::Register SimServer::MakeRegister() const {
  v1::Register r;
  r.set_protocol_version(kProtocolVersion);
  r.set_role(v1::SERVER);
  *r.mutable_node() = id_;
  r.set_host_id(cluster_->config.HostOf(id_.name()));
  r.set_address(id_.name());
  if (core_.generation() > 0) {
    v1::JobGeneration* g = r.add_jobs();
    g->set_job_id("sim-1");
    g->set_generation(core_.generation());
  }
  return r;
}

// ------------------------------------------------------------------------------------------------------ streams

void SimServer::AddStream(StreamId id, const v1::StreamHello& hello, std::shared_ptr<Link> link, CommitSink commit,
                          LeaseSink lease, LaterSink later) {
  streams_[id] = {link, std::move(commit), std::move(lease), std::move(later)};
  link->on_b_closed = [self = shared_from_this(), id] {
    self->streams_.erase(id);
    self->core_.OnStreamClosed(id);
  };
  Handled(id, core_.OnHello(id, hello));
}

void SimServer::Handled(StreamId id, const absl::Status& status) {
  if (status.ok()) return;
  // Only a message of a generation that is over may be refused: workers send nothing outside the plan.
  if (status.code() != absl::StatusCode::kAborted && cluster_->rules.fencing && cluster_->rules.dedup &&
      cluster_->rules.kept_version && cluster_->rules.persist_first && cluster_->rules.verdict_carried) {
    auto it = streams_.find(id);
    if (it != streams_.end()) cluster_->Fail(absl::StrCat(id_.name(), " refused: ", status.ToString()));
  }
  CloseStream(id, status);
  core_.OnStreamClosed(id);
}

void SimServer::OnPush(StreamId id, const v1::ChunkHeader& header, uint64_t hash, bool finite) {
  if (!streams_.contains(id)) return;
  const uint64_t bytes = header.elements() * sizeof(float);
  Handled(id, core_.OnPush(id, header, std::make_shared<HashContribution>(hash, finite, bytes), bytes));
}

void SimServer::Decline(StreamId stream, uint64_t chunk, uint64_t round) {
  ++cluster_->result.declines;
  v1::Later later;
  later.add_declined()->set_chunk(chunk);
  later.mutable_declined(0)->set_round(round);
  if (auto it = streams_.find(stream); it != streams_.end()) it->second.later(later);
}

void SimServer::AskAgain(StreamId stream, uint64_t chunk, uint64_t round) {
  v1::Later later;
  later.add_again()->set_chunk(chunk);
  later.mutable_again(0)->set_round(round);
  if (auto it = streams_.find(stream); it != streams_.end()) it->second.later(later);
}

void SimServer::OnSubscribe(StreamId id, const v1::Subscribe& subscribe) {
  if (streams_.contains(id)) Handled(id, core_.OnSubscribe(id, subscribe));
}

void SimServer::OnReport(StreamId id, const v1::RoundReport& report) {
  if (streams_.contains(id)) Handled(id, core_.OnReport(id, report));
}

void SimServer::OnLeaseRequest(StreamId id, const v1::LeaseRequest& request) {
  if (streams_.contains(id)) Handled(id, core_.OnLeaseRequest(id, request));
}

void SimServer::CloseStream(StreamId id, const absl::Status&) {
  auto it = streams_.find(id);
  if (it == streams_.end()) return;
  it->second.link->Break(/*graceful=*/true);
  streams_.erase(it);
}

// --------------------------------------------------------------------------------------------------------- data

void SimServer::OnLane(uint64_t chunk, std::function<void(Data*)> work) {
  Data& data = data_[chunk];
  World& world = cluster_->world;
  data.busy_until = std::max(data.busy_until, world.now() + absl::Milliseconds(world.Random() * .5));
  world.After(data.busy_until - world.now(), life_,
              [self = shared_from_this(), chunk, work = std::move(work)] { work(&self->data_[chunk]); });
}

void SimServer::LoadChunk(const std::shared_ptr<const Layout>& layout, uint64_t chunk, uint64_t version) {
  const v1::Plan& plan = layout->plan();
  const bool async = layout->async();
  uint64_t value = async ? 0 : InitialValue(chunk);
  PositionSet seen;
  if (plan.has_checkpoint()) {
    const SimCheckpoint& c = cluster_->storage[{plan.checkpoint().timeline(), plan.checkpoint().version()}];
    if (!c.published) cluster_->Fail("a plan names a checkpoint that was not published");
    value = c.values.at(chunk);
    if (async) seen = c.seen.at(chunk);
  }
  OnLane(chunk, [version, value, seen](Data* d) {
    d->seen = seen;
    d->version = version;
    d->value = value;
    d->has_previous = false;
    d->sum.clear();
  });
}

void SimServer::DropChunk(uint64_t chunk) {
  OnLane(chunk, [](Data* d) { d->sum.clear(); });
}

void SimServer::AddContribution(uint64_t chunk, uint32_t contributor, uint32_t, ContributionRef value) {
  if (value == nullptr) return;
  OnLane(chunk, [contributor, value](Data* d) {
    d->sum.erase(contributor);  // without dedup it may be there
    d->sum.emplace(contributor, *static_cast<const HashContribution*>(value.get()));
  });
}

uint64_t SimServer::HashOf(const Data& data, uint32_t contributors) {
  std::map<uint32_t, uint64_t> hashes;
  for (const auto& [contributor, c] : data.sum) hashes[contributor] = c.hash;
  return TreeHash(contributors, hashes);
}

void SimServer::DiscardSum(uint64_t chunk) {
  OnLane(chunk, [](Data* d) { d->sum.clear(); });
}

void SimServer::FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) {
  OnLane(chunk, [this, chunk, generation, round, contributors = core_.layout()->contributors(chunk)](Data* d) {
    SumResult result;
    const uint64_t hash = HashOf(*d, contributors);
    for (const auto& [contributor, c] : d->sum) {
      if (c.finite) continue;
      result.finite = false;
      result.nonfinite_contributors.push_back(contributor);
    }
    const Range range = core_.layout()->table().range(chunk);
    v1::NormFragment& f = result.fragments.emplace_back();
    f.set_offset(range.begin);
    for (uint64_t i = 0; i < range.size(); ++i) f.add_values(static_cast<float>(Mix(hash, i) % 1000) / 1000);
    cluster_->world.After(cluster_->world.Delay(), life_,
                          [self = shared_from_this(), chunk, generation, round, result] {
                            self->core_.OnSum(chunk, generation, round, result);
                          });
  });
}

void SimServer::Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) {
  const uint64_t timeline = core_.layout()->plan().timeline();
  if (core_.layout()->plan().discipline() == v1::Plan::VERDICT) cluster_->SawVerdict(timeline, verdict);
  OnLane(chunk,
         [this, chunk, verdict, skip_nonfinite, timeline, contributors = core_.layout()->contributors(chunk)](Data* d) {
           const uint64_t sum = HashOf(*d, contributors);
           bool finite = true;
           for (const auto& [contributor, c] : d->sum) finite &= c.finite;
           const bool skip = verdict.skip() || (skip_nonfinite && !finite);
           d->previous = d->value;
           d->has_previous = true;
           if (!skip) d->value = Mix(d->value, sum, Bits(verdict.gradient_scale()));
           ++d->version;
           d->sum.clear();
           cluster_->SawApply(id_, timeline, chunk, d->version, d->value);
         });
}

void SimServer::DropPrevious(uint64_t chunk) {
  OnLane(chunk, [](Data* d) { d->has_previous = false; });
}

void SimServer::Serve(StreamId stream, uint64_t chunk, uint64_t version) {
  const uint64_t generation = core_.generation(), elements = core_.layout()->table().range(chunk).size();
  OnLane(chunk, [this, stream, chunk, version, generation, elements](Data* d) {
    auto it = streams_.find(stream);
    if (it == streams_.end()) return;
    v1::ChunkHeader header;
    header.set_chunk(chunk);
    header.set_generation(generation);
    header.set_round(version);
    header.set_elements(elements);
    uint64_t value;
    if (version == d->version) {
      value = d->value;
    } else if (version + 1 == d->version && d->has_previous) {
      value = d->previous;
    } else {
      cluster_->Fail(absl::StrCat("chunk ", chunk, " version ", version, " is not here, now ", d->version));
    }
    it->second.commit(header, value);
  });
}

void SimServer::ApplyContribution(StreamId stream, const v1::ChunkHeader& answer, const ContributionUpdate& update,
                                  ContributionRef value) {
  OnLane(answer.chunk(), [this, answer, value](Data* d) {
    const Range lease{answer.position(), answer.position() + answer.positions()};
    if (d->seen.Overlaps(lease)) {
      cluster_->Fail(absl::StrCat("chunk ", answer.chunk(), ": positions from ", lease.begin, " were applied twice"));
    }
    d->seen.Add(lease);
    ++d->version;
    if (value != nullptr && static_cast<const HashContribution*>(value.get())->finite) ++d->value;
  });
  Answer(stream, answer);
  if (update.version + 1 != answer.round()) cluster_->Fail("an update does not make the version that is answered");
}

void SimServer::Answer(StreamId stream, const v1::ChunkHeader& answer) {
  OnLane(answer.chunk(), [this, stream, answer](Data* d) {
    if (d->version != answer.round())
      cluster_->Fail(absl::StrCat("chunk ", answer.chunk(), ": another version answers"));
    if (auto it = streams_.find(stream); it != streams_.end()) it->second.commit(answer, d->value);
  });
}

void SimServer::SendLease(StreamId stream, const v1::Lease& lease) {
  if (auto it = streams_.find(stream); it != streams_.end()) it->second.lease(lease);
}

void SimServer::Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version, const v1::ChunkCut& cut) {
  OnLane(chunk, [this, shard, chunk, timeline, version, cut](Data* d) {
    const auto key = std::make_pair(shard, std::make_pair(timeline, version));
    OpenSnapshot& open = snapshots_[key];
    open.values[chunk] = d->value;
    if (core_.layout()->async()) {
      open.seen[chunk] = d->seen;
      open.cuts[chunk] = cut;
    }
    if (open.values.size() < core_.layout()->table().chunks_of(shard).size()) return;
    v1::NodeMessage message;
    v1::SnapshotDone* done = message.mutable_snapshot_done();
    done->set_job_id("sim-1");
    done->set_timeline(timeline);
    done->set_version(version);
    done->set_shard(shard);
    done->mutable_file()->set_shard(shard);
    done->mutable_file()->set_name(absl::StrCat("shard-", shard));
    SimCheckpoint& stored = cluster_->storage[{timeline, version}];
    for (const auto& [c, value] : open.values) stored.values[c] = value;
    for (const auto& [c, seen] : open.seen) stored.seen[c] = seen;
    for (const auto& [c, held] : open.cuts) stored.cuts[c] = held;
    snapshots_.erase(key);
    cluster_->world.After(cluster_->world.Delay(), life_, [self = shared_from_this(), message] {
      self->done_.push_back(message);
      self->SendToScheduler(message);
    });
  });
}

// ------------------------------------------------------------------------------------------------------ messages

void SimServer::SendToScheduler(const v1::NodeMessage& message) {
  SimNode& node = cluster_->nodes.at(id_.name());
  if (node.session != nullptr && node.life == life_) cluster_->SendToScheduler(node, message);
}

void SimServer::OpenHolderLink() {
  if (core_.layout() == nullptr || core_.is_holder() || core_.layout()->plan().discipline() != v1::Plan::VERDICT)
    return;
  const v1::NodeId& holder = core_.layout()->primary(0).node();
  if (holder_link_ != nullptr && holder_link_->open() && SameNode(holder_, holder)) return;
  if (holder_link_ != nullptr) holder_link_->Break(true);
  holder_link_ = nullptr;
  SimNode* node = cluster_->FindLive(holder);
  if (node == nullptr) {  // again, until a plan names another one
    cluster_->world.After(absl::Milliseconds(5), life_, [self = shared_from_this()] { self->OpenHolderLink(); });
    return;
  }
  holder_ = holder;
  holder_link_ = cluster_->Connect(life_, node->life);
  std::shared_ptr<Link> link = holder_link_;
  link->on_a_closed = [self = shared_from_this(), link] {
    if (self->holder_link_ == link) self->OpenHolderLink();
  };
  link->ToB([peer = node->as_server, me = id_, link] {
    peer->peers_[{me.name(), me.incarnation()}] = link;
    link->on_b_closed = [peer, me, link] {
      auto it = peer->peers_.find({me.name(), me.incarnation()});
      if (it != peer->peers_.end() && it->second == link) peer->peers_.erase(it);
    };
  });
  core_.OnHolderConnected();
}

void SimServer::SendNorm(const v1::Member& holder, const v1::NormReport& report) {
  if (holder_link_ == nullptr || !SameNode(holder_, holder.node())) return;
  SimNode* node = cluster_->FindLive(holder_);
  if (node == nullptr) return;
  holder_link_->ToB([peer = node->as_server, report, me = id_] { peer->core_.OnNorm(report, me).IgnoreError(); });
}

void SimServer::SendVerdict(const v1::NodeId& primary, const v1::VerdictNotice& notice) {
  auto it = peers_.find({primary.name(), primary.incarnation()});
  SimNode* node = cluster_->FindLive(primary);
  if (it == peers_.end() || node == nullptr) return;
  it->second->ToA([peer = node->as_server, notice] { peer->core_.OnVerdict(notice); });
}

}  // namespace sluice
