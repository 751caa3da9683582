// The weights of a Hugging Face folder, seen as one set of tensors: model.safetensors, or the shards that
// model.safetensors.index.json names ({"metadata": {...}, "weight_map": {tensor: file}}). Where both are there
// model.safetensors counts, as with Hugging Face.
#ifndef SLUICE_COMMON_WEIGHT_FILES_H_
#define SLUICE_COMMON_WEIGHT_FILES_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/safetensors.h"

namespace sluice {

inline constexpr char kWeightsName[] = "model.safetensors";
inline constexpr char kWeightsIndexName[] = "model.safetensors.index.json";
// "model-00001-of-00003.safetensors"; both count from 1.
std::string WeightsShardName(size_t shard, size_t shards);

// Constant after opening; thread-safe.
class WeightFiles {
 public:
  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsTensor* tensor = nullptr;

    absl::Status Read(uint64_t first, absl::Span<float> values) const {
      return file->ReadFloats(*tensor, first, values);
    }
  };

  // Reads headers only. NOT_FOUND: no weights here (and what is here instead), or a shard is missing. DATA_LOSS: as
  // SafetensorsFile::Open. INVALID_ARGUMENT: index and files contradict each other; names file and tensor.
  static absl::StatusOr<std::unique_ptr<WeightFiles>> Open(const std::string& folder);

  // The one file, or the index.
  const std::string& path() const { return path_; }
  const std::map<std::string, Place>& tensors() const { return tensors_; }

 private:
  WeightFiles() = default;
  absl::Status OpenShards();

  std::string folder_, path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> tensors_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_WEIGHT_FILES_H_
