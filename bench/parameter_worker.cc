#include "bench/parameter_worker.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/parameter_job.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);  // of one round

PsClientOptions ClientOptions(const Layout& layout, Transport* transport, size_t window) {
  PsClientOptions options;
  options.job_id = layout.plan().job_id();
  options.node = BenchWorkerId();
  options.transport = transport;
  options.window = window;
  return options;
}

std::shared_ptr<ParameterMemory> MakeParameters(const Layout& layout) {
  auto memory = ParameterMemory::Make(layout.space().size());
  CHECK(memory.ok(), "{}", memory.status().ToString());
  return *std::move(memory);
}

}  // namespace

BenchWorker::BenchWorker(std::shared_ptr<const Layout> layout, Transport* transport, size_t window,
                         std::shared_ptr<SharedRegion> region)
    : layout_(std::move(layout)),
      region_(std::move(region)),
      parameters_(MakeParameters(*layout_)),
      client_(ClientOptions(*layout_, transport, window), this) {
  const v1::Member& server = layout_->primary(0);
  client_.Open(layout_->generation(), 0, {{server.node(), server.address()}}, {region_, region_ != nullptr});
}

BenchWorker::~BenchWorker() { client_.Stop(); }

absl::Span<const float> BenchWorker::parameters() const {
  absl::MutexLock lock(&mutex_);
  return {parameters_->window(version_), layout_->space().size()};
}

absl::Status BenchWorker::AwaitInitial() { return AwaitVersion(0); }

absl::StatusOr<BenchWorker::Times> BenchWorker::Round(uint64_t round,
                                                      const std::shared_ptr<const std::vector<float>>& gradient) {
  const uint64_t generation = layout_->generation();
  const float* values = gradient->data();
  std::shared_ptr<const void> owner = gradient;
  if (region_ != nullptr) {  // where a model's backward pass would have written it
    std::memcpy(region_->data(), values, gradient->size() * sizeof(float));
    values = reinterpret_cast<const float*>(region_->data());
    owner = region_;
  }
  {
    absl::MutexLock lock(&mutex_);
    version_ = round + 1;
    in_place_ = 0;
    first_.reset();
  }
  const absl::Time start = absl::Now();
  v1::RoundReport report;
  report.set_generation(generation);
  report.set_round(round);
  report.set_kind(v1::RoundReport::TRAIN);
  report.set_count(kBenchCount);
  client_.Report(generation, 0, report);
  for (uint64_t i = 0; i < layout_->table().chunks(); ++i) {
    const Range range = layout_->table().range(i);
    v1::ChunkHeader header;
    header.set_chunk(i);
    header.set_generation(generation);
    header.set_round(round);
    header.set_elements(range.size());
    header.set_count(kBenchCount);
    client_.Push(generation, 0, header, {values + range.begin, range.size() * sizeof(float), owner});
  }
  client_.Flush();
  RETURN_IF_ERROR(AwaitVersion(round + 1));
  absl::MutexLock lock(&mutex_);
  return Times{absl::ToDoubleSeconds(*first_ - start), absl::ToDoubleSeconds(last_ - *first_)};
}

absl::Status BenchWorker::AwaitVersion(uint64_t version) {
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || in_place_ == layout_->table().chunks();
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&done), kDeadline)) {
    return absl::DeadlineExceededError(absl::StrCat("version ", version, ": ", in_place_, " of ",
                                                    layout_->table().chunks(), " chunks came within ",
                                                    absl::ToInt64Seconds(kDeadline), " s"));
  }
  return failure_;
}

absl::Status BenchWorker::OnCommits(uint64_t, size_t, const ParsedFrame& frame) {
  const absl::Time arrived = absl::Now();
  uint64_t version = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!first_.has_value()) first_ = arrived;
    version = version_;
    for (const v1::ChunkHeader& header : frame.control.header()) {
      if (header.round() == version_ && header.chunk() < layout_->table().chunks() &&
          header.elements() == layout_->table().range(header.chunk()).size()) {
        continue;
      }
      failure_ = absl::InvalidArgumentError(absl::StrCat("a commit of chunk ", header.chunk(), " at version ",
                                                         header.round(), "; expected version ", version_));
      return failure_;
    }
  }
  size_t offset = 0;
  for (const v1::ChunkHeader& header : frame.control.header()) {
    const size_t bytes = header.elements() * sizeof(float);
    const Payload payload = frame.payload.Sub(offset, bytes);
    const Range range = layout_->table().range(header.chunk());
    if (frame.region == nullptr || payload.contiguous() == nullptr ||
        !parameters_->Show(version, range, frame.region, payload.contiguous())) {
      payload.CopyTo(parameters_->Own(version, range));
    }
    offset += bytes;
  }
  absl::MutexLock lock(&mutex_);
  in_place_ += static_cast<uint64_t>(frame.control.header_size());
  last_ = absl::Now();
  return absl::OkStatus();
}

void BenchWorker::OnStreamUp(uint64_t generation, size_t server) {
  v1::Subscribe subscribe;
  subscribe.set_generation(generation);
  v1::Want* want = subscribe.add_wants();
  want->set_chunks(layout_->table().chunks());
  client_.Subscribe(generation, server, subscribe);
}

void BenchWorker::OnStreamDown(uint64_t, size_t, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = absl::UnavailableError(absl::StrCat("the stream broke: ", status.ToString()));
}

void BenchWorker::OnUnreachable(uint64_t, size_t, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = status;
}

void BenchWorker::OnRefused(uint64_t, size_t, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = status;
}

}  // namespace sluice
