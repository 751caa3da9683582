#include "worker/worker_job.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/optimizer.h"
#include "common/status_macros.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

constexpr absl::Duration kFirstStallLog = absl::Seconds(5);  // then after twice as long each time

// A chunk's value as slices of the frame it came in.
class PayloadValue : public CommitValue {
 public:
  PayloadValue(v1::Encoding encoding, uint64_t elements, Payload payload, std::shared_ptr<const MappedRegion> region)
      : encoding_(encoding), elements_(elements), payload_(std::move(payload)), region_(std::move(region)) {}

  // As `version` of the model's parameters from element `first` on.
  void PutInPlace(Model* model, uint64_t version, uint64_t first) const {
    ParameterMemory* const memory = model->parameter_memory();
    const Range range = {first, first + elements_};
    if (memory == nullptr) {
      DecodePayload(encoding_, payload_, elements_, model->parameters() + first);
    } else if (region_ == nullptr || encoding_ != v1::F32 || payload_.contiguous() == nullptr ||
               !memory->Show(version, range, region_, payload_.contiguous())) {
      DecodePayload(encoding_, payload_, elements_, memory->Own(version, range));
    }
  }
  const Payload& payload() const { return payload_; }

 private:
  const v1::Encoding encoding_;
  const uint64_t elements_;
  const Payload payload_;
  const std::shared_ptr<const MappedRegion> region_;  // where it lies; null: it came in the stream
};

uint64_t ViewElements(const Layout& layout, uint32_t rank) {
  uint64_t elements = 0;
  for (const uint64_t chunk : layout.view(rank)) elements += layout.table().range(chunk).size();
  return elements;
}

}  // namespace

WorkerJob::WorkerJob(const WorkerJobOptions& options, std::shared_ptr<const Layout> layout, uint32_t rank)
    : options_(options),
      id_(layout->plan().job_id()),
      table_(layout->table()),
      view_elements_(ViewElements(*layout, rank)),
      clips_alone_(layout->async() && layout->plan().spec().optimizer().clip_norm() > 0),
      place_(layout->mesh().place(rank)),
      encoder_(*layout),
      core_(options.rules, this),
      layout_(std::move(layout)),
      rank_(rank),
      mail_(std::make_shared<PeerMail>(MailOptions(), *layout_, rank)),
      client_({.job_id = id_,
               .node = options.node,
               .transport = options.transport,
               .residuals = ErrorFeedback(layout_->plan().spec()) && !layout_->async(),
               .patient = layout_->plan().discipline() == v1::Plan::VERDICT},
              this) {
  const Mesh& mesh = layout_->mesh();
  if (mesh.tensor > 1) tensor_.emplace(mail_->tensor(), options.clock);
  if (mesh.pipeline > 1) stages_.emplace(mail_->stages(), options.clock);
}

WorkerJob::~WorkerJob() {
  mail_->Stop();
  client_.Stop();
}

// ---------------------------------------------------------------- life
void WorkerJob::Run() {
  const absl::Status status = OpenAndTrain();
  if (!status.ok()) {
    Problem(status);
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&ended_));
  }
  client_.Stop();  // no commit is being installed after this
  mail_->Stop();
  {
    absl::MutexLock lock(&mutex_);
    const auto made = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return core_.summing() == 0; };
    mutex_.Await(absl::Condition(&made));
    made_.clear();
  }
  model_ = nullptr;
  data_ = nullptr;
}

absl::Status WorkerJob::OpenAndTrain() {
  v1::JobSpec spec;
  uint64_t parameters = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return absl::OkStatus();
    spec = layout_->plan().spec();
    parameters = layout_->space().size();
  }
  ASSIGN_OR_RETURN(data_, options_.open_dataset(spec));
  ASSIGN_OR_RETURN(model_, options_.make_model(spec, Part()));
  CHECK(model_->space().size() == parameters, "the model has {} parameters, the plan {}", model_->space().size(),
        parameters);
  Deliver([this](RoundCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    open_ = true;
    if (!ended_) core.OnPlan(layout_, rank_);
  });
  return TrainLoop(id_, spec, data_.get(), model_.get(), this, options_.clock, options_.hooks).Run();
}

