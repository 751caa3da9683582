// Writing shard files, publishing, listing and removing checkpoint folders. Reading: checkpoint_reader.cc.
#include "common/checkpoint.h"

#include <zlib.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/checkpoint_manifest.h"
#include "common/file.h"
#include "common/log.h"
#include "common/safetensors.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr char kRemoving[] = "removing-";

// The number in `text` as the folder names write it: decimal digits without a leading zero.
std::optional<uint64_t> Number(const std::string& text) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || absl::StrCat(value) != text) return std::nullopt;
  return value;
}

struct Instant {
  uint64_t timeline = 0, version = 0;
};

// "t1-v400" -> {1, 400}.
std::optional<Instant> ParseFolderName(const std::string& name) {
  const size_t dash = name.find("-v");
  if (name.empty() || name[0] != 't' || dash == std::string::npos) return std::nullopt;
  const std::optional<uint64_t> timeline = Number(name.substr(1, dash - 1)), version = Number(name.substr(dash + 2));
  if (!timeline || !version) return std::nullopt;
  return Instant{*timeline, *version};
}

uint32_t ShardOfFileName(const std::string& name) {
  unsigned shard = 0, shards = 0;
  if (std::sscanf(name.c_str(), "shard-%u-of-%u.safetensors", &shard, &shards) != 2) return 0;
  return name == ShardFileName(shard, shards) ? shard : 0;
}

class Writer : public ShardFileWriter {
 public:
  Writer(std::unique_ptr<OutputFile> file, std::vector<Piece> pieces, SafetensorsPrefix prefix)
      : file_(std::move(file)), pieces_(std::move(pieces)), prefix_(std::move(prefix)), crcs_(pieces_.size()) {
    for (size_t i = 0; i < pieces_.size(); ++i) index_[{pieces_[i].slot, pieces_[i].first}] = i;
  }

  absl::Status Begin() {
    RETURN_IF_ERROR(file_->Reserve(prefix_.file_bytes));
    return file_->Write(0, prefix_.bytes.data(), prefix_.bytes.size());
  }

  absl::Status Write(const std::string& slot, uint64_t first, absl::Span<const float> values) override {
    if (!status_.ok()) return status_;
    const auto found = index_.find({slot, first});
    if (found == index_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_->path(), ": no piece of slot ", slot, " begins at element ", first));
    }
    const size_t i = found->second;
    if (values.size() != pieces_[i].elements) {
      return absl::InvalidArgumentError(absl::StrCat(file_->path(), ": the piece of slot ", slot, " from element ",
                                                     first, " has ", pieces_[i].elements, " elements, found ",
                                                     values.size()));
    }
    if (crcs_[i].has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat(file_->path(), ": the piece of slot ", slot, " from element ", first, " was written before"));
    }
    status_ = file_->Write(prefix_.offsets[i], values.data(), values.size() * sizeof(float));
    if (status_.ok()) crcs_[i] = Crc(values.data(), values.size() * sizeof(float));
    return status_;
  }

  absl::StatusOr<v1::CheckpointFile> Finish() override {
    if (!status_.ok()) return status_;
    // The checksum of the whole from those of the parts, in the file's order: nothing is read back.
    uLong crc = Crc(prefix_.bytes.data(), prefix_.bytes.size());
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (!crcs_[i].has_value()) {
        return absl::FailedPreconditionError(absl::StrCat(file_->path(), ": the piece of slot ", pieces_[i].slot,
                                                          " from element ", pieces_[i].first, " (", pieces_[i].elements,
                                                          " elements) was never written"));
      }
      crc = crc32_combine(crc, *crcs_[i], static_cast<z_off_t>(pieces_[i].elements * sizeof(float)));
    }
    status_ = file_->Sync();
    if (status_.ok()) status_ = SyncDirectory(ParentDirectory(file_->path()));
    if (!status_.ok()) return status_;
    v1::CheckpointFile result;
    result.set_name(BaseName(file_->path()));
    result.set_bytes(prefix_.file_bytes);
    result.set_crc32(static_cast<uint32_t>(crc));
    result.set_shard(ShardOfFileName(result.name()));
    return result;
  }

 private:
  static uint32_t Crc(const void* data, size_t bytes) {
    if (bytes == 0) return 0;  // zlib takes a null pointer as "begin"
    return static_cast<uint32_t>(crc32_z(0, static_cast<const Bytef*>(data), bytes));
  }

  const std::unique_ptr<OutputFile> file_;
  const std::vector<Piece> pieces_;
  const SafetensorsPrefix prefix_;
  std::map<std::pair<std::string, uint64_t>, size_t> index_;
  std::vector<std::optional<uint32_t>> crcs_;  // of the pieces that are written
  absl::Status status_;                        // the first error of the file itself
};

