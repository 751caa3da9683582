#include "common/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::StatusCode::kResourceExhausted;
    case ENOTDIR:
    case EISDIR:
    case ENAMETOOLONG:
    case ELOOP:
    case EINVAL:
    case EXDEV:
      return absl::StatusCode::kInvalidArgument;
    case ENOTEMPTY:
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case EIO:
      return absl::StatusCode::kDataLoss;
    default:
      return absl::ErrnoToStatusCode(error);
  }
}

}  // namespace

absl::Status ErrnoStatus(int error, std::string_view what, const std::string& path) {
  const std::string reason = std::generic_category().message(error);
  return absl::Status(CodeOf(error), absl::StrCat(std::string(what), " ", path, ": ", reason));
}

absl::StatusOr<std::unique_ptr<InputFile>> InputFile::Open(const std::string& path) {
  // Without O_NONBLOCK a named pipe would keep the call forever.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return ErrnoStatus(errno, "opening", path);
  struct stat info;
  if (fstat(descriptor, &info) != 0) {
    const int error = errno;
    close(descriptor);
    return ErrnoStatus(error, "opening", path);
  }
  if (!S_ISREG(info.st_mode)) {
    close(descriptor);
    return absl::InvalidArgumentError(absl::StrCat("opening ", path, ": expected a file, found a ",
                                                   S_ISDIR(info.st_mode) ? "folder" : "special file"));
  }
  return std::unique_ptr<InputFile>(new InputFile(path, descriptor, static_cast<uint64_t>(info.st_size)));
}

InputFile::~InputFile() { close(descriptor_); }

absl::Status InputFile::Read(uint64_t offset, void* data, size_t bytes) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "reading", path_);
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat("reading ", path_, ": the file ends at byte ", offset, ", expected ", bytes, " more bytes"));
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> InputFile::Crc32() const {
  std::string buffer(std::min<uint64_t>(size_, uint64_t{1} << 20), '\0');
  uLong crc = crc32(0, nullptr, 0);
  for (uint64_t offset = 0; offset < size_; offset += buffer.size()) {
    const size_t bytes = std::min<uint64_t>(buffer.size(), size_ - offset);
    RETURN_IF_ERROR(Read(offset, buffer.data(), bytes));
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(buffer.data()), bytes);
  }
  return static_cast<uint32_t>(crc);
}

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(const std::string& path) {
  // A new inode: somebody who still writes to the old file cannot damage this one.
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, "replacing", path);
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return ErrnoStatus(errno, "creating", path);
  return std::unique_ptr<OutputFile>(new OutputFile(path, descriptor));
}

OutputFile::~OutputFile() { close(descriptor_); }

absl::Status OutputFile::Reserve(uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  // Not posix_fallocate: where the file system cannot, that writes every block.
  while (fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS) break;
    return ErrnoStatus(errno, absl::StrCat("reserving ", bytes, " bytes for"), path_);
  }
  if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) return ErrnoStatus(errno, "sizing", path_);
  return absl::OkStatus();
}

absl::Status OutputFile::Write(uint64_t offset, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor_, from, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return ErrnoStatus(errno, "writing", path_);
    from += done;
    offset += static_cast<uint64_t>(done);
    bytes -= static_cast<size_t>(done);
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Sync() {
  if (fsync(descriptor_) != 0) return ErrnoStatus(errno, "syncing", path_);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<InputFile> file, InputFile::Open(path));
  if (file->size() > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("reading ", path, ": it has ", file->size(), " bytes, expected at most ", max_bytes));
  }
  std::string contents(file->size(), '\0');
  RETURN_IF_ERROR(file->Read(0, contents.data(), contents.size()));
  return contents;
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view contents) {
  static std::atomic<uint64_t> counter{0};
  const std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", counter.fetch_add(1));
  auto remove = absl::MakeCleanup([&] { unlink(temporary.c_str()); });
  {
    ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Create(temporary));
    RETURN_IF_ERROR(file->Write(0, contents.data(), contents.size()));
    RETURN_IF_ERROR(file->Sync());
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, "replacing", path);
  std::move(remove).Cancel();
  return SyncDirectory(ParentDirectory(path));
}

bool PathExists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

absl::Status MakeDirectories(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0) return SyncDirectory(ParentDirectory(path));
  if (errno == ENOENT && ParentDirectory(path) != path) {
    RETURN_IF_ERROR(MakeDirectories(ParentDirectory(path)));
    if (mkdir(path.c_str(), 0755) == 0) return SyncDirectory(ParentDirectory(path));
  }
  const int error = errno;
  struct stat info;
  if (error == EEXIST && stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return absl::OkStatus();
  return ErrnoStatus(error == EEXIST ? ENOTDIR : error, "creating folder", path);
}

absl::Status SyncDirectory(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return ErrnoStatus(errno, "opening folder", path);
  const int result = fsync(descriptor), error = errno;
  close(descriptor);
  if (result != 0 && error != EINVAL) return ErrnoStatus(error, "syncing folder", path);  // EINVAL: it has no fsync
  return absl::OkStatus();
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) return ErrnoStatus(errno, absl::StrCat("renaming ", from, " to"), to);
  return SyncDirectory(ParentDirectory(to));
}

absl::Status RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error && error.value() != ENOENT) return ErrnoStatus(error.value(), "removing", path);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) {
  DIR* const folder = opendir(path.c_str());
  if (folder == nullptr) return ErrnoStatus(errno, "listing", path);
  const auto closed = absl::MakeCleanup([&] { closedir(folder); });
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* const entry = readdir(folder);
    if (entry == nullptr && errno != 0) return ErrnoStatus(errno, "listing", path);
    if (entry == nullptr) break;
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ParentDirectory(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  const size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  const size_t last = path.find_last_not_of('/', slash);
  return last == std::string::npos ? "/" : path.substr(0, last + 1);
}

std::string BaseName(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return "";
  const size_t slash = path.rfind('/', end);
  const size_t begin = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(begin, end + 1 - begin);
}

}  // namespace sluice
