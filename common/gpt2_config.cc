// Hugging Face's GPT-2: names, shapes and config.json.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/gpt2_folder.h"
#include "common/gpt2_tensors.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxConfigBytes = 16 << 20;

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

}  // namespace

absl::StatusOr<ParameterSpace> Gpt2Space(const v1::Gpt2Spec& spec) {
  v1::ModelSpec model;
  *model.mutable_gpt2() = spec;
  return MakeParameterSpace(model);
}

Gpt2Source Gpt2SourceOf(const Tensor& tensor, uint64_t c) {
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

absl::Status CheckGpt2Config(const std::string& folder, const v1::Gpt2Spec& found, const v1::Gpt2Spec& expected) {
  const auto differs = [&](const char* key, const char* field, const auto& in_file, const auto& in_spec) {
    if (in_file == in_spec) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(folder, "/", kGpt2ConfigName, ": ", key, " is ", in_file,
                                                   ", but the job's ", field, " is ", in_spec,
                                                   ": give the folder's value in the job"));
  };
  RETURN_IF_ERROR(differs("n_layer", "model.gpt2.layers", found.layers(), expected.layers()));
  RETURN_IF_ERROR(differs("n_head", "model.gpt2.heads", found.heads(), expected.heads()));
  RETURN_IF_ERROR(differs("n_embd", "model.gpt2.width", found.width(), expected.width()));
  RETURN_IF_ERROR(differs("n_positions", "model.gpt2.context", found.context(), expected.context()));
  RETURN_IF_ERROR(differs("vocab_size", "model.gpt2.vocabulary", found.vocabulary(), expected.vocabulary()));
  const double epsilon = expected.layer_norm_epsilon() == 0 ? 1e-5 : expected.layer_norm_epsilon();
  return differs("layer_norm_epsilon", "model.gpt2.layer_norm_epsilon", found.layer_norm_epsilon(), epsilon);
}

std::string Gpt2ConfigText(const v1::Gpt2Spec& spec, FloatFormat format) {
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
  config["embd_pdrop"] = spec.dropout();
  config["attn_pdrop"] = spec.dropout();
  config["resid_pdrop"] = spec.dropout();
  config["torch_dtype"] = format == FloatFormat::kF16    ? "float16"
                          : format == FloatFormat::kBF16 ? "bfloat16"
                                                         : "float32";
  // GPT-2's own vocabulary ends with <|endoftext|>; of others we know no such token.
  const nlohmann::ordered_json end = spec.vocabulary() == 50257 ? nlohmann::ordered_json(50256) : nullptr;
  config["bos_token_id"] = end;
  config["eos_token_id"] = end;
  return config.dump(2) + "\n";
}

bool IsGpt2Folder(const std::string& folder) {
  return PathExists(absl::StrCat(folder, "/", kGpt2ConfigName)) && !PathExists(absl::StrCat(folder, "/manifest.json"));
}

absl::StatusOr<v1::Gpt2Spec> ReadGpt2Config(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kGpt2ConfigName);
  ASSIGN_OR_RETURN(const json config, ReadJsonObject(path, kMaxConfigBytes));
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

}  // namespace sluice
