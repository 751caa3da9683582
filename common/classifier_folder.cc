#include "common/classifier_folder.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/model_layout.h"
#include "common/safetensors.h"
#include "common/staged_folder.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// "layer.1.weight" -> "2.weight": every other module of the nn.Sequential is a ReLU. "weight" stays.
std::string TorchName(const std::string& name) {
  const size_t dot = name.find('.'), last = name.rfind('.');
  if (dot == std::string::npos) return name;
  return absl::StrCat(2 * std::stoul(name.substr(dot + 1, last - dot - 1)), name.substr(last));
}

std::string ConfigText(const v1::JobSpec& spec, const ClassifierSizes& sizes) {
  ordered_json config;
  config["format"] = "sluice-classifier";
  config["format_version"] = 1;
  config["model_type"] = sizes.kind;
  config["inputs"] = sizes.inputs;
  config["hidden"] = std::vector<uint64_t>(spec.model().mlp().hidden().begin(), spec.model().mlp().hidden().end());
  config["outputs"] = sizes.kind == "logistic" ? 1 : sizes.classes;
  config["activation"] = "relu";
  config["output_activation"] = sizes.kind == "logistic" ? "sigmoid" : "softmax";
  ordered_json labels = ordered_json::array();
  const v1::TableSchema& schema = spec.data().csv().schema();
  if (spec.data().has_csv()) {
    for (const std::string& label : schema.labels()) labels.push_back(label);
    config["features"] = std::vector<std::string>(schema.features().begin(), schema.features().end());
  } else {
    for (uint64_t i = 0; i < sizes.classes; ++i) labels.push_back(absl::StrCat(i));
  }
  config["labels"] = labels;
  // input = (value - mean) / deviation, or value * scale.
  if (schema.mean_size() > 0) {
    config["standardization"] = {
        {"mean", std::vector<double>(schema.mean().begin(), schema.mean().end())},
        {"deviation", std::vector<double>(schema.deviation().begin(), schema.deviation().end())}};
  }
  if (spec.data().has_idx()) config["scale"] = 1.0 / 255;
  return config.dump(2) + "\n";
}

absl::Status WriteModel(const std::string& path, const ParameterSpace& space, absl::Span<const float> values) {
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : space.tensors()) entries.push_back({TorchName(tensor.name), tensor.shape});
  ASSIGN_OR_RETURN(const SafetensorsPrefix prefix, MakeSafetensorsPrefix(entries, {{"format", "pt"}}));
  ASSIGN_OR_RETURN(const auto file, OutputFile::Create(path));
  RETURN_IF_ERROR(file->Reserve(prefix.file_bytes));
  RETURN_IF_ERROR(file->Write(0, prefix.bytes.data(), prefix.bytes.size()));
  for (size_t i = 0; i < entries.size(); ++i) {
    const Tensor& tensor = space.tensors()[i];
    RETURN_IF_ERROR(file->Write(prefix.offsets[i], values.data() + tensor.offset, tensor.elements * sizeof(float)));
  }
  return file->Sync();
}

}  // namespace

absl::Status ExportClassifier(const v1::JobSpec& spec, absl::Span<const float> values, const std::string& folder) {
  const std::optional<ClassifierSizes> sizes = ClassifierSizesOf(spec.model());
  if (!sizes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("exporting to ", folder, ": expected model.mlp, model.softmax or model.logistic"));
  }
  ASSIGN_OR_RETURN(const ParameterSpace space, MakeParameterSpace(spec.model()));
  if (values.size() != space.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("exporting to ", folder, ": the model has ", space.size(), " parameters, found ", values.size()));
  }
  if (PathExists(folder)) return absl::AlreadyExistsError(absl::StrCat(folder, ": exists already; name a new folder"));
  ASSIGN_OR_RETURN(const auto staged, StagedFolder::Create(folder));
  RETURN_IF_ERROR(WriteModel(absl::StrCat(staged->path(), "/model.safetensors"), space, values));
  RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(staged->path(), "/config.json"), ConfigText(spec, *sizes)));
  return staged->Commit();
}

}  // namespace sluice
