// Hugging Face GPT-2 folders: config.json and model.safetensors.
//
// Hugging Face keeps linear weights as [in, out] and q, k, v side by side in one c_attn of [C, 3C]; our storage has q,
// k, v and mlp.fc as [out, in] (common/model_layout.h), so these are transposed on the way.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/file.h"
#include "common/model_layout.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using nlohmann::json;

constexpr char kConfig[] = "config.json";
constexpr char kModel[] = "model.safetensors";
constexpr uint64_t kMaxConfigBytes = 16 << 20;

// Where one of our tensors lies in the file.
struct Source {
  std::string name;             // without "transformer."
  std::vector<uint64_t> shape;  // of the file's tensor
  // Ours [out, in] is the file's [in, columns], columns [first_column, first_column + out). Else our elements are the
  // file's from first_column on.
  bool transposed = false;
  uint64_t first_column = 0;
};

// `tensor` of MakeParameterSpace for a GPT-2 of width c.
Source SourceOf(const Tensor& tensor, uint64_t c) {
  if (tensor.name == "wte" || tensor.name == "wpe") return {tensor.name + ".weight", tensor.shape};
  const size_t layer_end = tensor.name.find('.', 2);  // "h.12." of "h.12.attn.q.weight"
  if (tensor.name.rfind("h.", 0) != 0 || layer_end == std::string::npos) return {tensor.name, tensor.shape};  // ln_f
  const std::string layer = tensor.name.substr(0, layer_end + 1), rest = tensor.name.substr(layer_end + 1);
  const char* const parts[] = {"attn.q.", "attn.k.", "attn.v."};
  for (uint64_t p = 0; p < 3; ++p) {
    if (rest == std::string(parts[p]) + "weight") return {layer + "attn.c_attn.weight", {c, 3 * c}, true, p * c};
    if (rest == std::string(parts[p]) + "bias") return {layer + "attn.c_attn.bias", {3 * c}, false, p * c};
  }
  if (rest == "mlp.fc.weight") return {layer + "mlp.c_fc.weight", {c, 4 * c}, true, 0};
  if (rest == "mlp.fc.bias") return {layer + "mlp.c_fc.bias", tensor.shape};
  if (rest.rfind("attn.proj.", 0) == 0) return {layer + "attn.c_" + rest.substr(5), tensor.shape};
  if (rest.rfind("mlp.proj.", 0) == 0) return {layer + "mlp.c_" + rest.substr(4), tensor.shape};
  return {tensor.name, tensor.shape};  // layer norms
}

absl::StatusOr<ParameterSpace> SpaceOf(const v1::Gpt2Spec& spec) {
  v1::ModelSpec model;
  *model.mutable_gpt2() = spec;
  return MakeParameterSpace(model);
}

// What a GPT-2 checkpoint may hold beside the parameters: the tied head again, and constant masks.
bool Ignored(const std::string& name) {
  return name == "lm_head.weight" || absl::EndsWith(name, ".attn.bias") || absl::EndsWith(name, ".attn.masked_bias");
}

class Reader : public Gpt2FolderReader {
 public:
  Reader(ParameterSpace space, std::vector<Source> sources, std::vector<const SafetensorsTensor*> tensors,
         std::unique_ptr<SafetensorsFile> file)
      : space_(std::move(space)), sources_(std::move(sources)), tensors_(std::move(tensors)), file_(std::move(file)) {}

  absl::Status Read(uint64_t first, absl::Span<float> values) const override {
    if (first > space_.size() || values.size() > space_.size() - first) {
      return absl::OutOfRangeError(absl::StrCat(file_->file().path(), ": the model has ", space_.size(),
                                                " elements, asked for ", values.size(), " from ", first));
    }
    for (size_t i = values.empty() ? 0 : space_.TensorAt(first); !values.empty(); ++i) {
      const Tensor& tensor = space_.tensors()[i];
      const uint64_t skip = first - tensor.offset;
      const size_t n = std::min<uint64_t>(values.size(), tensor.elements - skip);
      RETURN_IF_ERROR(ReadTensor(i, skip, values.subspan(0, n)));
      values.remove_prefix(n);
      first += n;
    }
    return absl::OkStatus();
  }

