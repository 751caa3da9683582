// How much memory this process may have.
#ifndef SLUICE_COMMON_MACHINE_MEMORY_H_
#define SLUICE_COMMON_MACHINE_MEMORY_H_

#include <cstdint>

namespace sluice {

// Bytes: the machine's memory, or what the process's control group is limited to where that is less.
uint64_t MemoryOfMachine();

}  // namespace sluice

#endif  // SLUICE_COMMON_MACHINE_MEMORY_H_
