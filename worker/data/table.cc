#include "worker/data/table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/job_spec.h"
#include "common/status_macros.h"
#include "common/utf8.h"
#include "worker/data/csv_reader.h"

namespace sluice {
namespace {

constexpr size_t kMaxClasses = 1 << 20;

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Decimal, with an optional exponent; infinities and NaN are numbers here. The locale has no part in it.
std::optional<double> NumberOf(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || text.empty()) return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    // Too small is as good as 0; too large is refused with its range.
    return text.find("e-") != std::string_view::npos || text.find("E-") != std::string_view::npos
               ? 0.0
               : std::numeric_limits<double>::infinity();
  }
  return error == std::errc() ? std::optional<double>(value) : std::nullopt;
}

// What programs write where a value is not known.
bool Missing(std::string_view text) {
  for (const char* word : {"", "?", "-", "na", "n/a", "nan", "null", "none", "nil"}) {
    if (absl::EqualsIgnoreCase(absl::string_view(text.data(), text.size()), word)) return true;
  }
  return false;
}

std::string Shown(std::string_view text) {
  constexpr size_t kShown = 60;
  std::string shown = absl::Utf8SafeCEscape(absl::string_view(text.data(), std::min(text.size(), kShown)));
  if (text.size() > kShown) shown += "...";
  return absl::StrCat("\"", shown, "\"");
}

// A file's columns by what a spec says of them.
class Columns {
 public:
  Columns(const std::string& path, const v1::CsvSource& source) : path_(path), source_(source) {}

  // From the first record, which is the header where header() says so afterwards.
  absl::Status Resolve(const CsvReader& first) {
    const std::vector<std::string>& fields = first.fields();
    count_ = fields.size();
    bool names = !IndexOf(source_.label()).has_value();
    for (const std::string& ignored : source_.ignore()) names = names || !IndexOf(ignored).has_value();
    header_ = source_.header() == v1::CsvSource::YES || (source_.header() != v1::CsvSource::NO && names);
    if (names && !header_) {
      return absl::InvalidArgumentError(
          "data.csv: columns are named, but data.csv.header is no; name them by their index from 0, or set it to yes");
    }
    if (header_) RETURN_IF_ERROR(ReadNames(first));
    ASSIGN_OR_RETURN(label_, Find("data.csv.label", source_.label(), first));
    std::vector<bool> used(count_, false);
    used[label_] = true;
    for (const std::string& ignored : source_.ignore()) {
      ASSIGN_OR_RETURN(const size_t column, Find("data.csv.ignore", ignored, first));
      if (column == label_) {
        return absl::InvalidArgumentError(absl::StrCat("data.csv.ignore: ", Shown(ignored), " is the label's column"));
      }
      used[column] = true;
    }
    for (size_t i = 0; i < count_; ++i) {
      if (!used[i]) features_.push_back(i);
    }
    if (!header_ && source_.header() != v1::CsvSource::NO) {
      for (const size_t i : features_) {
        const std::string_view field = Trim(fields[i]);
        header_ = header_ || (!Missing(field) && !NumberOf(field).has_value());
      }
      if (header_) RETURN_IF_ERROR(ReadNames(first));
    }
    if (features_.empty()) {
      return Error(first.line(),
                   absl::StrCat("beside the label no column is left to learn from", DelimiterHint(fields)));
    }
    return absl::OkStatus();
  }

  bool header() const { return header_; }
  size_t count() const { return count_; }
  size_t label() const { return label_; }
  const std::vector<size_t>& features() const { return features_; }

  std::string Name(size_t column) const { return header_ ? names_[column] : absl::StrCat(column); }
  // "column 3 ("b")": counted from 1, as programs that show tables do.
  std::string Place(size_t column) const {
    return header_ ? absl::StrCat("column ", column + 1, " (", Shown(names_[column]), ")")
                   : absl::StrCat("column ", column + 1);
  }