void WorkerJob::OnPlan(std::shared_ptr<const Layout> layout, uint32_t rank) {
  Deliver([&, this](RoundCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_ || layout->generation() <= layout_->generation()) return;
    layout_ = std::move(layout);
    rank_ = rank;
    if (open_) core.OnPlan(layout_, rank_);
  });
}

void WorkerJob::End() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  core_.OnEnd();
  for (auto& [contributor, member] : members_) member.stream->Close(absl::OkStatus());
  members_.clear();
}

bool WorkerJob::ended() const {
  absl::MutexLock lock(&mutex_);
  return ended_;
}

uint64_t WorkerJob::generation() const {
  absl::MutexLock lock(&mutex_);
  return layout_->generation();
}

void WorkerJob::Problem(const absl::Status& status) {
  v1::NodeMessage message;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || problem_.has_value()) return;
    v1::NodeProblem* problem = message.mutable_problem();
    problem->set_job_id(id_);
    problem->set_generation(layout_->generation());
    problem->set_code(static_cast<int>(status.code()));
    problem->set_message(std::string(status.message()));
    problem_ = message;
  }
  LOG_ERROR("job {}: {}", id_, status.ToString());
  options_.send(message);
}

void WorkerJob::Repeat() {
  std::optional<v1::NodeMessage> problem;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_) problem = problem_;
  }
  if (problem.has_value()) options_.send(*problem);
}

// ---------------------------------------------------------------- events and installs
WorkerJob::Orders WorkerJob::TakeOrders() {
  return {std::exchange(installs_, {}), std::exchange(push_orders_, {}), std::exchange(sums_, {})};
}

void WorkerJob::Carry(Orders orders) {
  for (;;) {
    PushEncoded(orders.pushes);
    if (orders.installs.empty() && orders.sums.empty()) break;
    std::vector<MadeSum> made;
    for (const HostSum& sum : orders.sums) made.push_back(MakeSum(sum));
    orders.sums.clear();  // and with it what it holds of members' memory
    for (const InstallOrder& order : orders.installs) {
      const auto& value = static_cast<const PayloadValue&>(*order.value);
      if (order.residual) {
        encoder_.Restore(order.chunk, value.payload());
      } else {
        value.PutInPlace(model_.get(), order.version, table_.range(order.chunk).begin);
      }
    }
    absl::MutexLock lock(&mutex_);
    for (const InstallOrder& order : orders.installs) {
      if (order.residual) {
        core_.OnResidualInstalled(order.generation, order.chunk);
      } else {
        core_.OnInstalled(order.generation, order.chunk, order.version);
      }
    }
    for (MadeSum& sum : made) {
      const uint64_t generation = sum.generation, chunk = sum.chunk, round = sum.round;
      const std::vector<uint32_t> nonfinite = sum.nonfinite;
      if (generation == core_.generation()) made_[chunk] = std::move(sum);
      core_.OnHostSum(generation, chunk, round, nonfinite);
    }
    orders = TakeOrders();
  }
  client_.Flush();
}

void WorkerJob::PushEncoded(const std::vector<PushOrder>& orders) {
  for (const PushOrder& order : orders) {
    const uint64_t chunk = order.header.chunk();
    if (order.encode) {
      encoder_.Encode(chunk, order.number, order.header.round(), model_->gradients() + table_.range(chunk).begin);
    } else if (const auto bytes = encoder_.Bytes(order.generation, chunk, order.number); bytes.has_value()) {
      client_.Push(order.generation, order.server, order.header, *bytes);
      if (&order != &orders.back()) client_.Flush();  // it travels while the next one is encoded
    }
  }
}

void WorkerJob::Install(uint64_t generation, uint64_t chunk, uint64_t version,
                        std::shared_ptr<const CommitValue> value) {
  installs_.push_back({generation, chunk, version, std::move(value)});
}

void WorkerJob::InstallResidual(uint64_t generation, uint64_t chunk, std::shared_ptr<const CommitValue> value) {
  installs_.push_back({generation, chunk, 0, std::move(value), /*residual=*/true});
}

