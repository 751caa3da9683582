// ParseJobSpec and SetSpecField: a tree of any format laid over the message by its descriptor.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/job_spec.h"
#include "common/spec_fields.h"
#include "common/spec_node.h"
#include "common/status_macros.h"
#include "common/utf8.h"

namespace sluice {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;

// Fills messages from nodes and gathers all problems, so that a user mends a file once.
class Walker {
 public:
  Walker(SpecFormat format, std::string_view file) : format_(format), file_(file) {}

  void Fill(const SpecNode& node, const std::string& path, Message* message) {
    if (node.kind == SpecNode::kNull) return;  // "parallel:" with nothing below it
    if (node.kind != SpecNode::kMap) {
      return Problem(node, absl::StrCat(path.empty() ? "" : path + ": ", "found ", Describe(node),
                                        ", expected a group of fields"));
    }
    std::map<const FieldDescriptor*, const SpecNode*> seen;
    std::map<const OneofDescriptor*, std::pair<const FieldDescriptor*, const SpecNode*>> chosen;
    for (const SpecEntry& entry : node.entries) {
      if (problems_.size() > kReported) return;  // looking for suggestions takes time
      const std::string name = Join(path, Shown(entry.key.text));
      const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(entry.key.text);
      if (field == nullptr) {
        Problem(entry.key, absl::StrCat("unknown field ", name, "; ",
                                        SuggestField(message->GetDescriptor(), path, entry.key.text)));
        continue;
      }
      const bool may_repeat = field->is_repeated() && format_ == SpecFormat::kText;
      if (const auto [first, fresh] = seen.emplace(field, &entry.key); !fresh && !may_repeat) {
        Problem(entry.key, absl::StrCat(name, " is given twice, first in line ", first->second->line, "; remove one"));
        continue;
      }
      if (const OneofDescriptor* oneof = field->real_containing_oneof(); oneof != nullptr) {
        if (const auto [first, fresh] = chosen.emplace(oneof, std::pair(field, &entry.key)); !fresh) {
          Problem(entry.key, absl::StrCat(name, " excludes ", Join(path, first->second.first->name()), " of line ",
                                          first->second.second->line, "; remove one"));
          continue;
        }
      }
      Value(entry.value, field, name, message);
    }
  }

  void Value(const SpecNode& node, const FieldDescriptor* field, const std::string& path, Message* message) {
    if (!field->is_repeated()) return One(node, field, path, message);
    if (node.kind == SpecNode::kList) {
      for (size_t i = 0; i < node.items.size(); ++i) {
        One(node.items[i], field, absl::StrCat(path, "[", i, "]"), message);
      }
    } else if (format_ == SpecFormat::kText) {
      One(node, field, path, message);
    } else {
      Problem(node, absl::StrCat(path, ": found ", Describe(node), ", expected a list, like [128, 64]"));
    }
  }

  absl::Status status() const {
    if (problems_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(problems_, "\n"));
  }

 private:
  void One(const SpecNode& node, const FieldDescriptor* field, const std::string& path, Message* message) {
    if (field->message_type() != nullptr) {
      const auto* reflection = message->GetReflection();
      return Fill(
          node, path,
          field->is_repeated() ? reflection->AddMessage(message, field) : reflection->MutableMessage(message, field));
    }
    const absl::Status set =
        SetScalar(node, field, format_ == SpecFormat::kText, format_ == SpecFormat::kYaml, message);
    if (!set.ok()) Problem(node, absl::StrCat(path, ": ", set.message()));
  }

  static std::string Join(const std::string& path, const std::string& name) {
    return path.empty() ? name : absl::StrCat(path, ".", name);
  }

  static std::string Shown(const std::string& name) {
    SpecNode node;
    node.kind = SpecNode::kScalar;
    node.text = name;
    return Describe(node);
  }

  void Problem(const SpecNode& at, const std::string& what) {
    if (problems_.size() < kReported) {
      problems_.emplace_back(SpecError(file_, at.line, at.column, what).message());
    } else if (problems_.size() == kReported) {
      problems_.emplace_back("... and more");
    }
  }

  static constexpr size_t kReported = 20;

