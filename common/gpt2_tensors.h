// Inside the Hugging Face import and export: which tensor of a GPT-2 file holds which of ours, and how; config.json.
#ifndef SLUICE_COMMON_GPT2_TENSORS_H_
#define SLUICE_COMMON_GPT2_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/float_formats.h"
#include "common/model_layout.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

inline constexpr char kGpt2ConfigName[] = "config.json";

// Where one of our tensors lies in the file.
struct Gpt2Source {
  std::string name;             // without "transformer."
  std::vector<uint64_t> shape;  // of the file's tensor
  // Ours [out, in] is the file's [in, columns], columns [first_column, first_column + out). Else our elements are the
  // file's from first_column on.
  bool transposed = false;
  uint64_t first_column = 0;
};

absl::StatusOr<ParameterSpace> Gpt2Space(const v1::Gpt2Spec& spec);
// `tensor` of the space of a GPT-2 of width c.
Gpt2Source Gpt2SourceOf(const Tensor& tensor, uint64_t c);

// INVALID_ARGUMENT where `found`, read from the folder's config.json, is not the job's model.
absl::Status CheckGpt2Config(const std::string& folder, const v1::Gpt2Spec& found, const v1::Gpt2Spec& expected);
// The text of config.json for an export.
std::string Gpt2ConfigText(const v1::Gpt2Spec& spec, FloatFormat format);

}  // namespace sluice

#endif  // SLUICE_COMMON_GPT2_TENSORS_H_
