#include "worker/data/file_list.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status_macros.h"
#include "worker/data/file.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

bool IsPattern(const std::string& path) { return path.find_first_of("*?[") != std::string::npos; }

std::vector<std::string> Matches(const std::string& pattern) {
  glob_t found = {};
  const auto clean = absl::MakeCleanup([&found] { globfree(&found); });
  if (glob(pattern.c_str(), 0, nullptr, &found) != 0) return {};
  return {found.gl_pathv, found.gl_pathv + found.gl_pathc};
}

// Also a link that leads nowhere: whoever reads it says so.
bool IsFileOrBrokenLink(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return fs::is_regular_file(status) || (!fs::exists(status) && fs::is_symlink(path, error));
}

absl::StatusOr<std::vector<std::string>> FilesBelow(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error), end;
  for (; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->path().filename().string()[0] == '.') {
      if (at->is_directory(ignored)) at.disable_recursion_pending();
    } else if (IsFileOrBrokenLink(at->path())) {
      files.push_back(at->path().string());
    }
  }
  if (error) return ErrnoStatus(error.value(), "listing", folder);
  return files;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> FindDataFiles(const std::string& path, const std::string& data_root,
                                                       const std::string& field) {
  ASSIGN_OR_RETURN(const std::string resolved, ResolveDataPath(path, data_root, field));
  std::error_code error;
  std::vector<std::string> files;
  if (fs::is_directory(resolved, error)) {
    ASSIGN_OR_RETURN(files, FilesBelow(resolved));
    if (files.empty()) return absl::NotFoundError(absl::StrCat(field, ": the folder ", resolved, " has no files"));
  } else if (IsPattern(path) && !fs::exists(resolved, error)) {
    files = Matches(resolved);
    files.erase(std::remove_if(files.begin(), files.end(), [](const auto& file) { return !IsFileOrBrokenLink(file); }),
                files.end());
    if (files.empty()) return absl::NotFoundError(absl::StrCat(field, ": no file matches ", resolved));
  } else {
    return std::vector<std::string>{resolved};
  }
  std::sort(files.begin(), files.end());
  for (std::string& file : files) {
    ASSIGN_OR_RETURN(file, ResolveDataPath(file, data_root, field));  // a link may lead out
  }
  return files;
}

bool DataPathExists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) || (IsPattern(path) && !Matches(path).empty());
}

}  // namespace sluice
