#include "worker/ps_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "common/wire_format.h"

namespace sluice {
// Events of one stream.
class PsClient::Handler : public StreamHandler {
 public:
  Handler(PsClient* client, std::shared_ptr<EventGate> gate, const StreamKey& key)
      : client_(client), gate_(std::move(gate)), key_(key) {}

  void OnMessage(grpc::ByteBuffer message) override {
    if (!gate_->Enter()) return;
    client_->HandleMessage(key_, std::move(message));
    gate_->Leave();
  }
  void OnClosed(const absl::Status& status) override {
    if (!gate_->Enter()) return;
    client_->HandleClosed(key_, status);
    gate_->Leave();
  }

 private:
  PsClient* const client_;  // valid while inside the gate
  const std::shared_ptr<EventGate> gate_;
  const StreamKey key_;
};

PsClient::PsClient(const PsClientOptions& options, Events* events)
    : options_(options), events_(events), gate_(std::make_shared<EventGate>()), thread_([this] { ClientThread(); }) {}

PsClient::~PsClient() { Stop(); }

// ---------------------------------------------------------------- the owner's side
void PsClient::Open(uint64_t generation, uint32_t contributor, std::vector<ServerEnd> servers,
                    const SharedMemoryUse& sharing) {
  absl::MutexLock lock(&mutex_);
  sharing_ = sharing;
  for (auto& link : links_) Drop(*link);
  links_.clear();
  generation_ = generation;
  contributor_ = contributor;
  for (ServerEnd& server : servers) {
    auto link =
        std::make_unique<Link>(Reopening::Pace{options_.first_delay, options_.last_delay, options_.accuse_after});
    link->server = std::move(server);
    link->queue = PushQueue(options_.window, kMaxFramePayload, options_.patient);
    links_.push_back(std::move(link));
  }
  changed_ = true;
}

void PsClient::Close() {
  absl::MutexLock lock(&mutex_);
  for (auto& link : links_) Drop(*link);
  links_.clear();
  changed_ = true;
}

void PsClient::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    for (auto& link : links_) Drop(*link);
    links_.clear();
    stopping_ = true;
  }
  thread_.join();
  gate_->CloseAndAwait();
}

void PsClient::Subscribe(uint64_t generation, size_t server, const v1::Subscribe& subscribe) {
  absl::MutexLock lock(&mutex_);
  Link* link = FindUp(generation, server);
  if (link == nullptr) return;
  v1::ChunkFrame frame;
  *frame.mutable_subscribe() = subscribe;
  link->stream->Write(EncodeFrame(frame, {}));
}

void PsClient::Report(uint64_t generation, size_t server, const v1::RoundReport& report) {
  absl::MutexLock lock(&mutex_);
  Link* link = FindUp(generation, server);
  if (link == nullptr) return;
  v1::ChunkFrame frame;
  *frame.mutable_report() = report;
  link->stream->Write(EncodeFrame(frame, {}));
}

void PsClient::Ask(uint64_t generation, size_t server, const v1::LeaseRequest& request) {
  absl::MutexLock lock(&mutex_);
  Link* link = FindUp(generation, server);
  if (link == nullptr) return;
  v1::ChunkFrame frame;
  *frame.mutable_lease_request() = request;
  link->stream->Write(EncodeFrame(frame, {}));
}

void PsClient::Push(uint64_t generation, size_t server, const v1::ChunkHeader& header, BorrowedBytes bytes) {
  absl::MutexLock lock(&mutex_);
  Link* link = FindUp(generation, server);
  if (link == nullptr) return;
  if (bytes.size > 0) {  // the same for all of a job
    link->in_region = sharing_.pushes != nullptr && sharing_.pushes->OffsetOf(bytes.data, bytes.size).has_value();
  }
  link->queue.Add(header, std::move(bytes));
}

void PsClient::MoreFollow(bool more) {
  absl::MutexLock lock(&mutex_);
  more_ = more;
}

void PsClient::Flush() {
  absl::MutexLock lock(&mutex_);
  for (auto& link : links_) Pump(*link);
}

void PsClient::DropBefore(uint64_t round) {
  absl::MutexLock lock(&mutex_);
  for (auto& link : links_) link->queue.DropBefore(round);
}

PsClient::Link* PsClient::Find(const StreamKey& key) {
  if (key.generation != generation_ || key.server >= links_.size()) return nullptr;
  Link* link = links_[key.server].get();
  return link->life == key.life ? link : nullptr;
}

PsClient::Link* PsClient::FindUp(uint64_t generation, size_t server) {
  if (generation != generation_ || server >= links_.size()) return nullptr;
  Link* link = links_[server].get();
  return link->stream != nullptr ? link : nullptr;
}

void PsClient::Pump(Link& link) {
  if (link.stream == nullptr) return;
  v1::ChunkFrame control;
  std::vector<BorrowedBytes> payload;
  // What goes to a host leader leaves over its network link next: it never waits for more.
  const bool described = link.in_region && link.frames->describes() && !link.server.leader;
  while (link.queue.Next(&control, &payload, more_ && !link.server.leader, described)) {
    link.stream->Write(link.frames->Encode(&control, payload));
  }
}

void PsClient::Drop(Link& link) {
  if (link.stream != nullptr) dropped_.push_back(std::move(link.stream));
  link.stream = nullptr;
  changed_ = true;
}

// ---------------------------------------------------------------- opening
absl::Time PsClient::NextTry() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& link : links_) {
    if (link->stream == nullptr && !link->opening) next = std::min(next, link->reopening.next());
  }
  return next;
}

