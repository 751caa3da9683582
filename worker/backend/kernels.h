// The kernels of the cpu (and of the fake device), over plain memory. Operations, shapes and formulas as in backend.h.
//
// Loops are cut over the pool's threads by rows, columns or heads, and each element's arithmetic is the same wherever
// the cut falls. Vector code is compiled for several instruction sets and chosen at run time (Highway).
#ifndef SLUICE_WORKER_BACKEND_KERNELS_H_
#define SLUICE_WORKER_BACKEND_KERNELS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/task_pool.h"

namespace sluice::kernels {

// Name of the instruction set chosen for the vector code: "AVX2".
std::string VectorTarget();

struct Operand {
  const float* at;
  int64_t stride;
  bool transposed;
};

// c [m, n], rows `c_stride` apart. gemm.cc, over oneDNN.
absl::Status Gemm(TaskPool& pool, int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta,
                  float* c, int64_t c_stride);
absl::Status BatchedGemm(TaskPool& pool, int64_t batch, int64_t m, int64_t n, int64_t k, float alpha, Operand a,
                         int64_t a_step, Operand b, int64_t b_step, float beta, float* c, int64_t c_stride,
                         int64_t c_step);
// "onednn-2.6.3/avx2".
std::string GemmProfile();

// elementwise.cc
void AddBias(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias);
void BiasGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* dy, float* dbias);
void AddBiasResidual(TaskPool& pool, int64_t rows, int64_t cols, const float* residual, const float* x,
                     const float* bias, float* y);
void BiasGelu(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias, float* y);
void BiasGeluGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, float* dy, float* dbias);
void BiasRelu(TaskPool& pool, int64_t rows, int64_t cols, float* x, const float* bias);
void BiasReluGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, float* dy, float* dbias);

// norm.cc
void LayerNorm(TaskPool& pool, int64_t rows, int64_t cols, float epsilon, const float* x, const float* weight,
               const float* bias, float* y, float* mean, float* rstd);
void LayerNormGradient(TaskPool& pool, int64_t rows, int64_t cols, const float* x, const float* weight,
                       const float* mean, const float* rstd, const float* dy, float* dx, float* dweight, float* dbias);

// cross_entropy.cc
void CrossEntropy(TaskPool& pool, int64_t rows, int64_t classes, float* logits, const int32_t* targets, bool gradient,
                  double* sums);
void CrossEntropyPart(TaskPool& pool, int64_t n, TableRows rows, const float* logits, const int32_t* targets,
                      float* parts);
void CrossEntropyJoin(TaskPool& pool, int64_t n, TableRows rows, int64_t ranks, float* logits, const int32_t* targets,
                      const float* parts, bool gradient, double* sums);
void SigmoidCrossEntropy(int64_t rows, float* logits, const int32_t* targets, bool gradient, double* sums);

// dropout.cc
void Dropout(TaskPool& pool, int64_t rows, int64_t cols, const float* x, const DropoutMask& mask, float* y);
void AddBiasDropoutResidual(TaskPool& pool, int64_t rows, int64_t cols, const float* residual, const float* x,
                            const float* bias, const DropoutMask& mask, float* y);

// embedding.cc
void Embedding(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens, TableRows rows,
               const float* wte, const float* wpe, float* x);
void EmbeddingGradient(TaskPool& pool, int64_t batch, int64_t length, int64_t width, const int32_t* tokens,
                       TableRows rows, const float* dx, float* dwte, float* dwpe);

// attention.cc
void Attention(TaskPool& pool, AttentionShape shape, const DropoutMask& mask, const float* qkv, float* y,
               float* log_sum);
void AttentionGradient(TaskPool& pool, AttentionShape shape, const DropoutMask& mask, const float* qkv, const float* y,
                       const float* log_sum, const float* dy, float* dqkv);

}  // namespace sluice::kernels

#endif  // SLUICE_WORKER_BACKEND_KERNELS_H_
