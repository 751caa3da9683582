#include "worker/backend/host_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/backend/kernels.h"

namespace sluice {
namespace {

template <typename T>
T* At(View<T> view) {
  return static_cast<T*>(static_cast<HostBuffer*>(view.buffer)->memory()) + view.first;
}

kernels::Operand At(const Matrix& matrix) { return {At(matrix.at), matrix.stride, matrix.transposed}; }

}  // namespace

absl::StatusOr<std::shared_ptr<void>> AllocatePages(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  const size_t mapped = std::max<size_t>(1, static_cast<size_t>(bytes));
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes: ", strerror(errno)));
  }
  return std::shared_ptr<void>(memory, [mapped](void* p) { munmap(p, mapped); });
}

std::string HostBackend::numeric_profile() const {
  std::string profile = absl::StrCat("cpu/", kernels::GemmProfile());
  // The usual pairs go by oneDNN's name alone.
  const std::string vectors = kernels::VectorTarget();
  const bool usual = (vectors == "AVX2" && absl::EndsWith(profile, "/avx2")) ||
                     (vectors == "AVX3" && absl::StrContains(profile, "/avx512_core")) ||
                     (vectors == "SSE4" && absl::EndsWith(profile, "/sse41"));
  if (!usual) absl::StrAppend(&profile, "+", absl::AsciiStrToLower(vectors));
  return absl::StrCat(profile, "/threads-", pool_.threads());
}

absl::StatusOr<std::shared_ptr<void>> HostBackend::AllocateHost(int64_t bytes) { return AllocatePages(bytes); }

void HostBackend::Upload(Stream& stream, const void* host, Buffer* to, int64_t first_byte, int64_t bytes) {
  Launch(stream, {to}, [=](TaskPool&) {
    std::copy_n(static_cast<const char*>(host), bytes, At(View<char>{to, first_byte}));
    return absl::OkStatus();
  });
}

void HostBackend::Download(Stream& stream, Buffer* from, int64_t first_byte, int64_t bytes, void* host) {
  Launch(stream, {from}, [=](TaskPool&) {
    std::copy_n(At(View<char>{from, first_byte}), bytes, static_cast<char*>(host));
    return absl::OkStatus();
  });
}

void HostBackend::Gemm(Stream& stream, int64_t m, int64_t n, int64_t k, float alpha, Matrix a, Matrix b, float beta,
                       Matrix c) {
  Launch(stream, {a.at.buffer, b.at.buffer, c.at.buffer},
         [=](TaskPool& pool) { return kernels::Gemm(pool, m, n, k, alpha, At(a), At(b), beta, At(c.at), c.stride); });
}

void HostBackend::BatchedGemm(Stream& stream, int64_t batch, int64_t m, int64_t n, int64_t k, float alpha, Matrix a,
                              int64_t a_step, Matrix b, int64_t b_step, float beta, Matrix c, int64_t c_step) {
  Launch(stream, {a.at.buffer, b.at.buffer, c.at.buffer}, [=](TaskPool& pool) {
    return kernels::BatchedGemm(pool, batch, m, n, k, alpha, At(a), a_step, At(b), b_step, beta, At(c.at), c.stride,
                                c_step);
  });
}

void HostBackend::Fill(Stream& stream, Floats x, int64_t n, float value) {
  Launch(stream, {x.buffer}, [=](TaskPool&) {
    std::fill_n(At(x), n, value);
    return absl::OkStatus();
  });
}

void HostBackend::AddBias(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) {
  Launch(stream, {x.buffer, bias.buffer}, [=](TaskPool& pool) {
    kernels::AddBias(pool, rows, cols, At(x), At(bias));
    return absl::OkStatus();
  });
}

void HostBackend::BiasGradient(Stream& stream, int64_t rows, int64_t cols, Floats dy, Floats dbias) {
  Launch(stream, {dy.buffer, dbias.buffer}, [=](TaskPool& pool) {
    kernels::BiasGradient(pool, rows, cols, At(dy), At(dbias));
    return absl::OkStatus();
  });
}

void HostBackend::AddBiasResidual(Stream& stream, int64_t rows, int64_t cols, Floats residual, Floats x, Floats bias,
                                  const DropoutMask& dropout, Floats y) {
  Launch(stream, {residual.buffer, x.buffer, bias.buffer, y.buffer}, [=](TaskPool& pool) {
    if (dropout.probability == 0) {
      kernels::AddBiasResidual(pool, rows, cols, At(residual), At(x), At(bias), At(y));
    } else {
      kernels::AddBiasDropoutResidual(pool, rows, cols, At(residual), At(x), At(bias), dropout, At(y));
    }
    return absl::OkStatus();
  });
}

void HostBackend::Dropout(Stream& stream, int64_t rows, int64_t cols, Floats x, const DropoutMask& dropout, Floats y) {
  Launch(stream, {x.buffer, y.buffer}, [=](TaskPool& pool) {
    kernels::Dropout(pool, rows, cols, At(x), dropout, At(y));
    return absl::OkStatus();
  });
}

void HostBackend::BiasGelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias, Floats y) {
  Launch(stream, {x.buffer, bias.buffer, y.buffer}, [=](TaskPool& pool) {
    kernels::BiasGelu(pool, rows, cols, At(x), At(bias), At(y));
    return absl::OkStatus();
  });
}

void HostBackend::BiasGeluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) {
  Launch(stream, {x.buffer, dy.buffer, dbias.buffer}, [=](TaskPool& pool) {
    kernels::BiasGeluGradient(pool, rows, cols, At(x), At(dy), At(dbias));
    return absl::OkStatus();
  });
}

