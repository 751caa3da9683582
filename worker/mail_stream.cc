#include "worker/mail_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/frame.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace sluice {
namespace {

class MailStream : public StreamHandler {
 public:
  MailStream(FindMail find, std::shared_ptr<ByteStream> stream, std::string peer)
      : find_(std::move(find)), stream_(std::move(stream)), peer_(std::move(peer)) {}

  void OnMessage(grpc::ByteBuffer message) override {
    if (closed_) return;
    const absl::Status status = Handle(std::move(message));
    if (status.ok()) return;
    closed_ = true;
    // A plan that is not here yet and a generation that is over are part of every transition.
    if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) {
      LOG_WARN("mail of {} ({}), job {}, rank {}: {}", hello_.node().name(), peer_, hello_.job_id(), hello_.from(),
               status.ToString());
    }
    RefuseMail(stream_.get(), status, mail_ == nullptr ? 0 : mail_->generation());
  }

  void OnClosed(const absl::Status& status) override {
    if (mail_ != nullptr) mail_->OnStreamClosed(hello_, stream_.get(), status);
    mail_ = nullptr;
  }

 private:
  absl::Status Handle(grpc::ByteBuffer message) {
    ASSIGN_OR_RETURN(ParsedMail frame, ParseMail(std::move(message)));
    if (mail_ != nullptr) {
      if (frame.control.has_hello()) return absl::InvalidArgumentError("a second hello");
      return mail_->OnFrame(hello_, stream_.get(), std::move(frame));
    }
    if (!frame.control.has_hello()) {
      return absl::InvalidArgumentError("the first message of a stream must carry hello");
    }
    hello_ = frame.control.hello();
    if (frame.control.has_letter() || frame.payload.size() > 0) {
      return absl::InvalidArgumentError("letters follow the welcome");
    }
    if (hello_.protocol_version() != kProtocolVersion) {
      return absl::FailedPreconditionError(absl::StrCat("protocol version ", hello_.protocol_version(), " meets ",
                                                        kProtocolVersion, "; run one build on all nodes"));
    }
    std::shared_ptr<PeerMail> mail = find_(hello_.job_id());
    if (mail == nullptr) {
      return absl::UnavailableError(absl::StrCat("job ", hello_.job_id(), " is not here (yet)"));
    }
    RETURN_IF_ERROR(mail->Accept(frame.control, stream_));
    mail_ = std::move(mail);
    return absl::OkStatus();
  }

  const FindMail find_;
  const std::shared_ptr<ByteStream> stream_;
  const std::string peer_;
  v1::MailHello hello_;
  std::shared_ptr<PeerMail> mail_;
  bool closed_ = false;
};

}  // namespace

Acceptor MakeMailAcceptor(FindMail find) {
  return [find = std::move(find)](std::shared_ptr<ByteStream> stream, const std::string& peer) {
    return std::make_shared<MailStream>(find, std::move(stream), peer);
  };
}

void RefuseMail(ByteStream* stream, const absl::Status& status, uint64_t generation) {
  v1::MailFrame frame;
  frame.mutable_refusal()->set_code(static_cast<int>(status.code()));
  frame.mutable_refusal()->set_message(std::string(status.message()));
  frame.mutable_refusal()->set_generation(generation);
  stream->Write(EncodeMail(frame, {}));
  stream->Close(status);
}

}  // namespace sluice
