#include "client/byte_size.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sluice {

absl::StatusOr<uint64_t> ParseByteSize(const std::string& text) {
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"", 1},      {"b", 1},        {"kb", 1e3},     {"mb", 1e6},     {"gb", 1e9},
      {"tb", 1e12}, {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40}};
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(text.substr(digits)));
  double number = 0;
  for (const auto& [name, bytes] : kUnits) {
    if (unit != name || !absl::SimpleAtod(text.substr(0, digits), &number)) continue;
    if (number * bytes >= 1 && number * bytes <= 0x1p62) return static_cast<uint64_t>(number * bytes);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "': expected a size such as 500MB, 5GB or 2GiB, from 1 byte to 2^62"));
}

}  // namespace sluice
