// What waits to be sent to one worker: values of chunks, coalesced into frames of up to 1 MiB in chunk order. Of a
// chunk only the newest two versions wait (a restarting worker needs v-1 first); payloads are references to immutable
// buffers.
#ifndef SLUICE_SERVER_COMMIT_QUEUE_H_
#define SLUICE_SERVER_COMMIT_QUEUE_H_

#include <map>
#include <memory>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "common/transport.h"
#include "server/chunk_store.h"

namespace sluice {

// Thread-safe.
class CommitQueue {
 public:
  CommitQueue(std::shared_ptr<ByteStream> stream, uint64_t generation)
      : stream_(std::move(stream)), generation_(generation) {}

  // True where the caller should see to it that Flush is called soon (nobody else will).
  bool Add(uint64_t chunk, uint64_t version, ChunkValue value);
  // The same with a header of which chunk, round and elements are set; its generation is this stream's.
  bool Add(v1::ChunkHeader header, ChunkValue value);
  // Writes everything that waits.
  void Flush();

  const std::shared_ptr<ByteStream>& stream() const { return stream_; }

 private:
  const std::shared_ptr<ByteStream> stream_;
  const uint64_t generation_;
  absl::Mutex mutex_;
  struct Waiting {
    v1::ChunkHeader header;
    ChunkValue value;
  };
  std::map<std::pair<uint64_t, uint64_t>, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // by (version, chunk)
  bool flush_due_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace sluice

#endif  // SLUICE_SERVER_COMMIT_QUEUE_H_
