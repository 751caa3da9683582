// What the files with vector code share outside of Highway's per-target namespaces. Include before any header of
// Highway.
#ifndef SLUICE_WORKER_BACKEND_BLOCK_H_
#define SLUICE_WORKER_BACKEND_BLOCK_H_

// Targets that would only add code: AVX3_DL brings nothing for float32 (and the fewer targets, the fewer profiles).
#define HWY_DISABLED_TARGETS (HWY_AVX3_DL)

#include <algorithm>
#include <cstdint>

#include "worker/backend/task_pool.h"

namespace sluice::kernels {

// The part of a [rows, cols] operation that one thread does.
struct Block {
  int64_t row_begin, row_end, col_begin, col_end, cols;
};

// Parts of at least this many elements are worth waking a thread for.
inline constexpr int64_t kPartElements = 16384;

// body(Block) with the rows cut: for operations without sums over rows.
template <class Body>
void ByRows(TaskPool& pool, int64_t rows, int64_t cols, Body body) {
  if (cols == 0) return;
  pool.For(rows, std::max<int64_t>(1, kPartElements / cols), [&](int64_t begin, int64_t end) {
    body(Block{begin, end, 0, cols, cols});
  });
}

// body(Block) with the columns cut: every column is summed in the order of its rows.
template <class Body>
void ByColumns(TaskPool& pool, int64_t rows, int64_t cols, Body body) {
  if (rows == 0) return;
  pool.For(cols, std::max<int64_t>(64, kPartElements / rows / 64 * 64), [&](int64_t begin, int64_t end) {
    body(Block{0, rows, begin, end, cols});
  });
}

}  // namespace sluice::kernels

#endif  // SLUICE_WORKER_BACKEND_BLOCK_H_
