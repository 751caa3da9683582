// The streams of PeerMail: those that it opens to peers, and those that peers opened to it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/shared_frames.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "worker/mail_stream.h"
#include "worker/peer_mail.h"

namespace sluice {
namespace {

constexpr size_t kMaxWaitingStreams = 256;  // of generations whose plan is not here

}  // namespace

// ---------------------------------------------------------------- from peers
absl::Status PeerMail::Accept(const v1::MailFrame& first, std::shared_ptr<ByteStream> stream) {
  const v1::MailHello& hello = first.hello();
  absl::MutexLock lock(&mutex_);
  if (stopping_) return absl::UnavailableError(absl::StrCat("this worker leaves job ", options_.job_id));
  if (hello.generation() < generation_ || (hello.generation() == generation_ && closed_)) {
    return absl::AbortedError(absl::StrCat("generation ", hello.generation(), " is over"));
  }
  if (hello.generation() == generation_) return Attach(first, std::move(stream));
  if (waiting_.size() >= kMaxWaitingStreams) {
    return absl::ResourceExhaustedError(absl::StrCat(waiting_.size(), " streams wait for a plan already"));
  }
  waiting_.push_back({first, std::move(stream)});
  return absl::OkStatus();
}

absl::Status PeerMail::Attach(const v1::MailFrame& first, std::shared_ptr<ByteStream> stream) {
  const v1::MailHello& hello = first.hello();
  const auto it = links_.find(hello.from());
  if (hello.to() != rank_ || it == links_.end() || !SameNode(it->second->peer.node, hello.node())) {
    return absl::PermissionDeniedError(absl::StrCat("job ", options_.job_id, " generation ", generation_, ": ",
                                                    hello.node().name(), " (life ", hello.node().incarnation(),
                                                    ") as rank ", hello.from(), " has nothing to send to rank ",
                                                    hello.to(), "; this is rank ", rank_));
  }
  Link& link = *it->second;
  if (link.from != nullptr) link.from->Close(absl::AbortedError("a newer stream of the same rank took its place"));
  v1::MailFrame frame;
  link.region = nullptr;
  if (link.on_host && first.has_memory()) {
    absl::StatusOr<std::shared_ptr<const MappedRegion>> region = MappedRegion::Open(first.memory());
    if (region.ok()) {
      link.region = *std::move(region);
      frame.set_mapped(true);
    } else {
      LOG_WARN("job {}: messages of worker {} come through a socket: {}", options_.job_id, link.peer.node.name(),
               region.status().ToString());
    }
  }
  frame.mutable_welcome()->set_received(link.inbox.received());
  frame.mutable_welcome()->set_taken(link.inbox.taken());
  stream->Write(EncodeMail(frame, {}));
  link.from = std::move(stream);
  return absl::OkStatus();
}

absl::Status PeerMail::OnFrame(const v1::MailHello& hello, const ByteStream* stream, ParsedMail frame) {
  std::shared_ptr<ByteStream> answer;
  v1::MailFrame ack;
  {
    absl::MutexLock lock(&mutex_);
    if (hello.generation() > generation_) return absl::InvalidArgumentError("a frame before the welcome");
    const auto it = links_.find(hello.from());
    if (hello.generation() < generation_ || it == links_.end() || it->second->from.get() != stream) {
      return absl::AbortedError(absl::StrCat("generation ", hello.generation(), " is over"));
    }
    Link& link = *it->second;
    bool due = false;
    if (frame.control.has_shared()) {
      if (link.region == nullptr) return absl::FailedPreconditionError("shared bytes, but none of the sender's memory");
      if (frame.payload.size() > 0) return absl::InvalidArgumentError("both `payload` and `shared`");
      ASSIGN_OR_RETURN(grpc::Slice slice, MappedSlice(link.region, frame.control.shared()));
      frame.payload = Payload({std::move(slice)});
    }
    if (frame.control.has_letter()) {
      ASSIGN_OR_RETURN(const bool is_new,
                       link.inbox.Add(std::move(*frame.control.mutable_letter()), std::move(frame.payload)));
      due = !is_new;
    } else if (frame.payload.size() > 0) {
      return absl::InvalidArgumentError("a payload without a letter");
    }
    if (frame.control.ack_wanted() > 0) {
      ASSIGN_OR_RETURN(const bool taken, link.inbox.AckWanted(frame.control.ack_wanted()));
      due = due || taken;
    }
    if (!due) return absl::OkStatus();
    answer = link.from;
    ack.mutable_ack()->set_taken(link.inbox.taken());
  }
  answer->Write(EncodeMail(ack, {}));
  return absl::OkStatus();
}

void PeerMail::OnStreamClosed(const v1::MailHello& hello, const ByteStream* stream, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(waiting_, [stream](const WaitingStream& each) { return each.stream.get() == stream; });
  const auto it = links_.find(hello.from());
  if (it == links_.end() || it->second->from.get() != stream) return;
  it->second->from = nullptr;
  it->second->from_ended = status.ok() ? absl::UnavailableError("the peer closed it") : status;
}

// ---------------------------------------------------------------- to peers
// Events of a stream that was opened.
class PeerMail::Handler : public StreamHandler {
 public:
  Handler(PeerMail* mail, std::shared_ptr<EventGate> gate, const StreamKey& key)
      : mail_(mail), gate_(std::move(gate)), key_(key) {}

