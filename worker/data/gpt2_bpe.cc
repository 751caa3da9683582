#include "worker/data/gpt2_bpe.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "absl/strings/string_view.h"
#include "worker/data/pre_tokens.h"

namespace sluice {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
constexpr size_t kShortWord = 48;   // symbols up to which a scan beats a heap
constexpr size_t kKnownWord = 128;  // bytes of the longest pre-token that is remembered
constexpr size_t kKnownWords = 1u << 20;

}  // namespace

template <typename Unit>
void Gpt2Encoder::Encode(std::string_view text, std::vector<Unit>* out) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = PreTokenEnd(text, at);
    const std::string_view word = text.substr(at, end - at);
    at = end;
    if (word.size() == 1) {
      out->push_back(static_cast<Unit>(bpe_->byte_tokens_[static_cast<unsigned char>(word[0])]));
      continue;
    }
    if (word.size() > kKnownWord) {
      EncodeWord(word);
      out->insert(out->end(), symbols_.begin(), symbols_.end());
      continue;
    }
    auto known = known_.find(absl::string_view(word.data(), word.size()));
    if (known == known_.end()) {
      EncodeWord(word);
      if (known_.size() >= kKnownWords) {  // text without end has new words without end
        known_.clear();
        kept_.clear();
      }
      const Place place{kept_.size(), static_cast<uint32_t>(symbols_.size())};
      kept_.insert(kept_.end(), symbols_.begin(), symbols_.end());
      known = known_.emplace(std::string(word), place).first;
    }
    const Place place = known->second;
    out->insert(out->end(), kept_.begin() + place.begin, kept_.begin() + place.begin + place.count);
  }
}

template void Gpt2Encoder::Encode(std::string_view, std::vector<uint16_t>*);
template void Gpt2Encoder::Encode(std::string_view, std::vector<uint32_t>*);
template void Gpt2Encoder::Encode(std::string_view, std::vector<int32_t>*);

void Gpt2Encoder::EncodeWord(std::string_view word) {
  symbols_.clear();
  for (const unsigned char byte : word) symbols_.push_back(bpe_->byte_tokens_[byte]);
  symbols_.size() <= kShortWord ? MergeShort() : MergeLong();
}

void Gpt2Encoder::MergeShort() {
  const auto rank_at = [this](size_t i) {
    const Gpt2Bpe::Merge* merge = i + 1 < symbols_.size() ? Find(symbols_[i], symbols_[i + 1]) : nullptr;
    return merge == nullptr ? kNoRank : merge->rank;
  };
  ranks_.resize(symbols_.size());
  for (size_t i = 0; i < symbols_.size(); ++i) ranks_[i] = rank_at(i);
  while (symbols_.size() > 1) {
    const uint32_t best = *std::min_element(ranks_.begin(), ranks_.end());
    if (best == kNoRank) return;
    const auto [left, right] = bpe_->merge_lines_[best];
    const uint32_t merged = Find(left, right)->token;
    // One pass over all places of the pair, from the left; none of them overlap afterwards.
    size_t out = 0;
    for (size_t i = 0; i < symbols_.size(); ++i, ++out) {
      if (i + 1 < symbols_.size() && symbols_[i] == left && symbols_[i + 1] == right) {
        symbols_[out] = merged;
        ++i;
      } else {
        symbols_[out] = symbols_[i];
      }
    }
    symbols_.resize(out);
    ranks_.resize(out);
    for (size_t i = 0; i < out; ++i) ranks_[i] = rank_at(i);
  }
}

void Gpt2Encoder::MergeLong() {
  // A linked list of symbols, and a heap of the places where two neighbours can merge. An entry is stale once one of
  // its two symbols has changed.
  struct Candidate {
    uint32_t rank;
    size_t at;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  const size_t n = symbols_.size();
  constexpr uint32_t kGone = kNoRank;
  std::vector<size_t> next(n), previous(n);
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
  const auto offer = [&](size_t at) {
    if (next[at] == n) return;
    if (const Gpt2Bpe::Merge* merge = Find(symbols_[at], symbols_[next[at]])) heap.push({merge->rank, at});
  };
  for (size_t i = 0; i < n; ++i) next[i] = i + 1, previous[i] = i - 1;
  for (size_t i = 0; i < n; ++i) offer(i);
  std::vector<size_t> places;
  while (!heap.empty()) {
    // All places of one pair before any pair that these merges make possible, even if its line came earlier.
    const uint32_t rank = heap.top().rank;
    const auto [left, right] = bpe_->merge_lines_[rank];
    const uint32_t merged = Find(left, right)->token;
    places.clear();
    while (!heap.empty() && heap.top().rank == rank) {
      places.push_back(heap.top().at);
      heap.pop();
    }
    for (const size_t at : places) {
      if (symbols_[at] != left || next[at] == n || symbols_[next[at]] != right) continue;
      const size_t gone = next[at];
      symbols_[at] = merged;
      symbols_[gone] = kGone;
      next[at] = next[gone];
      if (next[at] != n) previous[next[at]] = at;
      if (at != 0) offer(previous[at]);
      offer(at);
    }
  }
  size_t out = 0;
  for (size_t at = 0; at < n; at = next[at]) symbols_[out++] = symbols_[at];
  symbols_.resize(out);
}

std::vector<int32_t> Gpt2Bpe::Encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  // A view of this object that owns nothing: it does not outlive the call.
  Gpt2Encoder(std::shared_ptr<const Gpt2Bpe>(std::shared_ptr<const Gpt2Bpe>(), this)).Encode(text, &tokens);
  return tokens;
}

int32_t Gpt2Bpe::Find(std::string_view bytes) const {
  const auto found = tokens_.find(absl::string_view(bytes.data(), bytes.size()));
  return found == tokens_.end() ? -1 : static_cast<int32_t>(found->second);
}

std::string Gpt2Bpe::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) {
    if (token >= 0 && static_cast<uint32_t>(token) < vocabulary()) text += bytes_[token];
  }
  return text;
}

}  // namespace sluice
