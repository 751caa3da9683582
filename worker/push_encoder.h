// What a rank's contributions look like in a push encoding other than float32, and what the encodings have left out of
// them so far (error feedback).
//
// A chunk is encoded once a round, into memory that stays readable until its next round is encoded: however often it is
// pushed, also in a later generation that computes the round again, the same bytes leave. So the residual, which
// becomes what the encoding left out as the bytes are made, counts each round once. (In one timeline a round that is
// computed again starts from the same parameters and the same samples: its gradient is the same.)
#ifndef SLUICE_WORKER_PUSH_ENCODER_H_
#define SLUICE_WORKER_PUSH_ENCODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "common/frame.h"
#include "common/layout.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// Not thread-safe. Sums over samples go in and come out: nothing is scaled from round to round.
class PushEncoder {
 public:
  // `layout`: of any generation of the job.
  explicit PushEncoder(const Layout& layout);

  v1::Encoding encoding() const { return encoding_; }
  // Before pushes of a generation: another timeline than before (a rewind), or another replica's samples, drop what was
  // kept. Returns whether that was more than zeros.
  bool Begin(const Layout& layout, uint32_t replica);
  // The contribution to `round` of the chunk; `gradient`: its elements, read in the first call of a round only.
  BorrowedBytes Encode(const Layout& layout, uint64_t chunk, uint64_t round, const float* gradient);

  // What was left out so far, over the whole space; empty without error feedback.
  const std::vector<float>& residual() const { return residual_; }

 private:
  struct Chunk {
    uint64_t rounds = 0;  // 1 + the round that `bytes` are of; 0: none
    std::shared_ptr<uint8_t[]> bytes;
    size_t capacity = 0, size = 0;
  };
  void Reserve(Chunk* chunk, size_t bytes);

  const v1::Encoding encoding_;
  const v1::TopKFormat top_k_;
  std::vector<float> residual_;
  std::vector<Chunk> chunks_;
  uint64_t timeline_ = 0;
  uint32_t replica_ = 0;
  bool fresh_ = true;  // nothing has been encoded since the residual was zero
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PUSH_ENCODER_H_
