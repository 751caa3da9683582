// Token and position embedding. Sums in the order of the rows; compiled for the baseline (memory-bound).
#include <algorithm>
#include <cstring>

#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

namespace sluice::kernels {

void Embedding(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens, TableRows rows,
               const float* wte, const float* wpe, float* x) {
  ByRows(pool, batch * length, width, [&](Block block) {
    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
      const int64_t row = tokens[i] - rows.first;
      float* out = x + i * width;
      if (row < 0 || row >= rows.count) {
        std::fill(out, out + width, 0.0f);
      } else {
        std::copy_n(wte + row * width, width, out);
      }
      if (wpe == nullptr) continue;
      const float* position = wpe + i % length * width;
      for (int64_t j = 0; j < width; ++j) out[j] += position[j];
    }
  });
}

void EmbeddingGradient(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens,
                       TableRows rows, const float* dx, float* dwte, float* dwpe) {
  ByColumns(pool, batch * length, width, [&](Block block) {
    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
      const float* in = dx + i * width;
      if (const int64_t row = tokens[i] - rows.first; row >= 0 && row < rows.count) {
        float* token = dwte + row * width;
        for (int64_t j = block.col_begin; j < block.col_end; ++j) token[j] += in[j];
      }
      if (dwpe == nullptr) continue;
      float* position = dwpe + i % length * width;
      for (int64_t j = block.col_begin; j < block.col_end; ++j) position[j] += in[j];
    }
  });
}

}  // namespace sluice::kernels
