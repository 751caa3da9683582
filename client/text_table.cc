#include "client/text_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace sluice {

void PrintTable(const std::vector<std::vector<std::string>>& rows, std::ostream* out) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i], i + 1 < row.size() ? std::string(widths[i] + 2 - row[i].size(), ' ') : "");
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    *out << line << "\n";
  }
  *out << std::flush;
}

}  // namespace sluice
