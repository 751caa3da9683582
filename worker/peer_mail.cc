#include "worker/peer_mail.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/mail_stream.h"

namespace sluice {
namespace {

// Of shared memory, for buffers of all sizes that letters come in. What does not fit goes in the stream.
constexpr size_t kSharedWindows = 8;
constexpr size_t kLeastShared = 16 << 20;  // bytes

constexpr absl::Duration kFirstStallLog = absl::Seconds(5);  // then after twice as long each time

Mesh MeshOf(const Layout& layout) {
  const v1::ParallelSpec& degrees = layout.plan().spec().parallel();
  return {.data = degrees.data(), .pipeline = degrees.pipeline(), .tensor = degrees.tensor()};
}

const char* NameOf(v1::Letter::Purpose purpose) { return purpose == v1::Letter::TENSOR ? "tensor" : "stage"; }

std::string StreamText(bool there, const absl::Status& ended) {
  if (there) return "open";
  return ended.ok() ? "none yet" : absl::StrCat("down (", ended.ToString(), ")");
}

}  // namespace

PeerMail::PeerMail(PeerMailOptions options, const Layout& layout, uint32_t rank) : options_(std::move(options)) {
  SetGroups(layout, rank);
}

PeerMail::~PeerMail() { Stop(); }

// ---------------------------------------------------------------- generations
void PeerMail::SetGroups(const Layout& layout, uint32_t rank) {
  const Mesh mesh = MeshOf(layout);
  const Mesh::Place place = mesh.place(rank);
  tensor_.Set(place.tensor, mesh.tensor);
  stages_.Set(place.stage, mesh.pipeline);
}

void PeerMail::Begin(const std::shared_ptr<const Layout>& layout, uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || layout->generation() <= generation_) return;
  CloseGeneration();
  generation_ = layout->generation();
  closed_ = false;
  rank_ = rank;
  // Each generation has memory of its own: a receiver that has not heard that one is over still reads what was sent.
  region_ = nullptr;
  shared_pool_ = nullptr;
  mesh_ = MeshOf(*layout);
  SetGroups(*layout, rank);
  const Mesh::Place own = mesh_.place(rank);
  const uint32_t first = mesh_.rank({own.data, 0, 0});
  for (uint32_t r = first; r < first + mesh_.ranks_of_replica(); ++r) {
    const Mesh::Place place = mesh_.place(r);
    if (r == rank || (place.stage != own.stage && place.tensor != own.tensor)) continue;
    const v1::Rank& there = layout->plan().ranks(static_cast<int>(r));
    auto link = std::make_unique<Link>(
        options_.window, Reopening::Pace{options_.first_delay, options_.last_delay, options_.accuse_after});
    link->peer = {r, there.node(), there.address()};
    const std::string& host = layout->plan().ranks(static_cast<int>(rank)).host_id();
    link->on_host = options_.shared_memory && !host.empty() && there.host_id() == host;
    if (link->on_host && region_ == nullptr) ShareMemory();
    links_.emplace(r, std::move(link));
  }
  std::vector<WaitingStream> waiting;
  waiting.swap(waiting_);
  for (WaitingStream& each : waiting) {
    const uint64_t generation = each.first.hello().generation();
    if (generation > generation_) {
      waiting_.push_back(std::move(each));
      continue;
    }
    absl::Status status = absl::AbortedError(absl::StrCat("generation ", generation, " is over"));
    if (generation == generation_) status = Attach(each.first, each.stream);
    if (!status.ok()) RefuseMail(each.stream.get(), status, generation_);
  }
  changed_ = true;
  if (!links_.empty() && !thread_.joinable()) thread_ = std::thread([this] { MailThread(); });
}

void PeerMail::ShareMemory() {
  absl::StatusOr<std::shared_ptr<SharedRegion>> region =
      SharedRegion::Make(std::max(kSharedWindows * options_.window, kLeastShared));
  if (!region.ok()) {
    LOG_WARN("job {}: messages to workers of this host go through sockets: {}", options_.job_id,
             region.status().ToString());
    return;
  }
  region_ = *std::move(region);
  shared_pool_ = BufferPool::Make(region_);
}

void PeerMail::CloseGeneration() {
  for (auto& [rank, link] : links_) {
    if (link->from != nullptr) {
      link->from->Close(absl::AbortedError(absl::StrCat("generation ", generation_, " is over")));
    }
    Drop(*link);
  }
  links_.clear();
  closed_ = true;
}

void PeerMail::StartRound(uint64_t generation, uint64_t round) {
  absl::MutexLock lock(&mutex_);
  work_ = {work_.serial + 1, generation, round};
}

