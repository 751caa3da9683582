// What a rank's contributions look like in a push encoding other than float32, and what the encodings have left out of
// them so far (error feedback): the rank's residual.
//
// A chunk is encoded once a round, into memory that stays readable until its next round is encoded: however often it is
// pushed, also in a later generation that computes the round again, the same bytes leave. So the residual, which
// becomes what the encoding left out as the bytes are made, counts each round once. (In one timeline a round that is
// computed again starts from the same parameters and the same samples: its gradient is the same.)
//
// What is a round here is a lease in async jobs, numbered by the caller. A lease that a new generation interrupts is
// computed again from other parameters: what it had pushed of chunks that no server applied is lost.
//
// TOP_K has a number of values to choose in a round. It is dealt to the chunks by their shares in the largest values of
// the residual before the round, so that, as far as these tell, the largest of the whole gradient are chosen, and yet a
// chunk can leave before the others are computed. Without a residual every chunk gets its share by length.
#ifndef SLUICE_WORKER_PUSH_ENCODER_H_
#define SLUICE_WORKER_PUSH_ENCODER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/layout.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// Thread-safe, but Encode and Restore have one caller at a time, and Residual is not called meanwhile. Sums over
// samples go in and come out: nothing is scaled from round to round.
class PushEncoder {
 public:
  // `layout`: of any generation of the job.
  explicit PushEncoder(const Layout& layout);

  v1::Encoding encoding() const { return encoding_; }

  // What a generation begins with.
  enum class Start {
    kKept,     // what was there; nothing was, or the residual is of this timeline and replica
    kDropped,  // zeros: what was there belongs to another timeline (a rewind) or to another replica's samples
    kRestore,  // zeros, to be replaced by what the plan's checkpoint holds: Restore of every chunk
  };
  Start Begin(const Layout& layout, uint32_t replica) ABSL_LOCKS_EXCLUDED(mutex_);
  // The residual of the chunk; empty: zeros.
  void Restore(uint64_t chunk, const Payload& values) ABSL_LOCKS_EXCLUDED(mutex_);

  // Makes the contribution to `round` of the chunk, unless it is there; `gradient`: its elements.
  void Encode(uint64_t chunk, uint64_t round, const float* gradient) ABSL_LOCKS_EXCLUDED(mutex_) {
    Encode(chunk, round, round, gradient);
  }
  // The same for lease number `lease`, which lies in `round`.
  void Encode(uint64_t chunk, uint64_t lease, uint64_t round, const float* gradient) ABSL_LOCKS_EXCLUDED(mutex_);
  // The contribution that Encode made, or is about to make (then it is waited for). Absent where `generation` is over.
  std::optional<BorrowedBytes> Bytes(uint64_t generation, uint64_t chunk, uint64_t round) ABSL_LOCKS_EXCLUDED(mutex_);

  // The residual as it is now, in memory that is not written any more; no bytes where it is all zeros.
  BorrowedBytes Residual(uint64_t chunk) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kLevels = 2048;  // of magnitudes: 8 bits of the exponent, 3 of the significand
  struct Chunk {
    uint64_t rounds = 0;  // 1 + the round that `bytes` are of; 0: none
    std::shared_ptr<uint8_t[]> bytes;
    size_t capacity = 0, size = 0;
    std::shared_ptr<float[]> residual;  // null: zeros
    std::vector<uint32_t> levels;       // TOP_K: how many values of the residual have which magnitude; empty: zeros
    size_t count = 0;                   // TOP_K: values to choose in round dealt_ - 1
  };
  void Reserve(Chunk* chunk, size_t bytes) const;
  void Deal(uint64_t lease, uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<uint32_t> Levels(const float* residual, size_t n) const;

  const v1::Encoding encoding_;
  const v1::TopKFormat top_k_;
  const bool feedback_;
  const ChunkTable table_;  // chunks are the same in every generation

  mutable absl::Mutex mutex_;
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t timeline_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t replica_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t drops_ ABSL_GUARDED_BY(mutex_) = 0;      // how often all was dropped
  uint64_t restoring_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks that Restore is still owed for
  uint64_t dealt_ ABSL_GUARDED_BY(mutex_) = 0;      // 1 + the round of the chunks' counts; 0: none
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PUSH_ENCODER_H_
