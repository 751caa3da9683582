// A worker's streams to the servers of one generation: opening and reopening, hello, the window of pushes, parsing of
// what comes down. Which chunk is pushed or wanted when is the round core's business.
#ifndef SLUICE_WORKER_PS_CLIENT_H_
#define SLUICE_WORKER_PS_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/frame.h"
#include "common/shared_frames.h"
#include "common/transport.h"
#include "sluice/v1/parameter.pb.h"
#include "sluice/v1/plan.pb.h"
#include "worker/event_gate.h"
#include "worker/push_queue.h"
#include "worker/reopening.h"
#include "worker/round_core.h"

namespace sluice {

struct PsClientOptions {
  std::string job_id;
  v1::NodeId node;
  Transport* transport = nullptr;  // outlives the client
  bool residuals = false;          // it sends residuals for checkpoints
  bool patient = false;            // pushes, as PushQueue has it
  size_t window = kPushWindow;
  // Waits before a broken stream is opened again: doubled from the first to the last until a message has come down.
  absl::Duration first_delay = absl::Milliseconds(10);
  absl::Duration last_delay = absl::Milliseconds(500);
  // A server from which nothing came for so long, all attempts having failed, is accused; again after as long.
  absl::Duration accuse_after = absl::Seconds(1);
};

// With servers of the same host.
struct SharedMemoryUse {
  std::shared_ptr<const SharedRegion> pushes;  // where contributions lie; null: they travel in the stream
  bool commits = false;                        // whether commits are read out of the servers' memory
};

// Thread-safe. Nothing blocks but Stop and the destructor. Calls that name another generation than the last Open's, or
// a server whose stream is down, do nothing: what they meant is said again when the stream opens.
class PsClient {
 public:
  // Called on the transport's threads and the client's own, several at a time for different servers, never inside one
  // of the client's methods and with none of its locks held. Not called after Stop.
  class Events {
   public:
    virtual ~Events() = default;
    virtual void OnStreamUp(uint64_t generation, size_t server) = 0;
    virtual void OnStreamDown(uint64_t generation, size_t server, const absl::Status& status) = 0;
    // The server was ordered to write a version as a checkpoint. Before the commits of that version.
    virtual void OnCheckpoint(uint64_t generation, size_t server, uint64_t version) {}
    // Commits and residuals: headers with their payload (checked to be as long as the headers say). An error closes the
    // stream.
    virtual absl::Status OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) = 0;
    // Async: what the verdict holder leased. An error closes the stream.
    virtual absl::Status OnLease(uint64_t generation, size_t server, const v1::Lease& lease) {
      return absl::FailedPreconditionError("nobody asked for a lease");
    }
    // What became of pushes that the server had no room for. An error closes the stream.
    virtual absl::Status OnLater(uint64_t generation, size_t server, const v1::Later& later) {
      return absl::FailedPreconditionError("no contribution was expected to be declined");
    }
    // All payload that was pushed has been taken by the servers.
    virtual void OnPushesTaken() {}
    virtual void OnUnreachable(uint64_t generation, size_t server, const absl::Status& status) = 0;
    // The server keeps refusing this rank for a reason that trying again does not mend; told again and again.
    virtual void OnRefused(uint64_t generation, size_t server, const absl::Status& status) = 0;
  };

  PsClient(const PsClientOptions& options, Events* events);
  ~PsClient();
  PsClient(const PsClient&) = delete;
  PsClient& operator=(const PsClient&) = delete;

  // Drops all streams of the generation before and opens those of the new one.
  void Open(uint64_t generation, uint32_t contributor, std::vector<ServerEnd> servers,
            const SharedMemoryUse& sharing = {});
  void Close();
  // Closes, and returns when no event is being or will be delivered. Not from an event, nor under a lock that events
  // take.
  void Stop();

  void Subscribe(uint64_t generation, size_t server, const v1::Subscribe& subscribe);
  void Report(uint64_t generation, size_t server, const v1::RoundReport& report);
  void Ask(uint64_t generation, size_t server, const v1::LeaseRequest& request);
  // Queues a contribution; it goes with the next Flush or acknowledgement that the window has room for.
  void Push(uint64_t generation, size_t server, const v1::ChunkHeader& header, BorrowedBytes bytes);
  void Flush();
  // Whether further contributions follow soon, by themselves (each with its Flush): then those that there are may wait
  // for them, and for acknowledgements. Until the next call. At first: no.
  void MoreFollow(bool more);
  // Contributions of earlier rounds that still wait are committed already.
  void DropBefore(uint64_t round);

 private:
  class Handler;
  struct Link {
    explicit Link(const Reopening::Pace& pace) : reopening(pace) {}

    ServerEnd server;
    uint64_t life = 0;                     // counts openings: events of an earlier stream are told apart
    std::shared_ptr<ByteStream> stream;    // null while down
    std::shared_ptr<SharedFrames> frames;  // of the stream
    bool opening = false;                  // Open was called, its result not yet noted
    PushQueue queue;
    bool in_region = false;  // contributions lie in the memory that the server may map
    Reopening reopening;
  };
  struct StreamKey {
    uint64_t generation = 0, life = 0;
    size_t server = 0;
  };

  void HandleMessage(const StreamKey& key, grpc::ByteBuffer message);
  void HandleClosed(const StreamKey& key, const absl::Status& status);
  absl::Status HandleFrame(const StreamKey& key, grpc::ByteBuffer message);
  void ClientThread();
  void OpenLink(const StreamKey& key, const ServerEnd& server);

  Link* Find(const StreamKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Link* FindUp(uint64_t generation, size_t server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextTry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const PsClientOptions options_;
  Events* const events_;
  const std::shared_ptr<EventGate> gate_;  // outlives the client in handlers that a transport still holds

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;  // something for the client's thread
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t contributor_ ABSL_GUARDED_BY(mutex_) = 0;
  SharedMemoryUse sharing_ ABSL_GUARDED_BY(mutex_);
  bool more_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Link>> links_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ByteStream>> dropped_ ABSL_GUARDED_BY(mutex_);  // closed by the client's thread

  std::thread thread_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PS_CLIENT_H_
