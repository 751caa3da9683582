// Hugging Face GPT-2 folders, in and out: config.json and model.safetensors (or its shards with
// model.safetensors.index.json).
//
// Names are GPT2Model's ("wte.weight", "h.0.attn.c_attn.weight" [C, 3C], ...; docs/parameter_space.md has the table),
// in files read also with the prefix "transformer.". Linear weights are [in, out] there; q, k, v and mlp.fc are [out,
// in] in our space, so these are transposed on the way.
#ifndef SLUICE_COMMON_GPT2_FOLDER_H_
#define SLUICE_COMMON_GPT2_FOLDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/float_formats.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

// There is a config.json, and no manifest.json (which makes it a checkpoint).
bool IsGpt2Folder(const std::string& folder);

// config.json of the folder. INVALID_ARGUMENT names the key that is missing, out of range or asks for something that
// this program does not compute (another activation_function, untied embeddings, ...); DATA_LOSS: no JSON object.
absl::StatusOr<v1::Gpt2Spec> ReadGpt2Config(const std::string& folder);

// The weights of a folder as a parameter space. Thread-safe. F32, F16 and BF16 tensors, widened exactly; mask buffers
// (attn.bias, attn.masked_bias) are not read.
class Gpt2FolderReader {
 public:
  // Checks config.json against `spec` and every tensor's name, dtype and shape; reads headers only. INVALID_ARGUMENT
  // lists tensors missing, of the wrong shape or dtype (expected and found) and unknown; for the rest see WeightFiles.
  static absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> Open(const std::string& folder, const v1::Gpt2Spec& spec);
  virtual ~Gpt2FolderReader() = default;
  // Elements [first, first + values.size()) of the space; these alone are read. A lm_head.weight in the folder must be
  // equal to wte.weight over the range: INVALID_ARGUMENT, as this program's head is tied.
  virtual absl::Status Read(uint64_t first, absl::Span<float> values) const = 0;
};

struct Gpt2ExportOptions {
  FloatFormat format = FloatFormat::kF32;
  // Bytes of tensors in one file; more are cut into shards, no tensor in two (one tensor may exceed it). Hugging Face's
  // default.
  uint64_t max_shard_bytes = 5'000'000'000;
  // Writes further files (a tokenizer's) into the folder before it appears.
  std::function<absl::Status(const std::string& folder)> more = nullptr;
};

// Writes config.json and the weights, names without "transformer.". `values`: the whole space. The folder appears whole
// or not at all (staging folder beside it, rename); an earlier export is replaced; ALREADY_EXISTS where the folder
// holds anything else. RESOURCE_EXHAUSTED on a full disk, OUT_OF_RANGE where a value is beyond the format's largest;
// nothing is left behind by either.
absl::Status ExportGpt2(const v1::Gpt2Spec& spec, absl::Span<const float> values, const std::string& folder,
                        const Gpt2ExportOptions& options = {});

}  // namespace sluice

#endif  // SLUICE_COMMON_GPT2_FOLDER_H_
