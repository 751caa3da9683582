#include "worker/round_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/log.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

// `Node`: v1::Member or v1::Rank.
template <typename Node>
uint32_t IndexOf(std::vector<ServerEnd>* servers, const Node& node, bool leader = false) {
  for (uint32_t i = 0; i < servers->size(); ++i) {
    if (SameNode((*servers)[i].node, node.node())) return i;
  }
  servers->push_back({node.node(), node.address(), leader});
  return static_cast<uint32_t>(servers->size() - 1);
}

}  // namespace

RoundCore::RoundCore(const ProtocolRules& rules, RoundActions* actions) : rules_(rules), actions_(actions) {}

bool RoundCore::Current(uint64_t generation, uint64_t round, Phase phase) const {
  return phase_ == phase && generation == this->generation() && round == round_;
}

// ---------------------------------------------------------------- generations
void RoundCore::OnPlan(std::shared_ptr<const Layout> layout, uint32_t rank) {
  if (phase_ == Phase::kEnded || (layout_ && layout->generation() <= generation())) return;
  // First: work that the end of the streams stops is to know why.
  if (busy_ && phase_ != Phase::kStopping) actions_->CancelWork();
  if (layout_) actions_->CloseStreams();
  layout_ = std::move(layout);
  rank_ = rank;
  phase_ = Phase::kStopping;
  chunks_.clear();  // with them the values that were kept
  servers_.clear();
  up_.clear();
  reports_.clear();
  host_sum_.End();
  Step();
}

void RoundCore::BeginGeneration() {
  const v1::Plan& plan = layout_->plan();
  round_ = plan.start();
  evaluated_ = computed_ = false;
  at_current_ = at_next_ = 0;
  std::vector<uint32_t> primary, tail;
  for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
    primary.push_back(IndexOf(&servers_, layout_->primary(shard)));
    tail.push_back(IndexOf(&servers_, layout_->tail(shard)));
  }
  holder_ = primary[0];
  for (uint32_t shard = 0; shard < plan.shards(); ++shard) {
    const ContributorSpan span = layout_->contribution(rank_, shard);
    if (span.first == rank_) continue;
    primary[shard] = IndexOf(&servers_, plan.ranks(static_cast<int>(span.first)), /*leader=*/true);
  }
  up_.assign(servers_.size(), false);
  const ChunkTable& table = layout_->table();
  chunks_.assign(table.chunks(), Chunk());
  for (const uint64_t i : view()) {
    Chunk& chunk = chunks_[i];
    if (layout_->slot(i, rank_).has_value()) chunk.primary = primary[table.shard(i)];
    chunk.tail = tail[table.shard(i)];
    chunk.want = round_;
    chunk.unready = table.range(i).size();
  }
  phase_ = Phase::kPulling;
  request_.Clear();
  lease_.Clear();
  feedback_ = ErrorFeedback(plan.spec()) && !async();
  kept_ = 0;
  ordered_.assign(servers_.size(), {});
  const bool restore = actions_->BeginResidual(layout_, rank_);
  for (const uint64_t i : view()) chunks_[i].lacks_residual = restore;
  lacking_residual_ = restore ? view().size() : 0;
  host_sum_.Begin(layout_, rank_);
  actions_->OpenStreams(layout_, servers_);
  for (auto& [header, value] : host_sum_.TakeWaiting()) {
    // What was said before there was a plan to check it by.
    if (const absl::Status status = OnContribution(header, std::move(value)); !status.ok()) {
      LOG_WARN("job {} generation {}: {}; dropped", plan.job_id(), plan.generation(), status.ToString());
    }
  }
}

void RoundCore::OnEnd() {
  if (phase_ == Phase::kEnded) return;
  if (busy_ && phase_ != Phase::kStopping) actions_->CancelWork();
  if (layout_) actions_->CloseStreams();
  phase_ = Phase::kEnded;
  chunks_.clear();
  up_.clear();
  host_sum_.End();
}

// ---------------------------------------------------------------- rounds
void RoundCore::Step() {
  switch (phase_) {
    case Phase::kStopping:
      if (!busy_ && installing_ == 0 && summing_ == 0) BeginGeneration();
      break;
    case Phase::kPulling:
      if (at_current_ == view().size() && lacking_residual_ == 0) async() ? BeginLease() : BeginRound();
      break;
    case Phase::kWaiting:
      if (async()) {
        if (at_next_ == view().size()) EndLease();
      } else if (at_next_ == view().size() || !(layout_->EvaluateAt(round_ + 1) || round_ + 1 >= layout_->rounds())) {
        Advance();
      }
      break;
    default:
      break;
  }
}

