#include "tests/simulation/sim_worker.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "tests/simulation/sim_server.h"

namespace sluice {

SimWorker::SimWorker(Cluster* cluster, v1::NodeId id, LifeRef life)
    : cluster_(cluster), id_(id), life_(std::move(life)), core_(std::make_shared<RoundCore>(cluster->rules, this)) {}

v1::Register SimWorker::MakeRegister() const {
  v1::Register r;
  r.set_protocol_version(kProtocolVersion);
  r.set_role(v1::WORKER);
  *r.mutable_node() = id_;
  r.set_host_id(cluster_->config.HostOf(id_.name()));
  r.set_serves_peers(true);
  r.set_sums_on_host(true);
  r.set_address(id_.name());
  r.set_numeric_profile("sim");
  if (core_->generation() > 0 && core_->phase() != RoundCore::Phase::kEnded) {
    v1::JobGeneration* g = r.add_jobs();
    g->set_job_id("sim-1");
    g->set_generation(core_->generation());
  }
  return r;
}

void SimWorker::OnSchedulerMessage(const v1::SchedulerMessage& message) {
  if (message.has_plan()) {
    absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(message.plan());
    if (!layout.ok()) cluster_->Fail(layout.status().ToString());
    const int rank = (*layout)->RankOf(id_);
    if (rank < 0) return;
    if (core_->phase() == RoundCore::Phase::kEnded) core_ = std::make_shared<RoundCore>(cluster_->rules, this);
    core_->OnPlan(*layout, static_cast<uint32_t>(rank));
  } else if (message.has_end_job()) {
    core_->OnEnd();
  }
}

// ------------------------------------------------------------------------------------------------------ streams

void SimWorker::OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) {
  layout_ = layout;
  servers_ = servers;
  streams_generation_ = layout->generation();
  streams_.assign(servers.size(), Stream());
  for (size_t i = 0; i < servers.size(); ++i) OpenStream(streams_generation_, i);
}

void SimWorker::OpenStream(uint64_t generation, size_t index) {
  // Connecting takes a while; it fails while the server is not there, and is tried again until the generation ends.
  cluster_->world.After(cluster_->world.Delay(), life_, [self = shared_from_this(), generation, index] {
    if (generation != self->streams_generation_ || index >= self->streams_.size()) return;
    SimNode* node = self->cluster_->FindLive(self->servers_[index].node);
    if (node == nullptr) {
      self->cluster_->world.After(absl::Milliseconds(10), self->life_,
                                  [self, generation, index] { self->OpenStream(generation, index); });
      return;
    }
    Stream& stream = self->streams_[index];
    stream.server = node;
    stream.id = self->cluster_->next_stream++;
    stream.link = self->cluster_->Connect(self->life_, node->life);
    stream.up = true;
    std::shared_ptr<Link> link = stream.link;
    link->on_a_closed = [self, generation, index, link] {
      if (generation != self->streams_generation_ || self->streams_[index].link != link) return;
      self->streams_[index].up = false;
      self->core_->OnStreamDown(generation, index);
      self->OpenStream(generation, index);
    };
    v1::StreamHello hello;
    hello.set_protocol_version(kProtocolVersion);
    hello.set_job_id("sim-1");
    *hello.mutable_node() = self->id_;
    hello.set_contributor(self->core_->rank());
    hello.set_generation(generation);
    if (self->servers_[index].leader) {
      link->ToB([leader = node->as_worker, hello, link] { leader->AddMember(hello, link); });
      self->core_->OnStreamUp(generation, index);
      return;
    }
    SimServer::CommitSink commit = [self, link](const v1::ChunkHeader& header, uint64_t value) {
      link->ToA([self, header, value, link] {
        absl::Status status = self->core_->OnCommit(header, std::make_shared<HashValue>(value));
        if (!status.ok()) self->cluster_->Fail(absl::StrCat(self->id_.name(), ": ", status.ToString()));
      });
    };
    SimServer::LeaseSink lease = [self, link](const v1::Lease& lease) {
      link->ToA([self, lease] {
        absl::Status status = self->core_->OnLease(lease);
        if (!status.ok()) self->cluster_->Fail(absl::StrCat(self->id_.name(), ": ", status.ToString()));
      });
    };
    SimServer::LaterSink later = [self, link, generation](const v1::Later& later) {
      link->ToA([self, generation, later] {
        absl::Status status = self->core_->OnLater(generation, later);
        if (!status.ok()) self->cluster_->Fail(absl::StrCat(self->id_.name(), ": ", status.ToString()));
      });
    };
    link->ToB([server = node->as_server, id = stream.id, hello, link, commit, lease, later] {
      server->AddStream(id, hello, link, commit, lease, later);
    });
    self->core_->OnStreamUp(generation, index);
  });
}

// ------------------------------------------------------------------------------------------------------ host sums

