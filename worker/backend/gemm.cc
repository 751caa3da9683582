// Matrix products over oneDNN's sgemm. Threads are ours: oneDNN runs on one thread in each part, so that its OpenMP
// team never comes to life.
#include <algorithm>
#include <atomic>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>

#include "absl/strings/str_cat.h"
#include "worker/backend/kernels.h"

// Of OpenMP's run-time library; its header is the compiler's own, and not every compiler here has one.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int threads);
}

namespace sluice::kernels {
namespace {

// The number of OpenMP threads is a property of the calling thread; it gets its old value back.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneOpenMpThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }

 private:
  const int before_;
};

void Scale(int64_t m, int64_t n, float beta, float* c, int64_t c_stride) {
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * c_stride;
    for (int64_t j = 0; j < n; ++j) row[j] = beta == 0 ? 0 : beta * row[j];
  }
}

const float* Row(const Operand& a, int64_t i) { return a.at + (a.transposed ? i : i * a.stride); }
const float* Column(const Operand& b, int64_t j) { return b.at + (b.transposed ? j * b.stride : j); }

dnnl_status_t Sgemm(int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta, float* c,
                    int64_t c_stride) {
  // oneDNN insists on strides of at least the width, also where there is but one row.
  const int64_t a_stride = std::max(a.stride, a.transposed ? m : k),
                b_stride = std::max(b.stride, b.transposed ? k : n);
  return dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n, k, alpha, a.at, a_stride, b.at, b_stride,
                    beta, c, std::max(c_stride, n));
}

// Gradients of weights read `a` by columns. Where its rows lie a multiple of 512 bytes apart they fall into few sets of
// the cache, which costs oneDNN up to a third of its speed; blocks copied with an odd distance do not.
constexpr int64_t kCopyRows = 192, kCopyColumns = 512, kCopyStride = kCopyColumns + 16;

bool ShouldCopy(int64_t m, int64_t n, int64_t k, const Operand& a) {
  return a.transposed && a.stride % 128 == 0 && m >= 256 && n >= 64 && k >= 64;
}

dnnl_status_t SgemmByCopy(int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta, float* c,
                          int64_t c_stride) {
  const std::unique_ptr<float[]> copy(new float[kCopyRows * kCopyStride]);
  for (int64_t i = 0; i < m; i += kCopyColumns) {
    const int64_t columns = std::min(kCopyColumns, m - i);
    for (int64_t p = 0; p < k; p += kCopyRows) {
      const int64_t rows = std::min(kCopyRows, k - p);
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(a.at + (p + r) * a.stride + i, columns, copy.get() + r * kCopyStride);
      }
      const float* b_at = b.at + (b.transposed ? p : p * b.stride);
      const dnnl_status_t status =
          Sgemm(columns, n, rows, alpha, {copy.get(), kCopyStride, true}, {b_at, b.stride, b.transposed},
                p == 0 ? beta : 1.0f, c + i * c_stride, c_stride);
      if (status != dnnl_success) return status;
    }
  }
  return dnnl_success;
}

dnnl_status_t Part(int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta, float* c,
                   int64_t c_stride) {
  return (ShouldCopy(m, n, k, a) ? SgemmByCopy : Sgemm)(m, n, k, alpha, a, b, beta, c, c_stride);
}

absl::Status ToStatus(int status) {
  if (status == dnnl_success) return absl::OkStatus();
  if (status == dnnl_out_of_memory) return absl::ResourceExhaustedError("oneDNN sgemm: out of memory");
  return absl::InternalError(absl::StrCat("oneDNN sgemm failed with dnnl_status_t ", status));
}

const char* IsaName(dnnl_cpu_isa_t isa) {
  switch (isa) {
    case dnnl_cpu_isa_sse41:
      return "sse41";
    case dnnl_cpu_isa_avx:
      return "avx";
    case dnnl_cpu_isa_avx2:
      return "avx2";
    case dnnl_cpu_isa_avx2_vnni:
      return "avx2_vnni";
    case dnnl_cpu_isa_avx512_core:
      return "avx512_core";
    case dnnl_cpu_isa_avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl_cpu_isa_avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl_cpu_isa_avx512_core_amx:
      return "avx512_core_amx";
    default:
      return nullptr;
  }
}

}  // namespace

absl::Status Gemm(TaskPool& pool, int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta,
                  float* c, int64_t c_stride) {
  if (m == 0 || n == 0) return absl::OkStatus();
  if (k == 0) {
    Scale(m, n, beta, c, c_stride);
    return absl::OkStatus();
  }
  std::atomic<int> failed = dnnl_success;
  // The longer side of c is cut; a part has at least 64 rows or columns.
  const bool rows = m >= n;
  pool.For(rows ? m : n, 64, [&](int64_t begin, int64_t end) {
    const OneOpenMpThread one;
    dnnl_status_t status;
    if (rows) {
      status = Part(end - begin, n, k, alpha, {Row(a, begin), a.stride, a.transposed}, b, beta, c + begin * c_stride,
                    c_stride);
    } else {
      status = Part(m, end - begin, k, alpha, a, {Column(b, begin), b.stride, b.transposed}, beta, c + begin, c_stride);
    }
    if (status != dnnl_success) failed = status;
  });
  return ToStatus(failed);
}

absl::Status BatchedGemm(TaskPool& pool, int64_t batch, int64_t m, int64_t n, int64_t k, float alpha, Operand a,
                         int64_t a_step, Operand b, int64_t b_step, float beta, float* c, int64_t c_stride,
                         int64_t c_step) {
  if (batch == 0 || m == 0 || n == 0) return absl::OkStatus();
  std::atomic<int> failed = dnnl_success;
  pool.For(batch, 1, [&](int64_t begin, int64_t end) {
    const OneOpenMpThread one;
    for (int64_t i = begin; i < end; ++i) {
      if (k == 0) {
        Scale(m, n, beta, c + i * c_step, c_stride);
        continue;
      }
      const dnnl_status_t status = Part(m, n, k, alpha, {a.at + i * a_step, a.stride, a.transposed},
                                        {b.at + i * b_step, b.stride, b.transposed}, beta, c + i * c_step, c_stride);
      if (status != dnnl_success) failed = status;
    }
  });
  return ToStatus(failed);
}

std::string GemmProfile() {
  const dnnl_version_t* version = dnnl_version();
  const dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
  const char* name = IsaName(isa);
  return absl::StrCat("onednn-", version->major, ".", version->minor, ".", version->patch, "/",
                      name != nullptr ? std::string(name) : absl::StrCat("isa-", static_cast<int>(isa)));
}

}  // namespace sluice::kernels
