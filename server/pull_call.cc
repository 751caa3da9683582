#include "server/pull_call.h"

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/rpc.h"

namespace sluice {
namespace {

using grpc::ByteBuffer;

constexpr int kMaxHeaders = 2048;  // of a frame: keeps its control part far below kMaxFrameControl

// At any time one thing is under way: fetching a value, writing a frame, or the end. Each begins the next one.
class PullCall final : public grpc::ServerWriteReactor<ByteBuffer>, public std::enable_shared_from_this<PullCall> {
 public:
  explicit PullCall(grpc::CallbackServerContext* context) : context_(context) {}

  void Begin(ServerNode* node, const ByteBuffer& buffer, absl::Duration patience) {
    self_ = shared_from_this();
    v1::PullRequest request;
    if (!DecodeMessage(buffer, &request)) return End(absl::InvalidArgumentError("not a PullRequest"));
    job_ = node == nullptr ? nullptr : node->FindJob(request.job_id());
    if (job_ == nullptr) {
      return End(absl::NotFoundError(absl::StrCat("job ", request.job_id(), " is not on this server")));
    }
    if (job_->layout() == nullptr) {
      return End(absl::UnavailableError(absl::StrCat("job ", request.job_id(), ": its plan is not here yet")));
    }
    uint64_t end = UINT64_MAX;
    if (request.chunks() != 0 && request.chunks() <= UINT64_MAX - request.first_chunk()) {
      end = request.first_chunk() + request.chunks();
    }
    chunks_ = job_->Chunks();
    std::erase_if(chunks_, [&](uint64_t c) { return c < request.first_chunk() || c >= end; });
    if (chunks_.empty()) return End(absl::OutOfRangeError("none of these chunks is on this server"));
    if (request.has_version()) version_ = request.version();
    if (job_->memory() != nullptr) memory_ = job_->memory();
    memory_->Join();
    joined_ = true;
    {
      absl::MutexLock lock(&mutex_);
      alarm_.emplace();
      alarm_->Set(absl::ToChronoTime(absl::Now() + patience), [weak = weak_from_this(), patience](bool fired) {
        if (const auto call = weak.lock(); fired && call != nullptr) call->Cut(patience);
      });
    }
    Fetch();
  }

  void OnWriteDone(bool ok) override {
    memory_->Count(-static_cast<int64_t>(bytes_));
    bytes_ = 0;
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) return End(absl::CancelledError("the client left"));
    if (next_ == chunks_.size()) return End(absl::OkStatus());
    Fetch();
  }
  // The client left, or its deadline has passed.
  void OnCancel() override {
    {
      absl::MutexLock lock(&mutex_);
      cut_ = true;
    }
    if (job_ != nullptr) job_->CancelFetch(this);
  }
  void OnDone() override {
    const std::shared_ptr<PullCall> last = std::move(self_);
    if (joined_) memory_->Leave();
    absl::MutexLock lock(&mutex_);
    over_ = true;
    if (alarm_.has_value()) alarm_->Cancel();
  }

 private:
  // It has taken too long.
  void Cut(absl::Duration patience) {
    {
      absl::MutexLock lock(&mutex_);
      if (over_) return;
      cut_ = true;
      late_ = absl::DeadlineExceededError(absl::StrCat("a Pull takes ", absl::FormatDuration(patience), " at most"));
      if (writing_) context_->TryCancel();  // ends the write
    }
    job_->CancelFetch(this);
  }

  void Fetch() {
    job_->Fetch(this, chunks_[next_], version_,
                [self = self_](absl::StatusOr<FetchedChunk> value) { self->Fetched(std::move(value)); });
    bool cut;
    {
      absl::MutexLock lock(&mutex_);
      cut = cut_;
    }
    if (cut) job_->CancelFetch(this);
  }

  // On a lane.
  void Fetched(absl::StatusOr<FetchedChunk> fetched) {
    if (!fetched.ok()) return End(fetched.status());
    const ChunkValue& value = fetched->value;
    v1::ChunkHeader* const header = frame_.add_header();
    header->set_chunk(chunks_[next_++]);
    header->set_generation(fetched->generation);
    header->set_round(fetched->version);
    header->set_elements(value.elements);
    payload_.push_back({value.data.get(), value.elements * sizeof(float), value.data});
    bytes_ += payload_.back().size;
    if (bytes_ < std::min(kMaxFramePayload, memory_->share()) && frame_.header_size() < kMaxHeaders &&
        next_ < chunks_.size())
      return Fetch();
    buffer_ = EncodeFrame(frame_, payload_);
    frame_.Clear();
    payload_.clear();
    memory_->Count(static_cast<int64_t>(bytes_));
    absl::MutexLock lock(&mutex_);
    writing_ = true;
    if (cut_) context_->TryCancel();
    StartWrite(&buffer_);
  }

  void End(absl::Status status) {
    {
      absl::MutexLock lock(&mutex_);
      if (!late_.ok()) status = late_;
    }
    Finish(ToGrpc(status));
  }

  grpc::CallbackServerContext* const context_;  // gRPC's, until OnDone has returned
  std::shared_ptr<PullCall> self_;              // until OnDone
  std::shared_ptr<ServerJob> job_;
  std::shared_ptr<StreamMemory> memory_ = std::make_shared<StreamMemory>();
  bool joined_ = false;
  std::vector<uint64_t> chunks_;
  std::optional<uint64_t> version_;
  // Of whichever thing is under way.
  size_t next_ = 0;  // place in chunks_
  v1::ChunkFrame frame_;
  std::vector<BorrowedBytes> payload_;
  size_t bytes_ = 0;
  ByteBuffer buffer_;

  absl::Mutex mutex_;
  bool cut_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status late_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerWriteReactor<ByteBuffer>* NewPullCall(grpc::CallbackServerContext* context, ServerNode* node,
                                                  const ByteBuffer& request, absl::Duration patience) {
  const auto call = std::make_shared<PullCall>(context);
  call->Begin(node, request, patience);
  return call.get();
}

}  // namespace sluice
