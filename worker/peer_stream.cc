#include "worker/peer_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/frame.h"
#include "common/log.h"
#include "common/shared_frames.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace sluice {
namespace {

class PeerStream : public StreamHandler {
 public:
  PeerStream(FindJob find, bool shared_memory, std::shared_ptr<ByteStream> stream, std::string peer)
      : find_(std::move(find)), shared_memory_(shared_memory), stream_(std::move(stream)), peer_(std::move(peer)) {}

  void OnMessage(grpc::ByteBuffer message) override {
    if (closed_) return;
    const absl::Status status = Handle(std::move(message));
    if (status.ok()) return;
    closed_ = true;
    // A plan that is not here yet and a generation that is over are part of every transition.
    if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) {
      LOG_WARN("stream of {} ({}), job {}: {}", hello_.node().name(), peer_, hello_.job_id(), status.ToString());
    }
    v1::ChunkFrame refusal;
    refusal.mutable_refusal()->set_code(static_cast<int>(status.code()));
    refusal.mutable_refusal()->set_message(std::string(status.message()));
    refusal.mutable_refusal()->set_generation(job_ == nullptr ? 0 : job_->generation());
    stream_->Write(EncodeFrame(refusal, {}));
    stream_->Close(status);
  }

  void OnClosed(const absl::Status&) override {
    if (job_ != nullptr) job_->RemoveMember(hello_.contributor(), stream_.get());
    job_ = nullptr;
  }

 private:
  absl::Status Handle(grpc::ByteBuffer message) {
    ASSIGN_OR_RETURN(const ParsedFrame frame, frames_.Parse(std::move(message)));
    if (job_ == nullptr) RETURN_IF_ERROR(Begin(frame.control));
    if (frame.control.header_size() > 0) RETURN_IF_ERROR(job_->OnContributions(hello_, frame));
    taken_ += frame.payload.size();
    // A frame without contributions asks for the acknowledgement of those before it.
    if (frame.control.ack_later() || frame.control.has_hello()) return absl::OkStatus();
    v1::ChunkFrame ack;
    ack.mutable_ack()->set_bytes(taken_);
    stream_->WriteLatest(EncodeFrame(ack, {}));
    return absl::OkStatus();
  }

  absl::Status Begin(const v1::ChunkFrame& frame) {
    if (!frame.has_hello()) return absl::InvalidArgumentError("the first message of a stream must carry hello");
    hello_ = frame.hello();
    if (hello_.protocol_version() != kProtocolVersion) {
      return absl::FailedPreconditionError(absl::StrCat("protocol version ", hello_.protocol_version(), " meets ",
                                                        kProtocolVersion, "; run one build on all nodes"));
    }
    v1::ChunkFrame answer;
    answer.mutable_ack();  // a sign of life, whatever follows
    const std::shared_ptr<WorkerJob> job = find_(hello_.job_id());
    if (job == nullptr) {
      stream_->Write(EncodeFrame(answer, {}));
      return absl::UnavailableError(absl::StrCat("job ", hello_.job_id(), " is not here (yet)"));
    }
    absl::Status mapped = absl::FailedPreconditionError("it offers no memory");
    if (!shared_memory_) mapped = absl::FailedPreconditionError("this worker runs with --shared_memory=false");
    if (shared_memory_ && frame.has_memory()) mapped = frames_.Map(frame.memory(), &answer);
    if (!mapped.ok()) {
      const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
          "worker ", hello_.node().name(), " cannot share memory with its host leader: ", mapped.message()));
      job->OnMemberFailed(hello_, status);
      return status;
    }
    RETURN_IF_ERROR(job->AddMember(hello_, stream_));
    job_ = job;
    stream_->Write(EncodeFrame(answer, {}));
    return absl::OkStatus();
  }

  const FindJob find_;
  const bool shared_memory_;
  const std::shared_ptr<ByteStream> stream_;
  const std::string peer_;
  SharedFrames frames_;
  v1::StreamHello hello_;
  std::shared_ptr<WorkerJob> job_;
  uint64_t taken_ = 0;  // payload bytes
  bool closed_ = false;
};

}  // namespace

Acceptor MakePeerAcceptor(FindJob find, bool shared_memory) {
  return [find = std::move(find), shared_memory](std::shared_ptr<ByteStream> stream, const std::string& peer) {
    return std::make_shared<PeerStream>(find, shared_memory, std::move(stream), peer);
  };
}

}  // namespace sluice