void SimWorker::AddMember(const v1::StreamHello& hello, const std::shared_ptr<Link>& link) {
  if (hello.generation() < core_->generation() || core_->phase() == RoundCore::Phase::kEnded) {
    return link->Break(/*graceful=*/true);
  }
  if (hello.node().name() == cluster_->config.shares_nothing) {
    v1::NodeMessage message;
    message.mutable_host_sum_failure()->set_job_id("sim-1");
    message.mutable_host_sum_failure()->set_generation(hello.generation());
    *message.mutable_host_sum_failure()->mutable_node() = hello.node();
    SimNode& node = cluster_->nodes.at(id_.name());
    if (node.session != nullptr && node.life == life_) cluster_->SendToScheduler(node, message);
    return link->Break(/*graceful=*/true);
  }
  core_->OnMember(hello.contributor());
}

void SimWorker::OnContribution(const v1::ChunkHeader& header, const std::shared_ptr<SimWorker>& member) {
  std::shared_ptr<Member> value;
  if (header.elements() > 0) {
    value = std::make_shared<Member>();
    value->worker = member;
    value->chunk = header.chunk();
    value->rank = header.contributor();
  }
  const absl::Status status = core_->OnContribution(header, std::move(value));
  if (!status.ok()) cluster_->Fail(absl::StrCat(id_.name(), ": ", status.ToString()));
}

void SimWorker::SumOnHost(HostSum sum) {
  cluster_->world.After(absl::Milliseconds(cluster_->world.Random()), life_,
                        [self = shared_from_this(), core = core_, sum = std::move(sum)] {
                          std::map<uint32_t, uint64_t> hashes;
                          if (sum.own) {
                            if (self->gradient_round_ != sum.round) {
                              self->cluster_->Fail(absl::StrCat(self->id_.name(), ": chunk ", sum.chunk,
                                                                " was written before the host's sum read it"));
                            }
                            hashes[0] = self->GradientHash(sum.chunk, sum.span.first);
                          }
                          for (uint32_t i = 1; i < sum.span.count; ++i) {
                            const auto* member = static_cast<const Member*>(sum.values[i].get());
                            if (member != nullptr) hashes[i] = member->worker->GradientHash(sum.chunk, member->rank);
                          }
                          if (sum.generation == core->generation()) {
                            self->made_[sum.chunk] = TreeHash(sum.span.count, hashes);
                          }
                          ++self->cluster_->result.host_sums;
                          core->OnHostSum(sum.generation, sum.chunk, sum.round, {});
                        });
}

void SimWorker::CloseStreams() {
  for (Stream& stream : streams_) {
    if (stream.link != nullptr) stream.link->Break(/*graceful=*/cluster_->world.Chance(.5));
  }
  streams_.clear();
  streams_generation_ = 0;
}

void SimWorker::Subscribe(size_t index, const v1::Subscribe& subscribe) {
  const Stream& s = streams_[index];
  s.link->ToB([server = s.server->as_server, id = s.id, subscribe] { server->OnSubscribe(id, subscribe); });
}

void SimWorker::Report(size_t index, const v1::RoundReport& report) {
  const Stream& s = streams_[index];
  s.link->ToB([server = s.server->as_server, id = s.id, report] { server->OnReport(id, report); });
}

void SimWorker::Ask(size_t index, const v1::LeaseRequest& request) {
  const Stream& s = streams_[index];
  auto send = [server = s.server->as_server, id = s.id, request] { server->OnLeaseRequest(id, request); };
  s.link->ToB(send);
  if (cluster_->world.Chance(.1)) s.link->ToB(send);
}

void SimWorker::Push(size_t index, const v1::ChunkHeader& header) {
  const Stream& s = streams_[index];
  const uint64_t hash = header.contributors() > 1 ? made_[header.chunk()] : GradientHash(header.chunk(), core_->rank());
  bool finite = !cluster_->async() || cluster_->LeaseFinite(header.position());
  for (uint32_t i = 0; !cluster_->async() && i < std::max(1u, header.contributors()); ++i) {
    const uint32_t rank = header.contributor() + i;
    finite &= CountOf(header.round(), rank) == 0 || !cluster_->config.nonfinite.contains({header.round(), rank});
  }
  std::function<void()> send = [server = s.server->as_server, id = s.id, header, hash, finite] {
    server->OnPush(id, header, hash, finite);
  };
  if (servers_[index].leader) {
    send = [leader = s.server->as_worker, link = s.link, header, self = shared_from_this()] {
      if (link->open()) leader->OnContribution(header, self);
    };
  }
  s.link->ToB(send);
  if (cluster_->world.Chance(.1)) {  // a retry of something that had arrived after all
    cluster_->world.After(absl::Milliseconds(cluster_->world.Random() * 10), life_,
                          [link = s.link, send] { link->ToB(send); });
  }
}

// -------------------------------------------------------------------------------------------------------- rounds

void SimWorker::Install(uint64_t generation, uint64_t chunk, uint64_t version,
                        std::shared_ptr<const CommitValue> value) {
  cluster_->world.After(absl::Milliseconds(cluster_->world.Random()), life_,
                        [self = shared_from_this(), core = core_, generation, chunk, version, value] {
                          if (core != self->core_) return;
                          const uint64_t hash = static_cast<const HashValue*>(value.get())->hash;
                          self->parameters_[chunk] = {version, hash};
                          self->cluster_->SawInstalled(generation, chunk, version, hash);
                          self->core_->OnInstalled(generation, chunk, version);
                        });
}

