#include "common/checkpoint_manifest.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/json_util.h>
#include <zlib.h>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr uint64_t kMaxManifestBytes = 64 << 20;

uint32_t Checksum(v1::CheckpointManifest manifest) {
  manifest.clear_crc32();
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    manifest.SerializeToCodedStream(&coded);
  }
  return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace

absl::Status WriteManifest(const std::string& folder, v1::CheckpointManifest manifest) {
  manifest.set_format_version(kCheckpointFormatVersion);
  manifest.set_crc32(Checksum(manifest));
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto printed = google::protobuf::util::MessageToJsonString(manifest, &text, options);
  if (!printed.ok()) {
    return absl::InternalError(absl::StrCat(folder, "/", kManifestName, ": ", printed.ToString()));
  }
  return WriteFileAtomically(absl::StrCat(folder, "/", kManifestName), text);
}

absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxManifestBytes));
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;  // so that a newer format is named as such; in this one the checksum sees them
  v1::CheckpointManifest manifest;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, &manifest, options);
  if (!parsed.ok()) {
    return absl::DataLossError(absl::StrCat(path, ": expected a checkpoint's manifest: ", parsed.ToString()));
  }
  if (manifest.format_version() != kCheckpointFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": has format version ", manifest.format_version(),
                                                      ", this program reads ", kCheckpointFormatVersion));
  }
  const uint32_t checksum = Checksum(manifest);
  if (manifest.crc32() != checksum) {
    return absl::DataLossError(absl::StrCat(path, ": its checksum is ", checksum, ", expected ", manifest.crc32(),
                                            ": it was changed or damaged; use another checkpoint"));
  }
  return manifest;
}

}  // namespace sluice
