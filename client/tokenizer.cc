#include "client/tokenizer.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/file.h"
#include "common/status_macros.h"
#include "worker/data/file.h"

namespace sluice {
namespace {

constexpr uint32_t kBytes = 256;

absl::StatusOr<ModelTokenizer> TokenizerOfFiles(const std::string& vocab, const std::string& merges) {
  ModelTokenizer tokenizer;
  ASSIGN_OR_RETURN(tokenizer.vocab, ReadDataFile(vocab));
  ASSIGN_OR_RETURN(tokenizer.merges, ReadDataFile(merges));
  ASSIGN_OR_RETURN(tokenizer.bpe, Gpt2Bpe::Parse(tokenizer.vocab, vocab, tokenizer.merges, merges));
  return tokenizer;
}

// The names that Hugging Face and OpenAI gave the same two files.
constexpr const char* kNames[][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};

}  // namespace

ModelTokenizer ByteTokenizer() {
  ModelTokenizer tokenizer;
  tokenizer.bpe = Gpt2Bpe::Bytes();
  tokenizer.vocab = tokenizer.bpe->VocabText();
  tokenizer.merges = tokenizer.bpe->MergesText();
  return tokenizer;
}

absl::StatusOr<ModelTokenizer> TokenizerInFolder(const std::string& folder) {
  for (const auto& [vocab, merges] : kNames) {
    const std::string vocab_path = absl::StrCat(folder, "/", vocab);
    if (PathExists(vocab_path)) return TokenizerOfFiles(vocab_path, absl::StrCat(folder, "/", merges));
  }
  return absl::NotFoundError(
      absl::StrCat(folder, ": no tokenizer in it (vocab.json and merges.txt, or encoder.json and vocab.bpe)"));
}

ModelTokenizer TokenizerOfSpec(const v1::JobSpec& spec) {
  const v1::TokenizerSpec& asked = spec.data().text().tokenizer();
  if (asked.has_gpt2_bpe()) {
    auto tokenizer = TokenizerOfFiles(asked.gpt2_bpe().vocab(), asked.gpt2_bpe().merges());
    if (tokenizer.ok()) return *std::move(tokenizer);
    ModelTokenizer none;
    none.why = absl::StrCat("the job's tokenizer cannot be read here: ", std::string(tokenizer.status().message()));
    return none;
  }
  // Token files and rows of 256 tokens are taken for bytes too: nothing else says what they are.
  if (spec.data().has_text() || spec.model().gpt2().vocabulary() == kBytes) return ByteTokenizer();
  ModelTokenizer none;
  none.why = "the job was trained on token numbers, which nothing turns into text";
  return none;
}

absl::StatusOr<ModelTokenizer> TokenizerOfExport(const std::string& folder, uint32_t vocabulary) {
  auto tokenizer = TokenizerInFolder(folder);
  if (tokenizer.ok() || !absl::IsNotFound(tokenizer.status())) return tokenizer;
  if (vocabulary == kBytes) return ByteTokenizer();
  ModelTokenizer none;
  none.why = std::string(tokenizer.status().message());
  return none;
}

absl::StatusOr<ModelTokenizer> TokenizerOfModel(const std::string& folder, const v1::ModelSpec& model) {
  if (!PathExists(folder + "/manifest.json")) return TokenizerOfExport(folder, model.gpt2().vocabulary());
  ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder, /*verify=*/false));
  return TokenizerOfSpec(reader->manifest().spec());
}

absl::Status ExportTokenizer(const ModelTokenizer& tokenizer, uint32_t context, const std::string& folder) {
  if (tokenizer.bpe == nullptr) return absl::OkStatus();
  nlohmann::ordered_json config = {{"tokenizer_class", "GPT2Tokenizer"}, {"model_max_length", context}};
  const bool ends = tokenizer.bpe->Find("<|endoftext|>") >= 0;
  for (const char* token : {"bos_token", "eos_token", "unk_token"}) {
    // Where the vocabulary has no such token, the reader must not add one that the model does not know.
    config[token] = ends ? nlohmann::ordered_json("<|endoftext|>") : nlohmann::ordered_json(nullptr);
  }
  RETURN_IF_ERROR(WriteFileAtomically(folder + "/vocab.json", tokenizer.vocab));
  RETURN_IF_ERROR(WriteFileAtomically(folder + "/merges.txt", tokenizer.merges));
  return WriteFileAtomically(folder + "/tokenizer_config.json", config.dump(2) + "\n");
}

std::string TokenText::Push(int32_t token) {
  std::string text = stream_.Push(bpe_->Decode({token}));
  if (!terminal_) return text;
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character character = DecodeUtf8(text, at);
    const bool control = (character.point < 0x20 && character.point != '\n' && character.point != '\t') ||
                         (character.point >= 0x7f && character.point < 0xa0);
    control ? shown.push_back('?') : void(shown.append(text, at, character.bytes));
    at += character.bytes;
  }
  return shown;
}

}  // namespace sluice
