// Text: bytes as they are, or tokens of GPT-2's byte-pair encoding. Documents follow one another in the order of the
// files, each after a separator.
#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/utf8.h"
#include "worker/data/file.h"
#include "worker/data/file_list.h"
#include "worker/data/gpt2_bpe.h"
#include "worker/data/sources.h"
#include "worker/data/token_blocks.h"
#include "worker/data/token_cache.h"

namespace sluice {
namespace {

constexpr char kEndOfText[] = "<|endoftext|>";

// What a file that is no UTF-8 may be instead, and what to do.
std::string Advice(std::string_view bytes) {
  const auto begins = [&](std::string_view head) { return bytes.substr(0, head.size()) == head; };
  if (begins("\xff\xfe") || begins("\xfe\xff")) return "this looks like UTF-16: convert it (iconv -f UTF-16 -t UTF-8)";
  if (begins("\x1f\x8b")) return "this is a gzip file: unpack it (gunzip)";
  if (begins("PK\x03\x04")) return "this is a zip archive: unpack it";
  if (begins("%PDF")) return "this is a PDF, not a text";
  return "mend or convert the file (iconv), or set data.text.invalid_utf8: keep to train on its bytes as they are";
}

bool IsPageByName(const std::string& path) {
  const std::string lower = absl::AsciiStrToLower(path);
  return absl::EndsWith(lower, ".html") || absl::EndsWith(lower, ".htm") || absl::EndsWith(lower, ".xhtml") ||
         absl::EndsWith(lower, ".xml") || absl::EndsWith(lower, ".svg");
}

absl::StatusOr<std::string> ReadText(const std::string& path, const v1::TextSource& source) {
  ASSIGN_OR_RETURN(std::string bytes, ReadDataFile(path));
  if (!IsPageByName(path)) RETURN_IF_ERROR(CheckNotPlaceholder(path, bytes));
  if (source.invalid_utf8() == v1::TextSource::KEEP) return bytes;
  const size_t bad = FirstInvalidUtf8(bytes);
  if (bad == std::string::npos) return bytes;
  const auto line = 1 + std::count(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(bad), '\n');
  return absl::InvalidArgumentError(absl::StrCat(path, ":", line, ": not UTF-8 at byte offset ", bad, ": ",
                                                 DescribeInvalidUtf8(bytes, bad), "; ", Advice(bytes)));
}

// Calls visit(document) for the documents of a file; they hold all of its bytes.
template <typename Visit>
void ForEachDocument(std::string_view text, v1::TextSource::Documents documents, Visit visit) {
  while (!text.empty()) {
    size_t end = text.size();
    if (documents == v1::TextSource::BLANK_LINE) {
      const size_t blank = text.find("\n\n");
      if (blank != std::string_view::npos) end = blank + 2;
    }
    visit(text.substr(0, end));
    text.remove_prefix(end);
  }
}

absl::Status NothingToTrainOn(const std::vector<std::string>& files) {
  if (files.size() == 1) return absl::InvalidArgumentError(files[0] + ": the file is empty, nothing to train on");
  return absl::InvalidArgumentError(
      absl::StrCat(files[0], " and ", files.size() - 1, " more files: all are empty, nothing to train on"));
}

absl::StatusOr<std::vector<uint8_t>> ReadBytes(const std::vector<std::string>& files, const v1::TextSource& source,
                                               uint32_t vocabulary) {
  std::vector<uint8_t> all;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const std::string bytes, ReadText(file, source));
    if (vocabulary != 0) {
      const auto* first = reinterpret_cast<const uint8_t*>(bytes.data());
      RETURN_IF_ERROR(CheckInside<uint8_t>(file, absl::MakeConstSpan(first, bytes.size()), 0, vocabulary));
    }
    if (source.separator().empty()) {
      all.insert(all.end(), bytes.begin(), bytes.end());
      continue;
    }
    ForEachDocument(bytes, source.documents(), [&](std::string_view document) {
      all.insert(all.end(), source.separator().begin(), source.separator().end());
      all.insert(all.end(), document.begin(), document.end());
    });
  }
  if (all.empty()) return NothingToTrainOn(files);
  return all;
}

// Everything that turns files into tokens.
struct Tokenizing {
  v1::TextSource source;
  std::string vocab, merges;  // the files' contents
  std::shared_ptr<const Gpt2Bpe> bpe;
  int32_t separator = -1;  // before every document; -1: none
};

absl::StatusOr<Tokenizing> PrepareTokenizing(const v1::TextSource& source, const std::string& data_root) {
  const std::string field = "data.text.tokenizer.gpt2_bpe";
  const v1::Gpt2BpeTokenizer& files = source.tokenizer().gpt2_bpe();
  ASSIGN_OR_RETURN(const std::string vocab, ResolveDataPath(files.vocab(), data_root, field + ".vocab"));
  ASSIGN_OR_RETURN(const std::string merges, ResolveDataPath(files.merges(), data_root, field + ".merges"));
  Tokenizing how;
  how.source = source;
  ASSIGN_OR_RETURN(how.vocab, ReadDataFile(vocab));
  ASSIGN_OR_RETURN(how.merges, ReadDataFile(merges));
  ASSIGN_OR_RETURN(how.bpe, Gpt2Bpe::Parse(how.vocab, vocab, how.merges, merges));
  const std::string separator = source.has_separator() ? source.separator() : kEndOfText;
  if (!separator.empty()) how.separator = how.bpe->Find(separator);
  if (how.separator < 0 && source.has_separator() && !separator.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("data.text.separator: \"", separator, "\" is not one token of ",
                                                   vocab, "; name one that is, or \"\" for none"));
  }
  return how;
}