void PeerMail::Cancel() {
  absl::MutexLock lock(&mutex_);
  work_ = {work_.serial + 1, 0, 0};
}

void PeerMail::End() {
  absl::MutexLock lock(&mutex_);
  CloseGeneration();
}

void PeerMail::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
    CloseGeneration();
    for (WaitingStream& each : waiting_) each.stream->Close(absl::UnavailableError("this worker leaves the job"));
    waiting_.clear();
  }
  if (thread_.joinable()) thread_.join();
  gate_->CloseAndAwait();
}

uint64_t PeerMail::generation() const {
  absl::MutexLock lock(&mutex_);
  return generation_;
}

size_t PeerMail::waiting_bytes() const {
  absl::MutexLock lock(&mutex_);
  size_t bytes = 0;
  for (const auto& [rank, link] : links_) bytes += link->inbox.cost() + link->outbox.cost();
  return bytes;
}

// ---------------------------------------------------------------- waiting
absl::Status PeerMail::OverStatus(const Work& work) const {
  return absl::CancelledError(
      absl::StrCat("job ", options_.job_id, ": the work of generation ", work.generation, " was cancelled"));
}

PeerMail::Link& PeerMail::LinkTo(v1::Letter::Purpose purpose, uint32_t rank) {
  Mesh::Place place = mesh_.place(rank_);
  (purpose == v1::Letter::TENSOR ? place.tensor : place.stage) = rank;
  const auto link = links_.find(mesh_.rank(place));
  CHECK(rank < (purpose == v1::Letter::TENSOR ? mesh_.tensor : mesh_.pipeline) && link != links_.end(),
        "no mail goes to rank {} of the {} group of rank {}", rank, NameOf(purpose), rank_);
  return *link->second;
}

template <typename Ready>
absl::Status PeerMail::Await(const Work& work, v1::Letter::Purpose purpose, const Link& link, std::string_view what,
                             const Ready& ready) {
  const auto go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return Over(work) || ready(link); };
  const absl::Time from = absl::Now(), deadline = from + options_.deadline;
  for (absl::Duration patience = kFirstStallLog;; patience *= 2) {
    const absl::Time until = std::min(deadline, from + patience);
    if (mutex_.AwaitWithDeadline(absl::Condition(&go), until)) return Over(work) ? OverStatus(work) : absl::OkStatus();
    const std::string text = Describe(work, purpose, link, what);
    if (until == deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(text, "; given up after ", absl::FormatDuration(deadline - from)));
    }
    LOG_WARN("{}, for some {} s", text, patience / absl::Seconds(1));
  }
}

std::string PeerMail::Describe(const Work& work, v1::Letter::Purpose purpose, const Link& link,
                               std::string_view what) const {
  const Mesh::Place place = mesh_.place(link.peer.rank);
  const std::string to = link.welcomed        ? "open"
                         : link.to != nullptr ? "open, not welcomed yet"
                                              : StreamText(false, link.to_ended);
  return absl::StrCat("job ", options_.job_id, " generation ", work.generation, " round ", work.round, ": rank ", rank_,
                      " waits for ", absl::string_view(what.data(), what.size()), " rank ", link.peer.rank, " (data ",
                      place.data, ", stage ", place.stage, ", tensor ", place.tensor, "), worker ",
                      link.peer.node.name(), " at ", link.peer.address, ", in their ", NameOf(purpose),
                      " group; stream from it: ", StreamText(link.from != nullptr, link.from_ended), ", ",
                      link.inbox.received(), " letters; stream to it: ", to, ", ", link.outbox.kept(), " of ",
                      link.outbox.last(), " letters not taken");
}

