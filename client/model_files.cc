#include "client/model_files.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/classifier_folder.h"
#include "common/gpt2_folder.h"
#include "common/model_layout.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/backend/backend.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

absl::Status ExportModel(const std::string& folder, const std::string& target, Gpt2ExportOptions options,
                         const std::string& tokenizer_folder) {
  if (Exists(target)) return absl::AlreadyExistsError(absl::StrCat(target, ": exists already; name a new folder"));
  v1::JobSpec spec;  // of which only the model counts where a GPT-2 folder is converted
  std::unique_ptr<CheckpointReader> checkpoint;
  std::unique_ptr<Gpt2FolderReader> imported;
  if (IsGpt2Folder(folder)) {
    ASSIGN_OR_RETURN(*spec.mutable_model()->mutable_gpt2(), ReadGpt2Config(folder));
    ASSIGN_OR_RETURN(imported, Gpt2FolderReader::Open(folder, spec.model().gpt2()));
  } else {
    ASSIGN_OR_RETURN(checkpoint, CheckpointReader::Open(folder, /*verify=*/true));
    spec = checkpoint->manifest().spec();
  }
  const v1::ModelSpec& model = spec.model();
  ASSIGN_OR_RETURN(const ParameterSpace space, MakeParameterSpace(model));
  std::vector<float> values(space.size());
  const auto all = absl::MakeSpan(values);
  RETURN_IF_ERROR(checkpoint != nullptr ? checkpoint->Read("value", 0, all) : imported->Read(0, all));
  if (!model.has_gpt2()) {
    if (!tokenizer_folder.empty()) {
      return absl::InvalidArgumentError("--tokenizer: only models of tokens (model.gpt2) have one");
    }
    if (options.format != FloatFormat::kF32) {
      return absl::InvalidArgumentError("--dtype: classifiers are exported as F32 only");
    }
    return ExportClassifier(spec, values, target);
  }
  ASSIGN_OR_RETURN(const ModelTokenizer tokenizer,
                   !tokenizer_folder.empty() ? TokenizerInFolder(tokenizer_folder) : TokenizerOfModel(folder, model));
  options.more = [&](const std::string& made) { return ExportTokenizer(tokenizer, model.gpt2().context(), made); };
  return ExportGpt2(model.gpt2(), values, target, options);
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(const std::string& folder, int threads) {
  std::unique_ptr<LoadedModel> loaded(new LoadedModel());
  std::unique_ptr<CheckpointReader> checkpoint;
  std::unique_ptr<Gpt2FolderReader> exported;
  if (!IsGpt2Folder(folder) && Exists(fs::path(folder) / "manifest.json")) {
    ASSIGN_OR_RETURN(checkpoint, CheckpointReader::Open(folder, /*verify=*/true));
    loaded->spec_ = checkpoint->manifest().spec().model();
  } else if (IsGpt2Folder(folder)) {
    ASSIGN_OR_RETURN(*loaded->spec_.mutable_gpt2(), ReadGpt2Config(folder));
    ASSIGN_OR_RETURN(exported, Gpt2FolderReader::Open(folder, loaded->spec_.gpt2()));
  } else {
    return absl::NotFoundError(
        absl::StrCat(folder, ": neither a published checkpoint (manifest.json) nor a GPT-2 folder (config.json)"));
  }
  ASSIGN_OR_RETURN(loaded->tokenizer_, TokenizerOfModel(folder, loaded->spec_));
  BackendOptions options;
  options.threads = threads;
  ASSIGN_OR_RETURN(loaded->backend_, MakeBackend(options));
  ASSIGN_OR_RETURN(loaded->model_, MakeModel(loaded->spec_, loaded->backend_.get()));
  const uint64_t size = loaded->model_->space().size();
  const auto values = absl::MakeSpan(loaded->model_->parameters(), size);
  RETURN_IF_ERROR(checkpoint != nullptr ? checkpoint->Read("value", 0, values) : exported->Read(0, values));
  loaded->model_->ParametersChanged({0, size});
  return loaded;
}

absl::StatusOr<std::vector<float>> LoadedModel::Logits(const std::vector<int32_t>& tokens) {
  if (!spec_.has_gpt2()) return absl::UnimplementedError("only models of tokens (model.gpt2) can be sampled");
  if (tokens.empty()) return absl::InvalidArgumentError("a prompt of at least one token is expected, found none");
  for (int32_t token : tokens) {
    if (token < 0 || static_cast<uint32_t>(token) >= spec_.gpt2().vocabulary()) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " is outside the model's vocabulary of ", spec_.gpt2().vocabulary()));
    }
  }
  const size_t context = spec_.gpt2().context();
  const size_t skip = tokens.size() > context ? tokens.size() - context : 0;
  return model_->NextLogits(std::vector<int32_t>(tokens.begin() + skip, tokens.end()));
}

int32_t DrawToken(const std::vector<float>& logits, double temperature, double u) {
  size_t best = 0;
  bool found = false;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i]) && (!found || logits[i] > logits[best])) {
      best = i;
      found = true;
    }
  }
  if (!found || temperature <= 0) return static_cast<int32_t>(best);
  const auto share = [&](size_t i) {
    return std::isfinite(logits[i]) ? std::exp((double{logits[i]} - logits[best]) / temperature) : 0.0;
  };
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) total += share(i);
  double rest = u * total;
  size_t last = best;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double part = share(i);
    if (part <= 0) continue;
    last = i;
    rest -= part;
    if (rest < 0) break;
  }
  return static_cast<int32_t>(last);
}

int32_t DrawToken(const std::vector<float>& logits, const SampleOptions& options, double u) {
  const bool all = options.top_k <= 0 && options.top_p >= 1;
  if (all || options.temperature <= 0) return DrawToken(logits, options.temperature, u);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) tokens.push_back(static_cast<int32_t>(i));
  }
  if (tokens.empty()) return 0;
  std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < tokens.size()) tokens.resize(options.top_k);
  std::vector<double> shares;
  double total = 0;
  for (const int32_t token : tokens) {
    shares.push_back(std::exp((double{logits[token]} - logits[tokens[0]]) / options.temperature));
    total += shares.back();
  }
  size_t kept = 0;
  double sum = 0;
  while (kept < shares.size() && (kept == 0 || sum < options.top_p * total)) sum += shares[kept++];
  double rest = u * sum;
  for (size_t i = 0; i < kept; ++i) {
    rest -= shares[i];
    if (rest < 0) return tokens[i];
  }
  return tokens[kept - 1];
}

absl::Status Sample(LoadedModel* model, std::vector<int32_t> prompt, const SampleOptions& options,
                    const std::function<bool(int32_t)>& emit) {
  const uint64_t key = StreamKey(options.seed, "sample");
  for (int64_t i = 0; i < options.tokens; ++i) {
    ASSIGN_OR_RETURN(const std::vector<float> logits, model->Logits(prompt));
    const auto words = Philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), 0, 0},
                                  {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
    const double u = static_cast<double>((uint64_t{words[0]} << 32 | words[1]) >> 11) * 0x1.0p-53;
    prompt.push_back(DrawToken(logits, options, u));
    if (!emit(prompt.back())) break;
  }
  return absl::OkStatus();
}

}  // namespace sluice
