// The kinds of data behind OpenDataset, and the order in which all of them deal their samples.
#ifndef SLUICE_WORKER_DATA_SOURCES_H_
#define SLUICE_WORKER_DATA_SOURCES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model_layout.h"
#include "sluice/v1/job.pb.h"
#include "worker/data/dataset.h"

namespace sluice {

// Which sample of an epoch a position is. Pure: position p is place p mod n of epoch p / n; a permutation keyed by seed
// and epoch maps the place to a sample; without shuffling the place is the sample.
class EpochOrder {
 public:
  EpochOrder(uint64_t samples, uint64_t seed, bool shuffle) : samples_(samples), seed_(seed), shuffle_(shuffle) {}

  // What stays the same over an epoch.
  struct Epoch {
    uint64_t index = 0;
    uint64_t key = 0;    // of the permutation
    uint64_t phase = 0;  // a draw of 64 bits; 0 without shuffling
  };
  struct Place {
    uint64_t epoch = 0, sample = 0;
  };

  uint64_t samples() const { return samples_; }
  Epoch EpochAt(uint64_t index) const;
  // Calls visit(epoch, sample) for every position of the range, in order.
  template <typename Visit>
  void ForEach(Range positions, Visit visit) const {
    Epoch epoch = EpochAt(positions.begin / samples_);
    for (uint64_t p = positions.begin; p < positions.end; ++p) {
      if (p / samples_ != epoch.index) epoch = EpochAt(p / samples_);
      visit(epoch, SampleAt(epoch, p % samples_));
    }
  }

 private:
  uint64_t SampleAt(const Epoch& epoch, uint64_t place) const;

  const uint64_t samples_, seed_;
  const bool shuffle_;
};

// Samples of `total` that the fraction holds out: total * fraction rounded down, but one where the fraction is above 0
// and there are two samples or more. Never all.
uint64_t HeldOut(uint64_t total, double fraction);

double ValidationFraction(const v1::DataSpec& data);
uint64_t SeedOf(const v1::JobSpec& spec);
bool Shuffles(const v1::DataSpec& data);

// Each checks that the model is of the kind that takes such data. Errors as OpenDataset.
absl::StatusOr<std::shared_ptr<const Dataset>> OpenText(const v1::JobSpec& spec, const std::string& data_root,
                                                        const std::string& cache_folder);
absl::StatusOr<std::shared_ptr<const Dataset>> OpenTokens(const v1::JobSpec& spec, const std::string& data_root);
absl::StatusOr<std::shared_ptr<const Dataset>> OpenRows(const v1::JobSpec& spec, const std::string& data_root);
absl::StatusOr<std::shared_ptr<const Dataset>> OpenIdx(const v1::JobSpec& spec, const std::string& data_root);
absl::StatusOr<std::shared_ptr<const Dataset>> OpenCsv(const v1::JobSpec& spec, const std::string& data_root);

// What the model wants of dense samples. INVALID_ARGUMENT for a model of tokens. `source` ("data.idx holds images") is
// for messages.
absl::StatusOr<ClassifierSizes> CheckDenseModel(const v1::JobSpec& spec, const std::string& source);

// INVALID_ARGUMENT unless the model is a gpt2 with a context. `source` ("text") is for messages.
absl::Status CheckTokenModel(const v1::JobSpec& spec, const std::string& source);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_SOURCES_H_