 private:
  // Elements from `skip` on of our tensor i.
  absl::Status ReadTensor(size_t i, uint64_t skip, absl::Span<float> values) const {
    const Source& source = sources_[i];
    if (!source.transposed) return file_->ReadFloats(*tensors_[i], source.first_column + skip, values);
    const uint64_t in = source.shape[0], columns = source.shape[1];
    // The range touches our rows [begin, end): columns of the file, read row by row.
    const uint64_t begin = skip / in, end = (skip + values.size() + in - 1) / in;
    std::vector<float> row(end - begin);
    for (uint64_t k = 0; k < in; ++k) {
      RETURN_IF_ERROR(file_->ReadFloats(*tensors_[i], k * columns + source.first_column + begin, absl::MakeSpan(row)));
      for (uint64_t o = begin; o < end; ++o) {
        const uint64_t at = o * in + k;
        if (at >= skip && at - skip < values.size()) values[at - skip] = row[o - begin];
      }
    }
    return absl::OkStatus();
  }

  const ParameterSpace space_;
  const std::vector<Source> sources_;                    // of space_.tensors()
  const std::vector<const SafetensorsTensor*> tensors_;  // the same, in file_
  const std::unique_ptr<SafetensorsFile> file_;
};

// One value of config.json.
class ConfigReader {
 public:
  ConfigReader(std::string path, const json& config) : path_(std::move(path)), config_(config) {}

  absl::Status Size(const char* key, uint32_t least, uint32_t most, uint32_t* value) const {
    const auto found = config_.find(key);
    if (found == config_.end()) return Fault(key, "is missing");
    if (!found->is_number_unsigned() || found->get<uint64_t>() < least || found->get<uint64_t>() > most) {
      return Fault(key, absl::StrCat("is ", found->dump(), ", expected a whole number from ", least, " to ", most));
    }
    *value = found->get<uint32_t>();
    return absl::OkStatus();
  }

  // Where the key is given it must have one of the values that this program can compute.
  absl::Status Only(const char* key, const std::vector<json>& allowed) const {
    const auto found = config_.find(key);
    if (found == config_.end() || std::find(allowed.begin(), allowed.end(), *found) != allowed.end()) {
      return absl::OkStatus();
    }
    return Fault(key, absl::StrCat("is ", found->dump(), ", supported is ", json(allowed).dump()));
  }

  absl::Status Fault(const char* key, const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", key, " ", what));
  }

 private:
  const std::string path_;
  const json& config_;
};

absl::Status CheckSpec(const std::string& folder, const v1::Gpt2Spec& found, const v1::Gpt2Spec& expected) {
  const auto differs = [&](const char* key, const char* field, const auto& in_file, const auto& in_spec) {
    if (in_file == in_spec) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(folder, "/", kConfig, ": ", key, " is ", in_file, ", but the job's ",
                                                   field, " is ", in_spec, ": give the folder's value in the job"));
  };
  RETURN_IF_ERROR(differs("n_layer", "model.gpt2.layers", found.layers(), expected.layers()));
  RETURN_IF_ERROR(differs("n_head", "model.gpt2.heads", found.heads(), expected.heads()));
  RETURN_IF_ERROR(differs("n_embd", "model.gpt2.width", found.width(), expected.width()));
  RETURN_IF_ERROR(differs("n_positions", "model.gpt2.context", found.context(), expected.context()));
  RETURN_IF_ERROR(differs("vocab_size", "model.gpt2.vocabulary", found.vocabulary(), expected.vocabulary()));
  const double epsilon = expected.layer_norm_epsilon() == 0 ? 1e-5 : expected.layer_norm_epsilon();
  return differs("layer_norm_epsilon", "model.gpt2.layer_norm_epsilon", found.layer_norm_epsilon(), epsilon);
}

std::string ConfigText(const v1::Gpt2Spec& spec) {
  nlohmann::ordered_json config;
  config["architectures"] = {"GPT2LMHeadModel"};
  config["model_type"] = "gpt2";
  config["activation_function"] = "gelu_new";
  config["vocab_size"] = spec.vocabulary();
  config["n_positions"] = spec.context();
  config["n_ctx"] = spec.context();
  config["n_embd"] = spec.width();
  config["n_layer"] = spec.layers();
  config["n_head"] = spec.heads();
  config["n_inner"] = nullptr;
  config["layer_norm_epsilon"] = spec.layer_norm_epsilon() == 0 ? 1e-5 : spec.layer_norm_epsilon();
  config["tie_word_embeddings"] = true;
  config["embd_pdrop"] = 0.0;
  config["attn_pdrop"] = 0.0;
  config["resid_pdrop"] = 0.0;
  config["torch_dtype"] = "float32";
  // GPT-2's own vocabulary ends with <|endoftext|>; of others we know no such token.
  const nlohmann::ordered_json end = spec.vocabulary() == 50257 ? nlohmann::ordered_json(50256) : nullptr;
  config["bos_token_id"] = end;
  config["eos_token_id"] = end;
  return config.dump(2) + "\n";
}

