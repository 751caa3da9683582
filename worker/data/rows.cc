// JSON lines: each line an array of token ids; position i of a row predicts i + 1. Rows may differ in length.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/sources.h"

namespace sluice {
namespace {

// Rows end to end: row i is tokens [start[i], start[i + 1]).
struct Rows {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> start{0};
  uint64_t size() const { return start.size() - 1; }
  uint64_t length(uint64_t row) const { return start[row + 1] - start[row]; }
};

// Parses one line at a time; columns count bytes from 1.
class LineParser {
 public:
  LineParser(const std::string& path, uint64_t line, std::string_view text, uint32_t vocabulary)
      : path_(path), line_(line), text_(text), vocabulary_(vocabulary) {}

  absl::Status ParseInto(Rows* rows) {
    SkipSpace();
    if (!Take('['))
      return Error(absl::StrCat("'[' expected, found ", Found(), "; a row is [1, 2, 3], an empty one []"));
    SkipSpace();
    if (!Take(']')) {
      while (true) {
        RETURN_IF_ERROR(ParseToken(rows));
        SkipSpace();
        if (Take(']')) break;
        if (!Take(',')) return Error(absl::StrCat("',' or ']' expected, found ", Found()));
        SkipSpace();
      }
    }
    SkipSpace();
    if (at_ != text_.size()) return Error(absl::StrCat("end of line expected after the row, found ", Found()));
    rows->start.push_back(rows->tokens.size());
    return absl::OkStatus();
  }

 private:
  absl::Status ParseToken(Rows* rows) {
    const size_t begin = at_;
    uint64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = std::min<uint64_t>(value * 10 + (text_[at_] - '0'), uint64_t{1} << 40);
      ++at_;
    }
    if (at_ == begin) return Error(absl::StrCat("a token id (a whole number, 0 or more) expected, found ", Found()));
    if (at_ - begin > 1 && text_[begin] == '0') {
      at_ = begin;
      return Error("a number without leading zeros expected");
    }
    if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
      at_ = begin;
      return Error("a whole number expected, found a fraction");
    }
    if (value >= vocabulary_) {
      const std::string digits(text_.substr(begin, std::min<size_t>(at_ - begin, 20)));
      at_ = begin;
      return Error(absl::StrCat("token ", digits, " is outside model.gpt2.vocabulary ", vocabulary_));
    }
    rows->tokens.push_back(static_cast<int32_t>(value));
    return absl::OkStatus();
  }

  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }
  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  std::string Found() const {
    if (at_ >= text_.size()) return "the end of the line";
    const unsigned char c = text_[at_];
    return c >= 0x20 && c < 0x7f ? absl::StrCat("'", std::string(1, c), "'")
                                 : absl::StrCat("byte 0x", absl::Hex(c, absl::kZeroPad2));
  }
  absl::Status Error(const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", line_, ":", at_ + 1, ": ", what));
  }

  const std::string& path_;
  const uint64_t line_;
  const std::string_view text_;
  const uint64_t vocabulary_;
  size_t at_ = 0;
};

absl::StatusOr<std::shared_ptr<const Rows>> ReadRows(const std::string& path, const v1::Gpt2Spec& model) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadDataFile(path));
  RETURN_IF_ERROR(CheckNotPlaceholder(path, bytes));
  std::string_view text = bytes;
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ' || text.back() == '\t')) {
    text.remove_suffix(1);
  }
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": the file has no rows"));
  auto rows = std::make_shared<Rows>();
  for (uint64_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    RETURN_IF_ERROR(LineParser(path, line, text.substr(0, end), model.vocabulary()).ParseInto(rows.get()));
    const uint64_t length = rows->length(rows->size() - 1);
    if (length > uint64_t{model.context()} + 1) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", line, ":1: a row of ", length,
                                                     " ids; model.gpt2.context ", model.context(),
                                                     " takes rows of at most ", model.context() + uint64_t{1}));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return std::shared_ptr<const Rows>(std::move(rows));
}

