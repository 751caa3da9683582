#include "bench/network_place.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace sluice {

absl::StatusOr<std::vector<NetworkPlace>> ParsePlaces(const std::vector<std::string>& words, uint32_t processes) {
  if (words.empty()) return std::vector<NetworkPlace>(processes);
  if (words.size() != processes) {
    return absl::InvalidArgumentError(absl::StrCat(words.size(), " places for ", processes, " processes"));
  }
  std::vector<NetworkPlace> places;
  for (const std::string& word : words) {
    const std::vector<std::string> parts = absl::StrSplit(word, '@');
    if (parts.size() != 2 || parts[0].empty() || parts[1].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("place \"", word, "\": expected NAME@HOST"));
    }
    places.push_back({parts[0], parts[1]});
  }
  return places;
}

absl::Status EnterNetwork(const NetworkPlace& place) {
  if (place.network.empty()) return absl::OkStatus();
  const std::string path = absl::StrCat("/run/netns/", place.network);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const int result = setns(fd, CLONE_NEWNET);
  const absl::Status status = result == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, absl::StrCat("setns ", path));
  close(fd);
  return status;
}

}  // namespace sluice
