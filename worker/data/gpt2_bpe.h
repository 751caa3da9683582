// GPT-2's byte-level byte-pair encoding: vocab.json (also named encoder.json) and merges.txt (vocab.bpe).
//
// Text is cut into pre-tokens (pre_tokens.h); each begins as its bytes and grows by merging, as long as any two
// neighbours have a line in merges.txt, all places of the pair whose line comes first. Every byte string has tokens and
// comes back from them unchanged, also one that is no UTF-8. Special tokens ("<|endoftext|>") in a text are text;
// Find() gives their numbers.
#ifndef SLUICE_WORKER_DATA_GPT2_BPE_H_
#define SLUICE_WORKER_DATA_GPT2_BPE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

// Immutable after loading; thread-safe.
class Gpt2Bpe {
 public:
  // INVALID_ARGUMENT names file, line and cause; otherwise as ReadDataFile.
  static absl::StatusOr<std::shared_ptr<const Gpt2Bpe>> Load(const std::string& vocab_path,
                                                             const std::string& merges_path);
  // The same from the files' contents; the paths are for messages.
  static absl::StatusOr<std::shared_ptr<const Gpt2Bpe>> Parse(std::string_view vocab, const std::string& vocab_path,
                                                              std::string_view merges, const std::string& merges_path);
  // Token = byte: a vocabulary of 256 without merges.
  static std::shared_ptr<const Gpt2Bpe> Bytes();

  uint32_t vocabulary() const { return static_cast<uint32_t>(bytes_.size()); }
  // The token whose bytes are these, or -1.
  int32_t Find(std::string_view bytes) const;
  // The bytes of a token of the vocabulary.
  const std::string& bytes(int32_t token) const { return bytes_[token]; }
  // The bytes of tokens end to end; those outside the vocabulary have none.
  std::string Decode(absl::Span<const int32_t> tokens) const;
  std::vector<int32_t> Encode(std::string_view text) const;  // one text; Gpt2Encoder is faster for many

  // vocab.json and merges.txt that Parse, and Hugging Face's GPT2Tokenizer, take for this tokenizer.
  std::string VocabText() const;
  std::string MergesText() const;

 private:
  friend class Gpt2Encoder;
  struct Merge {
    uint32_t rank = 0;   // line order
    uint32_t token = 0;  // the two together
  };
  static uint64_t Pair(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }
  absl::Status ReadVocab(std::string_view text, const std::string& path);
  absl::Status ReadMerges(std::string_view text, const std::string& path);

  std::vector<std::string> bytes_;                          // by token
  absl::flat_hash_map<std::string, uint32_t> tokens_;       // by bytes
  uint32_t byte_tokens_[256] = {};                          // the token of each single byte
  absl::flat_hash_map<uint64_t, Merge> merges_;             // by Pair
  std::vector<std::pair<uint32_t, uint32_t>> merge_lines_;  // by rank
};

// Encodes text after text, remembering pre-tokens (up to about 100 MB of them). Not thread-safe.
class Gpt2Encoder {
 public:
  explicit Gpt2Encoder(std::shared_ptr<const Gpt2Bpe> bpe) : bpe_(std::move(bpe)) {}

  // Appends the tokens of `text`. Blocks for about 30 ns a byte; any pre-token takes O(n log n).
  template <typename Unit>
  void Encode(std::string_view text, std::vector<Unit>* out);

 private:
  struct Place {
    uint64_t begin = 0;
    uint32_t count = 0;
  };
  void EncodeWord(std::string_view word);  // into symbols_
  void MergeShort();                       // symbols_, quadratic in its length
  void MergeLong();                        // symbols_, by a heap
  const Gpt2Bpe::Merge* Find(uint32_t left, uint32_t right) const {
    const auto found = bpe_->merges_.find(Gpt2Bpe::Pair(left, right));
    return found == bpe_->merges_.end() ? nullptr : &found->second;
  }

  const std::shared_ptr<const Gpt2Bpe> bpe_;
  std::vector<uint32_t> symbols_, ranks_;
  absl::flat_hash_map<std::string, Place> known_;  // pre-tokens whose tokens lie in kept_
  std::vector<uint32_t> kept_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_GPT2_BPE_H_
