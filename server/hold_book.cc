#include "server/hold_book.h"

namespace sluice {

HoldBook::HoldBook(std::shared_ptr<HoldBudget> budget, const ProtocolRules& rules)
    : budget_(budget != nullptr ? std::move(budget) : std::make_shared<HoldBudget>()),
      take_pairs_(rules.take_pairs),
      take_oldest_(rules.take_oldest) {}

HoldBook::~HoldBook() { Clear(); }

void HoldBook::Clear() {
  Count(-bytes_);
  chunks_.clear();
  holding_.clear();
  queue_.clear();
  asked_ = 0;
}

void HoldBook::Count(int64_t bytes) {
  bytes_ += bytes;
  budget_->Add(bytes);
}

// As SumTree::Settle does it.
HoldBook::Placed HoldBook::Place(Chunk* chunk, const Item& item, bool keep) {
  Placed placed;
  Node node{item.empty ? Node::kAbsent : Node::kHeld, item.bytes};
  size_t level = 0, n = chunk->contributors, index = item.contributor;
  for (; n > 1; level += n, index /= 2, n = (n + 1) / 2) {
    if ((index ^ 1) >= n) continue;  // an odd last one passes up
    const Node& neighbour = chunk->nodes[level + (index ^ 1)];
    if (neighbour.state == Node::kPending) break;
    if (neighbour.state == Node::kAbsent) continue;
    placed.bytes -= static_cast<int64_t>(neighbour.bytes);
    --placed.held;
    if (node.state == Node::kHeld) {
      node.bytes = chunk->sum_bytes;
      placed.completes = true;
    } else {
      node = neighbour;
    }
  }
  if (n == 1) {
    placed.completes = true;  // the whole sum is not held for anybody
  } else if (node.state == Node::kHeld) {
    placed.bytes += static_cast<int64_t>(node.bytes);
    ++placed.held;
  }
  if (keep) chunk->nodes[level + index] = node;
  return placed;
}

HoldBook::Chunk& HoldBook::Open(const Item& item) {
  Chunk& chunk = chunks_[item.chunk];
  if (!chunk.nodes.empty()) return chunk;
  chunk.contributors = chunk.missing = item.contributors;
  chunk.sum_bytes = item.sum_bytes;
  size_t nodes = 1;
  for (size_t n = item.contributors; n > 1; n = (n + 1) / 2) nodes += n;
  chunk.nodes.resize(nodes);
  return chunk;
}

bool HoldBook::Completes(Chunk* chunk, uint32_t contributor) const {
  return Place(chunk, {.contributor = contributor}, /*keep=*/false).completes;
}

bool HoldBook::Oldest(uint64_t chunk) const {
  return holding_.empty() ? asked_ == 0 : holding_.begin()->second == chunk;
}

bool HoldBook::Take(const Item& item, std::vector<Ask>* asks) {
  if (item.contributors <= 1) return true;
  Chunk& chunk = Open(item);
  if (item.span > 1 && chunk.sums.insert(item.contributor).second) {
    for (uint32_t i = item.contributor + 1; i < item.contributor + item.span; ++i, --chunk.missing) {
      Place(&chunk, {.contributor = i, .empty = true}, /*keep=*/true);  // waits for the first one, which is missing
    }
  }
  const auto declined = chunk.declined.find(item.contributor);
  const bool asked = declined != chunk.declined.end() && declined->second.asked;
  const bool taken = item.empty || item.bytes == 0 || asked || budget_->Fits(item.bytes) ||
                     (take_oldest_ && Oldest(item.chunk)) || (take_pairs_ && Completes(&chunk, item.contributor));
  if (!taken) {
    Decline(&chunk, item);
    return false;
  }
  if (declined != chunk.declined.end()) Forget(&chunk, declined);
  const Placed placed = Place(&chunk, item, /*keep=*/true);
  Count(placed.bytes);
  const bool held = chunk.held > 0;
  chunk.held += placed.held;
  if (!held && chunk.held > 0) holding_[chunk.since = next_++] = item.chunk;
  if (--chunk.missing == 0) {
    if (held) holding_.erase(chunk.since);
    chunks_.erase(item.chunk);
  } else if (take_pairs_) {
    AskOf(item.chunk, &chunk, asks);
  }
  AskWhereThereIsRoom(asks);
  return true;
}

void HoldBook::Decline(Chunk* chunk, const Item& item) {
  const auto [it, fresh] = chunk->declined.try_emplace(item.contributor);
  it->second.streams.insert(item.stream);
  it->second.bytes = item.bytes;
  if (!fresh) return;  // a second copy
  ++declines_;
  it->second.order = next_++;
  queue_[it->second.order] = {item.chunk, item.contributor};
}

void HoldBook::Forget(Chunk* chunk, std::map<uint32_t, Declined>::iterator declined) {
  if (declined->second.asked) {
    --asked_;
    Count(-static_cast<int64_t>(declined->second.kept));
  } else {
    queue_.erase(declined->second.order);
  }
  chunk->declined.erase(declined);
}

void HoldBook::AskFor(uint64_t index, Declined* declined, uint64_t kept, std::vector<Ask>* asks) {
  queue_.erase(declined->order);
  declined->asked = true;
  declined->kept = kept;
  ++asked_;
  Count(static_cast<int64_t>(kept));
  for (const StreamId stream : declined->streams) asks->push_back({stream, index});
}

// Of one chunk, what would complete a pair now.
void HoldBook::AskOf(uint64_t index, Chunk* chunk, std::vector<Ask>* asks) {
  for (auto& [contributor, declined] : chunk->declined) {
    if (!declined.asked && Completes(chunk, contributor)) AskFor(index, &declined, 0, asks);
  }
}

void HoldBook::AskWhereThereIsRoom(std::vector<Ask>* asks) {
  if (take_oldest_ && !holding_.empty()) {
    const uint64_t oldest = holding_.begin()->second;
    for (auto& [contributor, declined] : chunks_.at(oldest).declined) {
      if (!declined.asked) AskFor(oldest, &declined, 0, asks);
    }
  }
  while (!queue_.empty()) {
    const auto [index, contributor] = queue_.begin()->second;
    Declined& declined = chunks_.at(index).declined.at(contributor);
    const bool nothing_else = take_oldest_ && holding_.empty() && asked_ == 0;
    if (!nothing_else && !budget_->Fits(declined.bytes)) return;
    AskFor(index, &declined, declined.bytes, asks);
  }
}

void HoldBook::OnStreamClosed(StreamId stream, std::vector<Ask>* asks) {
  for (auto& [index, chunk] : chunks_) {
    for (auto it = chunk.declined.begin(); it != chunk.declined.end();) {
      const auto next = std::next(it);
      if (it->second.streams.erase(stream) > 0 && it->second.streams.empty()) Forget(&chunk, it);
      it = next;
    }
  }
  AskWhereThereIsRoom(asks);
}

}  // namespace sluice
