// A folder that appears whole or not at all: its files are written beside the target, which they become in one step.
#ifndef SLUICE_COMMON_STAGED_FOLDER_H_
#define SLUICE_COMMON_STAGED_FOLDER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// Not thread-safe.
class StagedFolder {
 public:
  // Makes the staging folder ".NAME.tmp-PID" beside `target`, with parents. Blocks on the disk.
  static absl::StatusOr<std::unique_ptr<StagedFolder>> Create(const std::string& target);
  ~StagedFolder();  // removes what still lies in the staging folder
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::string& path() const { return path_; }      // write here
  const std::string& target() const { return target_; }  // without a slash at its end
  // Renames to the target, which must not exist or be empty, and syncs its parent.
  absl::Status Commit();

 private:
  StagedFolder(std::string path, std::string target);
  const std::string path_, target_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_STAGED_FOLDER_H_