// ---------------------------------------------------------------- what the core wants
void WorkerJob::OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) {
  LOG_INFO("job {} generation {}: rank {} of {}, from version {}, {} servers", id_, layout->generation(), core_.rank(),
           layout->ranks(), layout->plan().start(), servers.size());
  times_.Restart(options_.clock->Now());
  for (auto it = members_.begin(); it != members_.end();) {  // of generations that are over
    if (it->second.generation >= layout->generation()) {
      ++it;
      continue;
    }
    it->second.stream->Close(absl::AbortedError(absl::StrCat("generation ", it->second.generation, " is over")));
    it = members_.erase(it);
  }
  SharedMemoryUse sharing;
  if (options_.shared_memory) {
    sharing.pushes = model_->gradient_region();
    sharing.commits = !layout->async();
  }
  mail_->Begin(layout, core_.rank());
  client_.Open(layout->generation(), core_.rank(), servers, sharing);
}

void WorkerJob::CloseStreams() {
  client_.Close();
  mail_->End();
  made_.clear();
}

void WorkerJob::Subscribe(size_t server, const v1::Subscribe& subscribe) {
  client_.Subscribe(core_.generation(), server, subscribe);
}

void WorkerJob::Encode(uint64_t chunk, uint64_t round) {
  if (encoder_.encoding() == v1::F32) return;
  PushOrder& order = push_orders_.emplace_back();
  order.encode = true;
  order.header.set_chunk(chunk);
  order.header.set_round(round);
  order.number = core_.layout()->async() ? core_.leases() : round;
}

void WorkerJob::Push(size_t server, const v1::ChunkHeader& header) {
  if (options_.hooks != nullptr) pushed_.push_back(header.chunk());
  if (header.elements() > 0) times_.Pushed();
  if (header.elements() > 0 && header.encoding() != v1::F32) {
    push_orders_.push_back({.generation = core_.generation(),
                            .server = server,
                            .header = header,
                            .number = core_.layout()->async() ? core_.leases() : header.round()});
    return;
  }
  BorrowedBytes bytes;
  if (header.elements() > 0) {
    const float* gradient = model_->gradients() + core_.layout()->table().range(header.chunk()).begin;
    if (header.contributors() > 1) {
      const std::shared_ptr<float[]>& sum = made_.at(header.chunk()).values;
      bytes = {sum.get(), header.elements() * sizeof(float), sum};
    } else {
      bytes = {gradient, header.elements() * sizeof(float), model_->gradient_owner()};
    }
  }
  client_.Push(core_.generation(), server, header, std::move(bytes));
}

bool WorkerJob::BeginResidual(const std::shared_ptr<const Layout>& layout, uint32_t rank) {
  const PushEncoder::Start start = encoder_.Begin(*layout, layout->plan().ranks(static_cast<int>(rank)).data());
  if (start == PushEncoder::Start::kKept) return false;
  kept_residual_.clear();
  kept_version_ = 0;
  if (start == PushEncoder::Start::kRestore) return true;
  LOG_WARN(
      "job {} generation {}: what {} had left out of this rank's gradients belongs to another timeline or replica and "
      "is dropped",
      id_, layout->generation(), EncodingName(encoder_.encoding()));
  return false;
}

void WorkerJob::KeepResidual(uint64_t version) {
  if (kept_version_ == version) return;  // in an earlier generation, which may have gone on to encode the round
  kept_version_ = version;
  kept_residual_.clear();
  for (uint64_t i = 0; i < table_.chunks(); ++i) kept_residual_.push_back(encoder_.Residual(i));
}

void WorkerJob::PushResidual(size_t server, const v1::ChunkHeader& header) {
  v1::ChunkHeader complete = header;
  const BorrowedBytes& bytes = kept_residual_[header.chunk()];
  complete.set_elements(bytes.size / sizeof(float));
  client_.Push(core_.generation(), server, complete, bytes);
}

void WorkerJob::Report(size_t server, const v1::RoundReport& report) {
  client_.Report(core_.generation(), server, report);
}

void WorkerJob::Ask(size_t server, const v1::LeaseRequest& request) {
  client_.Ask(core_.generation(), server, request);
}

// Pushes of committed rounds that still wait must not leave any more: their memory will be written.
void WorkerJob::AllInPlace(uint64_t version) {
  client_.DropBefore(version);
  if (version > kept_version_) kept_residual_.clear();
  std::erase_if(made_, [version](const auto& sum) { return sum.second.round < version; });
}

