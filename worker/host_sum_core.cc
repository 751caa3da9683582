#include "worker/host_sum_core.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

constexpr size_t kMaxWaiting = 1 << 20;  // contributions of a member; it says each chunk of a round once

}  // namespace

void HostSumCore::End() {
  layout_ = nullptr;
  chunks_.clear();
}

void HostSumCore::Begin(std::shared_ptr<const Layout> layout, uint32_t rank) {
  layout_ = std::move(layout);
  generation_ = layout_->generation();
  span_ = layout_->host_sum(rank);
  chunks_.clear();
  if (span_.count < 2 || span_.first != rank) return;
  const ChunkTable& table = layout_->table();
  chunks_.resize(table.chunks());
  for (uint64_t i = 0; i < chunks_.size(); ++i) {
    if (SummedOnHost(layout_->plan(), span_, table.shard(i))) chunks_[i] = std::make_unique<Chunk>();
  }
}

std::vector<std::pair<v1::ChunkHeader, MemberValueRef>> HostSumCore::TakeWaiting() {
  std::vector<std::pair<v1::ChunkHeader, MemberValueRef>> due;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    auto& of_member = it->second;
    const uint64_t generation = of_member.front().first.generation();  // a stream is of one generation
    if (generation > generation_) {
      ++it;
      continue;
    }
    if (generation == generation_) {
      due.insert(due.end(), std::make_move_iterator(of_member.begin()), std::make_move_iterator(of_member.end()));
    }
    it = waiting_.erase(it);
  }
  return due;
}

HostSumCore::Chunk* HostSumCore::Open(uint64_t index, uint64_t round) {
  Chunk& chunk = *chunks_[index];
  if (chunk.rounds > round + 1) return nullptr;
  if (chunk.rounds < round + 1) {
    chunk.rounds = round + 1;
    chunk.have.assign(span_.count, false);
    chunk.counts.assign(span_.count, 0);
    chunk.values.assign(span_.count, nullptr);
    chunk.missing = span_.count;
    chunk.made = false;
  }
  return &chunk;
}

std::optional<HostSum> HostSumCore::AddOwn(uint64_t index, uint64_t round, double count) {
  Chunk* const chunk = Open(index, round);
  return chunk == nullptr ? std::nullopt : Note(index, chunk, 0, count, nullptr);
}

absl::StatusOr<std::optional<HostSum>> HostSumCore::Add(const v1::ChunkHeader& header, MemberValueRef value,
                                                        uint64_t open) {
  if (header.generation() < generation_) return std::nullopt;
  if (layout_ == nullptr || header.generation() > generation_) {
    if (layout_ == nullptr && header.generation() == generation_) return std::nullopt;  // it has ended
    auto& of_member = waiting_[header.contributor()];
    if (of_member.size() >= kMaxWaiting) {
      return absl::ResourceExhaustedError(absl::StrCat("more than ", kMaxWaiting, " contributions of rank ",
                                                       header.contributor(), " before the plan of generation ",
                                                       header.generation()));
    }
    of_member.emplace_back(header, std::move(value));
    return std::nullopt;
  }
  const uint64_t index = header.chunk();
  const uint32_t contributor = header.contributor();
  const std::string what = absl::StrCat("contribution of rank ", contributor, " to chunk ", index);
  if (header.space() != 0 || index >= layout_->table().chunks()) {
    return absl::OutOfRangeError(absl::StrCat(what, " of space ", header.space(), "; the plan has ",
                                              layout_->table().chunks(), " chunks in space 0"));
  }
  if (!Gathers(index) || contributor <= span_.first || contributor - span_.first >= span_.count) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": by the plan it is not added up by rank ", span_.first));
  }
  const uint64_t elements = layout_->table().range(index).size();
  if ((header.elements() != 0 && header.elements() != elements) || (header.elements() != 0) != (value != nullptr) ||
      header.encoding() != v1::F32 || header.contributors() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", header.elements(), " elements of encoding ",
                                                   static_cast<int>(header.encoding()), "; expected its own ", elements,
                                                   " float32"));
  }
  if (!std::isfinite(header.count()) || header.count() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": count ", header.count(), "; expected 0 or more"));
  }
  if (header.round() > open + 1) {
    return absl::InvalidArgumentError(absl::StrCat(what, " in round ", header.round(), "; the open one is ", open));
  }
  Chunk* const chunk = Open(index, header.round());
  if (chunk == nullptr || chunk->have[contributor - span_.first]) return std::nullopt;
  return Note(index, chunk, contributor - span_.first, header.count(), std::move(value));
}

std::optional<HostSum> HostSumCore::Note(uint64_t index, Chunk* chunk, uint32_t at, double count,
                                         MemberValueRef value) {
  chunk->have[at] = true;
  chunk->counts[at] = count;
  chunk->values[at] = std::move(value);
  if (--chunk->missing > 0) return std::nullopt;
  HostSum sum;
  sum.generation = generation_;
  sum.chunk = index;
  sum.round = chunk->rounds - 1;
  sum.span = span_;
  sum.own = chunk->counts[0] > 0;
  sum.values = std::move(chunk->values);
  sum.empty = !sum.own && std::all_of(sum.values.begin(), sum.values.end(),
                                      [](const MemberValueRef& member) { return member == nullptr; });
  v1::ChunkHeader& header = chunk->header;
  header.Clear();
  header.set_chunk(index);
  header.set_generation(generation_);
  header.set_round(sum.round);
  header.set_contributor(span_.first);
  header.set_contributors(span_.count);
  header.set_elements(sum.empty ? 0 : layout_->table().range(index).size());
  header.set_count(std::accumulate(chunk->counts.begin(), chunk->counts.end(), 0.0));
  chunk->made = sum.empty;
  return sum;
}

bool HostSumCore::OnMade(uint64_t generation, uint64_t index, uint64_t round, const std::vector<uint32_t>& nonfinite) {
  if (layout_ == nullptr || generation != generation_ || chunks_[index]->rounds != round + 1) return false;
  Chunk& chunk = *chunks_[index];
  chunk.made = true;
  chunk.header.mutable_nonfinite_contributors()->Add(nonfinite.begin(), nonfinite.end());
  return true;
}

const v1::ChunkHeader* HostSumCore::Made(uint64_t index, uint64_t round) const {
  const Chunk& chunk = *chunks_[index];
  return chunk.made && chunk.rounds == round + 1 ? &chunk.header : nullptr;
}

std::vector<uint32_t> HostSumCore::Missing(uint64_t index, uint64_t round) const {
  std::vector<uint32_t> missing;
  const Chunk& chunk = *chunks_[index];
  for (uint32_t i = 0; i < span_.count; ++i) {
    if (chunk.rounds != round + 1 || !chunk.have[i]) missing.push_back(span_.first + i);
  }
  return missing;
}

}  // namespace sluice
