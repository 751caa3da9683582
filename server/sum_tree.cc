#include "server/sum_tree.h"

#include <algorithm>
#include <cstring>

#include "common/log.h"
#include "common/optimizer.h"

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

void SumTree::Add(uint32_t index, Payload payload) {
  Node& leaf = levels_[0][index];
  DCHECK(leaf.state == Node::kPending);
  leaf.leaf = index;
  if (payload.size() == 0) {
    leaf.state = Node::kAbsent;
  } else {
    CHECK(payload.size() == elements_ * sizeof(float));
    leaf.state = Node::kSlices;
    leaf.slices = std::move(payload);
    present_[index] = true;
  }
  --missing_;
  Settle(0, index);
  if (complete()) {
    Node& root = levels_.back()[0];
    if (root.state == Node::kSlices) Materialize(&root);
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
      // Addition commutes bit for bit: whichever has a buffer takes the other.
      Node& into = a.state == Node::kBuffer ? a : b.state == Node::kBuffer ? b : a;
      Node& other = &into == &a ? b : a;
      if (into.state == Node::kSlices) Materialize(&into);
      AddInto(&into, &other);
      parent = std::move(into);
      other = Node();
    }
  }
  Settle(level + 1, index / 2);
}

void SumTree::Materialize(Node* node) {
  node->buffer = pool_->Take(elements_);
  node->slices.CopyTo(node->buffer.get());
  node->slices = Payload();
  node->state = Node::kBuffer;
  if (!AllFinite(node->buffer.get(), elements_)) bad_[node->leaf] = true;
}

void SumTree::AddInto(Node* node, Node* other) {
  float* out = node->buffer.get();
  if (other->state == Node::kBuffer) {
    AddAndCheck(out, other->buffer.get(), out, elements_);
    return;
  }
  bool bad = false;
  char carried[sizeof(float)];
  size_t carry = 0;
  other->slices.ForEach([&](const uint8_t* data, size_t bytes, size_t offset) {
    if (carry > 0) {  // an element straddles two slices
      const size_t take = std::min(sizeof(float) - carry, bytes);
      std::memcpy(carried + carry, data, take);
      carry += take;
      if (carry < sizeof(float)) return;
      float* at = out + (offset + take) / sizeof(float) - 1;
      bad |= (AddAndCheck(at, carried, at, 1) & 2) != 0;
      carry = 0;
      data += take;
      bytes -= take;
      offset += take;
    }
    const size_t whole = bytes / sizeof(float);
    float* at = out + offset / sizeof(float);
    bad |= (AddAndCheck(at, data, at, whole) & 2) != 0;
    carry = bytes - whole * sizeof(float);
    std::memcpy(carried, data + whole * sizeof(float), carry);
  });
  if (bad) bad_[other->leaf] = true;
}

const float* SumTree::result() const {
  const Node& root = levels_.back()[0];
  return root.state == Node::kBuffer ? root.buffer.get() : nullptr;
}

bool SumTree::finite() const {
  const float* sum = result();
  return sum == nullptr || AllFinite(sum, elements_);
}

std::vector<uint32_t> SumTree::nonfinite() const {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < bad_.size(); ++i) {
    if (bad_[i]) out.push_back(i);
  }
  if (!out.empty() || finite()) return out;
  for (uint32_t i = 0; i < present_.size(); ++i) {
    if (present_[i]) out.push_back(i);
  }
  return out;
}

}  // namespace sluice
