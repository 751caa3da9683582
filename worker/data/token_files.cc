#include "worker/data/token_files.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/file_list.h"
#include "worker/data/sources.h"
#include "worker/data/token_blocks.h"

namespace sluice {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr size_t kHeaderBytes = 1024;
constexpr uint32_t kGpt2Magic = 20240520, kGpt2Version = 1;
constexpr uint32_t kLlama3Magic = 20240801, kLlama3Version = 7;
constexpr uint32_t kGpt2Vocabulary = 50257;

// llm.c's other files. All these numbers, read as two uint16, begin with one that is no token of GPT-2.
const char* OtherFile(uint32_t magic) {
  switch (magic) {
    case 20240326:
      return "a model";
    case 20240327:
      return "a debugging state";
    case 20240328:
      return "a tokenizer";
    case 20240522:
      return "an evaluation set";
    case 20240527:
      return "an optimizer state";
    default:
      return nullptr;
  }
}

struct FileLayout {
  size_t first = 0;  // byte of the first token
  size_t unit = 2;   // bytes of a token
  bool gpt2 = false;
};

absl::StatusOr<FileLayout> FileLayoutOf(const std::string& path, const std::string& bytes) {
  const auto fault = [&path](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what...));
  };
  uint32_t head[3] = {};
  memcpy(head, bytes.data(), std::min(bytes.size(), sizeof(head)));
  if (const char* other = OtherFile(head[0]); other != nullptr && bytes.size() >= 4) {
    return fault("this is ", other, " of llm.c (magic ", head[0], " at byte offset 0), not tokens (magic ", kGpt2Magic,
                 ")");
  }
  if (head[0] != kGpt2Magic && head[0] != kLlama3Magic) {
    if (bytes.size() % 2 == 0) return FileLayout{};
    return fault("odd size of ", bytes.size(),
                 " bytes; tokens are 2 bytes each (little-endian uint16, no header): the file is cut off or of another "
                 "format");
  }
  FileLayout layout;
  layout.first = kHeaderBytes;
  layout.gpt2 = head[0] == kGpt2Magic;
  layout.unit = layout.gpt2 ? 2 : 4;
  if (bytes.size() < kHeaderBytes) {
    return fault("begins as a token file of llm.c (magic ", head[0], "), but has ", bytes.size(),
                 " bytes, less than its header's 1024: the file is cut off");
  }
  const uint32_t version = layout.gpt2 ? kGpt2Version : kLlama3Version;
  if (head[1] != version) {
    return fault("a token file of llm.c (magic ", head[0], ") of version ", head[1],
                 " at byte offset 4; known is version ", version);
  }
  const uint64_t expected = kHeaderBytes + uint64_t{head[2]} * layout.unit;
  if (bytes.size() != expected) {
    return fault("the header (llm.c, magic ", head[0], ") says ", head[2], " tokens of ", layout.unit,
                 " bytes at byte offset 8, which makes a file of ", expected, " bytes, but it has ", bytes.size(), ": ",
                 bytes.size() < expected ? "the file is cut off" : "something follows the tokens");
  }
  return layout;
}

template <typename Unit>
std::vector<Unit> CopyTokens(const std::string& bytes, size_t first) {
  std::vector<Unit> tokens((bytes.size() - first) / sizeof(Unit));
  if (!tokens.empty()) memcpy(tokens.data(), bytes.data() + first, tokens.size() * sizeof(Unit));
  return tokens;
}

absl::StatusOr<std::string> ReadChecked(const std::string& path) {
  ASSIGN_OR_RETURN(std::string bytes, ReadDataFile(path));
  RETURN_IF_ERROR(CheckNotPlaceholder(path, bytes));
  return bytes;
}

}  // namespace

template <typename Unit>
absl::Status ReadTokenFile(const std::string& path, uint32_t vocabulary, std::vector<Unit>* tokens) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadChecked(path));
  ASSIGN_OR_RETURN(const FileLayout layout, FileLayoutOf(path, bytes));
  const auto append = [&]<typename Found>(const std::vector<Found>& found) {
    RETURN_IF_ERROR(CheckInside<Found>(path, found, layout.first, vocabulary));
    tokens->insert(tokens->end(), found.begin(), found.end());
    return absl::OkStatus();
  };
  return layout.unit == 2 ? append(CopyTokens<uint16_t>(bytes, layout.first))
                          : append(CopyTokens<uint32_t>(bytes, layout.first));
}

template absl::Status ReadTokenFile(const std::string&, uint32_t, std::vector<uint16_t>*);
template absl::Status ReadTokenFile(const std::string&, uint32_t, std::vector<uint32_t>*);

absl::StatusOr<TokenFileSummary> SummarizeTokenFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadChecked(path));
  ASSIGN_OR_RETURN(const FileLayout layout, FileLayoutOf(path, bytes));
  TokenFileSummary summary;
  uint64_t most = layout.gpt2 ? kGpt2Vocabulary : 2;
  const auto raise = [&](const auto& tokens) {
    summary.tokens = tokens.size();
    for (const uint64_t token : tokens) most = std::max(most, token + 1);
  };
  layout.unit == 2 ? raise(CopyTokens<uint16_t>(bytes, layout.first))
                   : raise(CopyTokens<uint32_t>(bytes, layout.first));
  if (most > (1u << 24)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has the token ", most - 1, "; a vocabulary ends at 2^24: is it a file of tokens?"));
  }
  summary.vocabulary = static_cast<uint32_t>(most);
  return summary;
}

absl::StatusOr<std::shared_ptr<const Dataset>> OpenTokens(const v1::JobSpec& spec, const std::string& data_root) {
  RETURN_IF_ERROR(CheckTokenModel(spec, "tokens"));
  const uint32_t vocabulary = spec.model().gpt2().vocabulary();
  if (vocabulary == 0) {
    return absl::InvalidArgumentError(
        "model.gpt2.vocabulary: needed with data.tokens, which does not say it; found none");
  }
  const auto open = [&]<typename Unit>(Unit) -> absl::StatusOr<std::shared_ptr<const Dataset>> {
    const auto read = [&](const std::string& path,
                          const std::string& field) -> absl::StatusOr<std::unique_ptr<TokenPart<Unit>>> {
      ASSIGN_OR_RETURN(const std::vector<std::string> files, FindDataFiles(path, data_root, field));
      auto part = std::make_unique<TokenPart<Unit>>();
      part->path = files.size() == 1 ? files[0] : path;
      for (const std::string& file : files) RETURN_IF_ERROR(ReadTokenFile<Unit>(file, vocabulary, &part->tokens));
      return part;
    };
    const v1::TokenSource& source = spec.data().tokens();
    ASSIGN_OR_RETURN(auto train, read(source.path(), "data.tokens.path"));
    std::unique_ptr<TokenPart<Unit>> validation;
    if (!source.validation_path().empty()) {
      ASSIGN_OR_RETURN(validation, read(source.validation_path(), "data.tokens.validation_path"));
    }
    return MakeTokenBlocks<Unit>(spec, 0, "tokens", std::move(train), std::move(validation));
  };
  return vocabulary <= 65536 ? open(uint16_t{}) : open(uint32_t{});
}

}  // namespace sluice
