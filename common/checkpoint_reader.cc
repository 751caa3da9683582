// Reading a published checkpoint: any range of any slot, whatever the layout of its shard files.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/checkpoint_manifest.h"
#include "common/file.h"
#include "common/safetensors.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// Elements [first, first + elements) of a slot.
struct PieceAt {
  uint64_t first = 0, elements = 0;
  const SafetensorsFile* file = nullptr;
  const SafetensorsTensor* tensor = nullptr;
};

class Reader : public CheckpointReader {
 public:
  explicit Reader(v1::CheckpointManifest manifest) : manifest_(std::move(manifest)) {
    for (const std::string& slot : manifest_.slots()) slots_[slot];
  }

  // Files of the folder, in any order.
  absl::Status Add(const std::string& folder, const v1::CheckpointFile& entry, bool verify) {
    const std::string path = absl::StrCat(folder, "/", entry.name());
    if (entry.name() != ShardFileName(entry.shard(), manifest_.shards())) {
      return absl::DataLossError(absl::StrCat(folder, "/", kManifestName, ": shard ", entry.shard(),
                                              " stands in file \"", entry.name(), "\", expected ",
                                              ShardFileName(entry.shard(), manifest_.shards())));
    }
    RETURN_IF_ERROR(CheckBytes(path, entry, verify));
    ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
    for (const SafetensorsTensor& tensor : file->tensors()) RETURN_IF_ERROR(AddPiece(path, *file, tensor));
    files_.push_back(std::move(file));
    return absl::OkStatus();
  }

  // Every slot covers [0, P) without holes and overlaps.
  absl::Status CheckCoverage(const std::string& folder) {
    for (auto& [slot, pieces] : slots_) {
      std::sort(pieces.begin(), pieces.end(), [](const PieceAt& a, const PieceAt& b) { return a.first < b.first; });
      uint64_t end = 0;
      const std::string* before = nullptr;
      for (const PieceAt& piece : pieces) {
        if (piece.first != end) {
          return absl::DataLossError(absl::StrCat(
              piece.file->file().path(), ": tensor \"", piece.tensor->name, "\" begins at element ", piece.first,
              " of slot ", slot, ", but ",
              before != nullptr ? absl::StrCat("\"", *before, "\" ends") : "the pieces begin", " at ", end));
        }
        end += piece.elements;
        before = &piece.tensor->name;
      }
      if (end != manifest_.parameters()) {
        return absl::DataLossError(absl::StrCat(folder, ": slot ", slot, " has ", end,
                                                " elements in the shard files, expected ", manifest_.parameters()));
      }
    }
    return absl::OkStatus();
  }

  const v1::CheckpointManifest& manifest() const override { return manifest_; }

  absl::Status Read(const std::string& slot, uint64_t first, absl::Span<float> values) const override {
    const auto found = slots_.find(slot);
    if (found == slots_.end()) {
      return absl::NotFoundError(absl::StrCat("checkpoint ",
                                              CheckpointFolderName(manifest_.timeline(), manifest_.version()),
                                              " of job ", manifest_.job_id(), " has no slot \"", slot, "\""));
    }
    if (first > manifest_.parameters() || values.size() > manifest_.parameters() - first) {
      return absl::OutOfRangeError(
          absl::StrCat("checkpoint ", CheckpointFolderName(manifest_.timeline(), manifest_.version()), " has ",
                       manifest_.parameters(), " elements, asked for ", values.size(), " from ", first));
    }
    const std::vector<PieceAt>& pieces = found->second;
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                  [](uint64_t element, const PieceAt& p) { return element < p.first; });
    if (piece != pieces.begin()) --piece;
    while (!values.empty()) {
      const uint64_t skip = first - piece->first;
      const size_t n = std::min<uint64_t>(values.size(), piece->elements - skip);
      RETURN_IF_ERROR(piece->file->ReadFloats(*piece->tensor, skip, values.subspan(0, n)));
      values.remove_prefix(n);
      first += n;
      ++piece;
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckBytes(const std::string& path, const v1::CheckpointFile& entry, bool verify) {
    ASSIGN_OR_RETURN(const std::unique_ptr<InputFile> file, InputFile::Open(path));
    if (file->size() != entry.bytes()) {
      return absl::DataLossError(absl::StrCat(path, ": has ", file->size(), " bytes, the manifest says ", entry.bytes(),
                                              ": it was cut or replaced; use another checkpoint"));
    }
    if (!verify) return absl::OkStatus();
    ASSIGN_OR_RETURN(const uint32_t crc, file->Crc32());
    if (crc == entry.crc32()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(path, ": its crc32 is ", crc, ", the manifest says ", entry.crc32(),
                                            ": it was changed or damaged; use another checkpoint"));
  }

  // "<slot>.<first element>" F32 [elements]
  absl::Status AddPiece(const std::string& path, const SafetensorsFile& file, const SafetensorsTensor& tensor) {
    const auto fault = [&](const auto&... parts) {
      return absl::DataLossError(absl::StrCat(path, ": tensor \"", tensor.name, "\" ", parts...));
    };
    const size_t dot = tensor.name.rfind('.');
    uint64_t first = 0;
    if (dot == std::string::npos || !absl::SimpleAtoi(tensor.name.substr(dot + 1), &first)) {
      return fault("has not a name of the form <slot>.<first element>");
    }
    const auto slot = slots_.find(tensor.name.substr(0, dot));
    if (slot == slots_.end()) return fault("is of a slot that the manifest does not list");
    if (tensor.dtype != "F32" || tensor.shape.size() != 1) {
      return fault("is ", tensor.dtype, " ", ShapeString(tensor.shape), ", expected F32 of one dimension");
    }
    if (first > manifest_.parameters() || tensor.elements > manifest_.parameters() - first) {
      return fault("of ", tensor.elements, " elements ends past the parameters (", manifest_.parameters(), ")");
    }
    if (tensor.elements > 0) slot->second.push_back({first, tensor.elements, &file, &tensor});
    return absl::OkStatus();
  }

  const v1::CheckpointManifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::vector<PieceAt>> slots_;  // by first element
};

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& folder, bool verify) {
  ASSIGN_OR_RETURN(const v1::CheckpointManifest manifest, ReadManifest(folder));
  std::vector<bool> seen(manifest.files_size());
  if (manifest.shards() != seen.size()) {
    return absl::DataLossError(
        absl::StrCat(folder, "/", kManifestName, ": lists ", seen.size(), " files for ", manifest.shards(), " shards"));
  }
  auto reader = std::make_unique<Reader>(manifest);
  for (const v1::CheckpointFile& file : manifest.files()) {
    if (file.shard() >= seen.size() || seen[file.shard()]) {
      return absl::DataLossError(absl::StrCat(folder, "/", kManifestName, ": shard ", file.shard(), " is listed ",
                                              file.shard() < seen.size() ? "twice" : "but does not exist"));
    }
    seen[file.shard()] = true;
    RETURN_IF_ERROR(reader->Add(folder, file, verify));
  }
  RETURN_IF_ERROR(reader->CheckCoverage(folder));
  return reader;
}

}  // namespace sluice