  const SpecFormat format_;
  const std::string_view file_;
  std::vector<std::string> problems_;
};

absl::Status CheckText(std::string_view text, std::string_view file) {
  if (text.size() > kMaxSpecBytes) {
    return SpecError(
        file, 1, 1,
        absl::StrCat("the file has ", text.size(), " bytes, allowed at most ", kMaxSpecBytes, "; is it a job's spec?"));
  }
  if (const size_t bad = FirstInvalidUtf8(text); bad != std::string_view::npos) {
    const std::string_view before = text.substr(0, bad);
    int line = 1;
    for (const char c : before) line += c == '\n';
    return SpecError(file, line, static_cast<int>(bad - (before.rfind('\n') + 1)) + 1,
                     absl::StrCat("byte 0x", absl::Hex(static_cast<unsigned char>(text[bad]), absl::kZeroPad2),
                                  " is not UTF-8; save the file as UTF-8"));
  }
  return absl::OkStatus();
}

// The field that `path` names and the message that holds it, created on the way.
absl::StatusOr<std::pair<Message*, const FieldDescriptor*>> Descend(Message* message, const std::string& path) {
  const std::vector<std::string> names = absl::StrSplit(path, '.');
  std::string prefix;
  for (size_t i = 0; i < names.size(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(names[i]);
    if (field == nullptr) {
      const std::string whole = prefix.empty() ? names[i] : absl::StrCat(prefix, ".", names[i]);
      const size_t bracket = names[i].find('[');
      if (bracket != std::string::npos) {
        field = message->GetDescriptor()->FindFieldByName(names[i].substr(0, bracket));
        if (field != nullptr && field->is_repeated()) {
          return absl::InvalidArgumentError(
              absl::StrCat(whole, ": one element cannot be set; give the whole list, like [128, 64]"));
        }
      }
      return absl::InvalidArgumentError(absl::StrCat("unknown field ", absl::Utf8SafeCEscape(whole.substr(0, 200)),
                                                     "; ", SuggestField(message->GetDescriptor(), prefix, names[i])));
    }
    if (i + 1 == names.size()) return std::pair(message, field);
    prefix = prefix.empty() ? names[i] : absl::StrCat(prefix, ".", names[i]);
    if (field->message_type() == nullptr || field->is_repeated()) {
      return absl::InvalidArgumentError(absl::StrCat(prefix, " is a value: it has no field ", names[i + 1]));
    }
    message = message->GetReflection()->MutableMessage(message, field);
  }
  return absl::InvalidArgumentError("expected the path of a field");  // not reached: StrSplit gives at least one name
}

}  // namespace

absl::Status SpecError(std::string_view file, int line, int column, std::string_view what) {
  if (file.empty()) return absl::InvalidArgumentError(std::string(what));
  return absl::InvalidArgumentError(absl::StrCat(std::string(file), ":", line, ":", column, ": ", std::string(what)));
}

absl::StatusOr<SpecFormat> SpecFormatOf(std::string_view path) {
  const std::string_view base = path.substr(path.rfind('/') + 1);  // npos + 1 = 0
  const size_t dot = base.rfind('.');
  const std::string extension =
      dot == std::string_view::npos ? "" : absl::AsciiStrToLower(std::string(base.substr(dot)));
  if (extension == ".yaml" || extension == ".yml") return SpecFormat::kYaml;
  if (extension == ".json") return SpecFormat::kJson;
  if (extension == ".textproto" || extension == ".txtpb" || extension == ".pbtxt") return SpecFormat::kText;
  return absl::InvalidArgumentError(absl::StrCat(std::string(path), ": found ",
                                                 extension.empty() ? "no extension" : "extension " + extension,
                                                 ", expected .yaml, .yml, .json, .textproto, .txtpb or .pbtxt"));
}

absl::StatusOr<v1::JobSpec> ParseJobSpec(std::string_view text, SpecFormat format, std::string_view file_name) {
  if (file_name.empty()) file_name = "<spec>";
  RETURN_IF_ERROR(CheckText(text, file_name));
  if (text.substr(0, 3) == "\xef\xbb\xbf") text.remove_prefix(3);  // byte order mark
  absl::StatusOr<SpecNode> tree = format == SpecFormat::kYaml   ? ReadYamlTree(text, file_name)
                                  : format == SpecFormat::kJson ? ReadJsonTree(text, file_name)
                                                                : ReadTextTree(text, file_name);
  if (!tree.ok()) return tree.status();
  if (tree->kind == SpecNode::kNull)
    return SpecError(file_name, 1, 1, "expected a job's spec, found an empty document");
  v1::JobSpec spec;
  Walker walker(format, file_name);
  walker.Fill(*tree, "", &spec);
  RETURN_IF_ERROR(walker.status());
  return spec;
}

absl::Status SetSpecField(v1::JobSpec* spec, std::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    return absl::InvalidArgumentError(absl::StrCat("found \"",
                                                   absl::Utf8SafeCEscape(std::string(assignment.substr(0, 200))),
                                                   "\", expected FIELD=VALUE, like train.rounds=500"));
  }
  const std::string path(absl::StripAsciiWhitespace(std::string(assignment.substr(0, equals))));
  const std::string_view value = assignment.substr(equals + 1);
  const std::string context = path + "=" + std::string(value.substr(0, 60));
  if (const absl::Status text = CheckText(value, ""); !text.ok()) return Annotate(text, path);

  v1::JobSpec changed = *spec;  // all or nothing
  const auto place = Descend(&changed, path);
  if (!place.ok()) return Annotate(place.status(), absl::Utf8SafeCEscape(context));
  const auto [message, field] = *place;

  SpecNode node;
  const bool text = field->cpp_type() == FieldDescriptor::CPPTYPE_STRING && !field->is_repeated();
  if (text && value.substr(0, 1) != "\"" && value.substr(0, 1) != "'") {
    node.kind = SpecNode::kScalar;  // as it is: paths may hold what means something in YAML
    node.text = std::string(value);
  } else {
    absl::StatusOr<SpecNode> tree = ReadYamlTree(value, "");
    if (!tree.ok()) return Annotate(tree.status(), absl::Utf8SafeCEscape(context));
    node = *std::move(tree);
  }
  message->GetReflection()->ClearField(message, field);
  Walker walker(SpecFormat::kYaml, "");
  walker.Value(node, field, path, message);
  RETURN_IF_ERROR(walker.status());
  if (field->message_type() != nullptr && node.kind == SpecNode::kNull) {
    message->GetReflection()->MutableMessage(message, field);
  }
  *spec = std::move(changed);
  return absl::OkStatus();
}

}  // namespace sluice