void WorkerJob::StartCompute(uint64_t generation, uint64_t round) { SetWork(Work::kTrain, generation, round); }

void WorkerJob::StartEvaluation(uint64_t generation, uint64_t version) {
  SetWork(Work::kEvaluate, generation, version);
}

void WorkerJob::SetWork(Work::Kind kind, uint64_t generation, uint64_t round) {
  const Layout& layout = *core_.layout();
  cancel_ = false;  // the work before has ended
  work_ = Work{.kind = kind,
               .generation = generation,
               .round = round,
               .replica = layout.plan().ranks(static_cast<int>(core_.rank())).data(),
               .replicas = layout.replicas(),
               .positions = {},
               .cancel = &cancel_};
  if (layout.async()) {
    const v1::Lease& lease = core_.lease();
    work_->positions = {lease.position(), lease.position() + lease.positions()};
    if (kind == Work::kEvaluate) {
      work_->replica = lease.slice();
      work_->replicas = lease.slices();
    }
  } else if (kind == Work::kTrain) {
    work_->positions = TrainPositions(layout.plan().spec().train(), round, work_->replica, work_->replicas);
  }
}

void WorkerJob::CancelWork() {
  cancel_ = true;
  mail_->Cancel();
}

// ---------------------------------------------------------------- what the train loop says
Work WorkerJob::Next() {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ || work_.has_value(); };
  const absl::Time from = options_.clock->Now();
  absl::Duration patience = kFirstStallLog;
  while (!mutex_.AwaitWithTimeout(absl::Condition(&ready), patience)) {
    if (core_.phase() != RoundCore::Phase::kFinished)
      LOG_WARN("{}, for some {} s", core_.Describe(), patience / absl::Seconds(1));
    patience *= 2;
  }
  if (ended_) return Work();
  const Work work = *work_;
  work_.reset();
  mail_->StartRound(work.generation, work.round);
  times_.Waited(from, options_.clock->Now(), work.round, /*in_work=*/false);
  return work;
}

absl::Status WorkerJob::ParametersNeeded(const Work& work, Range range) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return *work.cancel || core_.InPlace(range); };
  if (ready()) return *work.cancel ? absl::CancelledError("the generation ended") : absl::OkStatus();
  const absl::Time from = options_.clock->Now();
  absl::Duration patience = kFirstStallLog;
  while (!mutex_.AwaitWithTimeout(absl::Condition(&ready), patience)) {
    LOG_WARN("{}, for some {} s", core_.Describe(), patience / absl::Seconds(1));
    patience *= 2;
  }
  times_.Waited(from, options_.clock->Now(), work.round, /*in_work=*/true);
  return *work.cancel ? absl::CancelledError("the generation ended") : absl::OkStatus();
}

void WorkerJob::Begin(const Work& work, double count) {
  gradients_left_ = count > 0 ? view_elements_ : 0;
  Deliver([&](RoundCore& core) { core.OnBatch(work.generation, work.round, count); });
  CallPushHooks(work);
}

void WorkerJob::GradientReady(const Work& work, Range range) {
  gradients_left_ -= range.size();
  client_.MoreFollow(gradients_left_ > 0);
  Deliver([&](RoundCore& core) { core.OnGradientReady(work.generation, work.round, range); });
  CallPushHooks(work);
}

void WorkerJob::Done(const Work& work, const LossSum& sum, double seconds) {
  WorkSum done{.loss = sum.loss, .count = sum.count, .correct = sum.correct, .seconds = seconds};
  if (stages_.has_value()) done.pipeline_seconds = absl::ToDoubleSeconds(stages_->TakeWaited());
  if (tensor_.has_value()) done.tensor_seconds = absl::ToDoubleSeconds(tensor_->TakeWaited());
  if (clips_alone_ && work.kind == Work::kTrain) done.gradient_norm = GradientNorm(sum.count);
  Deliver([&](RoundCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (work.kind == Work::kTrain) {
      const RoundClock::Times times = times_.Computed();
      const double waited = absl::ToDoubleSeconds(times.wait_in_work) + done.pipeline_seconds + done.tensor_seconds;
      done.seconds = std::max(0.0, seconds - waited);
      done.wait_seconds = absl::ToDoubleSeconds(times.wait);
      done.answer_seconds = absl::ToDoubleSeconds(times.answer);
      core.OnComputed(work.generation, work.round, done);
    } else {
      core.OnEvaluated(work.generation, work.round, done);
    }
  });
  CallPushHooks(work);  // with clipping the pushes leave here
}

