// What one stream to a server still has to push: contributions in order, cut into frames, held back by the window.
#ifndef SLUICE_WORKER_PUSH_QUEUE_H_
#define SLUICE_WORKER_PUSH_QUEUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "common/frame.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

inline constexpr size_t kPushWindow = 4 << 20;  // payload bytes sent and not acknowledged, a stream
// Of a frame that only says where its payload lies: what a server does with 2 MiB takes longer than the wake-up.
inline constexpr size_t kDescribedPayload = 2 << 20;

// Not thread-safe. Contributions leave in the order in which they were added.
class PushQueue {
 public:
  // `patient`: not where a chunk's answer comes back while others are still being pushed; there a frame that waits is
  // time that the way back does nothing.
  explicit PushQueue(size_t window = kPushWindow, size_t frame_bytes = kMaxFramePayload, bool patient = false)
      : window_(window), granted_(window), frame_bytes_(frame_bytes), patient_(patient) {}

  // `bytes` is empty for an empty contribution. Nothing is copied.
  void Add(v1::ChunkHeader header, BorrowedBytes bytes);
  // Contributions to rounds before `round` are committed: those that still wait are left out.
  void DropBefore(uint64_t round);
  // A smaller window than its own, or the own one again; 0: that.
  void SetWindow(size_t window) { granted_ = window == 0 ? window_ : std::min(window, window_); }
  // The server has taken so many payload bytes off the stream since its beginning. OUT_OF_RANGE where that is more than
  // was sent; an old acknowledgement changes nothing.
  absl::Status Acknowledge(uint64_t bytes);
  // The next frame that the window lets through: as many neighbours as fit `frame_bytes`, at least one, no chunk twice;
  // false where there is none. One contribution larger than the window goes when no acknowledgement is. Each of them
  // costs both ends a wake-up: they are asked for after every half of the window and with the last frame; an empty
  // one asks where the last that was sent did not know that it was. `more`: further contributions are added soon, and
  // then this is called again. Where the queue is `patient`, what does not fill a frame (or, with nothing under way, a
  // quarter of one), as float32, then waits for them: chunks are many and small where a model is cut. `described`:
  // payloads stay where they lie and cost the server no memory. No window then; and with `more` frames leave only when
  // they are full, for a frame's cost is in its number.
  bool Next(v1::ChunkFrame* control, std::vector<BorrowedBytes>* payload, bool more = false, bool described = false);

  bool empty() const { return waiting_.empty(); }
  uint64_t unacknowledged() const { return sent_ - acknowledged_; }

 private:
  struct Entry {
    v1::ChunkHeader header;
    BorrowedBytes bytes;
  };

  size_t window_, granted_;
  size_t frame_bytes_;
  bool patient_;
  std::deque<Entry> waiting_;
  uint64_t waiting_elements_ = 0;  // encoded in fewer bytes, they stand for as much computing
  uint64_t sent_ = 0;
  uint64_t asked_ = 0;  // of sent_, for an acknowledgement
  uint64_t acknowledged_ = 0;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PUSH_QUEUE_H_
