// Data as a function of position. Position p of the endless order belongs to epoch p / n; within it a keyed permutation
// (common/philox.h) picks the sample. Nothing has state: resume, replacement and rewinding need only the position.
#ifndef SLUICE_WORKER_DATA_DATASET_H_
#define SLUICE_WORKER_DATA_DATASET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/layout.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

// Samples in host memory. Token models use tokens and targets, dense ones features and labels.
struct Batch {
  int64_t rows = 0;              // B
  int64_t length = 0;            // T (token models): the longest row; shorter ones are padded with token 0
  std::vector<int32_t> tokens;   // [B, T]
  std::vector<int32_t> targets;  // [B, T]; -1: no prediction there
  std::vector<float> features;   // [B, inputs]
  std::vector<int32_t> labels;   // [B]
  int64_t count = 0;             // targets that count (not -1), or rows
  uint64_t first_position = 0;   // training: of row 0 in the data order; the others follow it
};

// Immutable after opening; thread-safe.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual uint64_t train_samples() const = 0;  // n of an epoch; at least 1
  virtual uint64_t eval_samples() const = 0;   // held out; may be 0
  // Samples of positions [range.begin, range.end), in order. Empty range: an empty batch.
  virtual Batch Train(Range positions) const = 0;
  // Held-out samples [range.begin, range.end) in file order.
  virtual Batch Evaluation(Range samples) const = 0;
  // What the data says of the model: 0 where it says nothing.
  virtual uint32_t vocabulary() const = 0;
  virtual uint64_t inputs() const = 0;
  virtual uint32_t classes() const = 0;
  // Tables: names of features and classes, means and deviations of the training part. nullptr for other data. Lives as
  // long as the data set.
  virtual const v1::TableSchema* table() const { return nullptr; }
};

// Opens and checks everything at once: unreadable or malformed files (name, line or offset, cause), data shorter than
// one block, tokens outside the vocabulary, sizes that differ from the model's. Paths are resolved under `data_root`
// where it is not empty: what leads out of it is PERMISSION_DENIED. `spec` may lack the sizes that the data decides.
// `cache_folder`: where tokenized texts are kept (token_cache.h); empty: nowhere.
absl::StatusOr<std::shared_ptr<const Dataset>> OpenDataset(const v1::JobSpec& spec, const std::string& data_root,
                                                           const std::string& cache_folder = "");

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_DATASET_H_
