// Tokenized texts kept on disk between jobs, named by a hash of all that they were made from.
//
// A file is <64 hex digits>.tokens: a header of 64 bytes (below), then the tokens, little-endian. It is written beside
// its place and renamed, so several processes may share a folder; what fails its checksum is as good as absent. Nothing
// is ever removed: the folder may be, at any time.
//
//   0  "SLUICETK"      8  u32 version, 1      12  u32 bytes of a token, 2 or 4      16  u64 tokens
//   24 hash, 32 bytes  56 u32 zlib's crc32 of the tokens         60  u32 crc32 of the header before it
#ifndef SLUICE_WORKER_DATA_TOKEN_CACHE_H_
#define SLUICE_WORKER_DATA_TOKEN_CACHE_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// SHA-256 of parts, each with its length: no two lists of parts are the same bytes. Not thread-safe.
class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  void Add(std::string_view part);
  std::string Finish();  // 32 bytes; nothing may follow

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Immutable; thread-safe. Unit: uint16_t or uint32_t.
class TokenCache {
 public:
  // `folder` is made when something is stored. Empty: nothing is found, nothing stored.
  explicit TokenCache(std::string folder) : folder_(std::move(folder)) {}

  bool enabled() const { return !folder_.empty(); }
  std::string PathOf(const std::string& hash) const;
  // NOT_FOUND; DATA_LOSS: not what was written, with the cause; what the file system says.
  template <typename Unit>
  absl::StatusOr<std::vector<Unit>> Find(const std::string& hash) const;
  template <typename Unit>
  absl::Status Store(const std::string& hash, const std::vector<Unit>& tokens) const;

 private:
  const std::string folder_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_TOKEN_CACHE_H_
