#include "worker/data/csv_reader.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kMaxField = 1 << 20;
constexpr size_t kMaxFields = 1 << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<CsvReader>> CsvReader::Open(const std::string& path, char delimiter) {
  ASSIGN_OR_RETURN(auto reader, PackedReader::Open(path));
  return std::unique_ptr<CsvReader>(new CsvReader(path, delimiter, std::move(reader)));
}

absl::Status CsvReader::Error(uint64_t line, const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, ":", line, ": ", what));
}

int CsvReader::Refill() {
  if (!status_.ok()) return kEnd;
  const auto got = reader_->Read(buffer_.data(), buffer_.size());
  at_ = available_ = 0;
  if (!got.ok()) {
    status_ = got.status();
    return kEnd;
  }
  available_ = *got;
  if (!started_) {
    started_ = true;
    const std::string_view head(buffer_.data(), available_);
    if (head.substr(0, 2) == "\xff\xfe" || head.substr(0, 2) == "\xfe\xff") {
      status_ = Error(1, "the file looks like UTF-16 (it begins with that byte order mark); convert it to UTF-8");
      available_ = 0;
      return kEnd;
    }
    if (head.substr(0, 3) == "\xef\xbb\xbf") at_ = 3;
  }
  return at_ < available_ ? static_cast<unsigned char>(buffer_[at_++]) : kEnd;
}

absl::Status CsvReader::Put(int byte) {
  if (byte == 0) {
    return Error(line_, "a zero byte: the file is not text, or looks like UTF-16; CSV in UTF-8 is expected");
  }
  if (fields_.back().size() == kMaxField) {
    return Error(lines_.back(), "a field of more than 1 MiB begins here; is a closing quote missing?");
  }
  fields_.back().push_back(static_cast<char>(byte));
  return absl::OkStatus();
}

absl::Status CsvReader::LineEndAfterReturn() {
  const int next = Get();
  if (next == '\n' || (next == kEnd && status_.ok())) return absl::OkStatus();
  RETURN_IF_ERROR(status_);
  return Error(line_,
               "a carriage return without a line feed; lines end with LF or CR LF: convert the file's line ends");
}

absl::StatusOr<int> CsvReader::ReadQuotedField() {
  const uint64_t begin = line_;
  for (;;) {
    int c = Get();
    if (c == '"') {
      c = Get();
      if (c != '"') {  // a doubled quote is one of the text
        if (c == '\r') {
          RETURN_IF_ERROR(LineEndAfterReturn());
          c = '\n';
        }
        if (c == delimiter_ || c == '\n' || c == kEnd) return c;
        return Error(line_, "text after the closing quote of a field; quotes within a field are doubled");
      }
    } else if (c == kEnd) {
      RETURN_IF_ERROR(status_);
      return Error(begin, "the file ends within a field whose quote opens here");
    } else if (c == '\n') {
      ++line_;
    }
    RETURN_IF_ERROR(Put(c));
  }
}

absl::StatusOr<int> CsvReader::ReadField() {
  int c = Get();
  if (c == '"') {
    quoted_.back() = true;
    return ReadQuotedField();
  }
  for (;; c = Get()) {
    if (c == delimiter_ || c == '\n' || c == kEnd) return c;
    if (c == '\r') {
      RETURN_IF_ERROR(LineEndAfterReturn());
      return '\n';
    }
    if (c == '"') {
      return Error(line_, absl::StrCat("a quote within column ", fields_.size(),
                                       ", which does not begin with one; a field with quotes is put in quotes as a "
                                       "whole and its own are doubled"));
    }
    RETURN_IF_ERROR(Put(c));
  }
}

absl::StatusOr<bool> CsvReader::Next() {
  for (;;) {
    fields_.clear();
    lines_.clear();
    quoted_.clear();
    record_line_ = line_;
    int end = delimiter_;
    while (end == delimiter_) {
      if (fields_.size() == kMaxFields) return Error(line_, "more than 2^20 columns");
      fields_.emplace_back();
      lines_.push_back(line_);
      quoted_.push_back(false);
      ASSIGN_OR_RETURN(end, ReadField());
    }
    RETURN_IF_ERROR(status_);
    if (end == '\n') ++line_;
    const bool blank = fields_.size() == 1 && fields_[0].empty() && !quoted_[0];
    if (!blank) return true;
    if (end == kEnd) return false;
  }
}

}  // namespace sluice