void RoundCore::Advance() {
  ++round_;
  evaluated_ = computed_ = false;
  at_current_ = at_next_;
  at_next_ = 0;
  count_before_ = count_;
  for (const uint64_t i : view()) chunks_[i].unready = layout_->table().range(i).size();
  if (at_current_ == view().size()) Settle();
  BeginRound();
}

// Every chunk is at round_.
void RoundCore::Settle() {
  // A report of the round before may still be lost with its stream; an older one cannot (the holder has had later
  // pushes).
  std::erase_if(reports_, [this](const v1::RoundReport& report) { return report.round() + 1 < round_; });
  actions_->AllInPlace(round_);
  if (feedback_) KeepResidual();
}

void RoundCore::BeginRound() {
  if (round_ > 0 && layout_->EvaluateAt(round_) && !evaluated_) {
    phase_ = Phase::kEvaluating;
    busy_ = true;
    actions_->StartEvaluation(generation(), round_);
  } else if (round_ >= layout_->rounds()) {
    phase_ = Phase::kFinished;  // stays in the gang until the job ends
  } else {
    phase_ = Phase::kComputing;
    busy_ = true;
    actions_->StartCompute(generation(), round_);
  }
}

void RoundCore::Keep(v1::RoundReport::Kind kind, uint64_t round, const WorkSum& sum) {
  v1::RoundReport& report = reports_.emplace_back();
  report.set_generation(generation());
  report.set_round(round);
  report.set_contributor(rank_);
  report.set_kind(kind);
  if (layout_->tells_loss(rank_)) {
    report.set_loss_sum(sum.loss);
    report.set_count(sum.count);
    report.set_correct(sum.correct);
  }
  report.set_compute_seconds(sum.seconds);
  report.set_wait_seconds(sum.wait_seconds);
  report.set_answer_seconds(sum.answer_seconds);
  report.set_pipeline_seconds(sum.pipeline_seconds);
  report.set_tensor_seconds(sum.tensor_seconds);
  if (up_[holder_]) actions_->Report(holder_, report);
}

void RoundCore::OnBatch(uint64_t generation, uint64_t round, double count) {
  if (!Current(generation, round, Phase::kComputing)) return;
  count_ = count;
  if (count > 0) return;
  CHECK(async() || at_current_ == view().size(), "round {} is computed before every chunk is at it", round);
  for (const uint64_t i : view()) Issue(i);
}

void RoundCore::OnGradientReady(uint64_t generation, uint64_t round, Range range) {
  if (!Current(generation, round, Phase::kComputing) || range.size() == 0) return;
  CHECK(async() || at_current_ == view().size(), "a gradient of round {} before every chunk is at it", round);
  const ChunkTable& table = layout_->table();
  CHECK(range.begin < range.end && range.end <= table.parameters(), "gradient range [{}, {}) of {} elements",
        range.begin, range.end, table.parameters());
  for (uint64_t i = table.chunk_at(range.begin); i <= table.chunk_at(range.end - 1); ++i) {
    const Range chunk = table.range(i);
    CHECK(chunks_[i].tail != kNobody, "a gradient of chunk {}, which rank {} does not hold", i, rank_);
    const uint64_t ready = std::min(chunk.end, range.end) - std::max(chunk.begin, range.begin);
    CHECK(ready <= chunks_[i].unready, "the gradient of chunk {} became ready twice in round {}", i, round);
    chunks_[i].unready -= ready;
    if (chunks_[i].unready == 0 && !(async() && clips())) Issue(i);  // clipping needs all of it first
  }
}

// The backward is past the chunk: its contribution leaves and its parameters may be replaced.
void RoundCore::Issue(uint64_t index) {
  Chunk& chunk = chunks_[index];
  chunk.pushed = round_ + 1;
  // Also of a chunk that is committed already: what is left out of its gradient counts for the rounds to come.
  if (count_ > 0 && chunk.primary != kNobody) actions_->Encode(index, round_);
  if (async() || chunk.want <= round_ + 1) {  // else it is committed already
    if (host_sum_.Gathers(index)) {
      Sum(host_sum_.AddOwn(index, round_, count_));
    } else {
      SendPush(index);
    }
  }
  if (chunk.kept) HandOut(index, round_ + 1, std::exchange(chunk.kept, nullptr));
}

