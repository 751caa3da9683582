// The sum of one chunk's contributions in a fixed shape: a binary tree over contributor indices, level by level (0,1),
// (2,3),
// ...; an odd last one passes up. Neighbours add as soon as both are there, whatever the order of arrival, so the bits
// never depend on it. An empty contribution is absent: absent (+) x = x.
//
// Nothing is copied on the way: the first of two neighbours waits as borrowed slices, both are read in place when the
// second has come, and a lone contribution is the sum as it came.
#ifndef SLUICE_COMMON_SUM_TREE_H_
#define SLUICE_COMMON_SUM_TREE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "common/buffer_pool.h"
#include "common/frame.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// What is known of a contribution that is a subtree's sum: how many contributors' it is, and which of them held NaN or
// Inf.
struct SubtreeSum {
  uint32_t contributors = 1;
  std::vector<uint32_t> nonfinite;
};

// Not thread-safe. Chunk of `elements` float32, whose contributions come in `encoding`; sums are float32.
class SumTree {
 public:
  SumTree(size_t elements, std::shared_ptr<BufferPool> pool, v1::Encoding encoding = v1::F32)
      : elements_(elements), encoding_(encoding), pool_(std::move(pool)) {}

  // Forgets everything and expects `contributors` of them.
  void Reset(uint32_t contributors);
  // Once for each index. `payload` of that many elements, or empty: absent. A subtree that was summed elsewhere stands
  // at its first index, with `of`; the others of it are absent.
  void Add(uint32_t index, Payload payload, const SubtreeSum& of = {});

  bool complete() const { return missing_ == 0; }
  // Complete: whether every contribution was absent; there is no sum then.
  bool absent() const { return levels_.back()[0].state == Node::kAbsent; }
  // Of a sum that is not finite: the contributors whose values held NaN or Inf, ascending; where finite values add up
  // to more than float32 holds: all that contributed.
  std::vector<uint32_t> nonfinite() const;
  // The former alone. Contributions that met no other one have not been looked at.
  std::vector<uint32_t> found_nonfinite() const;
  size_t elements() const { return elements_; }
  // Complete and not absent: the sum in a buffer of the pool; a lone contribution is copied.
  std::shared_ptr<float[]> ToBuffer() const;

 private:
  struct Node {
    enum State { kPending, kAbsent, kSlices, kBuffer } state = kPending;
    Payload slices;
    std::shared_ptr<float[]> buffer;
    uint32_t leaf = 0;  // of slices; kSubtree: not a contributor's alone
  };

  static constexpr uint32_t kSubtree = UINT32_MAX;

  friend class SumReader;

  void Blame(uint32_t leaf) {
    if (leaf != kSubtree) bad_[leaf] = true;
  }
  void Settle(size_t level, size_t index);
  Node Join(Node a, Node b);  // a + b
  Node JoinEncoded(Node a, Node b);

  const size_t elements_;
  const v1::Encoding encoding_;
  const std::shared_ptr<BufferPool> pool_;
  std::vector<std::vector<Node>> levels_;  // [0]: leaves; the last: the root
  uint32_t missing_ = 0;
  std::vector<bool> bad_, present_;  // by contributor
};

// Goes through a complete sum that is there, from front to back. Not thread-safe.
class SumReader {
 public:
  explicit SumReader(const SumTree& sum);
  // One of both: a buffer, or else slices.
  SumReader(const float* buffer, const Payload& slices) : buffer_(buffer), slices_(slices) {}

  // The next elements, unaligned: as many as lie together and no more than `most`, which the sum must still have; sets
  // `n`. A multiple of kUnit, unless it is `most`. `scratch` has room for kUnit elements.
  static constexpr size_t kUnit = 16;
  const float* Next(size_t most, float* scratch, size_t* n);

 private:
  const float* buffer_;  // null: slices
  PayloadReader slices_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_SUM_TREE_H_
