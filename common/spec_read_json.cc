#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/spec_node.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// Accepts every event and keeps the first error: whether the text is JSON is nlohmann's verdict.
class Judge : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& e) override {
    at = position > 0 ? position - 1 : 0;
    what = e.what();
    // "[json.exception...] parse error at line 1, column 5: syntax error ...": the place is said in our own form.
    const size_t place = what.find(", column ");
    const size_t from = what.find(place == std::string::npos ? "] " : ": ", place == std::string::npos ? 0 : place);
    if (from != std::string::npos) what.erase(0, from + 2);
    return false;
  }

  size_t at = 0;  // byte
  std::string what;
};

// Builds the tree of a text that is known to be JSON: what nlohmann's tree lacks are the places.
class Builder {
 public:
  Builder(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  absl::StatusOr<SpecNode> Value(int depth) {
    SkipSpace();
    SpecNode node = Here();
    if (depth > kMaxSpecDepth) return Error(node, absl::StrCat("nested deeper than ", kMaxSpecDepth, " levels"));
    if (++nodes_ > kMaxSpecNodes) return Error(node, absl::StrCat("more than ", kMaxSpecNodes, " values"));
    switch (text_[at_]) {
      case '{':
        node.kind = SpecNode::kMap;
        for (++at_; !Closes('}');) {
          SkipSpace();
          SpecNode key = String();
          SkipSpace();
          ++at_;  // ':'
          ASSIGN_OR_RETURN(SpecNode value, Value(depth + 1));
          node.entries.push_back({std::move(key), std::move(value)});
        }
        return node;
      case '[':
        node.kind = SpecNode::kList;
        for (++at_; !Closes(']');) {
          ASSIGN_OR_RETURN(SpecNode item, Value(depth + 1));
          node.items.push_back(std::move(item));
        }
        return node;
      case '"':
        return String();
      default:
        break;
    }
    const size_t end = std::min(text_.find_first_of(",]} \t\r\n", at_), text_.size());
    node.text = std::string(text_.substr(at_, end - at_));
    node.kind = node.text == "null" ? SpecNode::kNull : SpecNode::kScalar;
    at_ = end;
    return node;
  }

 private:
  SpecNode Here() const {
    SpecNode node;
    node.line = line_;
    node.column = static_cast<int>(at_ - line_start_) + 1;
    return node;
  }

  void SkipSpace() {
    for (; at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos; ++at_) {
      if (text_[at_] == '\n') {
        ++line_;
        line_start_ = at_ + 1;
      }
    }
  }

  // Steps over the comma before the next member, or over the bracket.
  bool Closes(char bracket) {
    SkipSpace();
    if (text_[at_] == ',') {
      ++at_;
      return false;
    }
    if (text_[at_] != bracket) return false;
    ++at_;
    return true;
  }

  SpecNode String() {
    SpecNode node = Here();
    size_t end = at_ + 1;
    while (text_[end] != '"') end += text_[end] == '\\' ? 2 : 1;
    node.kind = SpecNode::kScalar;
    node.quoted = true;
    node.text = nlohmann::json::parse(text_.substr(at_, end + 1 - at_)).get<std::string>();
    at_ = end + 1;
    return node;
  }

  absl::Status Error(const SpecNode& at, const std::string& what) const {
    return SpecError(file_, at.line, at.column, what);
  }

  const std::string_view text_, file_;
  size_t at_ = 0, line_start_ = 0, nodes_ = 0;
  int line_ = 1;
};

}  // namespace

absl::StatusOr<SpecNode> ReadJsonTree(std::string_view text, std::string_view file) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return SpecNode();
  Judge judge;
  if (!nlohmann::json::sax_parse(text, &judge)) {
    const std::string_view before = text.substr(0, std::min(judge.at, text.size()));
    const int line = 1 + static_cast<int>(std::count(before.begin(), before.end(), '\n'));
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 = 0
    return SpecError(file, line, static_cast<int>(before.size() - line_start) + 1,
                     absl::StrCat("not JSON: ", judge.what));
  }
  return Builder(text, file).Value(1);
}

}  // namespace sluice