void HostBackend::BiasRelu(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats bias) {
  Launch(stream, {x.buffer, bias.buffer}, [=](TaskPool& pool) {
    kernels::BiasRelu(pool, rows, cols, At(x), At(bias));
    return absl::OkStatus();
  });
}

void HostBackend::BiasReluGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats dy, Floats dbias) {
  Launch(stream, {x.buffer, dy.buffer, dbias.buffer}, [=](TaskPool& pool) {
    kernels::BiasReluGradient(pool, rows, cols, At(x), At(dy), At(dbias));
    return absl::OkStatus();
  });
}

void HostBackend::LayerNorm(Stream& stream, int64_t rows, int64_t cols, float epsilon, Floats x, Floats weight,
                            Floats bias, Floats y, Floats mean, Floats rstd) {
  Launch(stream, {x.buffer, weight.buffer, bias.buffer, y.buffer, mean.buffer, rstd.buffer}, [=](TaskPool& pool) {
    kernels::LayerNorm(pool, rows, cols, epsilon, At(x), At(weight), At(bias), At(y), At(mean), At(rstd));
    return absl::OkStatus();
  });
}

void HostBackend::LayerNormGradient(Stream& stream, int64_t rows, int64_t cols, Floats x, Floats weight, Floats mean,
                                    Floats rstd, Floats dy, Floats dx, Floats dweight, Floats dbias) {
  Launch(stream,
         {x.buffer, weight.buffer, mean.buffer, rstd.buffer, dy.buffer, dx.buffer, dweight.buffer, dbias.buffer},
         [=](TaskPool& pool) {
           kernels::LayerNormGradient(pool, rows, cols, At(x), At(weight), At(mean), At(rstd), At(dy), At(dx),
                                      At(dweight), At(dbias));
           return absl::OkStatus();
         });
}

void HostBackend::Attention(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv, Floats y,
                            Floats log_sum) {
  Launch(stream, {qkv.buffer, y.buffer, log_sum.buffer}, [=](TaskPool& pool) {
    kernels::Attention(pool, shape, dropout, At(qkv), At(y), At(log_sum));
    return absl::OkStatus();
  });
}

void HostBackend::AttentionGradient(Stream& stream, AttentionShape shape, const DropoutMask& dropout, Floats qkv,
                                    Floats y, Floats log_sum, Floats dy, Floats dqkv) {
  Launch(stream, {qkv.buffer, y.buffer, log_sum.buffer, dy.buffer, dqkv.buffer}, [=](TaskPool& pool) {
    kernels::AttentionGradient(pool, shape, dropout, At(qkv), At(y), At(log_sum), At(dy), At(dqkv));
    return absl::OkStatus();
  });
}

void HostBackend::Embedding(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens, TableRows rows,
                            Floats wte, Floats wpe, Floats x) {
  Buffer* const positions = wpe.buffer == nullptr ? wte.buffer : wpe.buffer;
  Launch(stream, {tokens.buffer, wte.buffer, positions, x.buffer}, [=](TaskPool& pool) {
    kernels::Embedding(pool, batch, length, width, At(tokens), rows, At(wte), wpe.buffer == nullptr ? nullptr : At(wpe),
                       At(x));
    return absl::OkStatus();
  });
}

void HostBackend::EmbeddingGradient(Stream& stream, int64_t batch, int64_t length, int64_t width, Ints tokens,
                                    TableRows rows, Floats dx, Floats dwte, Floats dwpe) {
  Buffer* const positions = dwpe.buffer == nullptr ? dwte.buffer : dwpe.buffer;
  Launch(stream, {tokens.buffer, dx.buffer, dwte.buffer, positions}, [=](TaskPool& pool) {
    kernels::EmbeddingGradient(pool, batch, length, width, At(tokens), rows, At(dx), At(dwte),
                               dwpe.buffer == nullptr ? nullptr : At(dwpe));
    return absl::OkStatus();
  });
}

void HostBackend::CrossEntropy(Stream& stream, int64_t rows, int64_t classes, Floats logits, Ints targets,
                               bool gradient, View<double> sums) {
  Launch(stream, {logits.buffer, targets.buffer, sums.buffer}, [=](TaskPool& pool) {
    kernels::CrossEntropy(pool, rows, classes, At(logits), At(targets), gradient, At(sums));
    return absl::OkStatus();
  });
}

void HostBackend::CrossEntropyPart(Stream& stream, int64_t n, TableRows rows, Floats logits, Ints targets,
                                   Floats parts) {
  Launch(stream, {logits.buffer, targets.buffer, parts.buffer}, [=](TaskPool& pool) {
    kernels::CrossEntropyPart(pool, n, rows, At(logits), At(targets), At(parts));
    return absl::OkStatus();
  });
}

void HostBackend::CrossEntropyJoin(Stream& stream, int64_t n, TableRows rows, int64_t ranks, Floats logits,
                                   Ints targets, Floats parts, bool gradient, View<double> sums) {
  Launch(stream, {logits.buffer, targets.buffer, parts.buffer, sums.buffer}, [=](TaskPool& pool) {
    kernels::CrossEntropyJoin(pool, n, rows, ranks, At(logits), At(targets), At(parts), gradient, At(sums));
    return absl::OkStatus();
  });
}

void HostBackend::SigmoidCrossEntropy(Stream& stream, int64_t rows, Floats logits, Ints targets, bool gradient,
                                      View<double> sums) {
  Launch(stream, {logits.buffer, targets.buffer, sums.buffer}, [=](TaskPool&) {
    kernels::SigmoidCrossEntropy(rows, At(logits), At(targets), gradient, At(sums));
    return absl::OkStatus();
  });
}

}  // namespace sluice
