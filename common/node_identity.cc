#include "common/node_identity.h"

#include <unistd.h>

#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace sluice {
namespace {

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string& ChosenHostId() {
  static auto* const id = new std::string;
  return *id;
}

}  // namespace

void SetHostId(std::string_view id) { ChosenHostId() = id; }

v1::NodeId MakeNodeId(std::string_view role, std::string_view name) {
  v1::NodeId id;
  if (name.empty()) {
    std::random_device random;
    id.set_name(absl::StrFormat("%s-%06x", std::string(role), random() & 0xffffff));
  } else {
    id.set_name(std::string(name));
  }
  id.set_incarnation(static_cast<uint64_t>(absl::GetCurrentTimeNanos()));
  return id;
}

std::string HostId() {
  if (!ChosenHostId().empty()) return ChosenHostId();
  if (std::string id = FirstLine("/etc/machine-id"); !id.empty()) return id;
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat(host, "/", FirstLine("/proc/sys/kernel/random/boot_id"));
}

}  // namespace sluice
