// Specs made from data alone, for those who have none yet.
#ifndef SLUICE_CLIENT_DEFAULT_SPECS_H_
#define SLUICE_CLIENT_DEFAULT_SPECS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

struct DefaultSpec {
  v1::JobSpec spec;         // without --set; nothing is filled in beyond what was chosen
  std::string yaml;         // the same with --set, as a file to keep
  std::string description;  // "1618 training samples of 64 features in 10 classes, 179 held out"
};

// A classifier for images or a table (data.idx, data.csv; paths as the working folder sees them). Chosen by how much
// data there is: images get an MLP of one hidden layer of 256; a table one of 64, or, with fewer than 1,000 rows,
// logistic regression (two classes) or softmax regression. `sets` ("data.csv.delimiter=;") hold while the data are
// read. Errors as OpenDataset and SetSpecField.
absl::StatusOr<DefaultSpec> DefaultClassifierSpec(const v1::DataSpec& data, const std::vector<std::string>& sets);

}  // namespace sluice

#endif  // SLUICE_CLIENT_DEFAULT_SPECS_H_
