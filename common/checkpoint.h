// Checkpoint folders: writing shard files, publishing, finding, verifying, reading any range in any layout.
// The format is stated in docs/checkpoint_format.md.
//
//   <root>/<directory>/t<timeline>-v<version>/            published (complete, synced, renamed from the staging folder)
//       shard-00003-of-00016.safetensors                  one per shard; tensors "<slot>.<first element>" [elements]
//       F32 manifest.json                                     v1::CheckpointManifest
//   <root>/<directory>/staging-t<timeline>-v<version>/    being written
#ifndef SLUICE_COMMON_CHECKPOINT_H_
#define SLUICE_COMMON_CHECKPOINT_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/gpt2_folder.h"  // the other kind of folder that init.path may name
#include "sluice/v1/checkpoint.pb.h"

namespace sluice {

std::string CheckpointFolderName(uint64_t timeline, uint64_t version);  // "t1-v400"
std::string StagingFolderName(uint64_t timeline, uint64_t version);
std::string ShardFileName(uint32_t shard, uint32_t shards);
// Slots of what the ranks' push encodings had left out (error feedback): "residual-0", ...; and how many ranks have
// one.
std::string ResidualSlot(uint32_t rank);
uint32_t ResidualRanks(const v1::CheckpointManifest& manifest);

// Writes one shard's file piece by piece, in any order. Not thread-safe. The header is fixed at creation from the
// pieces' table, so that bytes can be written as they come (pwrite).
class ShardFileWriter {
 public:
  struct Piece {
    std::string slot;    // "value", "m", ...
    uint64_t first = 0;  // element of the parameter space
    uint64_t elements = 0;
  };
  // Creates `path` (parents too), replacing what an earlier life left there. RESOURCE_EXHAUSTED on a full disk.
  static absl::StatusOr<std::unique_ptr<ShardFileWriter>> Create(const std::string& path, std::vector<Piece> pieces);
  virtual ~ShardFileWriter() = default;
  // One whole piece, each exactly once.
  virtual absl::Status Write(const std::string& slot, uint64_t first, absl::Span<const float> values) = 0;
  // All pieces are there: fsync; name, size, crc32 and (from the name) shard of the file. FAILED_PRECONDITION names a
  // missing piece. After an error every further call returns it: the file must be created anew.
  virtual absl::StatusOr<v1::CheckpointFile> Finish() = 0;
};

// Writes manifest.json (format version and checksum filled in) into the staging folder, syncs, renames it to its
// published name, syncs the parent. Idempotent: a folder published before is left as it is. `base` is
// <root>/<directory>. Returns the published folder. DATA_LOSS / NOT_FOUND where a file that the manifest lists is not
// there in its size.
absl::StatusOr<std::string> PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest);

// Published checkpoints under `base`, oldest first (by timeline, then version). A missing folder is an empty list; a
// folder whose manifest cannot be read is left out, with a warning in the log.
absl::StatusOr<std::vector<v1::CheckpointManifest>> ListCheckpoints(const std::string& base);
// Removes a published or a staging folder; that it is not there is ok. It is renamed first, so a half-removed one is
// never listed. INVALID_ARGUMENT for a folder with another kind of name.
absl::Status RemoveCheckpoint(const std::string& folder);

// A published checkpoint, open for reading. Thread-safe.
class CheckpointReader {
 public:
  // Checks manifest, sizes and headers; with `verify` also every file's crc32. DATA_LOSS names file and cause;
  // NOT_FOUND a missing file.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& folder, bool verify);
  virtual ~CheckpointReader() = default;
  virtual const v1::CheckpointManifest& manifest() const = 0;
  // values[i] = element first + i of the slot. NOT_FOUND where the checkpoint has no such slot.
  virtual absl::Status Read(const std::string& slot, uint64_t first, absl::Span<float> values) const = 0;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_CHECKPOINT_H_
