// A worker's messages to and from the other ranks of its replica: what collectives of tensor ranks and the stages of a
// pipeline are made of (worker/parallel/collectives.h).
//
// A rank opens a stream (PeerService.Mail) to each rank that shares its stage or its tensor index, and reopens it for
// as long as the generation lasts; letters that may have been lost go again, copies are dropped. Memory: for each such
// rank a window of bytes, or one message, sent and not yet taken by its model. So there is always room for one message
// between any two ranks, whatever others do.
//
// Between workers of one host letters lie in the sender's shared memory and their frames only say where. Each
// generation has memory of its own: a receiver that has not heard that it is over still reads what was sent.
//
// A generation's mail ends with it: what waits is dropped, streams are closed, calls under way return CANCELLED. A
// stream of a generation whose plan is not here yet waits for the plan, before any letter.
#ifndef SLUICE_WORKER_PEER_MAIL_H_
#define SLUICE_WORKER_PEER_MAIL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/buffer_pool.h"
#include "common/frame.h"
#include "common/layout.h"
#include "common/mesh.h"
#include "common/shared_memory.h"
#include "common/transport.h"
#include "sluice/v1/peer.pb.h"
#include "worker/event_gate.h"
#include "worker/mail_boxes.h"
#include "worker/parallel/collectives.h"
#include "worker/reopening.h"

namespace sluice {

// The same on all workers: a receiver refuses what a sender with this window would not have sent.
inline constexpr size_t kMailWindow = 16 << 20;  // bytes
struct MailPeer {
  uint32_t rank = 0;  // index in Plan.ranks
  v1::NodeId node;
  std::string address;
};

struct PeerMailOptions {
  std::string job_id = {};
  v1::NodeId node = {};
  Transport* transport = nullptr;  // outlives the mail
  size_t window = kMailWindow;
  // Of a call of Send or Receive. A rank waits for others that may wait for servers, for other replicas or for a
  // replacement to come: workers know no limit. What is gone is noticed in seconds (on_unreachable, the scheduler's
  // leases) and ends the generation; what merely takes long is logged with the rank that is waited for.
  absl::Duration deadline = absl::InfiniteDuration();
  // With ranks of the same Rank.host_id, where that is known.
  bool shared_memory = false;
  // Waits before a broken stream is opened again: doubled from the first to the last until the peer welcomes it.
  absl::Duration first_delay = absl::Milliseconds(10);
  absl::Duration last_delay = absl::Milliseconds(500);
  // A peer from which nothing came for so long, all attempts having failed, is told of; again after as long.
  absl::Duration accuse_after = absl::Seconds(1);
  // May be empty. Called on the transport's threads, never inside one of the mail's methods and with none of its locks
  // held; not after Stop. Unreachable: see above. Refused: it keeps refusing this rank for a reason that trying again
  // does not mend; told again and again.
  using OnPeer = std::function<void(uint64_t generation, const MailPeer& peer, const absl::Status& status)>;
  OnPeer on_unreachable = {}, on_refused = {};
};

// Thread-safe. Only the groups' Send and Receive block, and Stop (and the destructor) until no callback is under way.
class PeerMail {
 public:
  // `layout` names options.node as rank `rank`; groups have their place in it until Begin. No mail goes before Begin.
  PeerMail(PeerMailOptions options, const Layout& layout, uint32_t rank);
  ~PeerMail();
  PeerMail(const PeerMail&) = delete;
  PeerMail& operator=(const PeerMail&) = delete;

  // The tensor ranks of this rank's stage, and the stages' ranks of its tensor index, in their order. Valid as long as
  // the mail, in all generations. One thread at a time uses both. Errors besides those of PeerGroup: INTERNAL: the next
  // message is of another round, purpose or size than expected (the ranks do not make the same calls);
  // INVALID_ARGUMENT: a message of more than 2^28 floats.
  PeerGroup* tensor() { return &tensor_; }
  PeerGroup* stages() { return &stages_; }

  // A newer generation: what there was of the one before ends. Does nothing for one that has begun already.
  void Begin(const std::shared_ptr<const Layout>& layout, uint32_t rank);
  // What follows on the groups belongs to this round (evaluation: version); CANCELLED unless the generation is the
  // present one. Called by the thread that uses the groups.
  void StartRound(uint64_t generation, uint64_t round);
  // Calls under way and those that follow return CANCELLED until the next StartRound.
  void Cancel();
  // The present generation is over; the next one may not be there yet. Cancels.
  void End();
  // Ends for good. Not from a callback, nor under a lock that callbacks take.
  void Stop();

  // The accepting side (peer_mail_stream.h). Whether the stream is that of a peer: it is welcomed, now or when the plan
  // of its generation is there. Errors as on PeerService.Mail.
  // `first`: the frame with hello.
  absl::Status Accept(const v1::MailFrame& first, std::shared_ptr<ByteStream> stream);
  // What comes on it after hello; an error closes the stream.
  absl::Status OnFrame(const v1::MailHello& hello, const ByteStream* stream, ParsedMail frame);
  void OnStreamClosed(const v1::MailHello& hello, const ByteStream* stream, const absl::Status& status);

