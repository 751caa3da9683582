#include "common/sum_tree.h"

#include <algorithm>
#include <utility>

#include "common/log.h"
#include "common/optimizer.h"
#include "common/wire_format.h"

namespace sluice {
void SumTree::Reset(uint32_t contributors) {
  levels_.clear();
  for (size_t n = contributors;; n = (n + 1) / 2) {
    levels_.emplace_back(n);
    if (n <= 1) break;
  }
  missing_ = contributors;
  bad_.assign(contributors, false);
  present_.assign(contributors, false);
}

void SumTree::Add(uint32_t index, Payload payload, const SubtreeSum& of) {
  Node& leaf = levels_[0][index];
  DCHECK(leaf.state == Node::kPending);
  leaf.leaf = of.contributors > 1 ? kSubtree : index;
  for (const uint32_t contributor : of.nonfinite) bad_[contributor] = true;
  if (payload.size() == 0) {
    leaf.state = Node::kAbsent;
  } else {
    CHECK(encoding_ == v1::TOP_K || payload.size() == EncodedBytes(encoding_, elements_));
    leaf.state = Node::kSlices;
    leaf.slices = std::move(payload);
    std::fill_n(present_.begin() + index, of.contributors, true);
  }
  --missing_;
  Settle(0, index);
  Node& root = levels_.back()[0];
  // A lone contribution stays as it came, unless it has to be decoded, or pins much more memory than it has bytes.
  if (root.state == Node::kSlices &&
      (encoding_ != v1::F32 || root.slices.pinned_bytes() > root.slices.size() + root.slices.size() / 4)) {
    root.buffer = pool_->Take(elements_);
    DecodePayload(encoding_, root.slices, elements_, root.buffer.get());
    root.slices = Payload();
    root.state = Node::kBuffer;
  }
}

void SumTree::Settle(size_t level, size_t index) {
  if (level + 1 == levels_.size()) return;
  std::vector<Node>& row = levels_[level];
  const size_t left = index & ~size_t{1}, right = left + 1;
  Node& parent = levels_[level + 1][index / 2];
  Node& a = row[left];
  if (right == row.size()) {  // an odd last one passes up
    parent = std::move(a);
  } else {
    Node& b = row[right];
    if (a.state == Node::kPending || b.state == Node::kPending) return;
    if (a.state == Node::kAbsent || b.state == Node::kAbsent) {
      parent = std::move(a.state == Node::kAbsent ? b : a);
    } else {
      parent = Join(std::move(a), std::move(b));
      a = b = Node();
    }
  }
  Settle(level + 1, index / 2);
}

SumTree::Node SumTree::JoinEncoded(Node a, Node b) {
  if (b.state == Node::kBuffer) std::swap(a, b);
  if (a.state == Node::kSlices) {
    a.buffer = pool_->Take(elements_);
    DecodePayload(encoding_, a.slices, elements_, a.buffer.get());
    if (!AllFinite(a.buffer.get(), elements_)) Blame(a.leaf);
    a.slices = Payload();
    a.state = Node::kBuffer;
  }
  if (b.state == Node::kBuffer) {
    AddAndCheck(a.buffer.get(), b.buffer.get(), a.buffer.get(), elements_);
  } else if (!AddPayload(encoding_, b.slices, elements_, a.buffer.get())) {
    Blame(b.leaf);
  }
  return a;
}

SumTree::Node SumTree::Join(Node a, Node b) {
  if (encoding_ != v1::F32) return JoinEncoded(std::move(a), std::move(b));
  // Addition commutes bit for bit: whichever has a buffer takes the other.
  Node sum;
  sum.state = Node::kBuffer;
  sum.buffer = a.state == Node::kBuffer ? a.buffer : b.state == Node::kBuffer ? b.buffer : pool_->Take(elements_);
  // `b` is gone through in pieces of what lies together in `a`.
  SumReader from_a(a.buffer.get(), a.slices), from_b(b.buffer.get(), b.slices);
  float scratch_a[SumReader::kUnit], scratch_b[SumReader::kUnit];
  int bad = 0;
  for (size_t i = 0, of_a; i < elements_;) {
    const float* piece = from_a.Next(elements_ - i, scratch_a, &of_a);
    for (size_t n; of_a > 0; of_a -= n, i += n, piece += n) {
      const float* const other = from_b.Next(of_a, scratch_b, &n);
      bad |= AddAndCheck(piece, other, sum.buffer.get() + i, n);
    }
  }
  if (a.state == Node::kSlices && (bad & 1) != 0) Blame(a.leaf);
  if (b.state == Node::kSlices && (bad & 2) != 0) Blame(b.leaf);
  return sum;
}

std::shared_ptr<float[]> SumTree::ToBuffer() const {
  const Node& root = levels_.back()[0];
  DCHECK(complete() && !absent());
  if (root.state == Node::kBuffer) return root.buffer;
  std::shared_ptr<float[]> buffer = pool_->Take(elements_);
  root.slices.CopyTo(buffer.get());
  return buffer;
}

std::vector<uint32_t> SumTree::found_nonfinite() const {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < bad_.size(); ++i) {
    if (bad_[i]) out.push_back(i);
  }
  return out;
}

std::vector<uint32_t> SumTree::nonfinite() const {
  std::vector<uint32_t> out = found_nonfinite();
  if (!out.empty()) return out;
  for (uint32_t i = 0; i < present_.size(); ++i) {
    if (present_[i]) out.push_back(i);
  }
  return out;
}

SumReader::SumReader(const SumTree& sum) : SumReader(sum.levels_.back()[0].buffer.get(), sum.levels_.back()[0].slices) {
  DCHECK(sum.complete() && !sum.absent());
}

const float* SumReader::Next(size_t most, float* scratch, size_t* n) {
  *n = most;
  if (buffer_ != nullptr) return std::exchange(buffer_, buffer_ + most);
  size_t bytes;
  const void* const at = slices_.Next(most * sizeof(float), kUnit * sizeof(float), scratch, &bytes);
  *n = bytes / sizeof(float);
  return static_cast<const float*>(at);
}

}  // namespace sluice
