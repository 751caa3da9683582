#include "common/weight_files.h"

#include <cstdint>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

constexpr uint64_t kMaxIndexBytes = 256 << 20;

absl::Status NoWeights(const std::string& folder) {
  const std::string missing = absl::StrCat(folder, ": expected ", kWeightsName, " or ", kWeightsIndexName);
  for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"}) {
    if (!PathExists(absl::StrCat(folder, "/", other))) continue;
    return absl::NotFoundError(
        absl::StrCat(missing, ", found ", other, "; save the model with safe_serialization=True to get safetensors"));
  }
  return absl::NotFoundError(absl::StrCat(missing, ", found neither"));
}

}  // namespace

std::string WeightsShardName(size_t shard, size_t shards) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", shard, shards);
}

absl::StatusOr<std::unique_ptr<WeightFiles>> WeightFiles::Open(const std::string& folder) {
  std::unique_ptr<WeightFiles> opened(new WeightFiles());
  opened->folder_ = folder;
  opened->path_ = absl::StrCat(folder, "/", kWeightsName);
  if (!PathExists(opened->path_)) {
    opened->path_ = absl::StrCat(folder, "/", kWeightsIndexName);
    if (!PathExists(opened->path_)) return NoWeights(folder);
    RETURN_IF_ERROR(opened->OpenShards());
    return opened;
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(opened->path_));
  for (const SafetensorsTensor& tensor : file->tensors()) opened->tensors_[tensor.name] = {file.get(), &tensor};
  opened->files_.push_back(std::move(file));
  return opened;
}

absl::Status WeightFiles::OpenShards() {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", parts...));
  };
  ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonObject(path_, kMaxIndexBytes));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return fault("expected \"weight_map\", an object of tensor names and file names");
  }
  std::set<std::string> names;
  for (const auto& [tensor, name] : map->items()) {
    if (!name.is_string()) {
      return fault("weight_map: tensor \"", tensor, "\": expected a file name, found ", name.dump());
    }
    const std::string& file = name.get_ref<const std::string&>();
    if (file.find('/') != std::string::npos || !absl::EndsWith(file, ".safetensors")) {
      return fault("weight_map: tensor \"", tensor, "\": expected a .safetensors file of this folder, found \"", file,
                   "\"");
    }
    names.insert(file);
  }
  for (const std::string& name : names) {
    auto file = SafetensorsFile::Open(absl::StrCat(folder_, "/", name));
    if (!file.ok()) return Annotate(file.status(), absl::StrCat(path_, " names a shard that cannot be used"));
    for (const SafetensorsTensor& tensor : (*file)->tensors()) {
      const auto mapped = map->find(tensor.name);
      if (mapped == map->end()) return fault("tensor \"", tensor.name, "\" of ", name, " is not in weight_map");
      if (*mapped != name) {
        return fault("tensor \"", tensor.name, "\" is in ", name, ", but weight_map says ", mapped->dump());
      }
      tensors_[tensor.name] = {file->get(), &tensor};
    }
    files_.push_back(*std::move(file));
  }
  for (const auto& [tensor, name] : map->items()) {
    if (tensors_.count(tensor) == 0) {
      return fault("weight_map: tensor \"", tensor, "\" is not in ", name.get<std::string>());
    }
  }
  return absl::OkStatus();
}

}  // namespace sluice
