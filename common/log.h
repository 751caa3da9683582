// One log for a process: spdlog to stderr, "2026-01-31 12:00:00.123 I server-1 ...". Thread-safe.
//
//   LOG_INFO("job {} generation {}", id, generation);      // fmt syntax
//   CHECK(n > 0) << "...";  is not here: CHECK(cond, "fmt", args...) aborts; it is for our own bugs, never for a
//   peer's.
#ifndef SLUICE_COMMON_LOG_H_
#define SLUICE_COMMON_LOG_H_

#include <cstdlib>
#include <string>

#include "spdlog/spdlog.h"

namespace sluice {

// Names the process in every line and sets the level ("debug", "info", "warn", "error"). Call once, in main.
inline void InitLog(const std::string& process, const std::string& level = "info") {
  spdlog::set_pattern("%Y-%m-%d %H:%M:%S.%e %L " + process + " %v");
  spdlog::set_level(spdlog::level::from_str(level));
}

}  // namespace sluice

#define LOG_DEBUG(...) ::spdlog::debug(__VA_ARGS__)
#define LOG_INFO(...) ::spdlog::info(__VA_ARGS__)
#define LOG_WARN(...) ::spdlog::warn(__VA_ARGS__)
#define LOG_ERROR(...) ::spdlog::error(__VA_ARGS__)

#define CHECK(cond, ...)                                                        \
  do {                                                                          \
    if (!(cond)) [[unlikely]] {                                                 \
      ::spdlog::critical("{}:{}: CHECK({}) failed", __FILE__, __LINE__, #cond); \
      __VA_OPT__(::spdlog::critical(__VA_ARGS__);)                              \
      ::std::abort();                                                           \
    }                                                                           \
  } while (false)

#ifdef NDEBUG
#define DCHECK(cond, ...) \
  do {                    \
  } while (false)
#else
#define DCHECK(cond, ...) CHECK(cond __VA_OPT__(, ) __VA_ARGS__)
#endif

#endif  // SLUICE_COMMON_LOG_H_