  absl::Status CheckCount(const CsvReader& record) const {
    if (record.fields().size() == count_) return absl::OkStatus();
    return Error(record.line(), absl::StrCat(record.fields().size(), " of ", count_,
                                             record.fields().size() < count_ ? " columns" : " columns: too many",
                                             DelimiterHint(record.fields())));
  }

 private:
  absl::Status Error(uint64_t line, const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", line, ": ", what));
  }

  static std::optional<int64_t> IndexOf(const std::string& name) {
    int64_t index = 0;
    return absl::SimpleAtoi(name, &index) ? std::optional<int64_t>(index) : std::nullopt;
  }

  // Where there is one column and another delimiter in it.
  std::string DelimiterHint(const std::vector<std::string>& fields) const {
    if (fields.size() != 1) return "";
    for (const char other : {';', '\t', '|', ','}) {
      const char present = CsvDelimiter(source_.delimiter()).value_or(',');
      if (other == present || fields[0].find(other) == std::string::npos) continue;
      const std::string name = other == '\t' ? "tab" : std::string(1, other);
      return absl::StrCat("; the fields look as if they were separated by '", name, "': set data.csv.delimiter to \"",
                          name, "\"");
    }
    return "";
  }

  absl::Status ReadNames(const CsvReader& first) {
    names_.clear();
    for (size_t i = 0; i < first.fields().size(); ++i) {
      names_.emplace_back(Trim(first.fields()[i]));
      if (FirstInvalidUtf8(names_.back()) != std::string_view::npos) {
        return Error(first.line_of(i),
                     absl::StrCat("column ", i + 1, ": its name is not UTF-8; save the file as UTF-8"));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> Find(const char* field, const std::string& name, const CsvReader& first) const {
    const std::string hint = DelimiterHint(first.fields());
    if (const auto index = IndexOf(name); index.has_value()) {
      const int64_t count = static_cast<int64_t>(count_);
      if (*index >= count || *index < -count) {
        return absl::InvalidArgumentError(absl::StrCat(field, ": column ", *index, " is outside the ", count_,
                                                       " columns of ", path_, ", 0 to ", count_ - 1, hint));
      }
      return static_cast<size_t>(*index >= 0 ? *index : *index + count);
    }
    const auto at = std::find(names_.begin(), names_.end(), name);
    if (at == names_.end()) {
      std::vector<std::string> shown;
      for (size_t i = 0; i < names_.size() && i < 20; ++i) shown.push_back(Shown(names_[i]));
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": ", path_, " has no column ", Shown(name), "; its header (line ", first.line(),
                       ") names ", absl::StrJoin(shown, ", "), names_.size() > shown.size() ? ", ..." : "", hint));
    }
    if (std::find(at + 1, names_.end(), name) != names_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": ", path_, " has more than one column ", Shown(name), "; name it by its index from 0"));
    }
    return static_cast<size_t>(at - names_.begin());
  }

  const std::string path_;
  const v1::CsvSource& source_;
  bool header_ = false;
  size_t count_ = 0, label_ = 0;
  std::vector<size_t> features_;
  std::vector<std::string> names_;
};

absl::StatusOr<double> FeatureOf(std::string_view field, const std::string& place) {
  const std::string_view text = Trim(field);
  const std::optional<double> value = NumberOf(text);
  if (Missing(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, ": the value is missing (", Shown(text),
                     "); fill it in, leave the row out, or the column (data.csv.ignore)"));
  }
  if (!value.has_value()) {
    const bool comma = text.find(',') != std::string_view::npos &&
                       text.find_first_not_of("+-0123456789,eE.") == std::string_view::npos;
    return absl::InvalidArgumentError(absl::StrCat(
        place, ": a number is expected, found ", Shown(text),
        comma ? "; the decimal sign is a point" : "; columns of text can be left out with data.csv.ignore"));
  }
  if (!(std::abs(*value) <= std::numeric_limits<float>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, ": ", Shown(text), " is not finite, or outside the range of float32"));
  }
  return *value;
}

