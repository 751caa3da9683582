// What `cpu` and `fake_device` share: every operation is one of the kernels over the memory of a few buffers. They
// differ in when it runs (Launch), whose memory it is (Allocate), and how it is reached (Open).
#ifndef SLUICE_WORKER_BACKEND_HOST_BACKEND_H_
#define SLUICE_WORKER_BACKEND_HOST_BACKEND_H_

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "worker/backend/backend.h"
#include "worker/backend/task_pool.h"

namespace sluice {

// A buffer whose address kernels know.
class HostBuffer : public Buffer {
 public:
  HostBuffer(void* memory, int64_t bytes) : Buffer(bytes), memory_(memory) {}
  void* memory() const { return memory_; }

 private:
  void* const memory_;
};

// Anonymous pages, zeroed, 64-byte aligned and more; released with the last reference. RESOURCE_EXHAUSTED, or
// INVALID_ARGUMENT for a negative size.
absl::StatusOr<std::shared_ptr<void>> AllocatePages(int64_t bytes);

class HostBackend : public Backend {
 public:
  explicit HostBackend(int threads) : pool_(threads) {}

  std::string numeric_profile() const override;
  absl::StatusOr<std::shared_ptr<void>> AllocateHost(int64_t bytes) override;
  void Upload(Stream& stream, const void* host, Buffer* to, int64_t first_byte, int64_t bytes) override;
  void Download(Stream& stream, Buffer* from, int64_t first_byte, int64_t bytes, void* host) override;
  void Gemm(Stream& stream, int64_t m, int64_t n, int64_t k, float alpha, Matrix a, Matrix b, float beta,
            Matrix c) override;
  void BatchedGemm(Stream& stream, int64_t batch, int64_t m, int64_t n, int64_t k, float alpha, Matrix a,
                   int64_t a_step, Matrix b, int64_t b_step, float beta, Matrix c, int64_t c_step) override;
  void Fill(Stream& stream, Floats x, int64_t n, float value) override;
  void AddBias(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) override;
  void BiasGradient(Stream& stream, int64_t rows, int64_t cols, Floats dy, Floats dbias) override;
  void AddBiasResidual(Stream& stream, int64_t rows, int64_t cols, Floats residual, Floats x, Floats bias,
                       const DropoutMask& dropout, Floats y) override;
  void Dropout(Stream& stream, int64_t rows, int64_t cols, Floats x, const DropoutMask& dropout, Floats y) override;
  void BiasGelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias, Floats y) override;
  void BiasGeluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) override;
  void BiasRelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) override;
  void BiasReluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) override;
  void LayerNorm(Stream& stream, int64_t rows, int64_t cols, float epsilon, Floats x, Floats weight, Floats bias,
                 Floats y, Floats mean, Floats rstd) override;
  void LayerNormGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats weight, Floats mean, Floats rstd,
                         Floats dy, Floats dx, Floats dweight, Floats dbias) override;
  void Attention(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv, Floats y,
                 Floats log_sum) override;
  void AttentionGradient(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv, Floats y,
                         Floats log_sum, Floats dy, Floats dqkv) override;
  void Embedding(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens, TableRows rows, Floats wte,
                 Floats wpe, Floats x) override;
  void EmbeddingGradient(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens, TableRows rows,
                         Floats dx, Floats dwte, Floats dwpe) override;
  void CrossEntropy(Stream& stream, int64_t rows, int64_t classes, Floats logits, Ints targets, bool gradient,
                    View<double> sums) override;
  void CrossEntropyPart(Stream& stream, int64_t n, TableRows rows, Floats logits, Ints targets, Floats parts) override;
  void CrossEntropyJoin(Stream& stream, int64_t n, TableRows rows, int64_t ranks, Floats logits, Ints targets,
                        Floats parts, bool gradient, View<double> sums) override;
  void SigmoidCrossEntropy(Stream& stream, int64_t rows, Floats logits, Ints targets, bool gradient,
                           View<double> sums) override;

 protected:
  using Kernel = std::function<absl::Status(TaskPool& pool)>;
  // Runs the kernel in the stream's order; it touches these buffers and no others.
  virtual void Launch(Stream& stream, std::initializer_list<Buffer*> buffers, Kernel kernel) = 0;

  TaskPool& pool() { return pool_; }

 private:
  TaskPool pool_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_BACKEND_HOST_BACKEND_H_
