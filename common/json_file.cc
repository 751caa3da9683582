#include "common/json_file.h"

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/file_kind.h"
#include "common/status_macros.h"

namespace sluice {

using nlohmann::json;

absl::StatusOr<json> ReadJsonObject(const std::string& path, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, max_bytes));
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string twice;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second && twice.empty()) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  json object;
  try {
    object = json::parse(text, watch);
  } catch (const json::exception& error) {
    const std::string kind = ForeignKind(text);
    return absl::DataLossError(
        absl::StrCat(path, ": expected JSON", kind.empty() ? absl::StrCat(": ", error.what()) : ", but " + kind));
  }
  if (!twice.empty()) return absl::DataLossError(absl::StrCat(path, ": \"", twice, "\" is given twice"));
  if (!object.is_object()) return absl::DataLossError(absl::StrCat(path, ": expected a JSON object"));
  return object;
}

}  // namespace sluice
