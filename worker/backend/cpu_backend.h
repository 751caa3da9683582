// The `cpu` backend: oneDNN's products and vector kernels in host memory. Use MakeBackend.
#ifndef SLUICE_WORKER_BACKEND_CPU_BACKEND_H_
#define SLUICE_WORKER_BACKEND_CPU_BACKEND_H_

#include <memory>

#include "worker/backend/backend.h"

namespace sluice {

std::unique_ptr<Backend> MakeCpuBackend(int threads);

}  // namespace sluice

#endif  // SLUICE_WORKER_BACKEND_CPU_BACKEND_H_