double WorkerJob::GradientNorm(double count) const {
  if (count <= 0) return 0;
  return std::sqrt(SumOfSquares(model_->gradients(), model_->space().size())) / count;
}

void WorkerJob::Stopped(const Work& work) {
  client_.MoreFollow(false);
  // What the pass waited for was a new generation.
  if (stages_.has_value()) stages_->TakeWaited();
  if (tensor_.has_value()) tensor_->TakeWaited();
  Deliver([&](RoundCore& core) { core.OnStopped(work.generation); });
}

void WorkerJob::CallPushHooks(const Work& work) {
  if (options_.hooks == nullptr) return;
  std::vector<uint64_t> pushed;
  {
    absl::MutexLock lock(&mutex_);
    pushed.swap(pushed_);
  }
  for (uint64_t chunk : pushed) options_.hooks->AfterPush(id_, work.generation, work.round, chunk);
}

// ---------------------------------------------------------------- what the streams say
void WorkerJob::OnStreamUp(uint64_t generation, size_t server) {
  Deliver([&](RoundCore& core) { core.OnStreamUp(generation, server); });
}

void WorkerJob::OnStreamDown(uint64_t generation, size_t server, const absl::Status& status) {
  Deliver([&](RoundCore& core) { core.OnStreamDown(generation, server); });
}

void WorkerJob::OnCheckpoint(uint64_t generation, size_t server, uint64_t version) {
  Deliver([&](RoundCore& core) { core.OnCheckpoint(generation, server, version); });
}

absl::Status WorkerJob::OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) {
  absl::Status status;
  Deliver([&](RoundCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (generation == core.generation() && frame.control.header_size() > 0 && !core.layout()->async()) {
      times_.Arrived(frame.control.header(0).round(), options_.clock->Now());
    }
    size_t offset = 0;
    for (const v1::ChunkHeader& header : frame.control.header()) {
      const absl::StatusOr<size_t> bytes = LengthInPayload(header.encoding(), header.elements(), frame.payload, offset);
      status = bytes.status();
      if (!status.ok()) return;
      auto value = std::make_shared<PayloadValue>(header.encoding(), header.elements(),
                                                  frame.payload.Sub(offset, *bytes), frame.region);
      status = header.residual() ? core.OnResidual(header, std::move(value)) : core.OnCommit(header, std::move(value));
      if (!status.ok()) return;
      offset += *bytes;
    }
  });
  return status;
}

absl::Status WorkerJob::OnLease(uint64_t generation, size_t server, const v1::Lease& lease) {
  absl::Status status;
  Deliver([&](RoundCore& core) { status = core.OnLease(lease); });
  return status;
}

absl::Status WorkerJob::OnLater(uint64_t generation, size_t server, const v1::Later& later) {
  absl::Status status;
  Deliver([&](RoundCore& core) { status = core.OnLater(generation, later); });
  return status;
}

void WorkerJob::OnPushesTaken() {
  absl::MutexLock lock(&mutex_);
  times_.Taken(options_.clock->Now());
}

void WorkerJob::OnUnreachable(uint64_t generation, size_t server, const absl::Status& status) {
  if (IsLeader(generation, server)) return HostSumFailed(options_.node, status);
  v1::NodeId node;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || generation != core_.generation() || server >= core_.servers().size()) return;
    node = core_.servers()[server].node;
    LOG_WARN("job {} generation {}: server {} at {} cannot be reached: {}", id_, generation, node.name(),
             core_.servers()[server].address, status.ToString());
  }
  Accuse(generation, node, status);
}

void WorkerJob::OnRefused(uint64_t generation, size_t server, const absl::Status& status) {
  if (IsLeader(generation, server)) return HostSumFailed(options_.node, status);
  std::string what;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || generation != core_.generation() || server >= core_.servers().size()) return;
    what = absl::StrCat("server ", core_.servers()[server].node.name(), " keeps refusing rank ", core_.rank(), " (",
                        options_.node.name(), ") in generation ", generation);
  }
  Problem(Annotate(status, what));
}

}  // namespace sluice
