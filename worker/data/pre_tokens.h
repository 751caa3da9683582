// How GPT-2 cuts text before byte-pair encoding: the regular expression
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// over Unicode letters (L*), numbers (N*) and White_Space, written out by hand. Bytes that are no UTF-8 count as one
// character that is none of these, so that every byte is part of exactly one pre-token. Pure; thread-safe.
#ifndef SLUICE_WORKER_DATA_PRE_TOKENS_H_
#define SLUICE_WORKER_DATA_PRE_TOKENS_H_

#include <cstddef>
#include <string_view>

namespace sluice {

// The end of the pre-token that begins at text[at], at < text.size(); more than `at`.
size_t PreTokenEnd(std::string_view text, size_t at);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_PRE_TOKENS_H_
