#include "server/chunk_store.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "common/wire_format.h"

namespace sluice {

// ------------------------------------------------------------------------------------------------- ChunkSource

namespace {

namespace fs = std::filesystem;

bool Within(const fs::path& path, const fs::path& root) {
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

absl::StatusOr<std::string> ResolveInitPath(const std::string& path, const std::string& data_root,
                                            const std::string& checkpoint_root) {
  if (path.empty() || data_root.empty()) return path;
  std::error_code error;
  const fs::path root = fs::weakly_canonical(fs::absolute(data_root, error), error);
  if (error) return absl::InvalidArgumentError(absl::StrCat("--data_root ", data_root, ": ", error.message()));
  const fs::path full = fs::weakly_canonical(root / path, error);  // an absolute `path` replaces root here
  if (error) return absl::InvalidArgumentError(absl::StrCat("init.path: ", path, ": ", error.message()));
  if (Within(full, root)) return full.string();
  if (!checkpoint_root.empty()) {
    const fs::path checkpoints = fs::weakly_canonical(fs::absolute(checkpoint_root, error), error);
    if (!error && Within(full, checkpoints)) return full.string();
  }
  return absl::PermissionDeniedError(absl::StrCat("init.path: ", path, " leads to ", full.string(),
                                                  ", outside the data root ", root.string(),
                                                  "; move the folder there or start the server with another "
                                                  "--data_root"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ChunkSource>> ChunkSource::Open(const Layout& layout, const std::string& data_root,
                                                                     const std::string& checkpoint_root) {
  auto source = std::make_shared<ChunkSource>();
  const v1::Plan& plan = layout.plan();
  source->slot_names_ = OptimizerSlots(plan.spec().optimizer());
  std::string folder;
  if (plan.has_checkpoint()) {
    folder = plan.checkpoint().directory();
    source->resume_ = true;
  } else {
    ASSIGN_OR_RETURN(folder, ResolveInitPath(plan.spec().init().path(), data_root, checkpoint_root));
  }
  if (folder.empty()) return source;
  if (source->resume_ || access((folder + "/manifest.json").c_str(), F_OK) == 0) {
    ASSIGN_OR_RETURN(source->checkpoint_, CheckpointReader::Open(folder, /*verify=*/true));
    if (source->checkpoint_->manifest().parameters() != layout.space().size()) {
      return absl::InvalidArgumentError(absl::StrCat(folder, ": the checkpoint has ",
                                                     source->checkpoint_->manifest().parameters(),
                                                     " parameters, the model ", layout.space().size()));
    }
  } else {
    if (!plan.spec().model().has_gpt2()) {
      return absl::InvalidArgumentError(absl::StrCat(folder,
                                                     ": holds no manifest.json; only a gpt2 model can start from a "
                                                     "Hugging Face folder"));
    }
    ASSIGN_OR_RETURN(source->gpt2_, Gpt2FolderReader::Open(folder, plan.spec().model().gpt2()));
  }
  return source;
}

absl::Status ChunkSource::Load(const Layout& layout, Range range, float* value,
                               const std::vector<float*>& slots) const {
  const size_t n = range.size();
  for (size_t i = 0; i < slots.size(); ++i) {
    if (checkpoint_ != nullptr && resume_) {
      RETURN_IF_ERROR(checkpoint_->Read(slot_names_[i], range.begin, absl::MakeSpan(slots[i], n)));
    } else {
      std::memset(slots[i], 0, n * sizeof(float));
    }
  }
  if (checkpoint_ != nullptr) return checkpoint_->Read("value", range.begin, absl::MakeSpan(value, n));
  if (gpt2_ != nullptr) return gpt2_->Read(range.begin, absl::MakeSpan(value, n));
  const std::vector<Tensor>& tensors = layout.space().tensors();
  for (uint64_t at = range.begin; at < range.end;) {
    const Tensor& t = tensors[layout.space().TensorAt(at)];
    const uint64_t end = std::min(range.end, t.offset + t.elements);
    FillInitial(t, layout.plan().spec().train().seed(), at - t.offset, end - at, value + (at - range.begin));
    at = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> ChunkSource::LoadResidual(Range range, uint32_t rank, uint32_t ranks) const {
  std::vector<float> sum, more(range.size());
  const uint32_t held = checkpoint_ != nullptr && resume_ ? ResidualRanks(checkpoint_->manifest()) : 0;
  for (uint32_t i = rank; i < held; i += ranks) {
    RETURN_IF_ERROR(checkpoint_->Read(ResidualSlot(i), range.begin, absl::MakeSpan(more)));
    if (sum.empty()) {
      sum.swap(more);
      more.resize(range.size());
    } else {
      for (size_t k = 0; k < sum.size(); ++k) sum[k] += more[k];
    }
  }
  return sum;
}

std::vector<v1::ChunkCut> ChunkSource::Cuts() const {
  std::vector<v1::ChunkCut> cuts;
  if (checkpoint_ == nullptr || !resume_) return cuts;
  for (const v1::CheckpointFile& file : checkpoint_->manifest().files()) {
    cuts.insert(cuts.end(), file.cuts().begin(), file.cuts().end());
  }
  std::sort(cuts.begin(), cuts.end(), [](const auto& a, const auto& b) { return a.chunk() < b.chunk(); });
  return cuts;
}

// -------------------------------------------------------------------------------------------------- ChunkStore

namespace {

// Room for the values of three versions, the slack of small buffers, and readers that hold on to old ones.
std::shared_ptr<const SharedRegion> MakeRegion(const Layout& layout) {
  auto region = SharedRegion::Make(4 * layout.space().size() * sizeof(float) + (size_t{64} << 20));
  if (!region.ok()) LOG_INFO("values are not shared with workers of this host: {}", region.status().ToString());
  return region.ok() ? *std::move(region) : nullptr;
}

}  // namespace

ChunkStore::ChunkStore(std::shared_ptr<const Layout> layout, bool share)
    : layout_(std::move(layout)),
      slot_names_(OptimizerSlots(layout_->plan().spec().optimizer())),
      push_encoding_(PushEncoding(layout_->plan().spec())),
      pull_encoding_(PullEncoding(layout_->plan().spec())),
      region_(share ? MakeRegion(*layout_) : nullptr),
      values_(BufferPool::Make(region_)),
      pool_(BufferPool::Make()) {}

uint64_t ChunkStore::BytesPerElement(const v1::JobSpec& spec) {
  const uint64_t wire = PullEncoding(spec) == v1::F32 ? 0 : 2 * EncodedBytes(PullEncoding(spec), 1);
  return sizeof(float) * (2 + OptimizerSlots(spec.optimizer()).size() + (NeedsVerdict(spec) ? 1 : 0)) + wire;
}

ChunkStore::Chunk* ChunkStore::Find(uint64_t chunk) {
  absl::MutexLock lock(&mutex_);
  auto it = chunks_.find(chunk);
  return it == chunks_.end() ? nullptr : it->second.get();
}

absl::Status ChunkStore::Load(const ChunkSource& source, uint64_t chunk, uint64_t version) {
  const Range range = layout_->table().range(chunk);
  auto c = std::make_unique<Chunk>();
  c->version = version;
  c->value = values_->Take(range.size());
  std::vector<float*> slots;
  for (size_t i = 0; i < slot_names_.size(); ++i) {
    c->slots.push_back(pool_->Take(range.size()));
    slots.push_back(c->slots.back().get());
  }
  c->sum = std::make_unique<SumTree>(range.size(), pool_, push_encoding_);
  absl::Status status = source.Load(*layout_, range, c->value.get(), slots);
  absl::MutexLock lock(&mutex_);
  if (status.ok()) chunks_[chunk] = std::move(c);
  return status;
}

void ChunkStore::Drop(uint64_t chunk) {
  absl::MutexLock lock(&mutex_);
  chunks_.erase(chunk);
}

SumTree* ChunkStore::Open(Chunk* c, uint64_t chunk, uint32_t contributors) {
  if (!c->open) {
    c->sum->Reset(contributors);
    c->open = true;
  }
  return c->sum.get();
}

void ChunkStore::Add(uint64_t chunk, uint32_t contributor, uint32_t contributors, Payload payload,
                     const SubtreeSum& of) {
  if (Chunk* c = Find(chunk)) Open(c, chunk, contributors)->Add(contributor, std::move(payload), of);
}

void ChunkStore::DiscardSum(uint64_t chunk) {
  Chunk* c = Find(chunk);
  if (c == nullptr) return;
  c->open = false;
  c->sum->Reset(1);  // lets go of slices and buffers
}

SumResult ChunkStore::Finish(uint64_t chunk, uint32_t contributors) {
  SumResult result;
  Chunk* c = Find(chunk);
  if (c == nullptr) return result;
  SumTree* sum = Open(c, chunk, contributors);
  std::optional<SumReader> reader;
  if (!sum->absent()) reader.emplace(*sum);
  float scratch[SumReader::kUnit];
  size_t n;
  const Range range = layout_->table().range(chunk);
  const ChunkTable& blocks = layout_->norm_blocks();
  for (uint64_t b = blocks.chunk_at(range.begin); b < blocks.chunks() && blocks.range(b).begin < range.end; ++b) {
    const uint64_t begin = std::max(range.begin, blocks.range(b).begin), end = std::min(range.end, blocks.range(b).end);
    if (end - begin == blocks.range(b).size()) {
      SquareSum squares;
      for (uint64_t at = begin; reader.has_value() && at < end; at += n) {
        const float* const values = reader->Next(end - at, scratch, &n);
        squares.Add(values, n);
      }
      result.blocks.emplace_back(b, squares.Total());
      // Squares of float32 values do not overflow in float64: only NaN or Inf make NaN or Inf.
      result.finite &= std::isfinite(result.blocks.back().second);
    } else {
      v1::NormFragment& f = result.fragments.emplace_back();
      f.set_offset(begin);
      f.mutable_values()->Resize(static_cast<int>(end - begin), 0);
      for (uint64_t at = begin; reader.has_value() && at < end; at += n) {
        const void* const values = reader->Next(end - at, scratch, &n);
        std::memcpy(f.mutable_values()->mutable_data() + (at - begin), values, n * sizeof(float));
      }
      result.finite &= AllFinite(f.values().data(), end - begin);
    }
  }
  if (!result.finite) result.nonfinite_contributors = sum->nonfinite();
  c->finite = result.finite;
  return result;
}

void ChunkStore::Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite) {
  Chunk* c = Find(chunk);
  if (c == nullptr) return;
  const bool skip = verdict.skip() || (skip_nonfinite && c->open && !c->finite);
  std::shared_ptr<float[]> next = c->value;
  if (!skip) {
    const Range range = layout_->table().range(chunk);
    const v1::JobSpec& spec = layout_->plan().spec();
    const UpdateRule rule = MakeUpdateRule(spec.optimizer(), verdict.round(), spec.train().rounds());
    const float* const before = c->previous.get();
    c->previous = c->previous_wire = nullptr;    // back to the pool, unless it is still being sent
    next = values_->Take(range.size(), before);  // even and odd versions lie in two places
    std::optional<SumReader> sum;
    if (c->open && !c->sum->absent()) sum.emplace(*c->sum);
    Update(c, range, rule, verdict.gradient_scale(), sum.has_value() ? &*sum : nullptr, next.get());
  }
  c->previous = std::move(c->value);
  c->value = std::move(next);
  c->previous_wire = c->wire;
  if (!skip) c->wire = nullptr;
  ++c->version;
  DiscardSum(chunk);
}

void ChunkStore::Update(Chunk* c, Range range, const UpdateRule& rule, float scale, SumReader* sum, float* next) {
  static constexpr float kZeros[1024] = {};
  float scratch[SumReader::kUnit];
  float* const slot0 = c->slots.size() > 0 ? c->slots[0].get() : nullptr;
  float* const slot1 = c->slots.size() > 1 ? c->slots[1].get() : nullptr;
  for (uint64_t at = range.begin; at < range.end;) {
    const Tensor& t = layout_->space().tensors()[layout_->space().TensorAt(at)];
    const uint64_t end = std::min(range.end, t.offset + t.elements);
    for (size_t n; at < end; at += n) {
      n = std::min<uint64_t>(std::size(kZeros), end - at);
      const float* const gradient = sum != nullptr ? sum->Next(end - at, scratch, &n) : kZeros;
      const uint64_t i = at - range.begin;
      ApplyUpdate(rule, t.decays(), scale, gradient, c->value.get() + i, next + i,
                  slot0 == nullptr ? nullptr : slot0 + i, slot1 == nullptr ? nullptr : slot1 + i, n);
    }
  }
}

bool ChunkStore::ApplyContribution(uint64_t chunk, const ContributionUpdate& update, const Payload& pushed) {
  Chunk* c = Find(chunk);
  if (c == nullptr) return true;
  const Range range = layout_->table().range(chunk);
  ++c->version;
  if (pushed.size() == 0) return true;
  Payload payload = pushed;
  std::shared_ptr<float[]> decoded;
  if (push_encoding_ != v1::F32) {
    decoded = pool_->Take(range.size());
    DecodePayload(push_encoding_, pushed, range.size(), decoded.get());
    payload = Payload({grpc::Slice(decoded.get(), range.size() * sizeof(float), grpc::Slice::STATIC_SLICE)});
  }
  CHECK(payload.size() == range.size() * sizeof(float));
  float scratch[SumReader::kUnit];
  SumReader values(nullptr, payload);
  for (size_t left = range.size(), n; left > 0; left -= n) {
    const float* const piece = values.Next(left, scratch, &n);
    if (!AllFinite(piece, n)) return false;
  }
  const v1::JobSpec& spec = layout_->plan().spec();
  const UpdateRule rule =
      MakeUpdateRule(spec.optimizer(), update.round, spec.train().rounds(), update.version, update.rate_scale);
  std::shared_ptr<float[]> next = values_->Take(range.size());
  SumReader gradient(nullptr, payload);
  Update(c, range, rule, update.gradient_scale, &gradient, next.get());
  c->value = std::move(next);
  c->wire = nullptr;
  return true;
}

void ChunkStore::DropPrevious(uint64_t chunk) {
  if (Chunk* c = Find(chunk)) c->previous = c->previous_wire = nullptr;
}

absl::StatusOr<ChunkValue> ChunkStore::Get(uint64_t chunk, uint64_t version) {
  Chunk* c = Find(chunk);
  if (c == nullptr) return absl::NotFoundError(absl::StrCat("chunk ", chunk, " is not here"));
  const uint64_t elements = layout_->table().range(chunk).size();
  if (version == c->version) return ChunkValue{c->value, elements};
  if (version + 1 == c->version && c->previous != nullptr) return ChunkValue{c->previous, elements};
  return absl::NotFoundError(absl::StrCat("chunk ", chunk, " version ", version, " is not here; now ", c->version));
}

absl::StatusOr<WireValue> ChunkStore::GetWire(uint64_t chunk, uint64_t version) {
  ASSIGN_OR_RETURN(const ChunkValue value, Get(chunk, version));
  const size_t bytes = EncodedBytes(pull_encoding_, value.elements);
  if (pull_encoding_ == v1::F32) return WireValue{v1::F32, value.elements, {value.data.get(), bytes, value.data}};
  Chunk* c = Find(chunk);
  std::shared_ptr<float[]>& wire = version == c->version ? c->wire : c->previous_wire;
  if (wire == nullptr) {
    wire = pool_->Take((bytes + sizeof(float) - 1) / sizeof(float));
    EncodeValues(pull_encoding_, value.data.get(), nullptr, value.elements, wire.get());
  }
  return WireValue{pull_encoding_, value.elements, {wire.get(), bytes, wire}};
}

absl::Status ChunkStore::Save(uint64_t chunk, ShardFileWriter* writer) {
  Chunk* c = Find(chunk);
  if (c == nullptr) return absl::NotFoundError(absl::StrCat("chunk ", chunk, " is not here"));
  const Range range = layout_->table().range(chunk);
  RETURN_IF_ERROR(writer->Write("value", range.begin, absl::MakeConstSpan(c->value.get(), range.size())));
  for (size_t i = 0; i < slot_names_.size(); ++i) {
    RETURN_IF_ERROR(writer->Write(slot_names_[i], range.begin, absl::MakeConstSpan(c->slots[i].get(), range.size())));
  }
  return absl::OkStatus();
}

}  // namespace sluice
