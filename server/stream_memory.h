// What the data streams of a server buffer together (--stream_memory): half of it for values that wait to be read by
// clients, half for pushes that were received and not yet handed on to a sum.
//
// Each of the n live streams has a share of limit / 2n in each direction, at most 4 MiB: so the share shrinks before
// the server grows. A stream always may send one frame, no larger than the share (a chunk larger than that travels
// alone): a full server is slow and never stuck.
#ifndef SLUICE_SERVER_STREAM_MEMORY_H_
#define SLUICE_SERVER_STREAM_MEMORY_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sluice {

// The most that one stream gets in one direction, in bytes.
inline constexpr size_t kStreamWindow = 4 << 20;
// The least; a frame as small as this costs more for its number than for its bytes.
inline constexpr size_t kSmallestShare = 64 << 10;

// Thread-safe.
class StreamMemory {
 public:
  explicit StreamMemory(uint64_t limit = INT64_MAX) : limit_(limit) {}
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  void Join() { ++streams_; }
  void Leave() { --streams_; }
  // Bytes that a stream may buffer in each direction.
  size_t share() const {
    const uint64_t streams = static_cast<uint64_t>(std::max<int64_t>(1, streams_.load()));
    return static_cast<size_t>(std::clamp<uint64_t>(limit_ / 2 / streams, kSmallestShare, kStreamWindow));
  }
  // What waits to be read has changed by so much.
  void Count(int64_t bytes) { waiting_ += bytes; }
  // Whether there is room for so much beyond what each stream may send always.
  bool Fits(size_t more) const {
    return waiting_.load() + static_cast<int64_t>(more) <= static_cast<int64_t>(limit_ / 2);
  }

  int64_t streams() const { return streams_.load(); }
  int64_t waiting() const { return waiting_.load(); }

 private:
  const uint64_t limit_;
  std::atomic<int64_t> streams_{0}, waiting_{0};
};

}  // namespace sluice

#endif  // SLUICE_SERVER_STREAM_MEMORY_H_
