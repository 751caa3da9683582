#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include "absl/strings/str_cat.h"
#include "common/spec_node.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

using google::protobuf::io::Tokenizer;

class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int at_line, google::protobuf::io::ColumnNumber at_column, const std::string& message) override {
    if (!what.empty()) return;
    line = at_line + 1;
    column = at_column + 1;
    what = message;
  }

  int line = 1, column = 1;
  std::string what;
};

// Protobuf's text format (protobuf.dev/reference/protobuf/textformat-spec) over protobuf's own tokenizer. Its own
// parser would know neither enum values in lower case nor "did you mean".
class Reader {
 public:
  Reader(std::string_view text, std::string_view file)
      : file_(file), input_(text.data(), static_cast<int>(text.size())), tokenizer_(&input_, &errors_) {
    tokenizer_.set_comment_style(Tokenizer::SH_COMMENT_STYLE);
    tokenizer_.set_allow_f_after_float(true);
    tokenizer_.set_require_space_after_number(false);
    tokenizer_.set_allow_multiline_strings(true);
    Next();
  }

  absl::StatusOr<SpecNode> Document() {
    SpecNode root;
    root.kind = SpecNode::kMap;
    absl::Status status = Fields(&root, "", 1);
    // What the tokenizer objects to came first and explains more.
    if (!errors_.what.empty())
      return SpecError(file_, errors_.line, errors_.column, "not text format: " + errors_.what);
    if (!status.ok()) return status;
    if (root.entries.empty()) return SpecNode();
    return root;
  }

 private:
  // Fields up to `end` ("" is the end of the file), which is consumed.
  absl::Status Fields(SpecNode* node, std::string_view end, int depth) {
    while (!AtEnd(end)) {
      if (!Is(Tokenizer::TYPE_IDENTIFIER)) {
        return Unexpected(end.empty() ? "the name of a field"
                                      : absl::StrCat("the name of a field or '", std::string(end), "'"));
      }
      SpecNode key = Here(SpecNode::kScalar);
      key.text = token().text;
      Next();
      const bool colon = TakeSymbol(":");
      if (!colon && !IsSymbol("{") && !IsSymbol("<")) return Unexpected("':' or '{' after " + key.text);
      ASSIGN_OR_RETURN(SpecNode value, Value(depth + 1));
      node->entries.push_back({std::move(key), std::move(value)});
      if (!TakeSymbol(",")) TakeSymbol(";");
    }
    if (!end.empty()) Next();
    return absl::OkStatus();
  }

  absl::StatusOr<SpecNode> Value(int depth) {
    if (depth > kMaxSpecDepth) return Error(absl::StrCat("nested deeper than ", kMaxSpecDepth, " levels"));
    if (++nodes_ > kMaxSpecNodes) return Error(absl::StrCat("more than ", kMaxSpecNodes, " values"));
    if (IsSymbol("{") || IsSymbol("<")) {
      SpecNode node = Here(SpecNode::kMap);
      const std::string_view end = IsSymbol("{") ? "}" : ">";
      Next();
      RETURN_IF_ERROR(Fields(&node, end, depth));
      return node;
    }
    if (IsSymbol("[")) {
      SpecNode node = Here(SpecNode::kList);
      Next();
      while (!TakeSymbol("]")) {
        if (!node.items.empty() && !TakeSymbol(",")) return Unexpected("',' or ']'");
        ASSIGN_OR_RETURN(SpecNode item, Value(depth + 1));
        node.items.push_back(std::move(item));
      }
      return node;
    }
    return Scalar();
  }

  absl::StatusOr<SpecNode> Scalar() {
    SpecNode node = Here(SpecNode::kScalar);
    if (Is(Tokenizer::TYPE_STRING)) {
      node.quoted = true;
      for (; Is(Tokenizer::TYPE_STRING); Next()) Tokenizer::ParseStringAppend(token().text, &node.text);
      return node;
    }
    if (TakeSymbol("-")) node.text.push_back('-');
    if (Is(Tokenizer::TYPE_INTEGER)) {
      uint64_t value = 0;  // hexadecimal and octal too
      const bool fits = Tokenizer::ParseInteger(token().text, UINT64_MAX, &value);
      absl::StrAppend(&node.text, fits ? absl::StrCat(value) : token().text);
    } else if (Is(Tokenizer::TYPE_FLOAT)) {
      std::string number = token().text;
      if (number.back() == 'f' || number.back() == 'F') number.pop_back();
      node.text += number;
    } else if (Is(Tokenizer::TYPE_IDENTIFIER)) {
      node.text += token().text;
    } else {
      return Unexpected("a value");
    }
    Next();
    return node;
  }

  const Tokenizer::Token& token() { return tokenizer_.current(); }
  void Next() { tokenizer_.Next(); }
  bool Is(Tokenizer::TokenType type) { return token().type == type; }
  bool IsSymbol(std::string_view symbol) { return Is(Tokenizer::TYPE_SYMBOL) && token().text == symbol; }
  bool TakeSymbol(std::string_view symbol) {
    if (!IsSymbol(symbol)) return false;
    Next();
    return true;
  }
  bool AtEnd(std::string_view end) { return end.empty() ? Is(Tokenizer::TYPE_END) : IsSymbol(end); }

  SpecNode Here(SpecNode::Kind kind) {
    SpecNode node;
    node.kind = kind;
    node.line = token().line + 1;
    node.column = token().column + 1;
    return node;
  }

  absl::Status Error(const std::string& what) { return SpecError(file_, token().line + 1, token().column + 1, what); }
  absl::Status Unexpected(const std::string& expected) {
    const std::string found = Is(Tokenizer::TYPE_END) ? "the end of the file" : absl::StrCat("'", token().text, "'");
    return Error(absl::StrCat("not text format: expected ", expected, ", found ", found));
  }

  const std::string_view file_;
  FirstError errors_;
  google::protobuf::io::ArrayInputStream input_;
  Tokenizer tokenizer_;
  size_t nodes_ = 0;
};

}  // namespace

absl::StatusOr<SpecNode> ReadTextTree(std::string_view text, std::string_view file) {
  return Reader(text, file).Document();
}

}  // namespace sluice
