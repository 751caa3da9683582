#include "worker/push_encoder.h"

#include <algorithm>

#include "common/log.h"
#include "common/wire_format.h"

namespace sluice {

PushEncoder::PushEncoder(const Layout& layout)
    : encoding_(PushEncoding(layout.plan().spec())),
      top_k_(layout.plan().spec().transfer().push().top_k()),
      residual_(ErrorFeedback(layout.plan().spec()) ? layout.space().size() : 0),
      chunks_(layout.table().chunks()) {}

bool PushEncoder::Begin(const Layout& layout, uint32_t replica) {
  const bool same = timeline_ == layout.plan().timeline() && replica_ == replica;
  timeline_ = layout.plan().timeline();
  replica_ = replica;
  if (same || fresh_) return false;
  for (Chunk& chunk : chunks_) chunk.rounds = 0;
  std::fill(residual_.begin(), residual_.end(), 0.0f);
  fresh_ = true;
  return !residual_.empty();
}

void PushEncoder::Reserve(Chunk* chunk, size_t bytes) {
  // A transport may still hold the memory of a round that is committed.
  if (chunk->capacity >= bytes && chunk->bytes.use_count() == 1) return;
  chunk->bytes = std::make_shared_for_overwrite<uint8_t[]>(bytes);
  chunk->capacity = bytes;
}

BorrowedBytes PushEncoder::Encode(const Layout& layout, uint64_t index, uint64_t round, const float* gradient) {
  Chunk& chunk = chunks_[index];
  if (chunk.rounds != round + 1) {
    CHECK(chunk.rounds <= round, "chunk {}: round {} is encoded after round {}", index, round, chunk.rounds - 1);
    const Range range = layout.table().range(index);
    float* residual = residual_.empty() ? nullptr : residual_.data() + range.begin;
    if (encoding_ == v1::TOP_K) {
      const size_t count = TopKCount(TopKDensity(top_k_, round), range.size());
      Reserve(&chunk, MaxTopKBytes(range.size(), count));
      chunk.size = EncodeTopK(gradient, residual, range.size(), count, chunk.bytes.get());
    } else {
      chunk.size = EncodedBytes(encoding_, range.size());
      Reserve(&chunk, chunk.size);
      EncodeValues(encoding_, gradient, residual, range.size(), chunk.bytes.get());
    }
    chunk.rounds = round + 1;
    fresh_ = false;
  }
  return {chunk.bytes.get(), chunk.size, chunk.bytes};
}

}  // namespace sluice
