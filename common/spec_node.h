// The tree that all three formats of a job's spec are read into: nodes that know where they stand in the file.
// Internal to the spec's parser (spec_parse.cc). Pure; thread-safe.
#ifndef SLUICE_COMMON_SPEC_NODE_H_
#define SLUICE_COMMON_SPEC_NODE_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

inline constexpr size_t kMaxSpecBytes = size_t{1} << 20;
inline constexpr int kMaxSpecDepth = 32;
inline constexpr size_t kMaxSpecNodes = 100000;  // aliases count each time they are used

struct SpecEntry;

struct SpecNode {
  enum Kind { kNull, kScalar, kList, kMap };
  Kind kind = kNull;
  int line = 1, column = 1;  // from 1; column in bytes
  std::string text;          // kScalar: without quotes, escapes resolved
  bool quoted = false;       // kScalar: text by the format's rules, never a number
  std::vector<SpecNode> items;
  std::vector<SpecEntry> entries;  // in the order of the file; keys may repeat
};

struct SpecEntry {
  SpecNode key;  // kScalar
  SpecNode value;
};

// INVALID_ARGUMENT "FILE:LINE:COLUMN: what"; without the place where `file` is empty.
absl::Status SpecError(std::string_view file, int line, int column, std::string_view what);

// The readers expect valid UTF-8 without a byte order mark of at most kMaxSpecBytes. Errors are SpecErrors; documents
// nested deeper than kMaxSpecDepth or of more than kMaxSpecNodes nodes are refused. An empty document is kNull.
absl::StatusOr<SpecNode> ReadYamlTree(std::string_view text, std::string_view file);
absl::StatusOr<SpecNode> ReadJsonTree(std::string_view text, std::string_view file);
// A field given several times is several entries; they are one list where the field is repeated.
absl::StatusOr<SpecNode> ReadTextTree(std::string_view text, std::string_view file);

}  // namespace sluice

#endif  // SLUICE_COMMON_SPEC_NODE_H_