  uint64_t generation() const;
  // Bytes of messages sent or received and not yet taken by a model, all peers together.
  size_t waiting_bytes() const;

 private:
  class Handler;
  class Group : public PeerGroup {
   public:
    Group(PeerMail* mail, v1::Letter::Purpose purpose) : mail_(mail), purpose_(purpose) {}
    uint32_t rank() const override { return rank_; }
    uint32_t size() const override { return size_; }
    absl::Status Send(uint32_t to, absl::Span<const float> values) override {
      return mail_->Send(purpose_, to, values);
    }
    absl::Status Receive(uint32_t from, absl::Span<float> values) override {
      return mail_->Receive(purpose_, from, values);
    }
    void Set(uint32_t rank, uint32_t size) {
      rank_ = rank;
      size_ = size;
    }

   private:
    PeerMail* const mail_;
    const v1::Letter::Purpose purpose_;
    std::atomic<uint32_t> rank_{0}, size_{1};
  };

  // A rank of one of the groups in the present generation.
  struct Link {
    Link(size_t window, const Reopening::Pace& pace) : inbox(window), outbox(window), reopening(pace) {}

    MailPeer peer;
    bool on_host = false;  // letters to it lie in the region
    Inbox inbox;
    std::shared_ptr<ByteStream> from;            // the stream that it opened; null: there is none
    std::shared_ptr<const MappedRegion> region;  // the sender's, as the stream offered it; null: not mapped
    absl::Status from_ended;                     // why the last one ended

    Outbox outbox;
    uint64_t life = 0;               // counts openings: events of an earlier stream are told apart
    std::shared_ptr<ByteStream> to;  // null while down
    bool opening = false;            // Open was called, its result not yet noted
    bool welcomed = false;           // letters may go
    bool mapped = false;             // the peer has mapped the region
    bool pumping = false;            // a thread writes letters
    Reopening reopening;
    absl::Status to_ended;  // why the last one ended
  };
  struct StreamKey {
    uint64_t generation = 0, life = 0;
    uint32_t rank = 0;
  };
  struct WaitingStream {  // for the plan of its generation
    v1::MailFrame first;
    std::shared_ptr<ByteStream> stream;
  };
  struct Work {
    uint64_t serial = 0;  // counts StartRound and Cancel
    uint64_t generation = 0, round = 0;
  };

  absl::Status Send(v1::Letter::Purpose purpose, uint32_t to, absl::Span<const float> values)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Receive(v1::Letter::Purpose purpose, uint32_t from, absl::Span<float> values)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether work is none of the present generation any more.
  bool Over(const Work& work) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return work.serial != work_.serial || work.generation != generation_ || closed_;
  }
  absl::Status OverStatus(const Work& work) const;
  // Of the group's rank. CHECKs that there is such a one.
  Link& LinkTo(v1::Letter::Purpose purpose, uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until `ready`. CANCELLED, DEADLINE_EXCEEDED. `what` it waits for: "a message of", "room for a message to".
  template <typename Ready>
  absl::Status Await(const Work& work, v1::Letter::Purpose purpose, const Link& link, std::string_view what,
                     const Ready& ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Describe(const Work& work, v1::Letter::Purpose purpose, const Link& link, std::string_view what) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  void SetGroups(const Layout& layout, uint32_t rank);
  void ShareMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // the stream to it
  void CloseGeneration() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Attach(const v1::MailFrame& first, std::shared_ptr<ByteStream> stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Streams to others.
  void MailThread() ABSL_LOCKS_EXCLUDED(mutex_);
  void Open(const StreamKey& key, const MailPeer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Time NextTry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Link* Find(const StreamKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleMessage(const StreamKey& key, grpc::ByteBuffer message) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status HandleFrame(const StreamKey& key, grpc::ByteBuffer message) ABSL_LOCKS_EXCLUDED(mutex_);
  void HandleClosed(const StreamKey& key, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes the letters that wait for the stream, outside of the mutex.
  void Pump(uint64_t generation, uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);

  const PeerMailOptions options_;
  const std::shared_ptr<EventGate> gate_ = std::make_shared<EventGate>();  // outlives the mail in handlers
  const std::shared_ptr<BufferPool> pool_ = BufferPool::Make();            // of letters sent
  Group tensor_{this, v1::Letter::TENSOR}, stages_{this, v1::Letter::STAGE};

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;  // something for the mail's thread
  bool closed_ ABSL_GUARDED_BY(mutex_) = true;    // no generation is open
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  Mesh mesh_ ABSL_GUARDED_BY(mutex_);
  Work work_ ABSL_GUARDED_BY(mutex_);
  // Letters of the generation to ranks of this host lie there; null: there are none, or it cannot be made.
  std::shared_ptr<const SharedRegion> region_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<BufferPool> shared_pool_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::unique_ptr<Link>> links_ ABSL_GUARDED_BY(mutex_);  // by rank
  std::vector<WaitingStream> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ByteStream>> dropped_ ABSL_GUARDED_BY(mutex_);  // closed by the mail's thread

  std::thread thread_;  // started with the first peer, by Begin
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PEER_MAIL_H_
