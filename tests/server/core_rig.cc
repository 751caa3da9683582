#include "tests/server/core_rig.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {

class CoreRig::Server : public ShardActions {
 public:
  Server(CoreRig* rig, uint32_t number, const ProtocolRules& rules, uint64_t hold_bytes)
      : rig_(rig),
        number_(number),
        core(ServerTestPlan{}.job, ServerTestNode("server", number), rules, this,
             std::make_shared<HoldBudget>(hold_bytes)) {}

  CoreRig* const rig_;
  const uint32_t number_;
  ShardCore core;

 private:
  void LoadChunk(const std::shared_ptr<const Layout>&, uint64_t chunk, uint64_t version) override {
    rig_->data_[chunk] = Data{version, 1000.0 + static_cast<double>(chunk), 0, {}};
  }
  void DropChunk(uint64_t chunk) override { rig_->data_.erase(chunk); }
  void AddContribution(uint64_t chunk, uint32_t contributor, uint32_t, ContributionRef value) override {
    if (value == nullptr) return;
    const double v = static_cast<const NumberContribution*>(value.get())->value;
    CHECK(rig_->data_.at(chunk).sum.emplace(contributor, v).second, "chunk {}: contributor {} counted twice", chunk,
          contributor);
  }
  void DiscardSum(uint64_t chunk) override { rig_->data_.at(chunk).sum.clear(); }
  void FinishSum(uint64_t chunk, uint64_t generation, uint64_t round) override {
    SumResult result;
    double total = 0;
    for (const auto& [contributor, v] : rig_->data_.at(chunk).sum) {
      total += v;
      if (std::isfinite(v)) continue;
      result.finite = false;
      result.nonfinite_contributors.push_back(contributor);
    }
    // Chunks of the plan's size are norm blocks here, or fragments where the plan's blocks are larger.
    const Layout& layout = *core.layout();
    const Range range = layout.table().range(chunk);
    if (layout.plan().norm_block() == layout.plan().chunk_elements()) {
      result.blocks.emplace_back(chunk, total * total);
    } else {
      v1::NormFragment& f = result.fragments.emplace_back();
      f.set_offset(range.begin);
      f.add_values(static_cast<float>(total));
      for (uint64_t i = 1; i < range.size(); ++i) f.add_values(0);
    }
    rig_->steps_.push_back({absl::StrCat("lane ", chunk), [this, chunk, generation, round, result] {
                              core.OnSum(chunk, generation, round, result);
                            }});
  }
  void Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) override {
    Data& d = rig_->data_.at(chunk);
    CHECK(verdict.round() == d.version, "chunk {} at {}: a verdict of round {}", chunk, d.version, verdict.round());
    double total = 0;
    bool finite = true;
    for (const auto& [contributor, v] : d.sum) {
      total += v;
      finite &= std::isfinite(v);
    }
    d.previous = d.value;
    if (!verdict.skip() && !(skip_nonfinite && !finite)) d.value -= verdict.gradient_scale() * total;
    ++d.version;
    d.sum.clear();
    rig_->verdicts.push_back(verdict);
  }
  void DropPrevious(uint64_t) override {}
  void Serve(StreamId stream, uint64_t chunk, uint64_t version) override {
    const Data& d = rig_->data_.at(chunk);
    CHECK(version == d.version || version + 1 == d.version, "chunk {} version {} is not here", chunk, version);
    rig_->served.push_back({stream, chunk, version, version == d.version ? d.value : d.previous});
  }
  void Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version, const v1::ChunkCut& cut) override {
    if (core.layout()->async()) rig_->cuts[{chunk, version}] = cut;
    rig_->snapshots.emplace_back(shard, chunk, timeline, version);
  }
  void AbandonSnapshots() override { ++rig_->abandoned; }
  void SendNorm(const v1::Member& holder, const v1::NormReport& report) override {
    if (!rig_->links_open_) return;
    for (auto& peer : rig_->servers_) {
      if (!SameNode(ServerTestNode("server", peer->number_), holder.node())) continue;
      rig_->steps_.push_back({absl::StrCat("norm ", number_), [p = peer.get(), report, from = number_] {
                                const absl::Status s = p->core.OnNorm(report, ServerTestNode("server", from));
                                CHECK(s.ok(), "{}", s.ToString());
                              }});
    }
  }
  void SendVerdict(const v1::NodeId& primary, const v1::VerdictNotice& notice) override {
    if (!rig_->links_open_) return;
    for (auto& peer : rig_->servers_) {
      if (!SameNode(ServerTestNode("server", peer->number_), primary)) continue;
      rig_->steps_.push_back(
          {absl::StrCat("verdict ", peer->number_), [p = peer.get(), notice] { p->core.OnVerdict(notice); }});
    }
  }
  void ApplyContribution(StreamId stream, const v1::ChunkHeader& answer, const ContributionUpdate& update,
                         ContributionRef value) override {
    Data& d = rig_->data_.at(answer.chunk());
    CHECK(update.version == d.version, "chunk {} at {}: an update of {}", answer.chunk(), d.version, update.version);
    v1::ChunkHeader said = answer;
    ++d.version;
    if (value != nullptr) {
      const double v = static_cast<const NumberContribution*>(value.get())->value;
      said.set_nonfinite(!std::isfinite(v));
      if (std::isfinite(v)) d.value += v * update.gradient_scale;
    }
    rig_->updates.push_back(update);
    rig_->answers.emplace_back(stream, said);
  }
  void Answer(StreamId stream, const v1::ChunkHeader& answer) override { rig_->answers.emplace_back(stream, answer); }
  void SendLease(StreamId stream, const v1::Lease& lease) override { rig_->leases.emplace_back(stream, lease); }
  void SendToScheduler(const v1::NodeMessage& message) override { rig_->to_scheduler.push_back(message); }
  void CloseStream(StreamId stream, const absl::Status& status) override {
    rig_->closed[{number_, stream}] = status;
    rig_->open_.erase({number_, stream});
  }
  void Decline(StreamId stream, uint64_t chunk, uint64_t round) override {
    rig_->declined.push_back({stream, chunk, round});
  }
  void AskAgain(StreamId stream, uint64_t chunk, uint64_t round) override {
    rig_->again.push_back({stream, chunk, round});
  }
};

