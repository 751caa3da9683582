// Records of a CSV file (RFC 4180), raw or gzip, one after the other.
#ifndef SLUICE_WORKER_DATA_CSV_READER_H_
#define SLUICE_WORKER_DATA_CSV_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/file.h"

namespace sluice {

// Fields are separated by `delimiter`, records by LF or CR LF; a field in quotes may hold both, and quotes doubled. A
// byte order mark of UTF-8 at the start and blank lines are skipped; the last record needs no line end. Not
// thread-safe.
class CsvReader {
 public:
  // Errors as PackedReader::Open.
  static absl::StatusOr<std::unique_ptr<CsvReader>> Open(const std::string& path, char delimiter);

  // Reads the next record; false at the end. INVALID_ARGUMENT "PATH:LINE: what": UTF-16, a zero byte, a quote or a
  // carriage return where none may be, quotes that do not end, a field over 1 MiB, a record of over 2^20 fields.
  absl::StatusOr<bool> Next();

  // Of the record read last; valid until the next one.
  const std::vector<std::string>& fields() const { return fields_; }
  bool quoted(size_t field) const { return quoted_[field]; }
  uint64_t line() const { return record_line_; }  // on which it begins, from 1
  uint64_t line_of(size_t field) const { return lines_[field]; }

 private:
  CsvReader(std::string path, char delimiter, std::unique_ptr<PackedReader> reader)
      : path_(std::move(path)), delimiter_(delimiter), reader_(std::move(reader)), buffer_(1 << 16, '\0') {}

  static constexpr int kEnd = -1;
  // The next byte, or kEnd (also after an error, which status_ holds then).
  int Get() { return at_ < available_ ? static_cast<unsigned char>(buffer_[at_++]) : Refill(); }
  int Refill();
  // The byte after a CR, which has to be a LF (taken) or the end.
  absl::Status LineEndAfterReturn();
  absl::StatusOr<int> ReadField();        // returns the byte that ended it: delimiter, '\n' or kEnd
  absl::StatusOr<int> ReadQuotedField();  // after the opening quote
  absl::Status Put(int byte);
  absl::Status Error(uint64_t line, const std::string& what) const;

  const std::string path_;
  const char delimiter_;
  const std::unique_ptr<PackedReader> reader_;
  std::string buffer_;
  size_t at_ = 0, available_ = 0;
  bool started_ = false;
  absl::Status status_;
  uint64_t line_ = 1, record_line_ = 1;
  std::vector<std::string> fields_;
  std::vector<uint64_t> lines_;
  std::vector<bool> quoted_;
};

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_CSV_READER_H_
