#include "worker/data/dataset.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/data/sources.h"

namespace sluice {

EpochOrder::Epoch EpochOrder::EpochAt(uint64_t index) const {
  if (!shuffle_) return {index, 0, 0};
  return {index, StreamKey(seed_, absl::StrCat("shuffle.", index)), StreamKey(seed_, absl::StrCat("phase.", index))};
}

uint64_t EpochOrder::SampleAt(const Epoch& epoch, uint64_t place) const {
  return shuffle_ ? Permute(place, samples_, epoch.key) : place;
}

uint64_t HeldOut(uint64_t total, double fraction) {
  if (fraction <= 0 || total < 2) return 0;
  const uint64_t held = static_cast<uint64_t>(std::floor(static_cast<double>(total) * fraction));
  return std::min(total - 1, std::max<uint64_t>(held, 1));
}

double ValidationFraction(const v1::DataSpec& data) {
  return data.has_validation_fraction() ? data.validation_fraction() : 0.1;
}

uint64_t SeedOf(const v1::JobSpec& spec) { return spec.train().has_seed() ? spec.train().seed() : 1; }

bool Shuffles(const v1::DataSpec& data) { return !data.has_shuffle() || data.shuffle(); }

absl::Status CheckTokenModel(const v1::JobSpec& spec, const std::string& source) {
  if (!spec.model().has_gpt2()) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.", source, " holds tokens, which model.gpt2 takes; other models need data.idx or data.csv"));
  }
  if (spec.model().gpt2().context() == 0) {
    return absl::InvalidArgumentError("model.gpt2.context: 1 or more is expected, found 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<ClassifierSizes> CheckDenseModel(const v1::JobSpec& spec, const std::string& source) {
  if (auto sizes = ClassifierSizesOf(spec.model()); sizes.has_value()) return *std::move(sizes);
  return absl::InvalidArgumentError(absl::StrCat(source, ", which model.mlp, model.softmax and model.logistic take; ",
                                                 "model.gpt2 needs data.text, data.tokens or data.rows"));
}

absl::StatusOr<std::shared_ptr<const Dataset>> OpenDataset(const v1::JobSpec& spec, const std::string& data_root,
                                                           const std::string& cache_folder) {
  const double fraction = ValidationFraction(spec.data());
  if (!(fraction >= 0 && fraction <= 0.5)) {
    return absl::InvalidArgumentError(absl::StrCat("data.validation_fraction: 0 to 0.5 is expected, found ", fraction));
  }
  switch (spec.data().source_case()) {
    case v1::DataSpec::kText:
      return OpenText(spec, data_root, cache_folder);
    case v1::DataSpec::kTokens:
      return OpenTokens(spec, data_root);
    case v1::DataSpec::kRows:
      return OpenRows(spec, data_root);
    case v1::DataSpec::kIdx:
      return OpenIdx(spec, data_root);
    case v1::DataSpec::kCsv:
      return OpenCsv(spec, data_root);
    case v1::DataSpec::SOURCE_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("data: one of text, tokens, rows, idx, csv is expected, found none");
}

}  // namespace sluice
