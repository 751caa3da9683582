#include "bench/stream_alone.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/frame.h"
#include "common/log.h"

namespace sluice {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);  // of one transfer

// Sends all chunks of `values` in frames, as far as acknowledgements allow.
class ChunkSender {
 public:
  explicit ChunkSender(const TransferShape& shape) : shape_(shape) {}

  void Start(ByteStream* stream, SharedValues values, uint64_t round) {
    absl::MutexLock lock(&mutex_);
    stream_ = stream;
    values_ = std::move(values);
    round_ = round;
    next_ = 0;
    Advance();
  }
  void OnAck(uint64_t bytes) {
    absl::MutexLock lock(&mutex_);
    acked_ = bytes;
    Advance();
  }
  // Whether everything sent was acknowledged before the deadline.
  bool AwaitAcked() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return next_ == shape_.chunks() && acked_ == sent_; };
    return mutex_.AwaitWithTimeout(absl::Condition(&done), kDeadline);
  }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (values_ != nullptr && next_ < shape_.chunks() && sent_ - acked_ < shape_.window_bytes) {
      const size_t bytes = shape_.size_of(next_);
      v1::ChunkFrame control;
      v1::ChunkHeader* header = control.add_header();
      header->set_chunk(next_);
      header->set_round(round_);
      header->set_elements(bytes / sizeof(float));
      const BorrowedBytes payload{reinterpret_cast<const char*>(values_->data()) + next_ * shape_.chunk_bytes, bytes,
                                  values_};
      stream_->Write(EncodeFrame(control, {&payload, 1}));
      sent_ += bytes;
      ++next_;
    }
  }

  const TransferShape shape_;
  absl::Mutex mutex_;
  ByteStream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  SharedValues values_ ABSL_GUARDED_BY(mutex_);
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;  // payload bytes since the stream's beginning
  uint64_t acked_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

// One end of the stream: stores the chunks that come, acknowledges them, answers a subscription with its values.
class StreamAloneEnd : public StreamHandler {
 public:
  StreamAloneEnd(const TransferShape& shape, SharedValues values)
      : shape_(shape), values_(std::move(values)), sender_(shape) {}

  void SetStream(std::shared_ptr<ByteStream> stream) { stream_ = std::move(stream); }
  ByteStream& stream() { return *stream_; }
  ChunkSender& sender() { return sender_; }

  void ExpectRound(uint64_t round) {
    absl::MutexLock lock(&mutex_);
    round_ = round;
    stored_ = 0;
  }
  bool AwaitStored() {
    absl::MutexLock lock(&mutex_);
    const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stored_ == shape_.chunks() || closed_; };
    return mutex_.AwaitWithTimeout(absl::Condition(&all), kDeadline) && !closed_;
  }

  void OnMessage(grpc::ByteBuffer message) override {
    const auto frame = ParseFrame(std::move(message));
    if (!frame.ok()) return stream_->Close(frame.status());
    if (frame->control.has_ack()) sender_.OnAck(frame->control.ack().bytes());
    if (frame->control.has_subscribe())
      sender_.Start(stream_.get(), values_, frame->control.subscribe().wants(0).version());
    if (frame->control.header_size() > 0) Store(*frame);
  }
  void OnClosed(const absl::Status& status) override {
    if (!status.ok() && !absl::IsUnavailable(status)) LOG_ERROR("the stream ended: {}", std::string(status.message()));
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }

 private:
  void Store(const ParsedFrame& frame) {
    const v1::ChunkHeader& header = frame.control.header(0);
    if (frame.control.header_size() != 1 || header.chunk() >= shape_.chunks() ||
        frame.payload.size() != shape_.size_of(header.chunk())) {
      return stream_->Close(absl::InvalidArgumentError("a chunk outside the table"));
    }
    frame.payload.CopyTo(reinterpret_cast<char*>(values_->data()) + header.chunk() * shape_.chunk_bytes);
    received_ += frame.payload.size();
    v1::ChunkFrame ack;
    ack.mutable_ack()->set_bytes(received_);
    stream_->Write(EncodeFrame(ack, {}));
    absl::MutexLock lock(&mutex_);
    if (header.round() == round_) ++stored_;
  }

  const TransferShape shape_;
  const SharedValues values_;
  ChunkSender sender_;
  std::shared_ptr<ByteStream> stream_;  // set before the first event that needs it
  uint64_t received_ = 0;               // by the transport's thread
  absl::Mutex mutex_;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t stored_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace {

Acceptor StoringAcceptor(const TransferShape& shape) {
  auto stored = std::make_shared<std::vector<float>>(shape.bytes / sizeof(float));
  return [shape, stored](std::shared_ptr<ByteStream> stream, const std::string&) {
    auto end = std::make_shared<StreamAloneEnd>(shape, stored);
    end->SetStream(std::move(stream));
    return end;
  };
}

absl::Status Late(const char* what) {
  return absl::DeadlineExceededError(
      absl::StrCat("stream alone: a ", what, " failed or did not end within ", absl::ToInt64Seconds(kDeadline), " s"));
}

}  // namespace

StreamAloneService::StreamAloneService(const TransferShape& shape) : acceptor_(StoringAcceptor(shape)) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StreamAloneService::Stream(
    grpc::CallbackServerContext* context) {
  return NewAcceptedStream(context, acceptor_);
}

StreamAlone::StreamAlone(const TransferShape& shape, Transport* transport, const std::string& address,
                         SharedValues pulled)
    : shape_(shape), end_(std::make_shared<StreamAloneEnd>(shape, std::move(pulled))) {
  end_->SetStream(transport->Open(address, Plane::kParameter, end_));
}

StreamAlone::~StreamAlone() { end_->stream().Close(absl::OkStatus()); }

absl::Status StreamAlone::Push(SharedValues values, uint64_t round) {
  end_->sender().Start(&end_->stream(), std::move(values), round);
  return end_->sender().AwaitAcked() ? absl::OkStatus() : Late("push");
}

absl::Status StreamAlone::Pull(uint64_t round) {
  end_->ExpectRound(round);
  v1::ChunkFrame subscribe;
  v1::Want* want = subscribe.mutable_subscribe()->add_wants();
  want->set_chunks(shape_.chunks());
  want->set_version(round);
  end_->stream().Write(EncodeFrame(subscribe, {}));
  return end_->AwaitStored() ? absl::OkStatus() : Late("pull");
}

}  // namespace sluice