template <typename Unit>
absl::StatusOr<std::vector<Unit>> Tokenize(const std::vector<std::string>& files, const Tokenizing& how,
                                           const TokenCache& cache) {
  const auto begin_hash = [&](ContentHash* hash) {
    hash->Add("documents, tokens of GPT-2's BPE, 1");
    hash->Add(absl::StrCat(sizeof(Unit), " ", static_cast<int>(how.source.documents()), " ", how.separator));
    hash->Add(how.vocab);
    hash->Add(how.merges);
  };
  if (cache.enabled()) {
    ContentHash hash;
    begin_hash(&hash);
    for (const std::string& file : files) {
      ASSIGN_OR_RETURN(const std::string text, ReadText(file, how.source));
      hash.Add(text);
    }
    auto found = cache.Find<Unit>(hash.Finish());
    if (found.ok()) return found;
    if (!absl::IsNotFound(found.status())) LOG_INFO("tokenizing again: {}", std::string(found.status().message()));
  }
  // The files are read once more, and what is stored is named after what was read now.
  ContentHash hash;
  begin_hash(&hash);
  std::vector<Unit> tokens;
  Gpt2Encoder encoder(how.bpe);
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const std::string text, ReadText(file, how.source));
    hash.Add(text);
    ForEachDocument(text, how.source.documents(), [&](std::string_view document) {
      if (how.separator >= 0) tokens.push_back(static_cast<Unit>(how.separator));
      encoder.Encode(document, &tokens);
    });
  }
  if (tokens.empty()) return NothingToTrainOn(files);
  // Training does not need the stored copy.
  if (const absl::Status stored = cache.Store(hash.Finish(), tokens); !stored.ok()) {
    LOG_INFO("tokens are not kept: {}", std::string(stored.message()));
  }
  return tokens;
}

// make(files) returns StatusOr<vector<Unit>>.
template <typename Unit, typename Make>
absl::StatusOr<std::shared_ptr<const Dataset>> OpenParts(const v1::JobSpec& spec, const std::string& data_root,
                                                         uint32_t vocabulary, const std::string& unit, Make make) {
  const auto open = [&](const std::string& path,
                        const std::string& field) -> absl::StatusOr<std::unique_ptr<TokenPart<Unit>>> {
    ASSIGN_OR_RETURN(const std::vector<std::string> files, FindDataFiles(path, data_root, field));
    ASSIGN_OR_RETURN(std::vector<Unit> tokens, make(files));
    return std::make_unique<TokenPart<Unit>>(TokenPart<Unit>{files.size() == 1 ? files[0] : path, std::move(tokens)});
  };
  const v1::TextSource& source = spec.data().text();
  ASSIGN_OR_RETURN(auto train, open(source.path(), "data.text.path"));
  std::unique_ptr<TokenPart<Unit>> validation;
  if (!source.validation_path().empty()) {
    ASSIGN_OR_RETURN(validation, open(source.validation_path(), "data.text.validation_path"));
  }
  return MakeTokenBlocks<Unit>(spec, vocabulary, unit, std::move(train), std::move(validation));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Dataset>> OpenText(const v1::JobSpec& spec, const std::string& data_root,
                                                        const std::string& cache_folder) {
  RETURN_IF_ERROR(CheckTokenModel(spec, "text"));
  const v1::TextSource& source = spec.data().text();
  const uint32_t model = spec.model().gpt2().vocabulary();
  if (!source.tokenizer().has_gpt2_bpe()) {
    return OpenParts<uint8_t>(spec, data_root, 256, "bytes",
                              [&](const std::vector<std::string>& files) { return ReadBytes(files, source, model); });
  }
  ASSIGN_OR_RETURN(const Tokenizing how, PrepareTokenizing(source, data_root));
  const uint32_t vocabulary = how.bpe->vocabulary();
  if (model != 0 && model < vocabulary) {
    return absl::InvalidArgumentError(absl::StrCat("model.gpt2.vocabulary: found ", model, ", but the tokenizer ",
                                                   source.tokenizer().gpt2_bpe().vocab(), " has ", vocabulary,
                                                   " tokens; set it to that or more, or leave it out"));
  }
  const TokenCache cache(cache_folder);
  const auto open = [&]<typename Unit>(Unit) {
    return OpenParts<Unit>(spec, data_root, vocabulary, "tokens",
                           [&](const std::vector<std::string>& files) { return Tokenize<Unit>(files, how, cache); });
  };
  return vocabulary <= 65536 ? open(uint16_t{}) : open(uint32_t{});
}

}  // namespace sluice
