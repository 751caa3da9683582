// Files of a data source: where they lie and their bytes, with errors that say what to do.
#ifndef SLUICE_WORKER_DATA_FILE_H_
#define SLUICE_WORKER_DATA_FILE_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// The path that a spec's `path` means: under `data_root` where that is not empty, else relative to the working folder.
// `field` ("data.text.path") is for messages. INVALID_ARGUMENT: empty; PERMISSION_DENIED: leads out of data_root, also
// through a symbolic link. The file need not exist.
absl::StatusOr<std::string> ResolveDataPath(const std::string& path, const std::string& data_root,
                                            const std::string& field);

// INVALID_ARGUMENT where the file's first bytes are not the data but what stands in its place: a Git LFS pointer, or a
// web page (a download that was answered with an error or a log-in form). `head`: at least the first 256 bytes, or all.
absl::Status CheckNotPlaceholder(const std::string& path, std::string_view head);

// A whole file in memory: nothing that happens to the file later can disturb a reader. NOT_FOUND, PERMISSION_DENIED,
// INVALID_ARGUMENT (a folder; a Git LFS pointer instead of data), DATA_LOSS (shorter while being read).
absl::StatusOr<std::string> ReadDataFile(const std::string& path);

// Reads a file front to back, unpacking it where its first bytes are gzip's. Not thread-safe. For formats of numbers
// and tables: what CheckNotPlaceholder finds is refused when it is opened.
class PackedReader {
 public:
  static absl::StatusOr<std::unique_ptr<PackedReader>> Open(const std::string& path);
  virtual ~PackedReader() = default;

  virtual bool gzip() const = 0;
  // Up to n further bytes; fewer only at the end. DATA_LOSS: a gzip stream that ends early or is damaged.
  virtual absl::StatusOr<size_t> Read(void* out, size_t n) = 0;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_FILE_H_
