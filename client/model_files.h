// Models on disk: published checkpoints and exported GPT-2 folders; exporting and sampling.
#ifndef SLUICE_CLIENT_MODEL_FILES_H_
#define SLUICE_CLIENT_MODEL_FILES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tokenizer.h"
#include "common/gpt2_folder.h"
#include "sluice/v1/job.pb.h"
#include "worker/model/model.h"

namespace sluice {

// `folder` is a published checkpoint, or a GPT-2 folder to be converted; `target` must not exist: a GPT-2 folder
// (common/gpt2_folder.h), or a classifier's (common/classifier_folder.h, F32 only). Every checksum is verified on the
// way. The tokenizer goes with a GPT-2: that of `tokenizer_folder`, or if it is empty the model's own where it can be
// read.
absl::Status ExportModel(const std::string& folder, const std::string& target, Gpt2ExportOptions options = {},
                         const std::string& tokenizer_folder = "");

// A model with its parameters, ready to be asked. Not thread-safe.
class LoadedModel {
 public:
  // `folder`: a published checkpoint (manifest.json) or a GPT-2 folder (config.json).
  static absl::StatusOr<std::unique_ptr<LoadedModel>> Load(const std::string& folder, int threads);

  const v1::ModelSpec& spec() const { return spec_; }
  // What its tokens are, as far as the folder says.
  const ModelTokenizer& tokenizer() const { return tokenizer_; }
  // Tokens are bytes.
  bool bytes() const { return spec_.has_gpt2() && spec_.gpt2().vocabulary() == 256; }
  // Logits after the tokens, of which the last `context` count. INVALID_ARGUMENT: no token, or one outside the
  // vocabulary.
  absl::StatusOr<std::vector<float>> Logits(const std::vector<int32_t>& tokens);

 private:
  LoadedModel() = default;
  v1::ModelSpec spec_;
  ModelTokenizer tokenizer_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
};

struct SampleOptions {
  int64_t tokens = 300;
  double temperature = 0.8;  // 0: the likeliest token always
  int64_t top_k = 0;         // only the k likeliest tokens; 0: all
  double top_p = 1;          // of these the likeliest until their shares add up to p, one at least; 1: all
  uint64_t seed = 1;
};

// Draws from softmax(logits / temperature), cut to top_k, then to top_p; u in [0, 1). Pure. Not-finite logits have no
// share; all such: the first token. Of equal logits the smaller token comes first.
int32_t DrawToken(const std::vector<float>& logits, double temperature, double u);
int32_t DrawToken(const std::vector<float>& logits, const SampleOptions& options, double u);

// Goes on after `prompt` (not empty) and hands every new token on. The same arguments give the same tokens. Ends early
// where `emit` returns false.
absl::Status Sample(LoadedModel* model, std::vector<int32_t> prompt, const SampleOptions& options,
                    const std::function<bool(int32_t)>& emit);

}  // namespace sluice

#endif  // SLUICE_CLIENT_MODEL_FILES_H_
