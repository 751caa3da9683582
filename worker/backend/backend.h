// What a model computes with: memory, streams and events of one device, matrix products, and the fused operations of
// the models with their gradients. The train loop and the models never look into a Buffer.
//
// All operations are enqueued on a Stream and may run later; they return nothing. A failure (out of memory, a device
// error) stays on its stream: later operations there are skipped, and Synchronize and Event::Wait return it. Views must
// stay valid until the stream has passed the operation.
//
// Bits: results depend on the arguments alone: not on alignment, on what ran before, on timing or on neighbours in the
// process. Two backends with one numeric_profile() give equal bits. NaN and infinity propagate as IEEE arithmetic has
// it; `beta` = 0 in a product means that the old value is not read.
//
// Shapes are row-major, outermost first; sizes of 0 are legal everywhere. "+=" marks an output that accumulates.
#ifndef SLUICE_WORKER_BACKEND_BACKEND_H_
#define SLUICE_WORKER_BACKEND_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// Device memory, freed by the destructor (only after the streams that use it have been synchronized).
class Buffer {
 public:
  virtual ~Buffer() = default;
  int64_t bytes() const { return bytes_; }

 protected:
  explicit Buffer(int64_t bytes) : bytes_(bytes) {}

 private:
  const int64_t bytes_;
};

// Elements of a buffer from index `first` on; the operation's sizes say how many. Does not own.
template <typename T>
struct View {
  Buffer* buffer = nullptr;
  int64_t first = 0;
  View operator+(int64_t elements) const { return {buffer, first + elements}; }
};
using Floats = View<float>;
using Ints = View<int32_t>;

// A matrix operand, row-major with `stride` elements from one row to the next. `transposed`: the operation uses the
// transpose of what lies there.
struct Matrix {
  Floats at;
  int64_t stride = 0;
  bool transposed = false;
};

// Operations of one stream run in order, those of different streams in any order that Wait does not exclude.
class Stream {
 public:
  virtual ~Stream() = default;
};

class Event {
 public:
  virtual ~Event() = default;
  // Whether the stream has passed the point where the event was recorded. Any thread.
  virtual bool done() const = 0;
  // Blocks the calling thread until then; the stream's error at that point. Any thread.
  virtual absl::Status Wait() const = 0;
};

// Rows of a table (a token embedding, the classes of a softmax) that one rank holds.
struct TableRows {
  int64_t first = 0, count = 0;
};

struct AttentionShape {
  int64_t batch = 0, length = 0, heads = 0, head_width = 0;  // B, T, H, D
};

// Inverted dropout (Srivastava and others, 2014): an element is left out, which is times 0, with `probability`, and the
// others are multiplied by 1 / (1 - probability). Which ones follows from the key and from where the element lies in
// the whole job: so the mask is the same on every rank, in every division into ranks and microbatches, and in the
// backward pass, which makes it again. Of the sample at position s of the job's data order, time step t, element e of
// the row (a channel; of attention's weights a key) and head h (else 0):
//   word e % 4 of Philox4x32 with counter {e / 4, t, s mod 2^32, s / 2^32 + 2^16 h}; left out where its upper 24 bits
//   are below probability * 2^24, rounded.
struct DropoutMask {
  double probability = 0;     // [0, 1). 0: nothing is left out, and nothing of the following is used
  uint64_t key = 0;           // of round and site
  uint64_t first_sample = 0;  // position of the batch's first sample, the others follow; below 2^48
  int64_t first_head = 0;     // attention: head 0 of the operation among all heads; heads below 2^16
  // Others, on rows of a batch [B, T]: the operation's first row among them, and T.
  int64_t first_row = 0, length = 1;
};