std::optional<int64_t> WholeNumber(const std::string& text) {
  const std::optional<double> value = NumberOf(text);
  if (!value.has_value() || !(std::abs(*value) <= 0x1p53) || *value != std::floor(*value)) return std::nullopt;
  return static_cast<int64_t>(*value);
}

}  // namespace

absl::StatusOr<Table> ReadTable(const std::string& path, const v1::CsvSource& source) {
  const char delimiter = CsvDelimiter(source.delimiter()).value_or(',');
  ASSIGN_OR_RETURN(auto reader, CsvReader::Open(path, delimiter));
  ASSIGN_OR_RETURN(bool more, reader->Next());
  if (!more) return absl::InvalidArgumentError(absl::StrCat(path, ": the file has no rows"));
  Columns columns(path, source);
  RETURN_IF_ERROR(columns.Resolve(*reader));

  Table table;
  table.path = path;
  table.header = columns.header();
  table.feature_columns = columns.features();
  for (const size_t column : columns.features()) table.features.push_back(columns.Name(column));
  if (columns.header()) {
    ASSIGN_OR_RETURN(more, reader->Next());
    if (!more) return absl::InvalidArgumentError(absl::StrCat(path, ": the file has a header and no rows"));
  }
  absl::flat_hash_map<std::string, int32_t> ids;
  for (; more;) {
    RETURN_IF_ERROR(columns.CheckCount(*reader));
    const auto place = [&](size_t column) {
      return absl::StrCat(path, ":", reader->line_of(column), ": ", columns.Place(column));
    };
    for (const size_t column : columns.features()) {
      const std::string& field = reader->fields()[column];
      // The name of the place is made only for an error.
      const std::optional<double> quick = NumberOf(field);
      if (quick.has_value() && std::abs(*quick) <= std::numeric_limits<float>::max()) {
        table.values.push_back(*quick);
        continue;
      }
      ASSIGN_OR_RETURN(const double value, FeatureOf(field, place(column)));
      table.values.push_back(value);
    }
    const std::string label(Trim(reader->fields()[columns.label()]));
    if (label.empty() || absl::EqualsIgnoreCase(label, "nan")) {
      return absl::InvalidArgumentError(
          absl::StrCat(place(columns.label()), ": the label is missing; fill it in or leave the row out"));
    }
    const auto [at, added] = ids.emplace(label, static_cast<int32_t>(table.label_texts.size()));
    if (added) {
      if (FirstInvalidUtf8(label) != std::string_view::npos) {
        return absl::InvalidArgumentError(
            absl::StrCat(place(columns.label()), ": the label is not UTF-8; save the file as UTF-8"));
      }
      if (table.label_texts.size() == kMaxClasses) {
        return absl::InvalidArgumentError(
            absl::StrCat(place(columns.label()), ": more than 2^20 classes; is another column the label?"));
      }
      table.label_texts.push_back(label);
      table.label_lines.push_back(reader->line_of(columns.label()));
    }
    table.labels.push_back(at->second);
    table.lines.push_back(reader->line());
    ASSIGN_OR_RETURN(more, reader->Next());
  }
  return table;
}