class RowDataset : public Dataset {
 public:
  RowDataset(std::shared_ptr<const Rows> train, std::shared_ptr<const Rows> evaluation, uint64_t train_rows,
             uint64_t eval_first, uint64_t eval_rows, const v1::JobSpec& spec)
      : train_(std::move(train)),
        evaluation_(std::move(evaluation)),
        eval_first_(eval_first),
        eval_rows_(eval_rows),
        order_(train_rows, SeedOf(spec), Shuffles(spec.data())) {}

  uint64_t train_samples() const override { return order_.samples(); }
  uint64_t eval_samples() const override { return eval_rows_; }

  Batch Train(Range positions) const override {
    std::vector<uint64_t> picked;
    picked.reserve(positions.size());
    order_.ForEach(positions, [&](const EpochOrder::Epoch&, uint64_t sample) { picked.push_back(sample); });
    return Gather(*train_, picked);
  }

  Batch Evaluation(Range samples) const override {
    std::vector<uint64_t> picked;
    for (uint64_t i = samples.begin; i < samples.end; ++i) picked.push_back(eval_first_ + i);
    return Gather(*evaluation_, picked);
  }

  uint32_t vocabulary() const override { return 0; }
  uint64_t inputs() const override { return 0; }
  uint32_t classes() const override { return 0; }

 private:
  static Batch Gather(const Rows& rows, const std::vector<uint64_t>& picked) {
    Batch batch;
    batch.rows = static_cast<int64_t>(picked.size());
    for (uint64_t row : picked) {
      const int64_t predictions = std::max<int64_t>(static_cast<int64_t>(rows.length(row)) - 1, 0);
      batch.length = std::max(batch.length, predictions);
      batch.count += predictions;
    }
    batch.tokens.assign(batch.rows * batch.length, 0);
    batch.targets.assign(batch.rows * batch.length, -1);
    for (int64_t b = 0; b < batch.rows; ++b) {
      const int32_t* ids = rows.tokens.data() + rows.start[picked[b]];
      for (uint64_t i = 0; i + 1 < rows.length(picked[b]); ++i) {
        batch.tokens[b * batch.length + i] = ids[i];
        batch.targets[b * batch.length + i] = ids[i + 1];
      }
    }
    return batch;
  }

  const std::shared_ptr<const Rows> train_, evaluation_;
  const uint64_t eval_first_, eval_rows_;
  const EpochOrder order_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Dataset>> OpenRows(const v1::JobSpec& spec, const std::string& data_root) {
  RETURN_IF_ERROR(CheckTokenModel(spec, "rows"));
  if (spec.model().gpt2().vocabulary() == 0) {
    return absl::InvalidArgumentError(
        "model.gpt2.vocabulary: needed with data.rows, which does not say it; found none");
  }
  const v1::RowSource& source = spec.data().rows();
  ASSIGN_OR_RETURN(const std::string path, ResolveDataPath(source.path(), data_root, "data.rows.path"));
  ASSIGN_OR_RETURN(auto train, ReadRows(path, spec.model().gpt2()));
  if (!source.validation_path().empty()) {
    ASSIGN_OR_RETURN(const std::string validation_path,
                     ResolveDataPath(source.validation_path(), data_root, "data.rows.validation_path"));
    ASSIGN_OR_RETURN(auto validation, ReadRows(validation_path, spec.model().gpt2()));
    const uint64_t train_rows = train->size(), eval_rows = validation->size();
    return std::make_shared<const RowDataset>(std::move(train), std::move(validation), train_rows, 0, eval_rows, spec);
  }
  const uint64_t held = HeldOut(train->size(), ValidationFraction(spec.data()));
  const uint64_t kept = train->size() - held;
  return std::make_shared<const RowDataset>(train, train, kept, kept, held, spec);
}

}  // namespace sluice
