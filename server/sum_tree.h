// The sum of one chunk's contributions in a fixed shape: a binary tree over contributor indices, level by level (0,1),
// (2,3),
// ...; an odd last one passes up. Neighbours add as soon as both are there, whatever the order of arrival, so the bits
// never depend on it. An empty contribution is absent: absent (+) x = x.
//
// The first of two neighbours waits as borrowed slices; the second is added in place.
#ifndef SLUICE_SERVER_SUM_TREE_H_
#define SLUICE_SERVER_SUM_TREE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "common/frame.h"
#include "server/buffer_pool.h"

namespace sluice {

// Not thread-safe. Chunk of `elements` float32.
class SumTree {
 public:
  SumTree(size_t elements, std::shared_ptr<BufferPool> pool) : elements_(elements), pool_(std::move(pool)) {}

  // Forgets everything and expects `contributors` of them.
  void Reset(uint32_t contributors);
  // Once for each index. `payload` of elements * 4 bytes, or empty: absent.
  void Add(uint32_t index, Payload payload);

  bool complete() const { return missing_ == 0; }
  // Complete: the sum, elements() floats; null where every contribution was absent.
  const float* result() const;
  bool finite() const;  // of the result
  // Contributors whose values held NaN or Inf, ascending; where finite values add up to more than float32 holds: all
  // that contributed.
  std::vector<uint32_t> nonfinite() const;
  size_t elements() const { return elements_; }

 private:
  struct Node {
    enum State { kPending, kAbsent, kSlices, kBuffer } state = kPending;
    Payload slices;
    std::shared_ptr<float[]> buffer;
    uint32_t leaf = 0;  // of slices
  };

  void Settle(size_t level, size_t index);
  void Materialize(Node* node);  // slices -> buffer
  void AddInto(Node* buffer, Node* other);

  const size_t elements_;
  const std::shared_ptr<BufferPool> pool_;
  std::vector<std::vector<Node>> levels_;  // [0]: leaves; the last: the root
  uint32_t missing_ = 0;
  std::vector<bool> bad_, present_;  // by contributor
};

}  // namespace sluice

#endif  // SLUICE_SERVER_SUM_TREE_H_
