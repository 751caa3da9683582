// A fresh folder for one test, removed with everything in it at the end.
#ifndef SLUICE_TESTS_COMMON_TEMPORARY_FOLDER_H_
#define SLUICE_TESTS_COMMON_TEMPORARY_FOLDER_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace sluice {

class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "sluice-test-XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string Slurp(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

inline void Spill(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

// The shared folder's path, or "" where this machine has none: the test says SKIPPED then.
inline std::string SharedFolder() {
  const char* const given = std::getenv("SLUICE_SHARED");
  const std::string path = given != nullptr ? given : std::string(SLUICE_SOURCE_DIR) + "/../shared";
  return std::filesystem::exists(path + "/data") ? path : "";
}

}  // namespace sluice

#endif  // SLUICE_TESTS_COMMON_TEMPORARY_FOLDER_H_
