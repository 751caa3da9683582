// Token and position embedding. Sums in the order of the rows; compiled for the baseline (memory-bound).
#include <cstring>

#include "worker/backend/block.h"
#include "worker/backend/kernels.h"

namespace sluice::kernels {

void Embedding(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens, const float* wte,
               const float* wpe, float* x) {
  ByRows(pool, batch * length, width, [&](Block block) {
    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
      const float* token = wte + tokens[i] * width;
      const float* position = wpe + i % length * width;
      float* out = x + i * width;
      for (int64_t j = 0; j < width; ++j) out[j] = token[j] + position[j];
    }
  });
}

void EmbeddingGradient(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens,
                       const float* dx, float* dwte, float* dwpe) {
  ByColumns(pool, batch * length, width, [&](Block block) {
    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
      float* token = dwte + tokens[i] * width;
      float* position = dwpe + i % length * width;
      const float* in = dx + i * width;
      for (int64_t j = block.col_begin; j < block.col_end; ++j) token[j] += in[j];
      for (int64_t j = block.col_begin; j < block.col_end; ++j) position[j] += in[j];
    }
  });
}

}  // namespace sluice::kernels