absl::StatusOr<v1::TableSchema> MakeSchema(const Table& table, const std::vector<uint64_t>& part, bool standardize) {
  v1::TableSchema schema;
  for (const std::string& name : table.features) schema.add_features(name);

  bool numbers = true;  // labels
  for (const std::string& text : table.label_texts) numbers = numbers && NumberOf(text).has_value();
  if (numbers) {
    std::vector<int64_t> classes;
    for (size_t i = 0; i < table.label_texts.size(); ++i) {
      const auto whole = WholeNumber(table.label_texts[i]);
      if (!whole.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat(table.path, ":", table.label_lines[i], ": label ", Shown(table.label_texts[i]),
                         ": labels are classes (texts or whole numbers); values of a quantity cannot be learned yet"));
      }
      classes.push_back(*whole);
    }
    std::sort(classes.begin(), classes.end());
    classes.erase(std::unique(classes.begin(), classes.end()), classes.end());
    for (const int64_t label : classes) schema.add_labels(absl::StrCat(label));
  } else {
    std::vector<std::string> classes = table.label_texts;
    std::sort(classes.begin(), classes.end());
    for (const std::string& label : classes) schema.add_labels(label);
  }

  if (!standardize) return schema;
  const size_t inputs = table.inputs();
  const double n = static_cast<double>(part.size());
  std::vector<double> mean(inputs, 0.0), squares(inputs, 0.0);
  std::vector<bool> constant(inputs, true);
  for (const uint64_t row : part) {
    for (size_t j = 0; j < inputs; ++j) {
      const double value = table.values[row * inputs + j];
      mean[j] += value;
      constant[j] = constant[j] && value == table.values[part[0] * inputs + j];
    }
  }
  for (double& sum : mean) sum /= n;
  for (const uint64_t row : part) {
    for (size_t j = 0; j < inputs; ++j) {
      const double off = table.values[row * inputs + j] - mean[j];
      squares[j] += off * off;
    }
  }
  for (size_t j = 0; j < inputs; ++j) {
    const double deviation = std::sqrt(squares[j] / n);
    // A constant column becomes 0 exactly; so does one whose spread is lost in rounding.
    const bool flat = constant[j] || !(deviation > 0);
    schema.add_mean(flat && !part.empty() ? table.values[part[0] * inputs + j] : mean[j]);
    schema.add_deviation(flat ? 1.0 : deviation);
  }
  return schema;
}

absl::Status CheckColumns(const Table& table, const v1::TableSchema& schema) {
  if (table.inputs() != static_cast<uint64_t>(schema.features_size())) {
    return absl::InvalidArgumentError(absl::StrCat(table.path, ": ", table.inputs(), " columns of features, but ",
                                                   schema.features_size(), " were trained on"));
  }
  for (int j = 0; j < schema.features_size(); ++j) {
    if (table.features[j] == schema.features(j)) continue;
    if (!table.header) {
      return absl::InvalidArgumentError(
          absl::StrCat(table.path, ": the file has no header, but the training file's names its columns (",
                       Shown(schema.features(j)), ", ...); write the same header into both"));
    }
    return absl::InvalidArgumentError(absl::StrCat(table.path, ":1: column ", table.feature_columns[j] + 1, " is ",
                                                   Shown(table.features[j]), ", but ", Shown(schema.features(j)),
                                                   " was trained on there; bring the columns into the same order"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ClassesOf(const Table& table, const v1::TableSchema& schema) {
  absl::flat_hash_map<std::string, int32_t> known;
  for (int i = 0; i < schema.labels_size(); ++i) known.emplace(schema.labels(i), i);
  std::vector<int32_t> classes;
  for (size_t i = 0; i < table.label_texts.size(); ++i) {
    auto at = known.find(table.label_texts[i]);
    if (at == known.end()) {
      // "1.0" is class 1 where the classes are whole numbers.
      const auto whole = WholeNumber(table.label_texts[i]);
      if (whole.has_value()) at = known.find(absl::StrCat(*whole));
    }
    if (at == known.end()) {
      std::vector<std::string> shown(schema.labels().begin(),
                                     schema.labels().begin() + std::min(schema.labels_size(), 20));
      return absl::InvalidArgumentError(absl::StrCat(
          table.path, ":", table.label_lines[i], ": label ", Shown(table.label_texts[i]),
          " is not among the classes of the training file: ", absl::Utf8SafeCEscape(absl::StrJoin(shown, ", ")),
          schema.labels_size() > 20 ? ", ..." : ""));
    }
    classes.push_back(at->second);
  }
  return classes;
}

}  // namespace sluice