void PsClient::ClientThread() {
  for (;;) {
    std::vector<std::shared_ptr<ByteStream>> dropped;
    std::vector<std::pair<StreamKey, ServerEnd>> due;
    bool stopping = false;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || changed_; };
      mutex_.AwaitWithDeadline(absl::Condition(&ready), NextTry());
      changed_ = false;
      stopping = stopping_;
      dropped.swap(dropped_);
      const absl::Time now = absl::Now();
      for (size_t i = 0; i < links_.size(); ++i) {
        Link& link = *links_[i];
        if (link.stream != nullptr || link.opening || link.reopening.next() > now) continue;
        link.opening = true;
        link.frames = std::make_shared<SharedFrames>();
        link.reopening.Begin();
        due.push_back({{generation_, ++link.life, i}, link.server});
      }
    }
    for (auto& stream : dropped) stream->Close(absl::CancelledError("the worker closed the stream"));
    dropped.clear();
    if (stopping) return;
    for (const auto& [key, server] : due) OpenLink(key, server);
  }
}

void PsClient::OpenLink(const StreamKey& key, const ServerEnd& server) {
  std::shared_ptr<ByteStream> stream = options_.transport->Open(
      server.address, server.leader ? Plane::kPeer : Plane::kParameter, std::make_shared<Handler>(this, gate_, key));
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr || !link->opening) {  // another generation, or it broke already
      dropped_.push_back(std::move(stream));
      changed_ = true;
      return;
    }
    link->opening = false;
    link->stream = std::move(stream);
    link->queue = PushQueue(options_.window, kMaxFramePayload, options_.patient);
    v1::ChunkFrame frame;
    v1::StreamHello* hello = frame.mutable_hello();
    hello->set_protocol_version(kProtocolVersion);
    hello->set_job_id(options_.job_id);
    *hello->mutable_node() = options_.node;
    hello->set_contributor(contributor_);
    hello->set_generation(generation_);
    hello->set_residuals(options_.residuals);
    if (sharing_.pushes != nullptr) link->frames->Offer(sharing_.pushes, &frame);
    link->stream->Write(EncodeFrame(frame, {}));
  }
  events_->OnStreamUp(key.generation, key.server);
}

// ---------------------------------------------------------------- the transport's side
void PsClient::HandleMessage(const StreamKey& key, grpc::ByteBuffer message) {
  const absl::Status status = HandleFrame(key, std::move(message));
  if (status.ok()) return;
  std::string who;
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr) return;
    who = absl::StrCat(link->server.node.name(), " at ", link->server.address);
  }
  LOG_ERROR("job {} generation {}: {} sent what it must not: {}; the stream is opened anew", options_.job_id,
            key.generation, who, status.ToString());
  HandleClosed(key, status);
}

absl::Status PsClient::HandleFrame(const StreamKey& key, grpc::ByteBuffer message) {
  std::shared_ptr<SharedFrames> frames;
  bool accept = false;
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr) return absl::OkStatus();  // of a stream that was given up
    frames = link->frames;
    accept = sharing_.commits;
  }
  ASSIGN_OR_RETURN(ParsedFrame frame, frames->Parse(std::move(message)));
  v1::ChunkFrame answer;
  const bool has_answer = frames->OnFrame(frame.control, accept, &answer);
  RETURN_IF_ERROR(ChunkLengths(frame).status());
  bool taken = false;
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr) return absl::OkStatus();
    if (frame.control.has_refusal()) {
      link->reopening.Refused(frame.control.refusal(), "the server");
      return absl::OkStatus();  // the server ends the stream
    }
    link->reopening.Heard();
    link->reopening.Serves();
    if (has_answer && link->stream != nullptr) link->stream->Write(EncodeFrame(answer, {}));
    if (frame.control.has_ack()) {
      RETURN_IF_ERROR(link->queue.Acknowledge(frame.control.ack().bytes()));
      link->queue.SetWindow(frame.control.ack().window());
      Pump(*link);
      taken = std::all_of(links_.begin(), links_.end(), [](const std::unique_ptr<Link>& each) {
        return each->queue.empty() && each->queue.unacknowledged() == 0;
      });
    }
  }
  if (taken) events_->OnPushesTaken();
  if (frame.control.has_later()) {
    RETURN_IF_ERROR(events_->OnLater(key.generation, key.server, frame.control.later()));
  }
  if (frame.control.has_lease()) {
    RETURN_IF_ERROR(events_->OnLease(key.generation, key.server, frame.control.lease()));
  }
  if (frame.control.checkpoint() > 0) events_->OnCheckpoint(key.generation, key.server, frame.control.checkpoint());
  if (frame.control.header_size() == 0) return absl::OkStatus();
  return events_->OnCommits(key.generation, key.server, frame);
}

void PsClient::HandleClosed(const StreamKey& key, const absl::Status& closed) {
  bool was_up = false;
  Reopening::Outcome outcome;
  {
    absl::MutexLock lock(&mutex_);
    Link* link = Find(key);
    if (link == nullptr || (link->stream == nullptr && !link->opening)) return;
    was_up = link->stream != nullptr;
    link->opening = false;
    Drop(*link);
    outcome = link->reopening.Ended(closed, absl::Now());
    LOG_DEBUG("job {} generation {}: stream to {} at {} ended: {}", options_.job_id, key.generation,
              link->server.node.name(), link->server.address, outcome.status.ToString());
  }
  if (was_up) events_->OnStreamDown(key.generation, key.server, outcome.status);
  if (outcome.unreachable) events_->OnUnreachable(key.generation, key.server, outcome.status);
  if (outcome.refused) events_->OnRefused(key.generation, key.server, outcome.status);
}

}  // namespace sluice
