// The fields of job.proto by name: paths, suggestions for misspelt ones, values from text. Internal to the spec's
// parser. Pure; thread-safe.
#ifndef SLUICE_COMMON_SPEC_FIELDS_H_
#define SLUICE_COMMON_SPEC_FIELDS_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "common/spec_node.h"

namespace sluice {

// The word nearest to `word` (edit distance, upper and lower case alike), "" where none is near enough for a
// "did you mean": at most a third of the letters wrong, one at least.
std::string NearestWord(std::string_view word, const std::vector<std::string>& words);

// "did you mean train.rounds?": a field of the message at `prefix` ("" is the spec) with a name like `name`, else one
// of the whole spec with that name or nearly, else a list of the message's fields.
std::string SuggestField(const google::protobuf::Descriptor* message, const std::string& prefix, std::string_view name);

// Sets a scalar field, or appends to a repeated one. `text_format`: numbers count as bools where that format says so;
// `plain_strings`: strings need no quotes. The error says what was found and what was expected, without the place.
absl::Status SetScalar(const SpecNode& value, const google::protobuf::FieldDescriptor* field, bool text_format,
                       bool plain_strings, google::protobuf::Message* message);

// What was found, for messages to people: short, on one line.
std::string Describe(const SpecNode& node);

}  // namespace sluice

#endif  // SLUICE_COMMON_SPEC_FIELDS_H_