// ---------------------------------------------------------------- messages
absl::Status PeerMail::Send(v1::Letter::Purpose purpose, uint32_t to, absl::Span<const float> values) {
  if (values.size() > kMaxMessageFloats) {
    return absl::InvalidArgumentError(absl::StrCat("a message of ", values.size(), " floats; at most ",
                                                   kMaxMessageFloats, " fit: use more microbatches"));
  }
  Work work;
  uint32_t rank = 0;
  bool full = false;
  std::shared_ptr<BufferPool> pool = pool_;
  {
    absl::MutexLock lock(&mutex_);
    work = work_;
    if (Over(work)) return OverStatus(work);
    Link& link = LinkTo(purpose, to);
    rank = link.peer.rank;
    if (link.on_host && shared_pool_ != nullptr) pool = shared_pool_;
    full = !link.outbox.HasRoom(values.size());
    if (full) link.outbox.AskForAck();
  }
  if (full) {
    Pump(work.generation, rank);
    absl::MutexLock lock(&mutex_);
    if (Over(work)) return OverStatus(work);
    RETURN_IF_ERROR(Await(work, purpose, LinkTo(purpose, to), "room for a message to",
                          [&](const Link& link) { return link.outbox.HasRoom(values.size()); }));
  }
  size_t at = 0;
  do {  // each letter travels while the next one is copied
    const size_t floats = std::min(kLetterFloats, values.size() - at);
    BorrowedBytes bytes;
    if (floats > 0) {
      std::shared_ptr<float[]> buffer = pool->Take(std::bit_ceil(floats));
      std::memcpy(buffer.get(), values.data() + at, floats * sizeof(float));
      bytes = {buffer.get(), floats * sizeof(float), buffer};
    }
    v1::Letter letter;
    letter.set_purpose(purpose);
    letter.set_round(work.round);
    letter.set_floats(values.size());
    letter.set_first(at);
    {
      absl::MutexLock lock(&mutex_);
      if (Over(work)) return OverStatus(work);
      LinkTo(purpose, to).outbox.Add(std::move(letter), std::move(bytes));
    }
    Pump(work.generation, rank);
    at += floats;
  } while (at < values.size());
  return absl::OkStatus();
}

absl::Status PeerMail::Receive(v1::Letter::Purpose purpose, uint32_t from, absl::Span<float> values) {
  Work work;
  {
    absl::MutexLock lock(&mutex_);
    work = work_;
  }
  size_t at = 0;
  do {
    Inbox::Waiting letter;
    {
      absl::MutexLock lock(&mutex_);
      if (Over(work)) return OverStatus(work);
      Link& link = LinkTo(purpose, from);
      RETURN_IF_ERROR(
          Await(work, purpose, link, "a message of", [](const Link& there) { return !there.inbox.empty(); }));
      const v1::Letter& next = link.inbox.front();
      if (next.purpose() != purpose || next.round() != work.round || next.floats() != values.size() ||
          next.first() != at) {
        return absl::InternalError(absl::StrCat(
            "job ", options_.job_id, " generation ", work.generation, ": rank ", rank_, " expected ", values.size(),
            " floats of round ", work.round, " in its ", NameOf(purpose), " group, rank ", link.peer.rank, " (",
            link.peer.node.name(), ") sent ", next.floats(), " of round ", next.round(), " in the ",
            NameOf(next.purpose()), " group: the ranks do not make the same calls"));
      }
      letter = link.inbox.Pop();
    }
    letter.payload.CopyTo(values.data() + at);
    at += letter.payload.size() / sizeof(float);
    std::shared_ptr<ByteStream> stream;
    v1::MailFrame frame;
    {
      absl::MutexLock lock(&mutex_);
      if (Over(work)) return OverStatus(work);
      Link& link = LinkTo(purpose, from);
      if (link.inbox.Taken(letter)) stream = link.from;  // where that is down, the next one's welcome says it
      frame.mutable_ack()->set_taken(link.inbox.taken());
    }
    if (stream != nullptr) stream->Write(EncodeMail(frame, {}));
  } while (at < values.size());
  return absl::OkStatus();
}

void PeerMail::Pump(uint64_t generation, uint32_t rank) {
  for (bool mine = false;;) {
    std::shared_ptr<ByteStream> stream;
    grpc::ByteBuffer message;
    {
      absl::MutexLock lock(&mutex_);
      if (generation != generation_ || closed_) return;
      Link& link = *links_.at(rank);
      if (link.pumping && !mine) return;  // that thread sees what has been added
      v1::MailFrame frame;
      const Outbox::Sent* const sent = link.welcomed ? link.outbox.Next() : nullptr;
      const uint64_t ask = link.welcomed && sent == nullptr ? link.outbox.NextAsk() : 0;
      mine = link.pumping = sent != nullptr || ask > 0;
      if (!mine) return;
      if (sent != nullptr) {
        *frame.mutable_letter() = sent->letter;
        std::optional<uint64_t> offset;
        if (link.mapped && sent->bytes.size > 0) offset = region_->OffsetOf(sent->bytes.data, sent->bytes.size);
        if (offset.has_value()) {
          frame.mutable_shared()->set_offset(*offset);
          frame.mutable_shared()->set_bytes(sent->bytes.size);
          message = EncodeMail(frame, {});
        } else {
          message = EncodeMail(frame, {&sent->bytes, 1});
        }
      } else {
        frame.set_ack_wanted(ask);
        message = EncodeMail(frame, {});
      }
      stream = link.to;
    }
    stream->Write(std::move(message));
  }
}

}  // namespace sluice