// Thread-safe; a stream is used by one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  // Everything that decides bits: "cpu/onednn-2.6.3/avx2/threads-1".
  virtual std::string numeric_profile() const = 0;

  // --- memory ---
  // Zeroed. RESOURCE_EXHAUSTED with the size where there is not enough.
  virtual absl::StatusOr<std::shared_ptr<Buffer>> Allocate(int64_t bytes) = 0;
  // Zeroed host memory, 64-byte aligned, pinned where that speeds up copies.
  virtual absl::StatusOr<std::shared_ptr<void>> AllocateHost(int64_t bytes) = 0;
  // Where kernels compute in host memory: a buffer over memory of AllocateHost (kept alive by the buffer), so that no
  // copy is needed. Else nullptr.
  virtual std::shared_ptr<Buffer> WrapHost(std::shared_ptr<void> host, int64_t bytes) = 0;
  // The same of any elements while the stream that computes them is empty; else nullptr.
  virtual float* InHost(Floats at) { return nullptr; }
  // Host memory must stay valid and (Upload) unchanged until the stream has passed the copy.
  virtual void Upload(Stream& stream, const void* host, Buffer* to, int64_t first_byte, int64_t bytes) = 0;
  virtual void Download(Stream& stream, Buffer* from, int64_t first_byte, int64_t bytes, void* host) = 0;

  // --- order ---
  virtual std::unique_ptr<Stream> NewStream() = 0;
  virtual std::shared_ptr<Event> Record(Stream& stream) = 0;
  // What is enqueued on `stream` from now on runs after the event.
  virtual void Wait(Stream& stream, std::shared_ptr<Event> event) = 0;
  // Blocks until the stream is empty; returns its error and clears it.
  virtual absl::Status Synchronize(Stream& stream) = 0;

  // --- products ---
  // c [m, n] = alpha * a [m, k] b [k, n] + beta * c. `c` is not transposed.
  virtual void Gemm(Stream& stream, int64_t m, int64_t n, int64_t k, float alpha, Matrix a, Matrix b, float beta,
                    Matrix c) = 0;
  // `batch` products; operand i begins i times its step (in elements) behind operand 0.
  virtual void BatchedGemm(Stream& stream, int64_t batch, int64_t m, int64_t n, int64_t k, float alpha, Matrix a,
                           int64_t a_step, Matrix b, int64_t b_step, float beta, Matrix c, int64_t c_step) = 0;

  // --- element-wise; x, y, dx, dy [rows, cols], bias [cols] ---
  virtual void Fill(Stream& stream, Floats x, int64_t n, float value) = 0;
  // x += bias.
  virtual void AddBias(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) = 0;
  // dbias += column sums of dy.
  virtual void BiasGradient(Stream& stream, int64_t rows, int64_t cols, Floats dy, Floats dbias) = 0;
  // y = residual + dropout(x + bias). y may be x or residual.
  virtual void AddBiasResidual(Stream& stream, int64_t rows, int64_t cols, Floats residual, Floats x, Floats bias,
                               const DropoutMask& dropout, Floats y) = 0;
  // y = dropout(x), and so dx = dropout(dy): a copy where the probability is 0. y may be x.
  virtual void Dropout(Stream& stream, int64_t rows, int64_t cols, Floats x, const DropoutMask& dropout, Floats y) = 0;
  // x += bias; y = gelu_new(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
  virtual void BiasGelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias, Floats y) = 0;
  // dy *= gelu_new'(x), x as BiasGelu left it; dbias += column sums of the new dy.
  virtual void BiasGeluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) = 0;
  // x = max(x + bias, 0); NaN stays NaN.
  virtual void BiasRelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) = 0;
  // dy = 0 where x <= 0, x as BiasRelu left it; dbias += column sums of the new dy.
  virtual void BiasReluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) = 0;

  // --- layer norm over the last dimension (Ba, Kiros, Hinton 2016) ---
  // y = (x - mean) rstd weight + bias; mean, rstd [rows], rstd = 1 / sqrt(variance + epsilon), biased variance.
  virtual void LayerNorm(Stream& stream, int64_t rows, int64_t cols, float epsilon, Floats x, Floats weight,
                         Floats bias, Floats y, Floats mean, Floats rstd) = 0;
  // dx +=, dweight +=, dbias +=.
  virtual void LayerNormGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats weight, Floats mean,
                                 Floats rstd, Floats dy, Floats dx, Floats dweight, Floats dbias) = 0;

  // --- causal self-attention, dropout(softmax(q k^T / sqrt(D))) v over positions <= own ---
  // qkv [B, T, 3, H, D]; y [B, T, H, D]; log_sum [B, H, T]: logarithm of the softmax denominators, for the gradient.
  virtual void Attention(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv, Floats y,
                         Floats log_sum) = 0;
  // dqkv [B, T, 3, H, D] is overwritten.
  virtual void AttentionGradient(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv, Floats y,
                                 Floats log_sum, Floats dy, Floats dqkv) = 0;

  // --- embedding ---
  // x [B, T, C] = wte[tokens[b, t] - rows.first] + wpe[t], where wte holds the table's rows [first, first + count) and
  // other tokens get zeros; without a buffer in wpe nothing is added.
  virtual void Embedding(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens, TableRows rows,
                         Floats wte, Floats wpe, Floats x) = 0;
  // dwte +=, dwpe += (without a buffer: not), rows in order (b, t): equal tokens add up in that order.
  virtual void EmbeddingGradient(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens,
                                 TableRows rows, Floats dx, Floats dwte, Floats dwpe) = 0;

  // --- cross-entropy ---
  // sums[0..3) += loss in nats, targets that count, targets that are the first largest logit. Targets in [-1, classes),
  // -1: no prediction in that row. `gradient`: logits [rows, classes] are replaced by the gradient of the summed loss
  // (rows without a target by zeros).
  virtual void CrossEntropy(Stream& stream, int64_t rows, int64_t classes, Floats logits, Ints targets, bool gradient,
                            View<double> sums) = 0;
  // The same where ranks hold the logits of some classes each, rows.count columns of `logits`, in two steps.
  // parts [rows, 4]: the largest logit; the sum of exp(logit - largest); the target's logit (0 where it is another
  // rank's); the index of the first largest logit among all classes, exact below 2^24.
  virtual void CrossEntropyPart(Stream& stream, int64_t n, TableRows rows, Floats logits, Ints targets,
                                Floats parts) = 0;
  // From the parts of all ranks in the order of their classes, [ranks, n, 4]: the same sums on every rank, and the
  // gradient of the own logits.
  virtual void CrossEntropyJoin(Stream& stream, int64_t n, TableRows rows, int64_t ranks, Floats logits, Ints targets,
                                Floats parts, bool gradient, View<double> sums) = 0;
  // CrossEntropy for two classes and one logit a row, that of class 1: p = 1 / (1 + exp(-logit)). Targets in [-1, 2). A
  // logit above 0 answers 1, others 0. `gradient`: logits [rows] are replaced by p - target.
  virtual void SigmoidCrossEntropy(Stream& stream, int64_t rows, Floats logits, Ints targets, bool gradient,
                                   View<double> sums) = 0;
};

struct BackendOptions {
  std::string kind = "cpu";  // "cpu"; "fake_device": the cpu's kernels behind a device that has memory of its own
  int threads = 1;           // 1..1024, cores that kernels use, the caller's included; they sleep when idle
  // fake_device: operations start late by pseudo-random times from this seed. 0: no delays.
  uint64_t delay_seed = 0;
};

// INVALID_ARGUMENT for another kind or number of threads.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options);

}  // namespace sluice

#endif  // SLUICE_WORKER_BACKEND_BACKEND_H_