void RoundCore::SendPush(uint64_t index) {
  const Chunk& chunk = chunks_[index];
  if (chunk.primary == kNobody || !up_[chunk.primary]) return;  // goes out when the stream opens
  if (host_sum_.Gathers(index)) {
    const v1::ChunkHeader* const sum = host_sum_.Made(index, chunk.pushed - 1);
    if (sum != nullptr) actions_->Push(chunk.primary, *sum);  // else when it is made
    return;
  }
  v1::ChunkHeader header;
  header.set_chunk(index);
  header.set_generation(generation());
  // Its commit may be outstanding while the next round is being computed already.
  const uint64_t round = chunk.pushed - 1;
  const double count = round == round_ ? count_ : count_before_;
  header.set_round(round);
  header.set_contributor(rank_);
  header.set_elements(count > 0 ? layout_->table().range(index).size() : 0);
  if (count > 0) header.set_encoding(PushEncoding(layout_->plan().spec()));
  header.set_count(count);
  header.set_space(layout_->plan().space());
  if (async()) {
    header.set_round(static_cast<uint64_t>(chunk.installed));
    header.set_position(lease_.position());
    header.set_positions(lease_.positions());
    header.set_scale(scale_);
  }
  actions_->Push(chunk.primary, header);
}

// ---------------------------------------------------------------- host sums
void RoundCore::Sum(std::optional<HostSum> sum) {
  if (!sum.has_value()) return;
  if (sum->empty) return SendPush(sum->chunk);
  ++summing_;
  actions_->SumOnHost(*std::move(sum));
}

absl::Status RoundCore::OnContribution(const v1::ChunkHeader& header, MemberValueRef value) {
  if (phase_ == Phase::kEnded) return absl::OkStatus();
  absl::StatusOr<std::optional<HostSum>> sum = host_sum_.Add(header, std::move(value), round_);
  if (!sum.ok()) return sum.status();
  Sum(*std::move(sum));
  return absl::OkStatus();
}

void RoundCore::OnHostSum(uint64_t generation, uint64_t chunk, uint64_t round, const std::vector<uint32_t>& nonfinite) {
  CHECK(summing_ > 0, "a host sum was reported twice");
  --summing_;
  if (host_sum_.OnMade(generation, chunk, round, nonfinite) && chunks_[chunk].want <= round + 1) SendPush(chunk);
  Step();
}

void RoundCore::OnComputed(uint64_t generation, uint64_t round, const WorkSum& sum) {
  CHECK(busy_, "work ended twice");
  busy_ = false;
  if (Current(generation, round, Phase::kComputing)) {
    if (async() && clips() && count_ > 0) {
      const double clip = layout_->plan().spec().optimizer().clip_norm();
      if (sum.gradient_norm > clip) scale_ = static_cast<float>(clip / sum.gradient_norm);
      for (const uint64_t i : view()) {
        if (chunks_[i].unready == 0) Issue(i);
      }
    }
    for (const uint64_t i : view()) {
      CHECK(Pushed(chunks_[i]), "round {} was computed, but the gradient of chunk {} lacks {} elements", round, i,
            chunks_[i].unready);
    }
    computed_ = true;
    phase_ = Phase::kWaiting;
    sum_ = sum;
    if (!async()) Keep(v1::RoundReport::TRAIN, round, sum);
  }
  Step();
}

void RoundCore::OnEvaluated(uint64_t generation, uint64_t version, const WorkSum& sum) {
  CHECK(busy_, "work ended twice");
  busy_ = false;
  if (Current(generation, version, Phase::kEvaluating)) {
    evaluated_ = true;
    if (async()) {
      sum_ = sum;
      return EndLease();
    }
    Keep(v1::RoundReport::EVALUATION, version, sum);
    BeginRound();
    return;
  }
  Step();
}

void RoundCore::OnStopped(uint64_t generation) {
  CHECK(busy_, "work ended twice");
  busy_ = false;
  Step();
}

