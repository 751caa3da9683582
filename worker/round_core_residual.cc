// RoundCore with error feedback: this rank's residual goes into checkpoints and comes back out of them.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/wire_format.h"
#include "worker/round_core.h"

namespace sluice {

// ---------------------------------------------------------------- into a checkpoint
void RoundCore::OnCheckpoint(uint64_t generation, size_t server, uint64_t version) {
  if (generation != this->generation() || server >= ordered_.size()) return;
  std::set<uint64_t>& ordered = ordered_[server];
  ordered.erase(ordered.begin(),
                ordered.lower_bound(round_ > 0 ? round_ - 1 : 0));  // that one may have to be said again
  if (ordered.size() < kMaxOrdered) ordered.insert(version);
}

bool RoundCore::ResidualWanted(const Chunk& chunk, uint64_t version) const {
  const v1::Plan& plan = layout_->plan();
  if (plan.has_checkpoint() && plan.checkpoint().version() == version) return false;  // it is the one that there is
  return layout_->CheckpointAt(version) || ordered_[chunk.tail].count(version) > 0;
}

// Every chunk is at round_, and nothing of that round has been encoded in this generation.
void RoundCore::KeepResidual() {
  kept_ = 0;
  for (const uint64_t i : view()) {
    if (!ResidualWanted(chunks_[i], round_)) continue;
    kept_ = round_;
    actions_->KeepResidual(round_);
    break;
  }
  if (kept_ == 0) return;
  for (const uint64_t i : view()) {
    if (up_[chunks_[i].tail]) SendResidual(i);
  }
}

void RoundCore::SendResidual(uint64_t index) {
  const Chunk& chunk = chunks_[index];
  if (!ResidualWanted(chunk, kept_)) return;
  v1::ChunkHeader header;
  header.set_chunk(index);
  header.set_generation(generation());
  header.set_round(kept_);
  header.set_contributor(rank_);
  header.set_space(layout_->plan().space());
  header.set_residual(true);
  actions_->PushResidual(chunk.tail, header);
}

// ---------------------------------------------------------------- out of the plan's checkpoint
absl::Status RoundCore::OnResidual(const v1::ChunkHeader& header, std::shared_ptr<const CommitValue> value) {
  if (header.generation() != generation() || chunks_.empty()) return absl::OkStatus();
  const uint64_t index = header.chunk();
  if (header.space() != layout_->plan().space() || index >= chunks_.size()) {
    return absl::OutOfRangeError(
        absl::StrCat("residual of chunk ", index, " of space ", header.space(), "; the plan has ", chunks_.size()));
  }
  const uint64_t elements = layout_->table().range(index).size();
  if ((header.elements() != elements && header.elements() != 0) || header.encoding() != v1::F32) {
    return absl::InvalidArgumentError(absl::StrCat("residual of chunk ", index, " has ", header.elements(),
                                                   " elements in ", EncodingName(header.encoding()), "; expected ",
                                                   elements, " or 0 in F32"));
  }
  Chunk& chunk = chunks_[index];
  if (!chunk.lacks_residual) return absl::OkStatus();  // said again
  chunk.lacks_residual = false;
  ++installing_;
  actions_->InstallResidual(generation(), index, std::move(value));
  return absl::OkStatus();
}

void RoundCore::OnResidualInstalled(uint64_t generation, uint64_t chunk) {
  CHECK(installing_ > 0, "the residual of chunk {} was reported twice", chunk);
  --installing_;
  if (generation == this->generation() && lacking_residual_ > 0) --lacking_residual_;
  Step();
}

}  // namespace sluice
