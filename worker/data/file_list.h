// Which files a spec's path means.
#ifndef SLUICE_WORKER_DATA_FILE_LIST_H_
#define SLUICE_WORKER_DATA_FILE_LIST_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

// `path` under `data_root` as ResolveDataPath has it, which is
// - a file: that file (it need not exist: reading it says so);
// - a folder: all regular files below it in the order of their paths' bytes, without names that begin with '.';
// - else, with *, ? or [ in it, a pattern as glob(7) has it: the regular files that match, in the same order.
// NOT_FOUND: a folder or pattern without files. PERMISSION_DENIED: any file leads out of data_root; a folder that
// cannot be listed. A link that leads nowhere is in the list.
absl::StatusOr<std::vector<std::string>> FindDataFiles(const std::string& path, const std::string& data_root,
                                                       const std::string& field);

// There is something at the path, or a pattern matches something.
bool DataPathExists(const std::string& path);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_FILE_LIST_H_
