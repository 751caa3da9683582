// Tables for people.
#ifndef SLUICE_CLIENT_TEXT_TABLE_H_
#define SLUICE_CLIENT_TEXT_TABLE_H_

#include <ostream>
#include <string>
#include <vector>

namespace sluice {

// Columns as wide as their widest cell; the last one as it is.
void PrintTable(const std::vector<std::vector<std::string>>& rows, std::ostream* out);

}  // namespace sluice

#endif  // SLUICE_CLIENT_TEXT_TABLE_H_
