#include "client/default_token_spec.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/spec_loading.h"
#include "common/status_macros.h"
#include "worker/data/file_list.h"
#include "worker/data/token_files.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

struct Row {
  uint64_t below;  // tokens
  uint32_t layers, heads, width, context, batch;
  uint64_t rounds;
};
constexpr Row kRows[] = {
    {30'000, 2, 2, 64, 32, 8, 600},
    {5'000'000, 4, 4, 128, 64, 12, 2000},
    {UINT64_MAX, 6, 6, 192, 128, 16, 4000},
};

// The last part of the path that is a name: of "books/*.txt" it is books.
std::string NameOf(const std::string& path) {
  fs::path at = fs::path(path).lexically_normal();
  while (!at.empty() && (at.filename().empty() ||
                         at.string().find_first_of("*?[", at.parent_path().string().size()) != std::string::npos)) {
    const fs::path parent = at.parent_path();
    if (parent == at) break;
    at = parent;
  }
  return JobNameFrom(fs::is_directory(at) ? at.filename().string() : at.stem().string());
}

std::string InFiles(size_t files) { return absl::StrCat(" in ", files, files == 1 ? " file" : " files"); }

}  // namespace

v1::JobSpec DefaultTokenSpec(uint64_t tokens, uint32_t vocabulary) {
  const Row& row =
      *std::find_if(std::begin(kRows), std::end(kRows) - 1, [&](const Row& r) { return tokens < r.below; });
  const uint32_t context = static_cast<uint32_t>(std::clamp<uint64_t>(tokens / 20, 1, row.context));
  const uint64_t rounds = vocabulary > 4096 ? std::min<uint64_t>(row.rounds, 1000) : row.rounds;
  v1::JobSpec spec;
  v1::Gpt2Spec* gpt2 = spec.mutable_model()->mutable_gpt2();
  gpt2->set_layers(row.layers);
  gpt2->set_heads(row.heads);
  gpt2->set_width(row.width);
  gpt2->set_context(context);
  spec.mutable_train()->set_rounds(rounds);
  spec.mutable_train()->set_batch(row.batch);
  spec.mutable_train()->set_eval_samples(400);
  v1::AdamSpec* adamw = spec.mutable_optimizer()->mutable_adamw();
  adamw->set_learning_rate(1e-3);
  adamw->set_beta2(0.99);
  adamw->set_weight_decay(0.1);
  spec.mutable_optimizer()->set_clip_norm(1);
  v1::CosineSchedule* cosine = spec.mutable_optimizer()->mutable_schedule()->mutable_cosine();
  cosine->set_warmup_rounds(rounds / 20);
  cosine->set_final(1e-4);
  return spec;
}

absl::StatusOr<TokenDefaults> DefaultTextSpec(const std::string& path) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FindDataFiles(path, "", "--text"));
  uint64_t bytes = 0;
  for (const std::string& file : files) {
    std::error_code error;  // a file that cannot be read is reported when it is
    const uint64_t size = fs::file_size(file, error);
    if (!error) bytes += size;
  }
  TokenDefaults made;
  made.spec = DefaultTokenSpec(bytes, 256);
  made.spec.set_name(NameOf(path));
  made.spec.mutable_data()->mutable_text()->set_path(path);
  made.description = absl::StrCat(bytes, " bytes of text", InFiles(files.size()));
  return made;
}

absl::StatusOr<TokenDefaults> DefaultTokenFileSpec(const std::string& path) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FindDataFiles(path, "", "--tokens"));
  uint64_t tokens = 0;
  uint32_t vocabulary = 0;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const TokenFileSummary summary, SummarizeTokenFile(file));
    tokens += summary.tokens;
    vocabulary = std::max(vocabulary, summary.vocabulary);
  }
  TokenDefaults made;
  made.spec = DefaultTokenSpec(tokens, vocabulary);
  made.spec.set_name(NameOf(path));
  made.spec.mutable_model()->mutable_gpt2()->set_vocabulary(vocabulary);
  made.spec.mutable_data()->mutable_tokens()->set_path(path);
  made.description = absl::StrCat(tokens, " tokens of a vocabulary of ", vocabulary, InFiles(files.size()));
  return made;
}

}  // namespace sluice