CoreRig::CoreRig(uint32_t servers, const ProtocolRules& rules, uint64_t hold_bytes) {
  for (uint32_t i = 0; i < servers; ++i) servers_.push_back(std::make_unique<Server>(this, i, rules, hold_bytes));
}

CoreRig::~CoreRig() = default;

ShardCore& CoreRig::core(uint32_t server) { return servers_.at(server)->core; }

void CoreRig::Plan(const std::shared_ptr<const Layout>& layout, const std::vector<v1::ChunkCut>& cuts) {
  for (auto& server : servers_) server->core.OnPlan(layout, cuts);
}

void CoreRig::Run() {
  while (RunOne(0)) {
  }
}

void CoreRig::DropMessages() {
  std::erase_if(steps_, [](const Step& step) { return step.lane.rfind("lane", 0) != 0; });
}

bool CoreRig::RunOne(uint64_t place) {
  if (steps_.empty()) return false;
  size_t at = place % steps_.size();
  for (size_t i = 0; i < at; ++i) {
    if (steps_[i].lane == steps_[at].lane) at = i;
  }
  const std::function<void()> work = std::move(steps_[at].work);
  steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(at));
  work();
  return true;
}

absl::Status CoreRig::Hello(uint32_t server, uint64_t generation, uint32_t contributor) {
  v1::StreamHello hello;
  hello.set_generation(generation);
  hello.set_contributor(contributor);
  *hello.mutable_node() = ServerTestNode("worker", contributor);
  RETURN_IF_ERROR(core(server).OnHello(Stream(generation, contributor), hello));
  open_.emplace(server, Stream(generation, contributor));
  return absl::OkStatus();
}

absl::Status CoreRig::Push(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor, uint64_t chunk,
                           double value, double count, uint32_t contributors) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_generation(generation);
  header.set_round(round);
  header.set_contributor(contributor);
  header.set_count(count);
  header.set_contributors(contributors);
  const auto& layout = core(server).layout();
  header.set_elements(layout == nullptr ? 2 : layout->table().range(chunk).size());
  const uint64_t bytes = header.elements() * sizeof(float);
  return core(server).OnPush(Stream(generation, contributor), header,
                             std::make_shared<NumberContribution>(value, bytes), bytes);
}

absl::Status CoreRig::Contribute(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t chunk,
                                 uint64_t position, uint64_t positions, uint64_t base, double value, double count,
                                 float scale) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_generation(generation);
  header.set_round(base);
  header.set_contributor(contributor);
  header.set_count(count);
  header.set_position(position);
  header.set_positions(positions);
  header.set_scale(scale);
  header.set_elements(count == 0 ? 0 : core(server).layout()->table().range(chunk).size());
  return core(server).OnPush(Stream(generation, contributor), header, std::make_shared<NumberContribution>(value),
                             header.elements() * sizeof(float));
}

absl::Status CoreRig::Ask(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t number,
                          const std::optional<v1::RoundReport>& report) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::LeaseRequest request;
  request.set_generation(generation);
  request.set_contributor(contributor);
  request.set_number(number);
  if (report.has_value()) *request.mutable_report() = *report;
  return core(server).OnLeaseRequest(Stream(generation, contributor), request);
}

absl::Status CoreRig::Empty(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor,
                            uint64_t chunk) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_generation(generation);
  header.set_round(round);
  header.set_contributor(contributor);
  return core(server).OnPush(Stream(generation, contributor), header, nullptr, 0);
}

absl::Status CoreRig::Report(uint32_t server, uint64_t generation, uint64_t round, uint32_t contributor, double loss,
                             double count, v1::RoundReport::Kind kind) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::RoundReport report;
  report.set_generation(generation);
  report.set_round(round);
  report.set_contributor(contributor);
  report.set_kind(kind);
  report.set_loss_sum(loss);
  report.set_count(count);
  report.set_correct(1);
  return core(server).OnReport(Stream(generation, contributor), report);
}

absl::Status CoreRig::Subscribe(uint32_t server, uint64_t generation, uint32_t contributor, uint64_t version) {
  if (!open_.contains({server, Stream(generation, contributor)})) {
    RETURN_IF_ERROR(Hello(server, generation, contributor));
  }
  v1::Subscribe subscribe;
  subscribe.set_generation(generation);
  v1::Want* want = subscribe.add_wants();
  want->set_chunks(core(server).layout() == nullptr ? 1 : core(server).layout()->table().chunks());
  want->set_version(version);
  return core(server).OnSubscribe(Stream(generation, contributor), subscribe);
}

std::map<uint64_t, v1::RoundRecord> CoreRig::records() const {
  std::map<uint64_t, v1::RoundRecord> out;
  for (const v1::NodeMessage& m : to_scheduler) {
    if (m.has_round_record() && !m.round_record().evaluation()) out[m.round_record().round()] = m.round_record();
  }
  return out;
}

std::vector<v1::FenceReport> CoreRig::fence_reports() const {
  std::vector<v1::FenceReport> out;
  for (const v1::NodeMessage& m : to_scheduler) {
    if (m.has_fence_report()) out.push_back(m.fence_report());
  }
  return out;
}

}  // namespace sluice
