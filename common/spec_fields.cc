#include "common/spec_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "sluice/v1/job.pb.h"

namespace sluice {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Letters to change, add or leave out, or neighbours to swap, to make `b` of `a`; upper and lower case are alike.
size_t EditDistance(std::string_view a, std::string_view b) {
  const auto same = [&](size_t i, size_t j) { return absl::ascii_tolower(a[i - 1]) == absl::ascii_tolower(b[j - 1]); };
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j - 1] + (same(i, j) ? 0 : 1), d[i - 1][j] + 1, d[i][j - 1] + 1});
      if (i > 1 && j > 1 && same(i, j - 1) && same(i - 1, j)) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

void CollectFields(const Descriptor* message, const std::string& prefix, std::vector<const FieldDescriptor*>* fields,
                   std::vector<std::string>* paths) {
  for (int i = 0; i < message->field_count(); ++i) {
    const FieldDescriptor* field = message->field(i);
    fields->push_back(field);
    paths->push_back(prefix + field->name());
    if (field->message_type() != nullptr) CollectFields(field->message_type(), paths->back() + ".", fields, paths);
  }
}

// A decimal number as written, or what is wrong with it.
struct Number {
  bool valid = false;
  bool negative = false;
  bool whole = false;
  bool overflow = false;  // whole, but over 2^64 - 1
  uint64_t magnitude = 0;
};

// [+-] digits [. digits] [e [+-] digits], at least one digit before the exponent. Exact: 1e3 is whole, 1e-3 is not.
Number ParseNumber(std::string_view text) {
  Number number;
  size_t i = 0;
  if (i < text.size() && (text[i] == '-' || text[i] == '+')) number.negative = text[i++] == '-';
  std::string digits;
  int64_t exponent = 0;
  bool point = false;
  for (; i < text.size() && (absl::ascii_isdigit(text[i]) || (text[i] == '.' && !point)); ++i) {
    if (text[i] == '.') {
      point = true;
    } else {
      digits += text[i];
      if (point) --exponent;
    }
  }
  if (digits.empty()) return number;
  if (i < text.size()) {
    if (text[i] != 'e' && text[i] != 'E') return number;
    ++i;
    bool down = false;
    if (i < text.size() && (text[i] == '-' || text[i] == '+')) down = text[i++] == '-';
    if (i == text.size()) return number;
    int64_t written = 0;
    for (; i < text.size(); ++i) {
      if (!absl::ascii_isdigit(text[i])) return number;
      written = std::min<int64_t>(written * 10 + (text[i] - '0'), int64_t{1} << 40);
    }
    exponent += down ? -written : written;
  }
  number.valid = true;
  const size_t leading = digits.find_first_not_of('0');
  if (leading == std::string::npos) {
    number.whole = true;
    return number;
  }
  digits.erase(0, leading);
  while (digits.back() == '0') {
    digits.pop_back();
    ++exponent;
  }
  number.whole = exponent >= 0;
  if (!number.whole) return number;
  if (static_cast<int64_t>(digits.size()) + exponent > 20) {
    number.overflow = true;
    return number;
  }
  digits.append(static_cast<size_t>(exponent), '0');
  for (const char digit : digits) {
    number.overflow |= __builtin_mul_overflow(number.magnitude, uint64_t{10}, &number.magnitude);
    number.overflow |= __builtin_add_overflow(number.magnitude, static_cast<uint64_t>(digit - '0'), &number.magnitude);
  }
  return number;
}

absl::Status Mismatch(const SpecNode& value, std::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("found ", Describe(value), ", expected ", std::string(expected)));
}

absl::StatusOr<uint64_t> ToUnsigned(const SpecNode& value, uint64_t limit) {
  const std::string expected = absl::StrCat("a whole number from 0 to ", limit);
  if (value.kind != SpecNode::kScalar || value.quoted) return Mismatch(value, expected);
  const Number number = ParseNumber(value.text);
  if (!number.valid || !number.whole || (number.negative && number.magnitude > 0) || number.overflow ||
      number.magnitude > limit) {
    return Mismatch(value, expected);
  }
  // "017" is fifteen to some readers and seventeen to others.
  const std::string_view digits = std::string_view(value.text).substr(value.text[0] == '+' || value.text[0] == '-');
  if (digits.size() > 1 && digits[0] == '0' && absl::ascii_isdigit(digits[1])) {
    return Mismatch(value, expected + " without leading zeros");
  }
  return number.magnitude;
}

absl::StatusOr<double> ToDouble(const SpecNode& value) {
  if (value.kind != SpecNode::kScalar || value.quoted || !ParseNumber(value.text).valid) {
    return Mismatch(value, "a number");
  }
  std::string_view text = value.text;
  if (text[0] == '+') text.remove_prefix(1);
  double result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(result)) {
    return Mismatch(value, "a number within the range of float64");
  }
  return result;
}

