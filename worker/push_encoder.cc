#include "worker/push_encoder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/log.h"
#include "common/wire_format.h"

namespace sluice {

PushEncoder::PushEncoder(const Layout& layout)
    : encoding_(PushEncoding(layout.plan().spec())),
      top_k_(layout.plan().spec().transfer().push().top_k()),
      feedback_(ErrorFeedback(layout.plan().spec())),
      table_(layout.table()),
      chunks_(table_.chunks()) {}

// ---------------------------------------------------------------- generations
PushEncoder::Start PushEncoder::Begin(const Layout& layout, uint32_t replica) {
  const v1::Plan& plan = layout.plan();
  absl::MutexLock lock(&mutex_);
  const bool first = timeline_ == 0;
  const bool same = timeline_ == plan.timeline() && replica_ == replica;
  generation_ = plan.generation();
  timeline_ = plan.timeline();
  replica_ = replica;
  if (same && restoring_ == 0) return Start::kKept;
  bool held = false;
  for (Chunk& chunk : chunks_) {
    held |= chunk.rounds > 0 || chunk.residual != nullptr;
    chunk.rounds = 0;
    chunk.residual = nullptr;
    chunk.levels.clear();
  }
  restoring_ = dealt_ = 0;
  ++drops_;
  if (feedback_ && plan.has_checkpoint() && plan.checkpoint().residuals() > 0 &&
      plan.start() == plan.checkpoint().version()) {
    restoring_ = chunks_.size();
    return Start::kRestore;
  }
  return first || !held || !feedback_ ? Start::kKept : Start::kDropped;
}

void PushEncoder::Restore(uint64_t index, const Payload& values) {
  std::shared_ptr<float[]> residual;
  std::vector<uint32_t> levels;
  if (values.size() > 0) {
    const size_t n = table_.range(index).size();
    CHECK(values.size() == n * sizeof(float), "{} bytes of residual for {} elements", values.size(), n);
    residual = std::make_shared_for_overwrite<float[]>(n);
    values.CopyTo(residual.get());
    levels = Levels(residual.get(), n);
  }
  absl::MutexLock lock(&mutex_);
  if (restoring_ == 0) return;
  --restoring_;
  chunks_[index].residual = std::move(residual);
  chunks_[index].levels = std::move(levels);
}

// ---------------------------------------------------------------- top_k
std::vector<uint32_t> PushEncoder::Levels(const float* residual, size_t n) const {
  std::vector<uint32_t> levels;
  if (encoding_ != v1::TOP_K) return levels;
  levels.resize(kLevels);
  for (size_t i = 0; i < n; ++i) ++levels[(std::bit_cast<uint32_t>(residual[i]) & 0x7fffffffu) >> 20];
  return levels;
}

// The round's number of values, to chunks by how many of the residual's largest they have: those above a level, and of
// that level, where the number runs out, all chunks the same share.
void PushEncoder::Deal(uint64_t lease, uint64_t round) {
  std::vector<uint64_t> total(kLevels);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (chunk.levels.empty()) total[0] += table_.range(i).size();
    for (size_t level = 0; level < chunk.levels.size(); ++level) total[level] += chunk.levels[level];
  }
  uint64_t left = TopKCount(TopKDensity(top_k_, round), table_.parameters());
  size_t cut = kLevels - 1;
  while (total[cut] < left) left -= total[cut--];
  const double share = static_cast<double>(left) / static_cast<double>(total[cut]);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    Chunk& chunk = chunks_[i];
    const size_t n = table_.range(i).size();
    uint64_t count = 0, at_cut = 0;
    if (chunk.levels.empty()) {
      at_cut = cut == 0 ? n : 0;
    } else {
      for (size_t level = cut + 1; level < kLevels; ++level) count += chunk.levels[level];
      at_cut = chunk.levels[cut];
    }
    count += static_cast<uint64_t>(std::ceil(share * static_cast<double>(at_cut)));
    chunk.count = std::clamp<uint64_t>(count, 1, n);
  }
  dealt_ = lease + 1;
}

// ---------------------------------------------------------------- encoding
void PushEncoder::Reserve(Chunk* chunk, size_t bytes) const {
  // A transport may still hold the memory of a round that is committed.
  if (chunk->capacity >= bytes && chunk->bytes.use_count() == 1) return;
  chunk->bytes = std::make_shared_for_overwrite<uint8_t[]>(bytes);
  chunk->capacity = bytes;
}

void PushEncoder::Encode(uint64_t index, uint64_t lease, uint64_t round, const float* gradient) {
  const size_t n = table_.range(index).size();
  Chunk work;  // the chunk's memory while it is written: nobody else sees it
  uint64_t drops = 0;
  {
    absl::MutexLock lock(&mutex_);
    Chunk& chunk = chunks_[index];
    if (chunk.rounds == lease + 1) return;
    CHECK(chunk.rounds <= lease, "chunk {}: round {} is encoded after round {}", index, lease, chunk.rounds - 1);
    if (encoding_ == v1::TOP_K && dealt_ != lease + 1) Deal(lease, round);
    drops = drops_;
    work = std::move(chunk);
    chunk = Chunk();
  }
  if (feedback_ && (work.residual == nullptr || work.residual.use_count() > 1)) {  // held for a checkpoint: a copy
    auto own = std::make_shared_for_overwrite<float[]>(n);
    if (work.residual == nullptr) {
      std::memset(own.get(), 0, n * sizeof(float));
    } else {
      std::memcpy(own.get(), work.residual.get(), n * sizeof(float));
    }
    work.residual = std::move(own);
  }
  if (encoding_ == v1::TOP_K) {
    Reserve(&work, MaxTopKBytes(n, work.count));
    work.size = EncodeTopK(gradient, work.residual.get(), n, work.count, work.bytes.get());
  } else {
    work.size = EncodedBytes(encoding_, n);
    Reserve(&work, work.size);
    EncodeValues(encoding_, gradient, work.residual.get(), n, work.bytes.get());
  }
  if (feedback_) work.levels = Levels(work.residual.get(), n);
  work.rounds = lease + 1;
  absl::MutexLock lock(&mutex_);
  if (drops == drops_) chunks_[index] = std::move(work);  // else a rewind meanwhile
}

std::optional<BorrowedBytes> PushEncoder::Bytes(uint64_t generation, uint64_t index, uint64_t round) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return generation_ != generation || chunks_[index].rounds > round;
  };
  mutex_.Await(absl::Condition(&ready));
  const Chunk& chunk = chunks_[index];
  // A later round's bytes: this one is committed, nobody misses it.
  if (generation_ != generation || chunk.rounds != round + 1) return std::nullopt;
  return BorrowedBytes{chunk.bytes.get(), chunk.size, chunk.bytes};
}

BorrowedBytes PushEncoder::Residual(uint64_t index) const {
  absl::MutexLock lock(&mutex_);
  const Chunk& chunk = chunks_[index];
  if (chunk.residual == nullptr) return {};
  return {chunk.residual.get(), table_.range(index).size() * sizeof(float), chunk.residual};
}

}  // namespace sluice
