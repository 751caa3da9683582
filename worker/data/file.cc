#include "worker/data/file.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLfsHead = "version https://git-lfs.github.com/spec/";

absl::Status OpenError(const std::string& path, int error) {
  const std::string text = absl::StrCat(path, ": cannot be read: ", strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(text);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(text);
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InvalidArgumentError(text);
  }
}

struct Closer {
  void operator()(FILE* f) const { fclose(f); }
};
using File = std::unique_ptr<FILE, Closer>;

absl::StatusOr<File> OpenFile(const std::string& path, uint64_t* bytes) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return OpenError(path, errno);
  if (S_ISDIR(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": is a folder, a file is expected"));
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
  File file(fopen(path.c_str(), "rb"));
  if (file == nullptr) return OpenError(path, errno);
  *bytes = static_cast<uint64_t>(info.st_size);
  return file;
}

absl::Status CheckNotLfsPointer(const std::string& path, std::string_view head) {
  if (head.substr(0, kLfsHead.size()) != kLfsHead) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      path,
      ": this is a Git LFS pointer, not the data; run `git lfs pull` in its repository to fetch the file itself"));
}

absl::Status CheckNotWebPage(const std::string& path, std::string_view head) {
  if (head.substr(0, 3) == "\xef\xbb\xbf") head.remove_prefix(3);
  while (!head.empty() && absl::ascii_isspace(static_cast<unsigned char>(head[0]))) head.remove_prefix(1);
  for (const char* begin : {"<!doctype html", "<html", "<?xml"}) {
    if (!absl::StartsWithIgnoreCase(absl::string_view(head.data(), head.size()), begin)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": this is a web page, not the data (it begins with \"", std::string(head.substr(0, strlen(begin))),
        "\"); the download was answered with a page: fetch the file itself"));
  }
  return absl::OkStatus();
}

// `child` is `root` itself or below it; both canonical.
bool Within(const fs::path& child, const fs::path& root) {
  auto end = std::mismatch(root.begin(), root.end(), child.begin(), child.end()).first;
  // A root written with a trailing slash ends in an empty component.
  return end == root.end() || (end->empty() && std::next(end) == root.end());
}

class FileReader : public PackedReader {
 public:
  FileReader(std::string path, File file) : path_(std::move(path)), file_(std::move(file)), input_(1 << 16) {}

  ~FileReader() override {
    if (inflating_) inflateEnd(&z_);
  }

  absl::Status Start() {
    RETURN_IF_ERROR(Fill());
    RETURN_IF_ERROR(CheckNotPlaceholder(path_, std::string_view(reinterpret_cast<char*>(input_.data()), available_)));
    if (available_ >= 2 && input_[0] == 0x1f && input_[1] == 0x8b) {
      memset(&z_, 0, sizeof(z_));
      if (inflateInit2(&z_, 15 + 16) != Z_OK) return absl::ResourceExhaustedError("no memory to unpack " + path_);
      inflating_ = true;
    }
    return absl::OkStatus();
  }

  bool gzip() const override { return inflating_; }

  absl::StatusOr<size_t> Read(void* out, size_t n) override {
    return inflating_ ? Inflate(static_cast<uint8_t*>(out), n) : Copy(static_cast<uint8_t*>(out), n);
  }

