// export, sample: what a trained model is good for.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/byte_size.h"
#include "client/commands.h"
#include "client/model_files.h"
#include "client/spec_loading.h"
#include "common/checkpoint.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// The folder that JOB|DIR means: the folder itself, the newest checkpoint in it, or the job's newest one.
absl::StatusOr<std::string> ModelFolder(const std::string& what, const Args& args,
                                        const ClientEnvironment& environment) {
  if (Exists(fs::path(what) / "config.json")) return what;
  if (Exists(what)) return CheckpointFolder(what);
  if (what.find('/') != std::string::npos) {
    return absl::NotFoundError(absl::StrCat(what, ": no such folder, and no job's id"));
  }
  ASSIGN_OR_RETURN(const auto client, Connect(args, environment));
  ASSIGN_OR_RETURN(const v1::JobStatus job, client->GetJob(what));
  if (!job.has_last_checkpoint()) {
    return absl::FailedPreconditionError(absl::StrCat(job.job_id(),
                                                      " has published no checkpoint yet; `sluice checkpoint ",
                                                      job.job_id(), "` makes one while it runs"));
  }
  if (!Exists(job.last_checkpoint().directory())) {
    return absl::NotFoundError(absl::StrCat(job.job_id(), ": its newest checkpoint ", job.last_checkpoint().directory(),
                                            " cannot be seen from this machine; run this where the folder is mounted"));
  }
  return job.last_checkpoint().directory();
}

// By --tokenizer, else the model's own.
absl::StatusOr<ModelTokenizer> TokenizerFor(const Args& args, const LoadedModel& model) {
  return args.Has("tokenizer") ? TokenizerInFolder(args.String("tokenizer")) : model.tokenizer();
}

absl::StatusOr<std::vector<int32_t>> Prompt(const Args& args, const ModelTokenizer& tokenizer) {
  std::vector<int32_t> prompt;
  if (args.Has("tokens")) {
    if (args.Has("prompt")) return absl::InvalidArgumentError("--prompt and --tokens exclude each other");
    const std::string ids = args.String("tokens");
    for (absl::string_view word : absl::StrSplit(ids, absl::ByAnyChar(" ,\t\n"), absl::SkipEmpty())) {
      int32_t id = 0;
      if (!absl::SimpleAtoi(word, &id)) {
        return absl::InvalidArgumentError(absl::StrCat("--tokens: a token id expected, found '", word, "'"));
      }
      prompt.push_back(id);
    }
    return prompt;
  }
  if (tokenizer.bpe == nullptr) {
    if (args.Has("prompt")) {
      return absl::InvalidArgumentError(
          absl::StrCat("--prompt needs a tokenizer, and ", tokenizer.why,
                       "; name the folder of its files with --tokenizer, or give token ids with --tokens"));
    }
    return std::vector<int32_t>{0};
  }
  const std::string text = args.String("prompt", "\n");
  return tokenizer.bpe->Encode(text.empty() ? "\n" : text);
}

absl::Status SampleTo(const Args& args, const ClientEnvironment& environment) {
  ASSIGN_OR_RETURN(const std::string folder, ModelFolder(args.argument(0), args, environment));
  ASSIGN_OR_RETURN(const auto model, LoadedModel::Load(folder, static_cast<int>(args.Integer("threads", 1))));
  ASSIGN_OR_RETURN(const ModelTokenizer tokenizer, TokenizerFor(args, *model));
  ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, Prompt(args, tokenizer));
  std::ostream& out = *environment.out;
  if (args.Bool("logits")) {
    ASSIGN_OR_RETURN(const std::vector<float> logits, model->Logits(prompt));
    out << nlohmann::json(logits).dump() << std::endl;
    return absl::OkStatus();
  }
  SampleOptions options;
  options.tokens = args.Integer("bytes", 300);
  options.temperature = args.Number("temperature", 0.8);
  options.seed = static_cast<uint64_t>(args.Integer("seed", 1));
  options.top_k = args.Integer("top_k", 0);
  options.top_p = args.Number("top_p", 1);
  const bool text = tokenizer.bpe != nullptr;
  TokenText printed(tokenizer.bpe, environment.out_is_terminal);
  if (text) out << args.String("prompt");
  bool first = true;
  RETURN_IF_ERROR(Sample(model.get(), prompt, options, [&](int32_t token) {
    if (text) {
      out << printed.Push(token);
    } else {
      out << (first ? "" : " ") << token;
    }
    first = false;
    if (environment.out_is_terminal) out << std::flush;
    return environment.interrupt->count() == 0;
  }));
  out << std::endl;
  return environment.interrupt->count() == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
}

// "" where the exported folder has one or needs none.
std::string WhyWithoutTokenizer(const std::string& folder, const std::string& target) {
  const auto model = ReadGpt2Config(target);
  if (!model.ok() || Exists(fs::path(target) / "vocab.json")) return "";
  v1::ModelSpec spec;
  *spec.mutable_gpt2() = *model;
  const auto tokenizer = TokenizerOfModel(folder, spec);
  return tokenizer.ok() ? tokenizer->why : std::string(tokenizer.status().message());
}

absl::StatusOr<std::string> ExportTo(const Args& args, const ClientEnvironment& environment) {
  Gpt2ExportOptions options;
  const auto format = FloatFormatOf(absl::AsciiStrToUpper(args.String("dtype", "F32")));
  if (!format.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("--dtype ", args.String("dtype"), ": expected F32, BF16 or F16"));
  }
  options.format = *format;
  if (args.Has("max_shard_size")) {
    const auto bytes = ParseByteSize(args.String("max_shard_size"));
    if (!bytes.ok()) return Annotate(bytes.status(), "--max_shard_size");
    options.max_shard_bytes = *bytes;
  }
  ASSIGN_OR_RETURN(const std::string folder, ModelFolder(args.argument(0), args, environment));
  RETURN_IF_ERROR(ExportModel(folder, args.argument(1), options, args.String("tokenizer")));
  return folder;
}

}  // namespace

int RunExport(const Args& args, const ClientEnvironment& environment) {
  const auto folder = ExportTo(args, environment);
  if (!folder.ok()) return Report(folder.status(), environment);
  *environment.out << "exported " << *folder << " to " << args.argument(1) << std::endl;
  if (const std::string why = WhyWithoutTokenizer(*folder, args.argument(1)); !why.empty()) {
    *environment.err << "sluice: there is no tokenizer in " << args.argument(1) << ": " << why
                     << "; export with --tokenizer FOLDER adds one" << std::endl;
  }
  return kExitOk;
}

int RunSample(const Args& args, const ClientEnvironment& environment) {
  const absl::Status status = SampleTo(args, environment);
  return status.ok() ? kExitOk : Report(status, environment);
}

}  // namespace sluice
