// manifest.json of a checkpoint folder: protobuf's JSON form of v1::CheckpointManifest with a checksum of itself.
#ifndef SLUICE_COMMON_CHECKPOINT_MANIFEST_H_
#define SLUICE_COMMON_CHECKPOINT_MANIFEST_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/checkpoint.pb.h"

namespace sluice {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr uint32_t kCheckpointFormatVersion = 2;

// Fills in format version and checksum and writes the file atomically.
absl::Status WriteManifest(const std::string& folder, v1::CheckpointManifest manifest);

// NOT_FOUND names the file; FAILED_PRECONDITION: of another format version; DATA_LOSS: not JSON, or not what was
// written.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& folder);

}  // namespace sluice

#endif  // SLUICE_COMMON_CHECKPOINT_MANIFEST_H_
