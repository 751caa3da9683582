// Small JSON files that others wrote.
#ifndef SLUICE_COMMON_JSON_FILE_H_
#define SLUICE_COMMON_JSON_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace sluice {

// The object in the file. The codes of file.h; RESOURCE_EXHAUSTED over max_bytes; DATA_LOSS names file and fault: no
// JSON (and what it is instead, see file_kind.h), no object, a key given twice (JSON leaves open which one counts).
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, uint64_t max_bytes);

}  // namespace sluice

#endif  // SLUICE_COMMON_JSON_FILE_H_
