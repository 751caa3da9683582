// The seam between nodes: ordered, reliable, bidirectional byte-message streams that can break at any time.
//
// Five planes use it: Session (node - scheduler), ParameterService.Stream (worker - server), ShardService.Stream
// (server - server), PeerService.Stream and PeerService.Mail (worker - worker). common/grpc_transport.h carries them
// over gRPC (HTTP/2 on a socket); common/inprocess_transport.h inside one process with seeded delays, breaks and
// partitions. A message is a grpc::ByteBuffer that holds one protobuf message.
#ifndef SLUICE_COMMON_TRANSPORT_H_
#define SLUICE_COMMON_TRANSPORT_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace sluice {

enum class Plane { kSession, kParameter, kShard, kPeer, kMail };
inline constexpr size_t kPlanes = 5;

// Receives a stream's events, one at a time, in order, on a thread of the transport. Must not block for long: reading
// the next message starts only after OnMessage has returned and the message's buffer was moved on, which is the
// back-pressure.
class StreamHandler {
 public:
  virtual ~StreamHandler() = default;
  virtual void OnMessage(grpc::ByteBuffer message) = 0;
  // Something that Write queued has left the queue: queued_bytes() is smaller than before. For windows. The exception
  // to "one at a time": may come while another event is being handled; not after OnClosed.
  virtual void OnWritten() {}
  // Last event, exactly once, also after an own Close() (then with its status). OK: the other end closed in order.
  // UNAVAILABLE: the peer died, cannot be reached, or the opening peer closed with an error. Otherwise what the
  // accepting peer closed with. Never comes inside Close() or Write(), so locks may be held there; after an own Close()
  // it comes within about 2 s even if the peer is stuck.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// One end of a stream. Thread-safe. Dropping the last reference closes it.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // Queues a message; never blocks. Slices are borrowed until they are written. Dropped silently once the stream broke.
  virtual void Write(grpc::ByteBuffer message) = 0;
  // The same for a message that says all that the one written so before said, and more: takes its place where that one
  // is still queued (also before what was written in between). For acknowledgements.
  virtual void WriteLatest(grpc::ByteBuffer message) { Write(std::move(message)); }
  // Bytes queued and not yet handed to the transport: for windows.
  virtual size_t queued_bytes() const = 0;
  // Ends the stream; idempotent, allowed inside a callback. On an accepting end messages already written are sent first
  // and `status` reaches the peer. On an opening end OK does the same, an error cuts the stream at once. What the peer
  // sent and was not yet given to OnMessage is dropped; the handler gets OnClosed(status).
  virtual void Close(const absl::Status& status) = 0;
  // The same at once, on either end, for a peer that does not read: what is queued is dropped, and memory that it
  // borrows is given back; the peer may hear no more than that the stream was cut.
  virtual void Cut(const absl::Status& status) { Close(status); }
};

// Makes a handler for an accepted stream. `stream` outlives the handler's OnClosed. `peer` is for messages to people.
// Returning null refuses the stream with the status it was closed with, or UNAVAILABLE. May write to and close it.
using Acceptor =
    std::function<std::shared_ptr<StreamHandler>(std::shared_ptr<ByteStream> stream, const std::string& peer)>;

class Transport {
 public:
  virtual ~Transport() = default;
  // Opens a stream; failure to connect arrives as OnClosed(UNAVAILABLE). The transport keeps the handler alive until
  // then. Events may come before Open has returned.
  virtual std::shared_ptr<ByteStream> Open(const std::string& address, Plane plane,
                                           std::shared_ptr<StreamHandler> handler) = 0;
};

// What accepts streams at one address.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual const std::string& address() const = 0;  // HOST:PORT that others reach it by
};

}  // namespace sluice

#endif  // SLUICE_COMMON_TRANSPORT_H_
