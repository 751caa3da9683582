// Sizes as people write them.
#ifndef SLUICE_CLIENT_BYTE_SIZE_H_
#define SLUICE_CLIENT_BYTE_SIZE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace sluice {

// "500MB" (10^6 bytes), "2GiB" (2^30), "4096" (bytes); units KB, MB, GB, TB and KiB, MiB, GiB, TiB in any case, a
// decimal fraction before a unit. From 1 byte to 2^62. INVALID_ARGUMENT.
absl::StatusOr<uint64_t> ParseByteSize(const std::string& text);

}  // namespace sluice

#endif  // SLUICE_CLIENT_BYTE_SIZE_H_
