// Hugging Face GPT-2 folders out: into a staging folder, which then takes the place of the target in one step.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/gpt2_folder.h"
#include "common/gpt2_tensors.h"
#include "common/safetensors.h"
#include "common/staged_folder.h"
#include "common/status_macros.h"
#include "common/weight_files.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

// One tensor of the files and those of ours that make it up.
struct Target {
  std::string name;
  std::vector<uint64_t> shape;
  uint64_t elements = 0;
  std::vector<std::pair<Gpt2Source, const Tensor*>> parts;
};

std::vector<Target> TargetsOf(const ParameterSpace& space, uint64_t width) {
  std::map<std::string, Target> by_name;
  for (const Tensor& tensor : space.tensors()) {
    const Gpt2Source source = Gpt2SourceOf(tensor, width);
    Target& target = by_name[source.name];
    target.name = source.name;
    target.shape = source.shape;
    target.elements += tensor.elements;
    target.parts.emplace_back(source, &tensor);
  }
  std::vector<Target> targets;
  for (auto& [name, target] : by_name) targets.push_back(std::move(target));
  return targets;
}

// The target's values as the file has them.
void Fill(const Target& target, absl::Span<const float> values, std::vector<float>* data) {
  data->resize(target.elements);
  for (const auto& [source, tensor] : target.parts) {
    const float* from = values.data() + tensor->offset;
    if (!source.transposed) {
      std::copy_n(from, tensor->elements, data->data() + source.first_column);
      continue;
    }
    const uint64_t out = tensor->shape[0], in = tensor->shape[1], columns = target.shape[1];
    for (uint64_t o = 0; o < out; ++o) {
      for (uint64_t k = 0; k < in; ++k) (*data)[k * columns + source.first_column + o] = from[o * in + k];
    }
  }
}

absl::Status CheckRange(const Target& target, absl::Span<const float> data, FloatFormat format) {
  const float largest = LargestOf(format);
  std::vector<char> narrow(BytesOf(format));
  for (size_t i = 0; i < data.size(); ++i) {
    if (!(std::abs(data[i]) > largest) || !std::isfinite(data[i])) continue;
    float again = 0;
    Narrow(format, data.subspan(i, 1), narrow.data());
    Widen(format, narrow.data(), absl::MakeSpan(&again, 1));
    if (std::isfinite(again)) continue;  // it rounds down to the largest
    return absl::OutOfRangeError(absl::StrCat("tensor \"", target.name, "\": element ", i, " is ", data[i],
                                              ", more than the largest ", DtypeOf(format), ", ", largest,
                                              "; export in another dtype"));
  }
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, absl::Span<const Target> targets, absl::Span<const float> values,
                       FloatFormat format) {
  std::vector<SafetensorsEntry> entries;
  for (const Target& target : targets) entries.push_back({target.name, target.shape, format});
  // Hugging Face refuses a file that does not say which library's layout it has.
  ASSIGN_OR_RETURN(const SafetensorsPrefix prefix, MakeSafetensorsPrefix(entries, {{"format", "pt"}}));
  ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Create(path));
  RETURN_IF_ERROR(file->Reserve(prefix.file_bytes));
  RETURN_IF_ERROR(file->Write(0, prefix.bytes.data(), prefix.bytes.size()));
  std::vector<float> data;
  std::vector<char> narrow;
  for (size_t t = 0; t < targets.size(); ++t) {
    Fill(targets[t], values, &data);
    if (format != FloatFormat::kF32) {
      RETURN_IF_ERROR(CheckRange(targets[t], data, format));
      narrow.resize(data.size() * BytesOf(format));
      Narrow(format, data, narrow.data());
    }
    const void* const bytes = format == FloatFormat::kF32 ? static_cast<const void*>(data.data()) : narrow.data();
    RETURN_IF_ERROR(file->Write(prefix.offsets[t], bytes, data.size() * BytesOf(format)));
  }
  return file->Sync();
}

absl::Status WriteWeights(const std::string& folder, const std::vector<Target>& targets, absl::Span<const float> values,
                          const Gpt2ExportOptions& options) {
  std::vector<size_t> ends;  // of each shard in targets
  uint64_t in_shard = 0, total = 0;
  for (size_t t = 0; t < targets.size(); ++t) {
    const uint64_t bytes = targets[t].elements * BytesOf(options.format);
    if (in_shard > 0 && in_shard + bytes > options.max_shard_bytes) {
      ends.push_back(t);
      in_shard = 0;
    }
    in_shard += bytes;
    total += bytes;
  }
  ends.push_back(targets.size());
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  for (size_t shard = 0, begin = 0; shard < ends.size(); begin = ends[shard++]) {
    const std::string name = ends.size() == 1 ? kWeightsName : WeightsShardName(shard + 1, ends.size());
    const auto part = absl::MakeConstSpan(targets).subspan(begin, ends[shard] - begin);
    RETURN_IF_ERROR(WriteFile(absl::StrCat(folder, "/", name), part, values, options.format));
    for (const Target& target : part) index["weight_map"][target.name] = name;
  }
  if (ends.size() == 1) return absl::OkStatus();
  return WriteFileAtomically(absl::StrCat(folder, "/", kWeightsIndexName), index.dump(2) + "\n");
}

// What an export consists of.
bool IsExported(const std::string& name) {
  return name == kGpt2ConfigName || name == kWeightsName || name == kWeightsIndexName || name == "vocab.json" ||
         name == "merges.txt" || name == "tokenizer_config.json" ||
         (absl::StartsWith(name, "model-") && absl::StrContains(name, "-of-") && absl::EndsWith(name, ".safetensors"));
}

// Puts the finished folder `made` in the place of `folder`, in one step.
absl::Status MoveIntoPlace(const std::string& made, const std::string& folder) {
  if (PathExists(folder)) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
    for (const std::string& name : names) {
      if (IsExported(name)) continue;
      return absl::AlreadyExistsError(
          absl::StrCat("exporting to ", folder, ": it holds other files (", name, "); choose a new or empty folder"));
    }
    if (!names.empty()) {
      if (renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
        RETURN_IF_ERROR(SyncDirectory(ParentDirectory(folder)));
        return RemoveTree(made);
      }
      if (errno != EINVAL && errno != ENOSYS) return ErrnoStatus(errno, "replacing", folder);
      RETURN_IF_ERROR(RemoveTree(folder));  // this file system cannot exchange
    }
  }
  return Rename(made, folder);
}

}  // namespace

absl::Status ExportGpt2(const v1::Gpt2Spec& spec, absl::Span<const float> values, const std::string& folder,
                        const Gpt2ExportOptions& options) {
  ASSIGN_OR_RETURN(const ParameterSpace space, Gpt2Space(spec));
  if (values.size() != space.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("exporting to ", folder, ": the model has ", space.size(), " parameters, found ", values.size()));
  }
  ASSIGN_OR_RETURN(const auto staged, StagedFolder::Create(folder));
  const std::string& made = staged->path();
  const absl::Status written = WriteWeights(made, TargetsOf(space, spec.width()), values, options);
  if (!written.ok()) return Annotate(written, absl::StrCat("exporting to ", folder));
  RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(made, "/", kGpt2ConfigName), Gpt2ConfigText(spec, options.format)));
  if (options.more != nullptr) RETURN_IF_ERROR(options.more(made));
  return MoveIntoPlace(made, staged->target());
}

}  // namespace sluice