absl::StatusOr<bool> ToBool(const SpecNode& value, bool text_format) {
  if (value.kind == SpecNode::kScalar && !value.quoted) {
    const std::string& text = value.text;
    if (text == "true" || text == "True" || text == "TRUE") return true;
    if (text == "false" || text == "False" || text == "FALSE") return false;
    if (text_format && (text == "t" || text == "1")) return true;
    if (text_format && (text == "f" || text == "0")) return false;
  }
  return Mismatch(value, "true or false");
}

absl::StatusOr<int> ToEnum(const SpecNode& value, const google::protobuf::EnumDescriptor* type) {
  std::vector<std::string> names;  // without the one that stands for "not set"
  for (int i = 0; i < type->value_count(); ++i) {
    if (type->value(i)->number() == 0) continue;
    if (value.kind == SpecNode::kScalar && absl::EqualsIgnoreCase(value.text, type->value(i)->name())) {
      return type->value(i)->number();
    }
    names.push_back(absl::AsciiStrToLower(type->value(i)->name()));
  }
  std::string expected = "one of " + absl::StrJoin(names, ", ");
  const std::string near = value.kind == SpecNode::kScalar ? NearestWord(value.text, names) : "";
  if (!near.empty()) absl::StrAppend(&expected, "; did you mean ", near, "?");
  return Mismatch(value, expected);
}

}  // namespace

std::string NearestWord(std::string_view word, const std::vector<std::string>& words) {
  if (word.size() > 100) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : words) {
    const size_t distance = EditDistance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string SuggestField(const Descriptor* message, const std::string& prefix, std::string_view name) {
  const std::string dot = prefix.empty() ? "" : prefix + ".";
  std::vector<std::string> here;
  for (int i = 0; i < message->field_count(); ++i) here.push_back(message->field(i)->name());
  if (const std::string near = NearestWord(name, here); !near.empty()) {
    return absl::StrCat("did you mean ", dot, near, "?");
  }
  std::vector<const FieldDescriptor*> fields;
  std::vector<std::string> paths;
  CollectFields(v1::JobSpec::descriptor(), "", &fields, &paths);
  std::vector<std::string> names;
  for (const FieldDescriptor* field : fields) names.push_back(field->name());
  if (const std::string near = NearestWord(name, names); !near.empty()) {
    std::vector<std::string> places;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] == near) places.push_back(paths[i]);
    }
    return absl::StrCat("did you mean ", absl::StrJoin(places, " or "), "?");
  }
  return absl::StrCat("the fields ", prefix.empty() ? "here" : "of " + prefix, " are ", absl::StrJoin(here, ", "));
}

absl::Status SetScalar(const SpecNode& value, const FieldDescriptor* field, bool text_format, bool plain_strings,
                       Message* message) {
  const Reflection* reflection = message->GetReflection();
  const bool add = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32: {
      ASSIGN_OR_RETURN(const uint64_t number, ToUnsigned(value, std::numeric_limits<uint32_t>::max()));
      const uint32_t narrow = static_cast<uint32_t>(number);
      add ? reflection->AddUInt32(message, field, narrow) : reflection->SetUInt32(message, field, narrow);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      ASSIGN_OR_RETURN(const uint64_t number, ToUnsigned(value, std::numeric_limits<uint64_t>::max()));
      add ? reflection->AddUInt64(message, field, number) : reflection->SetUInt64(message, field, number);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      ASSIGN_OR_RETURN(const double number, ToDouble(value));
      add ? reflection->AddDouble(message, field, number) : reflection->SetDouble(message, field, number);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      ASSIGN_OR_RETURN(const bool truth, ToBool(value, text_format));
      add ? reflection->AddBool(message, field, truth) : reflection->SetBool(message, field, truth);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      ASSIGN_OR_RETURN(const int number, ToEnum(value, field->enum_type()));
      add ? reflection->AddEnumValue(message, field, number) : reflection->SetEnumValue(message, field, number);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_STRING:
      if (value.kind != SpecNode::kScalar || (!value.quoted && !plain_strings))
        return Mismatch(value, "text in quotes");
      add ? reflection->AddString(message, field, value.text) : reflection->SetString(message, field, value.text);
      return absl::OkStatus();
    default:
      break;  // job.proto has no others; the test over its descriptor says so when one is added
  }
  return absl::InternalError(absl::StrCat("a field of type ", field->type_name(), " cannot be read from a spec"));
}

std::string Describe(const SpecNode& node) {
  switch (node.kind) {
    case SpecNode::kNull:
      return "nothing";
    case SpecNode::kList:
      return "a list";
    case SpecNode::kMap:
      return "a group of fields";
    case SpecNode::kScalar:
      break;
  }
  constexpr size_t kShown = 60;
  std::string text = absl::Utf8SafeCEscape(node.text.substr(0, kShown));
  if (node.text.size() > kShown) text += "...";
  return node.quoted || text.empty() ? absl::StrCat("\"", text, "\"") : text;
}

}  // namespace sluice
