// Trained classifiers (mlp, softmax, logistic) for other programs. docs/tables_and_images.md states the format.
#ifndef SLUICE_COMMON_CLASSIFIER_FOLDER_H_
#define SLUICE_COMMON_CLASSIFIER_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

// Writes config.json (sizes, names of classes and features, what is done to a feature before) and model.safetensors,
// F32, names and shapes as PyTorch's modules load them: an MLP is nn.Sequential(Linear, ReLU, Linear, ...) with
// "0.weight" [out, in], "0.bias", "2.weight", ...; a regression is one nn.Linear with "weight", "bias". `spec` is
// filled in, `values` the whole parameter space. The folder appears whole or not at all. ALREADY_EXISTS;
// INVALID_ARGUMENT for another model, or where sizes do not fit.
absl::Status ExportClassifier(const v1::JobSpec& spec, absl::Span<const float> values, const std::string& folder);

}  // namespace sluice

#endif  // SLUICE_COMMON_CLASSIFIER_FOLDER_H_