double SimWorker::Count(uint64_t round) const {
  if (cluster_->async()) return cluster_->LeaseCount(core_->lease().position());
  return CountOf(round, core_->rank());
}

double SimWorker::CountOf(uint64_t round, uint32_t rank) const {
  // Ragged: some ranks have nothing in some rounds.
  if (layout_->ranks() > 1 && Mix(round, rank, 5) % 7 == 0) return 0;
  return 1 + static_cast<double>(Mix(round, rank, 6) % 5);
}

void SimWorker::StartCompute(uint64_t generation, uint64_t round) { Begin(generation, round, false); }
void SimWorker::StartEvaluation(uint64_t generation, uint64_t version) { Begin(generation, version, true); }

void SimWorker::Begin(uint64_t generation, uint64_t round, bool evaluation) {
  work_ = std::make_shared<Work>();
  work_->core = core_;
  work_->generation = generation;
  work_->round = round;
  work_->evaluation = evaluation;
  work_->hash = Mix(round, 3);
  for (uint64_t c = 0; c < layout_->table().chunks(); ++c) work_->order.push_back(c);
  for (size_t i = work_->order.size(); i > 1; --i)
    std::swap(work_->order[i - 1], work_->order[cluster_->world.Below(i)]);
  // Events of the core must not come from inside its own.
  cluster_->world.After(absl::Milliseconds(cluster_->world.Random() * 2), life_,
                        [self = shared_from_this(), work = work_] { self->Forward(work); });
}

// Reads the chunks in their order, a few at a time, each when it may be read.
void SimWorker::Forward(const std::shared_ptr<Work>& work) {
  if (work->cancelled) return Continue(work);
  for (; work->read < work->order.size(); ++work->read) {
    const uint64_t c = work->read;
    if (!work->evaluation && !work->core->InPlace(layout_->table().range(c))) break;
    const auto& [version, hash] = parameters_[c];
    if (cluster_->async()) {
      work->bases.push_back(version);
      if (work->evaluation && work->round == layout_->rounds() && hash != cluster_->ExpectedCount()) {
        cluster_->Fail(absl::StrCat(id_.name(), " evaluates chunk ", c, " before its last contribution"));
      }
    } else if (version != work->round) {
      cluster_->Fail(absl::StrCat(id_.name(), " reads chunk ", c, " at version ", version, " in round ", work->round));
    }
    work->hash = Mix(work->hash, hash);
    if (cluster_->world.Chance(.3)) {
      ++work->read;
      break;
    }
  }
  const bool whole = work->read == work->order.size();
  cluster_->world.After(absl::Milliseconds(.3 + cluster_->world.Random() * 3), life_,
                        [self = shared_from_this(), work, whole] {
                          if (!whole) return self->Forward(work);
                          if (!work->cancelled && !work->evaluation) {
                            self->gradient_hash_ = work->hash;
                            self->gradient_round_ = work->round;
                            work->core->OnBatch(work->generation, work->round, self->Count(work->round));
                            if (self->Count(work->round) == 0) work->order.clear();
                          }
                          if (work->evaluation) work->order.clear();
                          self->Continue(work);
                        });
}

void SimWorker::AllInPlace(uint64_t version) {
  for (uint64_t c = 0; c < layout_->table().chunks(); ++c) {
    if (parameters_[c].first < version) {
      cluster_->Fail(
          absl::StrCat(id_.name(), ": chunk ", c, " is at ", parameters_[c].first, " when all are at ", version));
    }
  }
}

void SimWorker::Continue(const std::shared_ptr<Work>& work) {
  if (work->cancelled) {
    if (work_ == work) work_ = nullptr;
    work->core->OnStopped(work->generation);
    return;
  }
  if (!work->order.empty()) {
    const uint64_t chunk = work->order.back();
    work->order.pop_back();
    // The backward still reads the chunk's parameters until its gradient is ready.
    if (parameters_[chunk].first != (cluster_->async() ? work->bases[chunk] : work->round)) {
      cluster_->Fail(absl::StrCat(id_.name(), ": chunk ", chunk, " was replaced by version ", parameters_[chunk].first,
                                  " while round ", work->round, " still read it"));
    }
    work->core->OnGradientReady(work->generation, work->round, layout_->table().range(chunk));
    cluster_->world.After(absl::Milliseconds(cluster_->world.Random() * 2), life_,
                          [self = shared_from_this(), work] { self->Continue(work); });
    return;
  }
  const WorkSum sum{.loss = 1, .count = work->evaluation ? 1 : Count(work->round), .correct = 0, .seconds = 0};
  work_ = nullptr;
  if (work->evaluation) {
    work->core->OnEvaluated(work->generation, work->round, sum);
  } else {
    work->core->OnComputed(work->generation, work->round, sum);
  }
}

void SimWorker::CancelWork() {
  if (work_ != nullptr) work_->cancelled = true;
}

}  // namespace sluice
