// Files of tokens: nanoGPT's (little-endian uint16, no header) and llm.c's (a header that says what it is).
#ifndef SLUICE_WORKER_DATA_TOKEN_FILES_H_
#define SLUICE_WORKER_DATA_TOKEN_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// Appends the tokens of a file. By its first number (llm.c's magic) it is
// - llm.c's 20240520, version 1: 256 int32, the third one the number of uint16 tokens that follow;
// - llm.c's 20240801, version 7: the same with uint32 tokens (Llama 3);
// - any other file of llm.c: INVALID_ARGUMENT that says which;
// - else nanoGPT's.
// INVALID_ARGUMENT: a size that the header contradicts, an odd one, a token that is not below `vocabulary` (which must
// fit Unit: at most 65,536 with uint16_t). Unit: uint16_t or uint32_t.
template <typename Unit>
absl::Status ReadTokenFile(const std::string& path, uint32_t vocabulary, std::vector<Unit>* tokens);

struct TokenFileSummary {
  uint64_t tokens = 0;
  // The smallest vocabulary that the file fits: the largest token and 1, at least 2; with llm.c's magic 20240520, whose
  // tokens are GPT-2's, at least 50,257.
  uint32_t vocabulary = 0;
};
absl::StatusOr<TokenFileSummary> SummarizeTokenFile(const std::string& path);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_TOKEN_FILES_H_
