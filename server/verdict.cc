#include "server/verdict.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/optimizer.h"
#include "common/status_macros.h"

namespace sluice {

absl::Status RoundTally::AddNorm(const v1::NormReport& report) {
  if (report.shard() >= layout_->plan().shards()) {
    return absl::InvalidArgumentError(
        absl::StrCat("norm report of shard ", report.shard(), " of ", layout_->plan().shards()));
  }
  if (layout_->table().chunks_of(report.shard()).empty()) {
    return absl::InvalidArgumentError(absl::StrCat("norm report of shard ", report.shard(), ", which has no chunks"));
  }
  const uint64_t parameters = layout_->space().size(), blocks = layout_->norm_blocks().chunks();
  if (report.block_size() != report.sum_size())
    return absl::InvalidArgumentError("norm report: blocks and sums differ");
  for (uint64_t b : report.block()) {
    if (b >= blocks) return absl::InvalidArgumentError(absl::StrCat("norm report: block ", b, " of ", blocks));
  }
  for (const v1::NormFragment& f : report.fragments()) {
    if (f.offset() >= parameters || static_cast<uint64_t>(f.values_size()) > parameters - f.offset()) {
      return absl::InvalidArgumentError(absl::StrCat("norm report: fragment at ", f.offset(), " leaves the space"));
    }
  }
  norms_.emplace(report.shard(), report);
  return absl::OkStatus();
}

absl::Status RoundTally::AddReport(const v1::RoundReport& report) {
  if (report.contributor() >= layout_->ranks()) {
    return absl::InvalidArgumentError(
        absl::StrCat("report of contributor ", report.contributor(), " of ", layout_->ranks()));
  }
  reports_.emplace(report.contributor(), report);
  return absl::OkStatus();
}

absl::StatusOr<v1::Verdict> RoundTally::Decide() const {
  v1::Verdict verdict;
  verdict.set_round(round_);
  bool finite = true;
  double count = -1;
  for (const auto& [shard, norm] : norms_) {
    finite &= norm.finite();
    if (count >= 0 && norm.count() != count) {
      return absl::FailedPreconditionError(
          absl::StrCat("round ", round_, ": shard ", shard, " counts ", norm.count(), " targets, others ", count));
    }
    count = norm.count();
  }
  verdict.set_count(count);
  if (!finite || count == 0) {
    verdict.set_skip(true);
    return verdict;
  }
  const ChunkTable& table = layout_->norm_blocks();
  const uint64_t blocks = table.chunks();
  std::vector<double> sums(blocks, -1);
  std::map<uint64_t, std::pair<std::vector<float>, uint64_t>> cut;  // block -> elements, how many are there
  for (const auto& [shard, norm] : norms_) {
    for (int i = 0; i < norm.block_size(); ++i) sums[norm.block(i)] = norm.sum(i);
    for (const v1::NormFragment& f : norm.fragments()) {
      for (uint64_t at = 0; at < static_cast<uint64_t>(f.values_size());) {  // a fragment may span blocks
        const uint64_t element = f.offset() + at, b = table.chunk_at(element);
        const Range block = table.range(b);
        const uint64_t n = std::min<uint64_t>(f.values_size() - at, block.end - element);
        auto& [values, have] = cut[b];
        values.resize(block.size());
        std::copy_n(f.values().begin() + at, n, values.begin() + (element - block.begin));
        have += n;
        at += n;
      }
    }
  }
  for (const auto& [b, piece] : cut) {
    if (piece.second == piece.first.size()) sums[b] = SumOfSquares(piece.first.data(), piece.first.size());
  }
  double total = 0;
  for (uint64_t b = 0; b < blocks; ++b) {
    if (sums[b] < 0)
      return absl::FailedPreconditionError(absl::StrCat("round ", round_, ": norm block ", b, " is missing"));
    total += sums[b];
  }
  const double norm = std::sqrt(total) / count;
  const double clip = layout_->plan().spec().optimizer().clip_norm();
  verdict.set_gradient_norm(norm);
  verdict.set_gradient_scale(static_cast<float>((clip > 0 && norm > clip ? clip / norm : 1.0) / count));
  if (!std::isfinite(norm)) verdict.set_skip(true);
  return verdict;
}

double RoundTally::loss_sum() const {
  double sum = 0;
  for (const auto& [contributor, report] : reports_) sum += report.loss_sum();
  return sum;
}

double RoundTally::count() const {
  double sum = 0;
  for (const auto& [contributor, report] : reports_) sum += report.count();
  return sum;
}

double RoundTally::correct() const {
  double sum = 0;
  for (const auto& [contributor, report] : reports_) sum += report.correct();
  return sum;
}

std::vector<uint32_t> RoundTally::nonfinite_contributors() const {
  std::set<uint32_t> all;
  for (const auto& [shard, norm] : norms_) {
    all.insert(norm.nonfinite_contributors().begin(), norm.nonfinite_contributors().end());
  }
  return {all.begin(), all.end()};
}

std::string RoundTally::Missing() const {
  std::string text = absl::StrCat("round ", round_, ": waits for");
  for (uint32_t s = 0; s < layout_->plan().shards(); ++s) {
    if (!norms_.contains(s)) absl::StrAppend(&text, " shard ", s);
  }
  for (uint32_t c = 0; c < layout_->ranks(); ++c) {
    if (!reports_.contains(c)) absl::StrAppend(&text, " report of contributor ", c);
  }
  return text;
}

}  // namespace sluice