// One tensor of the file and those of ours that make it up (index in the space).
struct Target {
  std::vector<uint64_t> shape;
  std::vector<size_t> parts;
};

absl::Status WriteModel(const std::string& path, const ParameterSpace& space, uint64_t width,
                        absl::Span<const float> values) {
  std::vector<Source> sources;
  std::map<std::string, Target> targets;
  for (const Tensor& tensor : space.tensors()) {
    Target& target = targets[sources.emplace_back(SourceOf(tensor, width)).name];
    target.shape = sources.back().shape;
    target.parts.push_back(sources.size() - 1);
  }
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, target] : targets) entries.push_back({name, target.shape});
  // Hugging Face refuses a file that does not say which library's layout it has.
  ASSIGN_OR_RETURN(const SafetensorsPrefix prefix, MakeSafetensorsPrefix(entries, {{"format", "pt"}}));
  ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Create(path));
  RETURN_IF_ERROR(file->Reserve(prefix.file_bytes));
  RETURN_IF_ERROR(file->Write(0, prefix.bytes.data(), prefix.bytes.size()));
  std::vector<float> data;
  size_t t = 0;
  for (const auto& [name, target] : targets) {
    uint64_t elements = 0;
    for (const size_t i : target.parts) elements += space.tensors()[i].elements;
    data.resize(elements);
    for (const size_t i : target.parts) {
      const Tensor& tensor = space.tensors()[i];
      const float* from = values.data() + tensor.offset;
      if (!sources[i].transposed) {
        std::copy_n(from, tensor.elements, data.data() + sources[i].first_column);
        continue;
      }
      const uint64_t out = tensor.shape[0], in = tensor.shape[1], columns = target.shape[1];
      for (uint64_t o = 0; o < out; ++o) {
        for (uint64_t k = 0; k < in; ++k) data[k * columns + sources[i].first_column + o] = from[o * in + k];
      }
    }
    RETURN_IF_ERROR(file->Write(prefix.offsets[t++], data.data(), data.size() * sizeof(float)));
  }
  return file->Sync();
}

// Puts the finished folder `made` in the place of `folder`, in one step.
absl::Status MoveIntoPlace(const std::string& made, const std::string& folder) {
  if (PathExists(folder)) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
    for (const std::string& name : names) {
      if (name == kConfig || name == kModel) continue;
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

absl::StatusOr<v1::Gpt2Spec> ReadGpt2Config(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kConfig);
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConfigBytes));
  json config;
  try {
    config = json::parse(text);
  } catch (const json::exception& error) {
    return absl::DataLossError(absl::StrCat(path, ": expected JSON: ", error.what()));
  }
  if (!config.is_object()) return absl::DataLossError(absl::StrCat(path, ": expected a JSON object"));
  const ConfigReader reader(path, config);
  RETURN_IF_ERROR(reader.Only("model_type", {"gpt2"}));
  RETURN_IF_ERROR(reader.Only("activation_function", {"gelu_new", "gelu_pytorch_tanh"}));
  RETURN_IF_ERROR(reader.Only("tie_word_embeddings", {true}));
  RETURN_IF_ERROR(reader.Only("scale_attn_weights", {true}));
  RETURN_IF_ERROR(reader.Only("scale_attn_by_inverse_layer_idx", {false}));
  RETURN_IF_ERROR(reader.Only("add_cross_attention", {false}));
  uint32_t layers = 0, heads = 0, width = 0, context = 0, vocabulary = 0;
  RETURN_IF_ERROR(reader.Size("n_layer", 1, 1024, &layers));
  RETURN_IF_ERROR(reader.Size("n_embd", 1, 65536, &width));
  RETURN_IF_ERROR(reader.Size("n_head", 1, width, &heads));
  RETURN_IF_ERROR(reader.Size("n_positions", 1, 1048576, &context));
  RETURN_IF_ERROR(reader.Size("vocab_size", 2, 1 << 24, &vocabulary));
  if (width % heads != 0) {
    return reader.Fault("n_head", absl::StrCat("is ", heads, " and does not divide n_embd, ", width));
  }
  RETURN_IF_ERROR(reader.Only("n_inner", {nullptr, 4 * uint64_t{width}}));
  const json epsilon = config.value("layer_norm_epsilon", json(1e-5));
  if (!epsilon.is_number() || !(epsilon.get<double>() > 0) || !(epsilon.get<double>() < 1)) {
    return reader.Fault("layer_norm_epsilon",
                        absl::StrCat("is ", epsilon.dump(), ", expected a number between 0 and 1"));
  }
  v1::Gpt2Spec spec;
  spec.set_layers(layers);
  spec.set_heads(heads);
  spec.set_width(width);
  spec.set_context(context);
  spec.set_vocabulary(vocabulary);
  spec.set_layer_norm_epsilon(epsilon.get<double>());
  return spec;
}

absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> Gpt2FolderReader::Open(const std::string& folder,
                                                                         const v1::Gpt2Spec& spec) {
  ASSIGN_OR_RETURN(const v1::Gpt2Spec found, ReadGpt2Config(folder));
  RETURN_IF_ERROR(CheckSpec(folder, found, spec));
  ASSIGN_OR_RETURN(ParameterSpace space, SpaceOf(spec));
  const std::string path = absl::StrCat(folder, "/", kModel);
  ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", parts...));
  };

  std::map<std::string, const SafetensorsTensor*> by_name;  // prefix taken off
  for (const SafetensorsTensor& tensor : file->tensors()) {
    constexpr char kPrefix[] = "transformer.";
    const bool prefixed = tensor.name.rfind(kPrefix, 0) == 0;
    const std::string name = prefixed ? tensor.name.substr(sizeof(kPrefix) - 1) : tensor.name;
    if (Ignored(name)) continue;
    if (!by_name.emplace(name, &tensor).second)
      return fault("tensor \"", name, "\" is there with and without the prefix");
  }
  std::vector<Source> sources;
  std::vector<const SafetensorsTensor*> tensors;
  std::map<std::string, const SafetensorsTensor*> unused = by_name;
  for (const Tensor& tensor : space.tensors()) {
    const Source& source = sources.emplace_back(SourceOf(tensor, spec.width()));
    const auto at = by_name.find(source.name);
    if (at == by_name.end()) {
      return fault("tensor \"", source.name, "\" is missing, expected F32 ", ShapeString(source.shape));
    }
    if (at->second->dtype != "F32" || at->second->shape != source.shape) {
      return fault("tensor \"", at->second->name, "\": expected F32 ", ShapeString(source.shape), ", found ",
                   at->second->dtype, " ", ShapeString(at->second->shape),
                   at->second->dtype != "F32" ? "; convert the model to float32" : "");
    }
    tensors.push_back(at->second);
    unused.erase(source.name);
  }
  if (!unused.empty()) {
    return fault("tensor \"", unused.begin()->second->name, "\" does not belong to a GPT-2 of ", spec.layers(),
                 " layers");
  }
  return std::make_unique<Reader>(std::move(space), std::move(sources), std::move(tensors), std::move(file));
}

absl::Status ExportGpt2(const v1::Gpt2Spec& spec, absl::Span<const float> values, const std::string& folder) {
  ASSIGN_OR_RETURN(const ParameterSpace space, SpaceOf(spec));
  if (values.size() != space.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("exporting to ", folder, ": the model has ", space.size(), " parameters, found ", values.size()));
  }
  const std::string parent = ParentDirectory(folder), name = BaseName(folder);
  const std::string target = absl::StrCat(parent, "/", name),
                    made = absl::StrCat(parent, "/.", name, ".tmp-", getpid());
  RETURN_IF_ERROR(MakeDirectories(parent));
  RETURN_IF_ERROR(RemoveTree(made));
  const auto clean = absl::MakeCleanup([&] { RemoveTree(made).IgnoreError(); });
  RETURN_IF_ERROR(MakeDirectories(made));
  RETURN_IF_ERROR(WriteModel(absl::StrCat(made, "/", kModel), space, spec.width(), values));
  RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(made, "/", kConfig), ConfigText(spec)));
  return MoveIntoPlace(made, target);
}

}  // namespace sluice
