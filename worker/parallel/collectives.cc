#include "worker/parallel/collectives.h"

#include <algorithm>

#include "common/mesh.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// The compiler makes vector code of it; the order of additions within an element is the caller's.
void AddTo(absl::Span<float> sum, absl::Span<const float> x) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
}

}  // namespace

absl::Span<float> Collectives::Part(absl::Span<float> x, size_t row, uint32_t part) const {
  const Range rows = PartOf(x.size() / row, group_->size(), part);
  return x.subspan(rows.begin * row, rows.size() * row);
}

absl::Status Collectives::Exchange(uint32_t to, absl::Span<const float> out, uint32_t from, absl::Span<float> in,
                                   bool add) {
  for (size_t at = 0; at < out.size() || at < in.size(); at += piece_) {
    if (at < out.size()) RETURN_IF_ERROR(group_->Send(to, out.subspan(at, piece_)));
    if (at >= in.size()) continue;
    const absl::Span<float> piece = in.subspan(at, piece_);
    if (!add) {
      RETURN_IF_ERROR(group_->Receive(from, piece));
      continue;
    }
    scratch_.resize(piece.size());
    RETURN_IF_ERROR(group_->Receive(from, absl::MakeSpan(scratch_)));
    AddTo(piece, scratch_);
  }
  return absl::OkStatus();
}

absl::Status Collectives::SumOfAll(absl::Span<float> x) {
  sum_.clear();
  for (uint32_t from = 0; from < group_->size(); ++from) {
    absl::Span<const float> theirs = x;
    if (from != group_->rank()) {
      scratch_.resize(x.size());
      RETURN_IF_ERROR(group_->Receive(from, absl::MakeSpan(scratch_)));
      theirs = scratch_;
    }
    if (from == 0) {
      sum_.assign(theirs.begin(), theirs.end());
    } else {
      AddTo(absl::MakeSpan(sum_), theirs);
    }
  }
  std::copy(sum_.begin(), sum_.end(), x.begin());
  return absl::OkStatus();
}

absl::Status Collectives::RingReduce(absl::Span<float> x, size_t row) {
  const uint32_t n = group_->size(), rank = group_->rank();
  for (uint32_t step = 0; step + 1 < n; ++step) {
    RETURN_IF_ERROR(Exchange((rank + 1) % n, Part(x, row, (rank + n - step - 1) % n), (rank + n - 1) % n,
                             Part(x, row, (rank + 2 * n - step - 2) % n), /*add=*/true));
  }
  return absl::OkStatus();
}

absl::Status Collectives::RingGather(absl::Span<float> x, size_t row) {
  const uint32_t n = group_->size(), rank = group_->rank();
  for (uint32_t step = 0; step + 1 < n; ++step) {
    RETURN_IF_ERROR(Exchange((rank + 1) % n, Part(x, row, (rank + n - step) % n), (rank + n - 1) % n,
                             Part(x, row, (rank + n - step - 1) % n), /*add=*/false));
  }
  return absl::OkStatus();
}

absl::Status Collectives::AllReduce(absl::Span<float> x) {
  if (group_->size() == 1 || x.empty()) return absl::OkStatus();
  if (!Direct(x.size())) {
    RETURN_IF_ERROR(RingReduce(x, 1));
    return RingGather(x, 1);
  }
  for (uint32_t to = 0; to < group_->size(); ++to) {
    if (to != group_->rank()) RETURN_IF_ERROR(group_->Send(to, x));
  }
  return SumOfAll(x);
}

absl::Status Collectives::ReduceScatter(absl::Span<float> x, size_t row) {
  if (group_->size() == 1 || x.empty()) return absl::OkStatus();
  if (!Direct(x.size())) return RingReduce(x, row);
  for (uint32_t to = 0; to < group_->size(); ++to) {
    if (to != group_->rank()) RETURN_IF_ERROR(group_->Send(to, Part(x, row, to)));
  }
  return SumOfAll(Part(x, row, group_->rank()));
}

absl::Status Collectives::AllGather(absl::Span<float> x, size_t row) {
  if (group_->size() == 1 || x.empty()) return absl::OkStatus();
  if (!Direct(x.size())) return RingGather(x, row);
  for (uint32_t to = 0; to < group_->size(); ++to) {
    if (to != group_->rank()) RETURN_IF_ERROR(group_->Send(to, Part(x, row, group_->rank())));
  }
  for (uint32_t from = 0; from < group_->size(); ++from) {
    if (from != group_->rank()) RETURN_IF_ERROR(group_->Receive(from, Part(x, row, from)));
  }
  return absl::OkStatus();
}

absl::Status Collectives::Broadcast(uint32_t root, absl::Span<float> x) {
  const uint32_t n = group_->size(), rank = group_->rank();
  if (n == 1 || x.empty()) return absl::OkStatus();
  if (Direct(x.size())) {
    if (rank != root) return group_->Receive(root, x);
    for (uint32_t to = 0; to < n; ++to) {
      if (to != root) RETURN_IF_ERROR(group_->Send(to, x));
    }
    return absl::OkStatus();
  }
  // A chain from the root around to its left, each piece handed on as it comes.
  const uint32_t right = (rank + 1) % n;
  for (size_t at = 0; at < x.size(); at += piece_) {
    const absl::Span<float> piece = x.subspan(at, piece_);
    if (rank != root) RETURN_IF_ERROR(group_->Receive((rank + n - 1) % n, piece));
    if (right != root) RETURN_IF_ERROR(group_->Send(right, piece));
  }
  return absl::OkStatus();
}

// Dissemination: after step k a rank has heard, through others, of 2^k ranks to its left (Hensgen, Finkel and Manber
// 1988).
absl::Status Collectives::Barrier() {
  const uint32_t n = group_->size(), rank = group_->rank();
  for (uint32_t far = 1; far < n; far *= 2) {
    RETURN_IF_ERROR(group_->Send((rank + far) % n, {}));
    RETURN_IF_ERROR(group_->Receive((rank + n - far) % n, {}));
  }
  return absl::OkStatus();
}

}  // namespace sluice