  void OnMessage(grpc::ByteBuffer message) override {
    if (!gate_->Enter()) return;
    mail_->HandleMessage(key_, std::move(message));
    gate_->Leave();
  }
  void OnClosed(const absl::Status& status) override {
    if (!gate_->Enter()) return;
    mail_->HandleClosed(key_, status.ok() ? absl::UnavailableError("the peer closed it") : status);
    gate_->Leave();
  }

 private:
  PeerMail* const mail_;  // valid while inside the gate
  const std::shared_ptr<EventGate> gate_;
  const StreamKey key_;
};

void PeerMail::Drop(Link& link) {
  if (link.to != nullptr) dropped_.push_back(std::move(link.to));
  link.to = nullptr;
  link.welcomed = link.mapped = false;
  changed_ = true;
}

PeerMail::Link* PeerMail::Find(const StreamKey& key) {
  if (key.generation != generation_) return nullptr;
  const auto it = links_.find(key.rank);
  return it != links_.end() && it->second->life == key.life ? it->second.get() : nullptr;
}

absl::Time PeerMail::NextTry() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [rank, link] : links_) {
    if (link->to == nullptr && !link->opening) next = std::min(next, link->reopening.next());
  }
  return next;
}

void PeerMail::MailThread() {
  for (;;) {
    std::vector<std::shared_ptr<ByteStream>> dropped;
    std::vector<std::pair<StreamKey, MailPeer>> due;
    bool stopping = false;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || changed_; };
      mutex_.AwaitWithDeadline(absl::Condition(&ready), NextTry());
      changed_ = false;
      stopping = stopping_;
      dropped.swap(dropped_);
      const absl::Time now = absl::Now();
      for (const auto& [rank, link] : links_) {
        if (link->to != nullptr || link->opening || link->reopening.next() > now) continue;
        link->opening = true;
        link->reopening.Begin();
        due.push_back({{generation_, ++link->life, rank}, link->peer});
      }
    }
    for (auto& stream : dropped) stream->Close(absl::CancelledError("the worker closed the stream"));
    dropped.clear();
    if (stopping) return;
    for (const auto& [key, peer] : due) Open(key, peer);
  }
}

void PeerMail::Open(const StreamKey& key, const MailPeer& peer) {
  std::shared_ptr<ByteStream> stream =
      options_.transport->Open(peer.address, Plane::kMail, std::make_shared<Handler>(this, gate_, key));
  absl::MutexLock lock(&mutex_);
  Link* link = Find(key);
  if (link == nullptr || !link->opening) {  // another generation, or it broke already
    dropped_.push_back(std::move(stream));
    changed_ = true;
    return;
  }
  link->opening = false;
  link->to = std::move(stream);
  v1::MailFrame frame;
  v1::MailHello* hello = frame.mutable_hello();
  hello->set_protocol_version(kProtocolVersion);
  hello->set_job_id(options_.job_id);
  *hello->mutable_node() = options_.node;
  hello->set_generation(generation_);
  hello->set_from(rank_);
  hello->set_to(key.rank);
  if (link->on_host && region_ != nullptr) *frame.mutable_memory() = region_->description();
  link->to->Write(EncodeMail(frame, {}));
}

void PeerMail::HandleMessage(const StreamKey& key, grpc::ByteBuffer message) {
  const absl::Status status = HandleFrame(key, std::move(message));
  if (status.ok()) return;
  LOG_ERROR("job {} generation {}: rank {} answers mail with what it must not: {}; the stream is opened anew",
            options_.job_id, key.generation, key.rank, status.ToString());
  HandleClosed(key, status);
}

absl::Status PeerMail::HandleFrame(const StreamKey& key, grpc::ByteBuffer message) {
  ASSIGN_OR_RETURN(const ParsedMail frame, ParseMail(std::move(message)));
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr || link->to == nullptr) return absl::OkStatus();  // of a stream that was given up
    link->reopening.Heard();
    if (frame.control.has_refusal()) {
      link->reopening.Refused(frame.control.refusal(), "the peer");
      return absl::OkStatus();  // the peer ends the stream
    }
    if (frame.control.has_welcome()) {
      if (link->welcomed) return absl::InvalidArgumentError("a second welcome");
      RETURN_IF_ERROR(link->outbox.Restart(frame.control.welcome().received(), frame.control.welcome().taken()));
      link->welcomed = true;
      link->mapped = link->on_host && region_ != nullptr && frame.control.mapped();
      link->reopening.Serves();
      link->reopening.ForgetRefusals();
    }
    if (frame.control.has_ack()) RETURN_IF_ERROR(link->outbox.Acknowledge(frame.control.ack().taken()));
    if (!frame.control.has_welcome()) return absl::OkStatus();
  }
  Pump(key.generation, key.rank);
  return absl::OkStatus();
}

void PeerMail::HandleClosed(const StreamKey& key, const absl::Status& closed) {
  Reopening::Outcome outcome;
  MailPeer peer;
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr || (link->to == nullptr && !link->opening)) return;
    link->opening = false;
    Drop(*link);
    outcome = link->reopening.Ended(closed, absl::Now());
    link->to_ended = outcome.status;
    peer = link->peer;
  }
  LOG_DEBUG("job {} generation {}: mail to rank {}, {} at {}, ended: {}", options_.job_id, key.generation, key.rank,
            peer.node.name(), peer.address, outcome.status.ToString());
  if (outcome.unreachable && options_.on_unreachable) options_.on_unreachable(key.generation, peer, outcome.status);
  if (outcome.refused && options_.on_refused) options_.on_refused(key.generation, peer, outcome.status);
}

}  // namespace sluice
