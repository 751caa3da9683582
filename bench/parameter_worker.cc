#include "bench/parameter_worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);  // of one round

PsClientOptions ClientOptions(const ParameterJob& job, const Layout& layout, uint32_t number, Transport* transport) {
  PsClientOptions options;
  options.job_id = layout.plan().job_id();
  options.node = BenchNode("worker", number);
  options.transport = transport;
  options.window = job.window;
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchWorker>> BenchWorker::Open(const ParameterJob& job, uint32_t number,
                                                               std::shared_ptr<const Layout> layout,
                                                               Transport* transport) {
  std::shared_ptr<SharedRegion> region;
  if (job.shared_memory) {
    ASSIGN_OR_RETURN(region, SharedRegion::Make(job.bytes()));
  }
  ASSIGN_OR_RETURN(auto parameters, ParameterMemory::Make(layout->space().size()));
  return std::unique_ptr<BenchWorker>(
      new BenchWorker(job, number, std::move(layout), transport, std::move(region), std::move(parameters)));
}

BenchWorker::BenchWorker(const ParameterJob& job, uint32_t number, std::shared_ptr<const Layout> layout,
                         Transport* transport, std::shared_ptr<SharedRegion> region,
                         std::shared_ptr<ParameterMemory> parameters)
    : layout_(std::move(layout)),
      number_(number),
      backward_(job.backward),
      region_(std::move(region)),
      server_of_(layout_->table().chunks()),
      encoder_(*layout_),
      parameters_(std::move(parameters)),
      client_(ClientOptions(job, *layout_, number, transport), this) {
  if (region_ != nullptr) {
    gradient_ = reinterpret_cast<float*>(region_->data());
    owner_ = region_;
  } else {
    const auto values = std::make_shared<std::vector<float>>(layout_->space().size());
    gradient_ = values->data();
    owner_ = values;
  }
  encoder_.Begin(*layout_, number);
  std::vector<ServerEnd> servers;
  for (uint64_t chunk = 0; chunk < server_of_.size(); ++chunk) {
    const v1::Member& member = layout_->primary(layout_->table().shard(chunk));
    const auto known = std::find_if(servers.begin(), servers.end(),
                                    [&](const ServerEnd& each) { return each.address == member.address(); });
    server_of_[chunk] = static_cast<size_t>(known - servers.begin());
    if (known == servers.end()) servers.push_back({member.node(), member.address()});
  }
  servers_ = servers.size();
  client_.Open(layout_->generation(), number, servers, {region_, region_ != nullptr});
}

BenchWorker::~BenchWorker() { client_.Stop(); }

absl::Span<const float> BenchWorker::parameters() const {
  absl::MutexLock lock(&mutex_);
  return {parameters_->window(version_), layout_->space().size()};
}

absl::Status BenchWorker::AwaitInitial() { return AwaitVersion(0); }

absl::StatusOr<BenchWorker::Times> BenchWorker::Round(uint64_t round, bool frames_apart) {
  const uint64_t generation = layout_->generation();
  {
    absl::MutexLock lock(&mutex_);
    version_ = round + 1;
    in_place_ = 0;
    first_.reset();
    taken_.reset();
    all_pushed_ = false;
  }
  const absl::Time start = absl::Now();
  v1::RoundReport report;
  report.set_generation(generation);
  report.set_round(round);
  report.set_contributor(number_);
  report.set_kind(v1::RoundReport::TRAIN);
  report.set_count(kBenchCount);
  client_.Report(generation, 0, report);  // chunk 0 is of shard 0, the verdict holder's
  const uint64_t chunks = layout_->table().chunks();
  for (uint64_t k = 0; k < chunks; ++k) {
    const uint64_t i = backward_ ? chunks - 1 - k : k;
    const Range range = layout_->table().range(i);
    v1::ChunkHeader header;
    header.set_chunk(i);
    header.set_generation(generation);
    header.set_round(round);
    header.set_contributor(number_);
    header.set_elements(range.size());
    header.set_count(kBenchCount);
    header.set_encoding(encoder_.encoding());
    const float* values = gradient_ + range.begin;
    // A backward pass, too, lets chunks go as they are ready; with f32 all are, unless it is to look like one.
    const bool one_by_one = backward_ || encoder_.encoding() != v1::F32;
    if (one_by_one) client_.MoreFollow(k + 1 < chunks);
    if (k + 1 == chunks) {
      absl::MutexLock lock(&mutex_);
      all_pushed_ = true;
    }
    BorrowedBytes bytes = {values, range.size() * sizeof(float), owner_};
    if (encoder_.encoding() != v1::F32) {
      encoder_.Encode(i, round, values);
      const auto encoded = encoder_.Bytes(generation, i, round);
      if (!encoded.has_value()) return absl::InternalError("the encoder has another generation");
      bytes = *encoded;
    }
    client_.Push(generation, server_of_[i], header, std::move(bytes));
    if (frames_apart || one_by_one) client_.Flush();
  }
  client_.Flush();
  RETURN_IF_ERROR(AwaitVersion(round + 1));
  absl::MutexLock lock(&mutex_);
  return Times{start, taken_.value_or(*first_), *first_, last_};
}

absl::Status BenchWorker::AwaitVersion(uint64_t version) {
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || (in_place_ == layout_->table().chunks() && (taken_.has_value() || servers_ > 1));
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
  ASSIGN_OR_RETURN(const std::vector<size_t> lengths, ChunkLengths(frame));
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
  for (int i = 0; i < frame.control.header_size(); ++i) {
    const v1::ChunkHeader& header = frame.control.header(i);
    const size_t bytes = lengths[static_cast<size_t>(i)];
    const Payload payload = frame.payload.Sub(offset, bytes);
    const Range range = layout_->table().range(header.chunk());
    if (header.encoding() != v1::F32 || frame.region == nullptr || payload.contiguous() == nullptr ||
        !parameters_->Show(version, range, frame.region, payload.contiguous())) {
      DecodePayload(header.encoding(), payload, header.elements(), parameters_->Own(version, range));
    }
    offset += bytes;
  }
  absl::MutexLock lock(&mutex_);
  in_place_ += static_cast<uint64_t>(frame.control.header_size());
  last_ = absl::Now();
  return absl::OkStatus();
}

void BenchWorker::OnPushesTaken() {
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mutex_);
  if (all_pushed_) taken_ = now;
}

void BenchWorker::OnStreamUp(uint64_t generation, size_t server) {
  v1::Subscribe subscribe;
  subscribe.set_generation(generation);
  v1::Want* want = subscribe.add_wants();
  want->set_chunks(layout_->table().chunks());  // of them the server's
  client_.Subscribe(generation, server, subscribe);
}

void BenchWorker::OnStreamDown(uint64_t, size_t, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = absl::UnavailableError(absl::StrCat("a stream broke: ", status.ToString()));
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
