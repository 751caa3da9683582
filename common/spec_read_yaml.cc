#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <exception>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/spec_node.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// Copies yaml-cpp's tree, whose aliases may share (or even contain) each other, within the limits.
class Copier {
 public:
  explicit Copier(std::string_view file) : file_(file) {}

  absl::StatusOr<SpecNode> Copy(const YAML::Node& from, int depth) {
    SpecNode to;
    to.line = from.Mark().line + 1;
    to.column = from.Mark().column + 1;
    if (depth > kMaxSpecDepth) return Error(to, absl::StrCat("nested deeper than ", kMaxSpecDepth, " levels"));
    if (++nodes_ > kMaxSpecNodes) {
      return Error(to, absl::StrCat("more than ", kMaxSpecNodes, " values, aliases counted each time they are used"));
    }
    const std::string& tag = from.Tag();
    const bool text = tag == "!" || tag == "tag:yaml.org,2002:str";
    if (!text && !tag.empty() && tag != "?") {
      return Error(to, absl::StrCat("the tag ", tag, " is not supported; write the plain value"));
    }
    switch (from.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        return to;
      case YAML::NodeType::Scalar:
        to.kind = SpecNode::kScalar;
        to.text = from.Scalar();
        to.quoted = text;
        return to;
      case YAML::NodeType::Sequence:
        to.kind = SpecNode::kList;
        for (const YAML::Node& item : from) {
          ASSIGN_OR_RETURN(SpecNode copy, Copy(item, depth + 1));
          to.items.push_back(std::move(copy));
        }
        return to;
      case YAML::NodeType::Map:
        to.kind = SpecNode::kMap;
        for (const auto& entry : from) {
          ASSIGN_OR_RETURN(SpecNode key, Copy(entry.first, depth + 1));
          if (key.kind != SpecNode::kScalar) return Error(key, "expected the name of a field before the colon");
          ASSIGN_OR_RETURN(SpecNode value, Copy(entry.second, depth + 1));
          to.entries.push_back({std::move(key), std::move(value)});
        }
        return to;
    }
    return to;
  }

 private:
  absl::Status Error(const SpecNode& at, const std::string& what) const {
    return SpecError(file_, at.line, at.column, what);
  }

  const std::string_view file_;
  size_t nodes_ = 0;
};

// Runs over the text before a tree is made of it: counts, and looks whether something follows the first document.
// (YAML::LoadAll never ends on "{a: 1}, {b: 2}": yaml-cpp 0.7 finds an endless row of empty documents at the comma.)
class Probe : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override { start = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Count(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string&) override {
    Count(mark);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    Count(mark);
  }
  void OnMapEnd() override {}

  YAML::Mark start;  // of the last document seen

 private:
  void Count(const YAML::Mark& mark) {
    if (++nodes_ > kMaxSpecNodes)
      throw YAML::ParserException(mark, absl::StrCat("more than ", kMaxSpecNodes, " values"));
  }

  size_t nodes_ = 0;
};

// YAML forbids control characters; yaml-cpp takes one of them (0x04) for the end of the document and drops the rest.
absl::Status CheckControlCharacters(std::string_view text, std::string_view file) {
  int line = 1;
  size_t line_start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c == '\n') {
      ++line;
      line_start = i + 1;
    } else if (c < 0x20 && c != '\t' && c != '\r') {
      return SpecError(file, line, static_cast<int>(i - line_start) + 1,
                       absl::StrCat("control character 0x", absl::Hex(c, absl::kZeroPad2), " is not allowed in YAML"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SpecNode> ReadYamlTree(std::string_view text, std::string_view file) {
  RETURN_IF_ERROR(CheckControlCharacters(text, file));
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    Probe probe;
    if (!parser.HandleNextDocument(probe)) return SpecNode();
    if (parser.HandleNextDocument(probe)) {
      return SpecError(file, probe.start.line + 1, probe.start.column + 1,
                       "expected one document, found more here; remove what follows the first");
    }
    return Copier(file).Copy(YAML::Load(std::string(text)), 1);
  } catch (const YAML::DeepRecursion& e) {
    return SpecError(file, e.mark.line + 1, e.mark.column + 1,
                     absl::StrCat("nested deeper than ", kMaxSpecDepth, " levels"));
  } catch (const YAML::Exception& e) {
    if (e.mark.is_null()) return SpecError(file, 1, 1, absl::StrCat("not YAML: ", e.msg));
    return SpecError(file, e.mark.line + 1, e.mark.column + 1, absl::StrCat("not YAML: ", e.msg));
  } catch (const std::exception& e) {
    return SpecError(file, 1, 1, absl::StrCat("not YAML: ", e.what()));
  }
}

}  // namespace sluice
