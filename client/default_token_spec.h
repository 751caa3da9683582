// Specs made from a text or token files alone, for those who have none yet.
#ifndef SLUICE_CLIENT_DEFAULT_TOKEN_SPEC_H_
#define SLUICE_CLIENT_DEFAULT_TOKEN_SPEC_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

// A GPT for so many tokens of a vocabulary (docs/text.md has the table), without data and name. Pure.
//   tokens          layers  heads  width  context  batch  rounds
//   below 30,000      2       2      64      32      8      600
//   below 5 million   4       4     128      64     12     2000
//   more              6       6     192     128     16     4000
// The context is at most a twentieth of the tokens; with a vocabulary over 4,096, whose output layer costs most of the
// time, there are at most 1,000 rounds.
v1::JobSpec DefaultTokenSpec(uint64_t tokens, uint32_t vocabulary);

struct TokenDefaults {
  v1::JobSpec spec;         // nothing is filled in beyond what was chosen; the path is as given
  std::string description;  // "1115394 bytes of text in 1 file"
};

// A byte-level GPT for a text: a file, a folder or a pattern. Errors as FindDataFiles and the file system have them.
absl::StatusOr<TokenDefaults> DefaultTextSpec(const std::string& path);
// A GPT for token files. Errors as ReadTokenFile.
absl::StatusOr<TokenDefaults> DefaultTokenFileSpec(const std::string& path);

}  // namespace sluice

#endif  // SLUICE_CLIENT_DEFAULT_TOKEN_SPEC_H_
