// Safetensors files: reading with every check of the format before a byte is used, and headers for writing.
//
// Format (https://github.com/huggingface/safetensors): uint64 little-endian header length, JSON header
// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "string"}},
// then the data, little-endian and row-major, without holes or overlaps. Offsets count from the end of the header; no
// alignment of the data is promised, and none is needed here.
#ifndef SLUICE_COMMON_SAFETENSORS_H_
#define SLUICE_COMMON_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/file.h"
#include "common/float_formats.h"

namespace sluice {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;            // "F32", ...
  std::vector<uint64_t> shape;  // outermost first; empty: a scalar
  uint64_t elements = 1;
  uint64_t begin = 0, end = 0;  // bytes from the beginning of the data
};

// "[2, 3]", for messages.
std::string ShapeString(absl::Span<const uint64_t> shape);

// What stands before the data of a file, checked.
struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};
// `json`: the header's text; `data_bytes`: what follows it. DATA_LOSS names the tensor and the fault.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes);

// An open file. Thread-safe; constant after opening.
class SafetensorsFile {
 public:
  static constexpr uint64_t kMaxHeaderBytes = 100'000'000;

  // NOT_FOUND and the other codes of file.h; DATA_LOSS names file, tensor and fault.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  const InputFile& file() const { return *file_; }
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // nullptr where there is none. Valid as long as this object.
  const SafetensorsTensor* Find(const std::string& name) const;

  // values[i] = element first + i (row-major) of an F32, F16 or BF16 tensor of this file, widened exactly; these bytes
  // alone are read. INVALID_ARGUMENT for another dtype, OUT_OF_RANGE past its end.
  absl::Status ReadFloats(const SafetensorsTensor& tensor, uint64_t first, absl::Span<float> values) const;

 private:
  SafetensorsFile(std::unique_ptr<InputFile> file, SafetensorsHeader header, uint64_t data_begin);

  const std::unique_ptr<InputFile> file_;
  const SafetensorsHeader header_;
  const uint64_t data_begin_;  // in the file
  absl::flat_hash_map<std::string, size_t> index_;
};

// The first bytes of a file: the data follow in the order given. The length is a multiple of 8.
// INVALID_ARGUMENT for a name given twice (or "__metadata__"), a size over 2^62 bytes.
struct SafetensorsPrefix {
  std::string bytes;              // length, JSON, padding
  std::vector<uint64_t> offsets;  // of each tensor, in the file
  uint64_t file_bytes = 0;
};
struct SafetensorsEntry {
  std::string name;
  std::vector<uint64_t> shape;
  FloatFormat format = FloatFormat::kF32;
};
absl::StatusOr<SafetensorsPrefix> MakeSafetensorsPrefix(absl::Span<const SafetensorsEntry> tensors,
                                                        const std::map<std::string, std::string>& metadata = {});

}  // namespace sluice

#endif  // SLUICE_COMMON_SAFETENSORS_H_
