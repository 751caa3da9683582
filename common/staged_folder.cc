#include "common/staged_folder.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status_macros.h"

namespace sluice {

StagedFolder::StagedFolder(std::string path, std::string target) : path_(std::move(path)), target_(std::move(target)) {}

StagedFolder::~StagedFolder() { RemoveTree(path_).IgnoreError(); }

absl::StatusOr<std::unique_ptr<StagedFolder>> StagedFolder::Create(const std::string& target) {
  const std::string parent = ParentDirectory(target), name = BaseName(target);
  std::unique_ptr<StagedFolder> staged(
      new StagedFolder(absl::StrCat(parent, "/.", name, ".tmp-", getpid()), absl::StrCat(parent, "/", name)));
  RETURN_IF_ERROR(RemoveTree(staged->path_));
  RETURN_IF_ERROR(MakeDirectories(staged->path_));
  return staged;
}

absl::Status StagedFolder::Commit() { return Rename(path_, target_); }

}  // namespace sluice