// ---------------------------------------------------------------- streams
void RoundCore::OnStreamUp(uint64_t generation, size_t server) {
  if (generation != this->generation() || server >= up_.size()) return;
  up_[server] = true;
  if (async()) {
    SubscribeMissing(server);
    if (server == holder_ && phase_ == Phase::kAsking) actions_->Ask(server, request_);
    for (uint64_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i].primary == server && chunks_[i].pushed > 0 && !chunks_[i].answered) SendPush(i);
    }
    return;
  }
  v1::Subscribe subscribe;
  subscribe.set_generation(generation);
  v1::Want* want = nullptr;
  for (uint64_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].tail == kNobody) want = nullptr;  // a range must not pass over what is not in the view
    if (chunks_[i].tail != server) continue;
    // One range as long as the version is the same; chunks of other servers in between are passed over.
    if (want == nullptr || want->version() != chunks_[i].want) {
      want = subscribe.add_wants();
      want->set_first_chunk(i);
      want->set_version(chunks_[i].want);
    }
    want->set_chunks(i + 1 - want->first_chunk());
  }
  for (const Chunk& chunk : chunks_) {
    if (chunk.tail == server && chunk.lacks_residual) subscribe.set_residuals(true);
  }
  if (subscribe.wants_size() > 0) actions_->Subscribe(server, subscribe);
  if (server == holder_) {
    for (const v1::RoundReport& report : reports_) actions_->Report(server, report);
  }
  for (uint64_t i = 0; i < chunks_.size(); ++i) {
    if (kept_ > 0 && chunks_[i].tail == server && chunks_[i].want <= kept_ + 1) SendResidual(i);
    if (chunks_[i].primary == server && chunks_[i].pushed > 0 && chunks_[i].want <= chunks_[i].pushed) SendPush(i);
  }
}

void RoundCore::OnStreamDown(uint64_t generation, size_t server) {
  if (generation == this->generation() && server < up_.size()) up_[server] = false;
}

// ---------------------------------------------------------------- commits
absl::Status RoundCore::OnCommit(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value) {
  if (header.generation() != generation() && rules_.fencing) return absl::OkStatus();
  if (chunks_.empty()) return absl::OkStatus();
  const uint64_t index = header.chunk(), version = header.round();
  if (header.space() != layout_->plan().space() || index >= chunks_.size()) {
    return absl::OutOfRangeError(absl::StrCat("commit of chunk ", index, " of space ", header.space(),
                                              "; the plan has ", chunks_.size(), " chunks in space ",
                                              layout_->plan().space()));
  }
  if (chunks_[index].tail == kNobody) {
    return absl::InvalidArgumentError(
        absl::StrCat("commit of chunk ", index, ", which rank ", rank_, " does not hold"));
  }
  const uint64_t elements = layout_->table().range(index).size();
  const v1::Encoding encoding = PullEncoding(layout_->plan().spec());
  if (header.elements() != elements || header.encoding() != encoding) {
    return absl::InvalidArgumentError(absl::StrCat("commit of chunk ", index, " has ", header.elements(),
                                                   " elements in ", EncodingName(header.encoding()), "; expected ",
                                                   elements, " in ", EncodingName(encoding)));
  }
  if (async()) return OnAnswer(header, std::move(value));
  Chunk& chunk = chunks_[index];
  if (version < chunk.want) return absl::OkStatus();  // seen already
  if (version > chunk.want || version > round_ + 1) {
    return absl::InvalidArgumentError(absl::StrCat("commit of chunk ", index, " at version ", version, "; expected ",
                                                   chunk.want, " in round ", round_));
  }
  ++chunk.want;
  if (version == round_ + 1 && !Pushed(chunk)) {
    chunk.kept = std::move(value);
  } else {
    HandOut(index, version, std::move(value));
  }
  return absl::OkStatus();
}

absl::Status RoundCore::OnLater(uint64_t generation, const v1::Later& later) {
  if (generation != this->generation() || chunks_.empty()) return absl::OkStatus();
  if (async()) return absl::FailedPreconditionError("in async no contribution is declined");
  for (const v1::ContributionName& name : later.again()) {
    if (name.chunk() >= chunks_.size()) {
      return absl::OutOfRangeError(
          absl::StrCat("chunk ", name.chunk(), " of ", chunks_.size(), " is asked for, once declined"));
    }
    const Chunk& chunk = chunks_[name.chunk()];
    if (chunk.pushed == name.round() + 1 && chunk.want <= chunk.pushed) SendPush(name.chunk());
  }
  return absl::OkStatus();
}

