// A CSV file as numbers and classes, before it is a data set: columns resolved, fields read, schema made or checked.
#ifndef SLUICE_WORKER_DATA_TABLE_H_
#define SLUICE_WORKER_DATA_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

struct Table {
  std::string path;
  bool header = false;
  std::vector<std::string> features;     // names of the feature columns; without a header their indices
  std::vector<size_t> feature_columns;   // their indices in the file
  std::vector<double> values;            // [rows, features], finite, within the range of float32
  std::vector<int32_t> labels;           // [rows], indices into label_texts
  std::vector<std::string> label_texts;  // distinct ones in the order of their first row, spaces around taken off
  std::vector<uint64_t> label_lines;     // [label_texts], where each is met first
  std::vector<uint64_t> lines;           // [rows]

  uint64_t rows() const { return labels.size(); }
  uint64_t inputs() const { return features.size(); }
};

// Reads all of `path` by the columns, delimiter and header that `source` names (its defaults need not be filled in).
// INVALID_ARGUMENT "PATH:LINE: column N ("name"): what": another number of columns, a missing value, what is no number;
// no rows; a column that is not there or named twice.
absl::StatusOr<Table> ReadTable(const std::string& path, const v1::CsvSource& source);

// What a training file decides: class names in their order, means and deviations over the rows of `part` (in this
// order, float64, two passes: a pure function of its arguments). INVALID_ARGUMENT: labels that are numbers but not
// whole; more than 2^20 classes.
absl::StatusOr<v1::TableSchema> MakeSchema(const Table& table, const std::vector<uint64_t>& part, bool standardize);

// The table's columns are the schema's. INVALID_ARGUMENT names the first that is not.
absl::Status CheckColumns(const Table& table, const v1::TableSchema& schema);

// Class of each of the table's label_texts. INVALID_ARGUMENT "PATH:LINE: ..." for one that the schema lacks.
absl::StatusOr<std::vector<int32_t>> ClassesOf(const Table& table, const v1::TableSchema& schema);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_TABLE_H_
