// Tokenizers of models on disk, and drawn tokens as text.
#ifndef SLUICE_CLIENT_TOKENIZER_H_
#define SLUICE_CLIENT_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/utf8.h"
#include "sluice/v1/job.pb.h"
#include "worker/data/gpt2_bpe.h"

namespace sluice {

// A tokenizer and its two files' contents. `bpe` is nullptr for a model whose tokens nobody here can read; `why` says
// why not.
struct ModelTokenizer {
  std::shared_ptr<const Gpt2Bpe> bpe;
  std::string vocab, merges;
  std::string why;
};

// Token = byte.
ModelTokenizer ByteTokenizer();

// vocab.json and merges.txt, or encoder.json and vocab.bpe, in a folder. NOT_FOUND: neither; INVALID_ARGUMENT:
// malformed.
absl::StatusOr<ModelTokenizer> TokenizerInFolder(const std::string& folder);

// Of a checkpoint, by the spec in its manifest: bytes, the files that the spec names where they can be read here, or
// none.
ModelTokenizer TokenizerOfSpec(const v1::JobSpec& spec);

// Of an exported folder: its files, else bytes where the vocabulary is 256, else none. Malformed files are an error.
absl::StatusOr<ModelTokenizer> TokenizerOfExport(const std::string& folder, uint32_t vocabulary);

// Of a published checkpoint or an exported folder that holds `model`, by the two functions above.
absl::StatusOr<ModelTokenizer> TokenizerOfModel(const std::string& folder, const v1::ModelSpec& model);

// Writes vocab.json, merges.txt and tokenizer_config.json, as Hugging Face's GPT2Tokenizer reads them, into an exported
// folder. Nothing where there is no tokenizer.
absl::Status ExportTokenizer(const ModelTokenizer& tokenizer, uint32_t context, const std::string& folder);

// Drawn tokens become valid UTF-8: a character that is not complete yet is held back, what is none becomes U+FFFD. For
// a terminal control characters become '?': they could set it up in strange ways. Not thread-safe.
class TokenText {
 public:
  TokenText(std::shared_ptr<const Gpt2Bpe> bpe, bool terminal) : bpe_(std::move(bpe)), terminal_(terminal) {}
  // The text that is complete now.
  std::string Push(int32_t token);

 private:
  const std::shared_ptr<const Gpt2Bpe> bpe_;
  const bool terminal_;
  Utf8Stream stream_;
};

}  // namespace sluice

#endif  // SLUICE_CLIENT_TOKENIZER_H_