void RoundCore::HandOut(uint64_t chunk, uint64_t version, std::shared_ptr<const CommitValue> value) {
  ++installing_;
  actions_->Install(generation(), chunk, version, std::move(value));
}

void RoundCore::OnInstalled(uint64_t generation, uint64_t chunk, uint64_t version) {
  CHECK(installing_ > 0, "an install was reported twice");
  --installing_;
  if (generation == this->generation() && !chunks_.empty()) {
    chunks_[chunk].installed = static_cast<int64_t>(version);
    const bool current = async() ? phase_ == Phase::kPulling : version == round_;
    ++(current ? at_current_ : at_next_);
    if (current && !async() && at_current_ == view().size()) Settle();
  }
  Step();
}

bool RoundCore::InPlace(Range range) const {
  if (phase_ != Phase::kComputing) return false;
  if (summing_ > 0) return false;  // of the round before; the gradient that it reads is written after this forward
  if (async() || at_current_ == view().size() || range.size() == 0) return true;
  const ChunkTable& table = layout_->table();
  for (uint64_t i = table.chunk_at(range.begin); i <= table.chunk_at(range.end - 1); ++i) {
    if (chunks_[i].tail != kNobody && chunks_[i].installed < static_cast<int64_t>(round_)) return false;
  }
  return true;
}

// ---------------------------------------------------------------- for people
std::string RoundCore::Describe() const {
  if (!layout_) return "no plan yet";
  std::string text = absl::StrCat("job ", layout_->plan().job_id(), " generation ", generation(), " rank ", rank_,
                                  " round ", round_, ": ");
  const bool on_the_way = phase_ == Phase::kComputing && !async() && at_current_ < view().size();
  const uint64_t missing = phase_ == Phase::kPulling || on_the_way ? round_ : round_ + 1;
  switch (phase_) {
    case Phase::kStopping:
      return absl::StrCat(text, "stops what is under way (", busy_ ? "work" : "", busy_ && installing_ ? ", " : "",
                          installing_ ? absl::StrCat(installing_, " installs") : "", ")");
    case Phase::kAsking:
      return absl::StrCat(text, "waits for a lease of positions from ", servers_[holder_].node.name(),
                          up_[holder_] ? "" : ", whose stream is down");
    case Phase::kEvaluating:
      return text + "evaluates";
    case Phase::kComputing:
      if (!on_the_way) return text + "computes";
      break;
    case Phase::kFinished:
      return text + "waits for the end of the job";
    case Phase::kPulling:
    case Phase::kWaiting:
      break;
    default:
      return text + (phase_ == Phase::kEnded ? "ended" : "idle");
  }
  uint64_t lacking = 0;
  std::string first;
  for (const uint64_t i : view()) {
    if (async() ? chunks_[i].answered : chunks_[i].installed >= static_cast<int64_t>(missing)) continue;
    if (lacking++ > 0) continue;
    const ServerEnd& server = servers_[chunks_[i].tail];
    first = absl::StrCat("the first is chunk ", i, " from ", server.node.name(), " at ", server.address,
                         up_[chunks_[i].tail] ? "" : ", whose stream is down");
    const uint32_t target = chunks_[i].primary;
    if (target != kNobody && servers_[target].leader) {
      absl::StrAppend(&first, "; ", servers_[target].node.name(), " pushes the host's sum",
                      up_[target] ? "" : ", but the stream to it is down");
    } else if (host_sum_.Gathers(i) && missing > 0) {
      const std::vector<uint32_t> lacks = host_sum_.Missing(i, missing - 1);
      if (!lacks.empty()) absl::StrAppend(&first, "; the host's sum lacks rank ", absl::StrJoin(lacks, ", "));
    }
  }
  if (async()) {
    return absl::StrCat(text, "waits for the answers of ", lacking, " of ", view().size(), " chunks (", first, ")");
  }
  return absl::StrCat(text, "waits for ", lacking, " of ", view().size(), " chunks at version ", missing, " (", first,
                      ")");
}

}  // namespace sluice
