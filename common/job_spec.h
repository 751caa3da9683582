// Reading, completing and checking a JobSpec.
#ifndef SLUICE_COMMON_JOB_SPEC_H_
#define SLUICE_COMMON_JOB_SPEC_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

enum class SpecFormat { kYaml, kJson, kText };

// By extension: .yaml .yml, .json, .textproto .txtpb .pbtxt; INVALID_ARGUMENT otherwise.
absl::StatusOr<SpecFormat> SpecFormatOf(std::string_view path);

// Parses the text. Errors are INVALID_ARGUMENT "FILE:LINE:COLUMN: what"; unknown fields come with "did you mean ...".
// The three formats share the field names of job.proto; the enum values too, in either case ("sync", "SYNC").
// Nothing is filled in or checked beyond types.
absl::StatusOr<v1::JobSpec> ParseJobSpec(std::string_view text, SpecFormat format, std::string_view file_name);

// "train.rounds=500", "model.mlp.hidden=[128,64]": sets one field by its path; value in YAML. Setting a member of a
// oneof replaces the others.
absl::Status SetSpecField(v1::JobSpec* spec, std::string_view assignment);

// Fills in every default that follows from the spec alone (sizes that the data decides come from the client).
void FillDefaults(v1::JobSpec* spec);

// Checks a filled-in spec: ranges, required fields, products that overflow, heads dividing width, options of later
// versions ("copies: 2 is not supported in this version; ..."). The error names the field path, what was found and what
// is allowed. All problems are reported, one a line.
absl::Status ValidateJobSpec(const v1::JobSpec& spec);

// The filled-in spec as YAML, fields in the order of job.proto.
std::string JobSpecToYaml(const v1::JobSpec& spec);

// Learning rate of a round (pure). Source of the shapes: job.proto, CosineSchedule.
double LearningRate(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds);

// VERDICT where clipping or SKIP_ROUND asks for it, else STREAM; never in async, where each contribution is its own.
bool NeedsVerdict(const v1::JobSpec& spec);

// Optimizer slots beside the value: {}, {"momentum"}, {"m", "v"}.
std::vector<std::string> OptimizerSlots(const v1::OptimizerSpec& optimizer);

// The character that a data.csv.delimiter means; nullopt where it is none of those allowed.
std::optional<char> CsvDelimiter(std::string_view text);

// A job that begins from a checkpoint of a table (resumed, or with its parameters only) goes on with that table's
// schema: the parameters mean those classes and those means and deviations. Does nothing unless both are of tables and
// `checkpoint` has a schema.
void TakeTableSchema(const v1::JobSpec& checkpoint, v1::JobSpec* spec);

}  // namespace sluice

#endif  // SLUICE_COMMON_JOB_SPEC_H_
