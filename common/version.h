#ifndef SLUICE_COMMON_VERSION_H_
#define SLUICE_COMMON_VERSION_H_

#include <cstdint>

namespace sluice {

// Of the messages between processes. Nodes of different versions refuse each other, naming both.
inline constexpr uint32_t kProtocolVersion = 2;
inline constexpr const char* kVersion = "0.1.0";

}  // namespace sluice

#endif  // SLUICE_COMMON_VERSION_H_
