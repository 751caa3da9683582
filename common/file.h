// Files with errors as Status: every message names the path and the system's reason.
//
// Codes: NOT_FOUND (no such file), PERMISSION_DENIED, ALREADY_EXISTS, RESOURCE_EXHAUSTED (full disk, quota, size limit,
// out of descriptors), INVALID_ARGUMENT (not a regular file, a path through a file), DATA_LOSS (the device's I/O error,
// a file shorter than it was). All calls block; InputFile is thread-safe, OutputFile is not.
#ifndef SLUICE_COMMON_FILE_H_
#define SLUICE_COMMON_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// "<what> <path>: <strerror>" with the code for errno value `error`.
absl::Status ErrnoStatus(int error, std::string_view what, const std::string& path);

// A regular file, open for reading at any offset.
class InputFile {
 public:
  static absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path);
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // when it was opened
  // Exactly `bytes` bytes from `offset`; DATA_LOSS where the file ends before.
  absl::Status Read(uint64_t offset, void* data, size_t bytes) const;
  // zlib's crc32 of the whole file.
  absl::StatusOr<uint32_t> Crc32() const;

 private:
  InputFile(std::string path, int descriptor, uint64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

  const std::string path_;
  const int descriptor_;
  const uint64_t size_;
};

// A file that is written from scratch, at any offsets.
class OutputFile {
 public:
  // Replaces what is there.
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // closes; what was not synced may be lost

  const std::string& path() const { return path_; }
  // Gives the file its final size and takes the disk space for it now where the file system can.
  absl::Status Reserve(uint64_t bytes);
  absl::Status Write(uint64_t offset, const void* data, size_t bytes);
  // The contents are on the device. After an error the file must not be trusted, also not after a second, successful
  // call.
  absl::Status Sync();

 private:
  OutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  const std::string path_;
  const int descriptor_;
};

// The whole file; RESOURCE_EXHAUSTED where it has more than max_bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes);
// The file at `path` has the old contents or the new ones, also after a power failure: temporary file beside it, fsync,
// rename, fsync of the folder. On an error nothing is left beside it.
absl::Status WriteFileAtomically(const std::string& path, std::string_view contents);

bool PathExists(const std::string& path);
// With parents; those that are there stay as they are.
absl::Status MakeDirectories(const std::string& path);
absl::Status SyncDirectory(const std::string& path);
// Within one file system; syncs the folder of `to`. An existing file or empty folder at `to` is replaced.
absl::Status Rename(const std::string& from, const std::string& to);
// A file or a whole folder; nothing there is ok.
absl::Status RemoveTree(const std::string& path);
// Names (without "." and ".."), sorted by bytes.
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path);
// "a/b" of "a/b/c"; "." of "c"; "/" of "/c". Trailing slashes do not count.
std::string ParentDirectory(const std::string& path);
// "c" of "a/b/c" and "a/b/c/".
std::string BaseName(const std::string& path);

}  // namespace sluice

#endif  // SLUICE_COMMON_FILE_H_