absl::Status CheckListedFiles(const std::string& folder, const v1::CheckpointManifest& manifest) {
  for (const v1::CheckpointFile& file : manifest.files()) {
    const std::string path = absl::StrCat(folder, "/", file.name());
    ASSIGN_OR_RETURN(const std::unique_ptr<InputFile> opened, InputFile::Open(path));
    if (opened->size() != file.bytes()) {
      return absl::DataLossError(
          absl::StrCat("publishing ", folder, ": ", path, " has ", opened->size(), " bytes, expected ", file.bytes()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string CheckpointFolderName(uint64_t timeline, uint64_t version) {
  return absl::StrCat("t", timeline, "-v", version);
}

std::string ResidualSlot(uint32_t rank) { return absl::StrCat("residual-", rank); }

uint32_t ResidualRanks(const v1::CheckpointManifest& manifest) {
  const auto has = [&](uint32_t rank) {
    return std::find(manifest.slots().begin(), manifest.slots().end(), ResidualSlot(rank)) != manifest.slots().end();
  };
  uint32_t ranks = 0;
  while (has(ranks)) ++ranks;
  return ranks;
}

std::string StagingFolderName(uint64_t timeline, uint64_t version) {
  return absl::StrCat("staging-", CheckpointFolderName(timeline, version));
}

std::string ShardFileName(uint32_t shard, uint32_t shards) {
  return absl::StrFormat("shard-%05d-of-%05d.safetensors", shard, shards);
}

absl::StatusOr<std::unique_ptr<ShardFileWriter>> ShardFileWriter::Create(const std::string& path,
                                                                         std::vector<Piece> pieces) {
  std::vector<SafetensorsEntry> entries;
  for (const Piece& piece : pieces) entries.push_back({absl::StrCat(piece.slot, ".", piece.first), {piece.elements}});
  absl::StatusOr<SafetensorsPrefix> prefix = MakeSafetensorsPrefix(entries);
  if (!prefix.ok()) return Annotate(prefix.status(), path);
  RETURN_IF_ERROR(MakeDirectories(ParentDirectory(path)));
  ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, OutputFile::Create(path));
  auto writer = std::make_unique<Writer>(std::move(file), std::move(pieces), *std::move(prefix));
  RETURN_IF_ERROR(writer->Begin());
  return writer;
}

absl::StatusOr<std::string> PublishCheckpoint(const std::string& base, const v1::CheckpointManifest& manifest) {
  const std::string published = absl::StrCat(base, "/", CheckpointFolderName(manifest.timeline(), manifest.version()));
  const std::string staging = absl::StrCat(base, "/", StagingFolderName(manifest.timeline(), manifest.version()));
  if (PathExists(published)) return published;
  RETURN_IF_ERROR(CheckListedFiles(staging, manifest));
  RETURN_IF_ERROR(WriteManifest(staging, manifest));
  const absl::Status renamed = Rename(staging, published);
  if (!renamed.ok() && !absl::IsAlreadyExists(renamed)) return renamed;
  return published;
}

absl::StatusOr<std::vector<v1::CheckpointManifest>> ListCheckpoints(const std::string& base) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(base);
  if (absl::IsNotFound(names.status())) return std::vector<v1::CheckpointManifest>();
  RETURN_IF_ERROR(names.status());
  std::vector<v1::CheckpointManifest> found;
  for (const std::string& name : *names) {
    const std::optional<Instant> instant = ParseFolderName(name);
    if (!instant) continue;
    const std::string folder = absl::StrCat(base, "/", name);
    absl::StatusOr<v1::CheckpointManifest> manifest = ReadManifest(folder);
    if (manifest.ok() && (manifest->timeline() != instant->timeline || manifest->version() != instant->version)) {
      manifest = absl::DataLossError(absl::StrCat(folder, "/", kManifestName, " is of ",
                                                  CheckpointFolderName(manifest->timeline(), manifest->version())));
    }
    if (!manifest.ok()) {
      LOG_WARN("checkpoint {} is left out: {}", folder, manifest.status().ToString());
      continue;
    }
    found.push_back(*std::move(manifest));
  }
  std::sort(found.begin(), found.end(), [](const v1::CheckpointManifest& a, const v1::CheckpointManifest& b) {
    return std::pair(a.timeline(), a.version()) < std::pair(b.timeline(), b.version());
  });
  return found;
}

absl::Status RemoveCheckpoint(const std::string& folder) {
  const std::string name = BaseName(folder), base = ParentDirectory(folder);
  constexpr char kStaging[] = "staging-";
  const bool staging = name.rfind(kStaging, 0) == 0;
  if (!ParseFolderName(staging ? name.substr(sizeof(kStaging) - 1) : name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "removing ", folder, ": expected a checkpoint folder, t<timeline>-v<version> or staging-t...-v..."));
  }
  const std::string doomed = absl::StrCat(base, "/", kRemoving, name);
  RETURN_IF_ERROR(RemoveTree(doomed));  // of an earlier life that died over it
  const absl::Status renamed = Rename(absl::StrCat(base, "/", name), doomed);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  RETURN_IF_ERROR(renamed);
  return RemoveTree(doomed);
}

}  // namespace sluice
