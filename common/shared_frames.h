// The frames of one end of a data-plane stream: in the stream, or, between processes of one host, with their payload
// left where it lies in the sender's shared memory and only described in the stream.
//
// Nothing is used before it is seen to work: a worker offers its region (`memory` in a frame), the server tries to map
// it, says so (`mapped`) and offers its own, and from then on frames whose payload lies in a region that the other end
// has mapped carry `shared` in place of `payload`. Everybody else, stock clients included, goes on with payloads in the
// stream.
//
// What a sender describes must keep its bytes until the receiver is done with them, and no message says when that is:
// the protocol must. A worker's gradient is written again only when the commits of all its chunks are in place
// (worker/round_core.h); a server's value of version v only when all contributors' pushes of round v + 1 are in, which
// they send when they have put every chunk of v + 1 in place (so not in async, where commits stay in the stream). A
// worker may therefore compute from v + 1 where it lies, and nothing is copied (worker/model/parameter_memory.h).
#ifndef SLUICE_COMMON_SHARED_FRAMES_H_
#define SLUICE_COMMON_SHARED_FRAMES_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "common/frame.h"
#include "common/shared_memory.h"

namespace sluice {

// The bytes that `part` describes. OUT_OF_RANGE: they do not lie in the region.
absl::StatusOr<grpc::Slice> MappedSlice(const std::shared_ptr<const MappedRegion>& region, const v1::SharedBytes& part);

// Thread-safe.
class SharedFrames {
 public:
  // Offers `own` to the other end, in a frame that the caller then sends.
  void Offer(std::shared_ptr<const SharedRegion> own, v1::ChunkFrame* frame) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the other end has offered memory: it can be answered with an own offer, others are not bothered.
  bool offered() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the other end has mapped the own offer: payloads that lie there are described.
  bool describes() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Looks at what a received frame says of memory. Maps it if `accept`. Returns whether `answer` is to be sent.
  bool OnFrame(const v1::ChunkFrame& frame, bool accept, v1::ChunkFrame* answer) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of an offer that must be accepted; errors as MappedRegion::Open.
  absl::Status Map(const v1::SharedMemory& memory, v1::ChunkFrame* answer) ABSL_LOCKS_EXCLUDED(mutex_);

  // As EncodeFrame and ParseFrame of common/frame.h. OUT_OF_RANGE: what is described does not lie in the memory
  // offered.
  grpc::ByteBuffer Encode(v1::ChunkFrame* control, absl::Span<const BorrowedBytes> payload) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<ParsedFrame> Parse(grpc::ByteBuffer message) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable absl::Mutex mutex_;
  std::shared_ptr<const SharedRegion> own_ ABSL_GUARDED_BY(mutex_);
  bool own_mapped_ ABSL_GUARDED_BY(mutex_) = false;  // the other end has it
  bool offered_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const MappedRegion> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice

#endif  // SLUICE_COMMON_SHARED_FRAMES_H_
