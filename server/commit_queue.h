// What waits to be sent to one worker: values of chunks, coalesced into frames of up to 1 MiB in chunk order. A full
// frame leaves at once, so that the first chunks of a version travel while the next ones are computed; the rest with
// Flush. Frames that only say where their payload lies grow from one to the next: what they cost is their number. No
// more than the stream's share (stream_memory.h) is given to it at a time, and frames that have their payload with them
// are no larger than that. To a slow reader wait references to immutable buffers, of a chunk the newest two versions (a
// restarting worker needs v-1 first): these the store has anyway.
#ifndef SLUICE_SERVER_COMMIT_QUEUE_H_
#define SLUICE_SERVER_COMMIT_QUEUE_H_

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "common/shared_frames.h"
#include "common/transport.h"
#include "server/chunk_store.h"
#include "server/stream_memory.h"

namespace sluice {

// Payload of one frame that only says where it lies, at most.
inline constexpr size_t kMostDescribed = 16 << 20;

// Thread-safe.
class CommitQueue {
 public:
  // `memory`: shared with the server's other streams; null: as if there were none.
  CommitQueue(std::shared_ptr<ByteStream> stream, std::shared_ptr<const SharedFrames> frames, uint64_t generation,
              std::shared_ptr<StreamMemory> memory = nullptr);
  ~CommitQueue();

  // True where the caller should see to it that Flush is called soon (nobody else will).
  bool Add(uint64_t chunk, uint64_t version, WireValue value);
  // The same with a header of which chunk and round are set; generation is this stream's, length and encoding the
  // value's. `receipt` is let go of when the value is given to the stream.
  bool Add(v1::ChunkHeader header, WireValue value, std::shared_ptr<const void> receipt = nullptr);
  // Something large that is made only when its turn comes: called once, with the queue locked.
  bool AddLater(v1::ChunkHeader header, std::function<WireValue()> make);
  // Sends what waits, as far as the window allows; the rest follows by OnWritten.
  void Flush();
  // The stream's event.
  void OnWritten();
  // How often it came.
  uint64_t written() const {
    absl::MutexLock lock(&mutex_);
    return written_;
  }

  // Whether a version still waited when its chunk was two versions further: never so with a worker, which reads all of
  // a round before it contributes to the next.
  bool fell_behind() const {
    absl::MutexLock lock(&mutex_);
    return fell_behind_;
  }

  const std::shared_ptr<ByteStream>& stream() const { return stream_; }

 private:
  struct Waiting {
    v1::ChunkHeader header;
    BorrowedBytes value;
    std::function<WireValue()> make = nullptr;  // AddLater: of `value`, whose size is the most that it can have
    std::shared_ptr<const void> receipt = nullptr;
    size_t bytes() const { return value.size; }
  };
  using Key = std::tuple<uint64_t, bool, uint64_t>;  // version, whether it is a value and no residual, chunk

  bool Insert(const Key& key, Waiting added) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Full frames, with `all` the last one too.
  void Send(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t NextFrame(size_t most) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendFrame(size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t Count() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<const SharedFrames> frames_;
  const uint64_t generation_;
  const std::shared_ptr<StreamMemory> memory_;
  mutable absl::Mutex mutex_;  // held while a stream's queue is added to, so that a chunk's versions leave in order
  std::map<Key, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t frame_bytes_ ABSL_GUARDED_BY(mutex_) = kMaxFramePayload;  // of the next one
  bool described_ ABSL_GUARDED_BY(mutex_) = false;
  size_t counted_ ABSL_GUARDED_BY(mutex_) = 0;  // of what waits in the stream, by memory_
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  bool flush_due_ ABSL_GUARDED_BY(mutex_) = false;
  bool fell_behind_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_COMMIT_QUEUE_H_
