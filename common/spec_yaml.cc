// JobSpecToYaml: a spec as YAML that ParseJobSpec reads back into the same message.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <charconv>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/job_spec.h"

namespace sluice {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The shortest decimal number that is read back as the same double.
std::string DoubleText(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

bool NeedsQuotes(const std::string& text) {
  if (text.empty() || !(absl::ascii_isalpha(text[0]) || text[0] == '/' || text[0] == '_')) return true;
  for (const char c : text) {
    if (!absl::ascii_isalnum(c) && std::string_view("/_-.+").find(c) == std::string_view::npos) return true;
  }
  const std::string lower = absl::AsciiStrToLower(text);
  for (const char* word : {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}) {
    if (lower == word) return true;
  }
  return false;
}

std::string StringText(const std::string& text) {
  if (!NeedsQuotes(text)) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (c == '\t') {
      quoted += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&quoted, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      quoted += c;  // UTF-8 goes as it is
    }
  }
  return quoted + "\"";
}

// Of a singular field (index < 0) or an element of a repeated one.
std::string ScalarText(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* r = message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(one ? r->GetUInt32(message, field) : r->GetRepeatedUInt32(message, field, index));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(one ? r->GetUInt64(message, field) : r->GetRepeatedUInt64(message, field, index));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return DoubleText(one ? r->GetDouble(message, field) : r->GetRepeatedDouble(message, field, index));
    case FieldDescriptor::CPPTYPE_BOOL:
      return (one ? r->GetBool(message, field) : r->GetRepeatedBool(message, field, index)) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int number = one ? r->GetEnumValue(message, field) : r->GetRepeatedEnumValue(message, field, index);
      const auto* value = field->enum_type()->FindValueByNumber(number);
      return value == nullptr ? absl::StrCat(number) : absl::AsciiStrToLower(value->name());
    }
    default:
      return StringText(one ? r->GetString(message, field) : r->GetRepeatedString(message, field, index));
  }
}

// Whether a singular field goes into the file: numbers always (a user sees what there is to set), texts and enum values
// that are not set never.
bool Shown(const Message& message, const FieldDescriptor* field) {
  const Reflection* reflection = message.GetReflection();
  if (field->has_presence()) return reflection->HasField(message, field);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) return reflection->HasField(message, field);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) return reflection->GetEnumValue(message, field) != 0;
  return true;
}

void Write(const Message& message, int indent, std::string* out) {
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const std::string start = absl::StrCat(std::string(static_cast<size_t>(indent), ' '), field->name(), ":");
    if (field->is_repeated()) {  // of scalars: job.proto has no others
      std::string items;
      for (int k = 0; k < message.GetReflection()->FieldSize(message, field); ++k) {
        absl::StrAppend(&items, k > 0 ? ", " : "", ScalarText(message, field, k));
      }
      absl::StrAppend(out, start, " [", items, "]\n");
    } else if (!Shown(message, field)) {
      continue;
    } else if (field->message_type() != nullptr) {
      std::string inner;
      Write(message.GetReflection()->GetMessage(message, field), indent + 2, &inner);
      absl::StrAppend(out, start, inner.empty() ? " {}" : "", "\n", inner);
    } else {
      absl::StrAppend(out, start, " ", ScalarText(message, field, -1), "\n");
    }
  }
}

}  // namespace

std::string JobSpecToYaml(const v1::JobSpec& spec) {
  std::string yaml;
  Write(spec, 0, &yaml);
  return yaml;
}

}  // namespace sluice
