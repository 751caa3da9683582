#include "common/machine_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace sluice {

uint64_t MemoryOfMachine() {
  uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  // In a container its own group is the root that it sees (version 2, version 1). "max", or no such file: no limit.
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    if (uint64_t limit; file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

}  // namespace sluice
