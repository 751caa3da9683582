#include "absl/strings/str_cat.h"
#include "worker/backend/backend.h"
#include "worker/backend/cpu_backend.h"
#include "worker/backend/fake_device.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options) {
  if (options.threads < 1 || options.threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("a backend needs 1 to 1024 threads, found ", options.threads));
  }
  if (options.kind == "cpu") return MakeCpuBackend(options.threads);
  if (options.kind == "fake_device") return MakeFakeDevice(options.threads, options.delay_seed);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown backend '", options.kind, "'; this build has 'cpu' and 'fake_device'"));
}

}  // namespace sluice