 private:
  absl::Status Fill() {
    at_ = 0;
    available_ = fread(input_.data(), 1, input_.size(), file_.get());
    if (available_ == 0 && ferror(file_.get())) return OpenError(path_, errno);
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> Copy(uint8_t* out, size_t n) {
    size_t done = 0;
    while (done < n) {
      if (available_ == 0) {
        RETURN_IF_ERROR(Fill());
        if (available_ == 0) break;
      }
      const size_t part = std::min(n - done, available_);
      memcpy(out + done, input_.data() + at_, part);
      at_ += part;
      available_ -= part;
      done += part;
    }
    return done;
  }

  absl::StatusOr<size_t> Inflate(uint8_t* out, size_t n) {
    size_t done = 0;
    while (done < n && !finished_) {
      if (available_ == 0) {
        RETURN_IF_ERROR(Fill());
        if (available_ == 0) return EndsEarly(done);
      }
      z_.next_in = input_.data() + at_;
      z_.avail_in = static_cast<uInt>(available_);
      z_.next_out = out + done;
      z_.avail_out = static_cast<uInt>(std::min<size_t>(n - done, 1u << 30));
      const uInt room = z_.avail_out;
      const int rc = inflate(&z_, Z_NO_FLUSH);
      at_ += available_ - z_.avail_in;
      available_ = z_.avail_in;
      done += room - z_.avail_out;
      total_ += room - z_.avail_out;
      if (rc == Z_STREAM_END) {
        RETURN_IF_ERROR(NextMember());
      } else if (rc != Z_OK && rc != Z_BUF_ERROR) {
        return absl::DataLossError(absl::StrCat(path_, ": damaged gzip stream after ", total_, " unpacked bytes (",
                                                z_.msg != nullptr ? z_.msg : "unknown cause", ")"));
      }
    }
    return done;
  }

  // gzip files may be joined end to end; zeros after the last one are padding, as gzip itself takes them.
  absl::Status NextMember() {
    while (true) {
      if (available_ == 0) RETURN_IF_ERROR(Fill());
      if (available_ == 0) {
        finished_ = true;
        return absl::OkStatus();
      }
      if (input_[at_] != 0) break;
      ++at_;
      --available_;
    }
    if (input_[at_] != 0x1f) {
      return absl::DataLossError(absl::StrCat(path_, ": bytes that are not gzip follow the end of the gzip stream"));
    }
    inflateReset(&z_);
    return absl::OkStatus();
  }

  absl::Status EndsEarly(size_t) const {
    return absl::DataLossError(absl::StrCat(path_, ": the gzip stream ends early, after ", total_,
                                            " unpacked bytes; the file is cut off: fetch it again"));
  }

  const std::string path_;
  const File file_;
  std::vector<uint8_t> input_;
  size_t at_ = 0, available_ = 0;
  uint64_t total_ = 0;
  z_stream z_;
  bool inflating_ = false, finished_ = false;
};

}  // namespace

absl::StatusOr<std::string> ResolveDataPath(const std::string& path, const std::string& data_root,
                                            const std::string& field) {
  if (path.empty()) return absl::InvalidArgumentError(absl::StrCat(field, ": a path is expected, found none"));
  if (data_root.empty()) return path;
  std::error_code error;
  const fs::path root = fs::weakly_canonical(fs::absolute(data_root, error), error);
  if (error) return absl::InvalidArgumentError(absl::StrCat("data root ", data_root, ": ", error.message()));
  const fs::path full = fs::weakly_canonical(root / path, error);  // an absolute `path` replaces root here
  if (error) return absl::InvalidArgumentError(absl::StrCat(field, ": ", path, ": ", error.message()));
  if (!Within(full, root)) {
    return absl::PermissionDeniedError(
        absl::StrCat(field, ": ", path, " leads to ", full.string(), ", outside the data root ", root.string(),
                     "; move the file there or start the worker with another --data_root"));
  }
  return full.string();
}

absl::Status CheckNotPlaceholder(const std::string& path, std::string_view head) {
  RETURN_IF_ERROR(CheckNotLfsPointer(path, head));
  return CheckNotWebPage(path, head);
}

absl::StatusOr<std::string> ReadDataFile(const std::string& path) {
  uint64_t bytes = 0;
  ASSIGN_OR_RETURN(File file, OpenFile(path, &bytes));
  std::string data(bytes, '\0');
  const size_t got = fread(data.data(), 1, bytes, file.get());
  if (got != bytes) {
    if (ferror(file.get())) return OpenError(path, errno);
    return absl::DataLossError(absl::StrCat(path, ": ", bytes, " bytes expected, only ", got,
                                            " read: the file was cut while it was being read"));
  }
  RETURN_IF_ERROR(CheckNotLfsPointer(path, data));
  return data;
}

absl::StatusOr<std::unique_ptr<PackedReader>> PackedReader::Open(const std::string& path) {
  uint64_t bytes = 0;
  ASSIGN_OR_RETURN(File file, OpenFile(path, &bytes));
  auto reader = std::make_unique<FileReader>(path, std::move(file));
  RETURN_IF_ERROR(reader->Start());
  return std::unique_ptr<PackedReader>(std::move(reader));
}

}  // namespace sluice
