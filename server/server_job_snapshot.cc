// Checkpoints on the server's side: a shard's values, and the contributors' residuals of its chunks, go into a file as
// the shard reaches the version; and residuals come back out of the checkpoint that a timeline begins from.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/wire_format.h"
#include "server/server_job.h"

namespace sluice {

// One shard's file of a checkpoint that is being written; pieces come from several lanes.
struct ServerJob::Snapshot {
  uint32_t shard = 0;
  uint64_t timeline = 0, version = 0;
  absl::Mutex mutex;
  std::string path ABSL_GUARDED_BY(mutex);
  std::vector<ShardFileWriter::Piece> pieces ABSL_GUARDED_BY(mutex);
  std::unique_ptr<ShardFileWriter> writer ABSL_GUARDED_BY(mutex);
  absl::Status status ABSL_GUARDED_BY(mutex);
  uint64_t left ABSL_GUARDED_BY(mutex) = 0;  // chunks, and residuals of chunks
  // Guarded by the job's mutex:
  std::set<uint64_t> posted;                          // chunks handed to lanes
  std::set<std::pair<uint64_t, uint32_t>> residuals;  // chunk and contributor: the same
  uint64_t residuals_left = 0;                        // still to come
  std::vector<v1::ChunkCut> cuts;                     // async, of `posted`

  // Writes something into the file, which the first call creates. Whether it was the last piece.
  template <typename Write>
  bool Add(Write write) ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    if (writer == nullptr && status.ok()) {
      auto created = ShardFileWriter::Create(path, std::move(pieces));
      status = created.status();
      if (created.ok()) writer = *std::move(created);
    }
    if (status.ok()) status = write(writer.get());
    return --left == 0;
  }
};

// ------------------------------------------------------------------------------------------------------ snapshots

std::shared_ptr<struct ServerJob::Snapshot> ServerJob::MakeSnapshot(uint32_t shard, uint64_t timeline,
                                                                    uint64_t version) {
  auto snapshot = std::make_shared<struct Snapshot>();
  snapshot->shard = shard;
  snapshot->timeline = timeline;
  snapshot->version = version;
  const Layout& layout = *core_.layout();
  const v1::JobSpec& spec = layout.plan().spec();
  const uint32_t contributors = ErrorFeedback(spec) && !layout.async() ? layout.ranks() : 0;
  std::vector<ShardFileWriter::Piece> pieces;
  std::vector<std::string> slots = OptimizerSlots(spec.optimizer());
  slots.insert(slots.begin(), "value");
  for (uint32_t i = 0; i < contributors; ++i) slots.push_back(ResidualSlot(i));
  for (const std::string& slot : slots) {
    for (const uint64_t c : layout.table().chunks_of(shard)) {
      pieces.push_back({slot, layout.table().range(c).begin, layout.table().range(c).size()});
    }
  }
  const std::string base =
      absl::StrCat(options_.checkpoint_root, "/",
                   spec.checkpoint().directory().empty() ? options_.job_id : spec.checkpoint().directory());
  const uint64_t chunks = layout.table().chunks_of(shard).size();
  snapshot->residuals_left = chunks * contributors;
  absl::MutexLock lock(&snapshot->mutex);
  snapshot->left = chunks * (1 + contributors);
  snapshot->path =
      absl::StrCat(base, "/", StagingFolderName(timeline, version), "/", ShardFileName(shard, layout.table().shards()));
  snapshot->pieces = std::move(pieces);
  return snapshot;
}

void ServerJob::Snapshot(uint32_t shard, uint64_t chunk, uint64_t timeline, uint64_t version, const v1::ChunkCut& cut) {
  mutex_.AssertHeld();
  std::shared_ptr<struct Snapshot>& open = snapshots_[{shard, version}];
  if (open == nullptr) {
    open = MakeSnapshot(shard, timeline, version);
    if (open->residuals_left > 0) {
      for (const auto& [id, stream] : streams_) {
        if (!stream.hello.residuals() && stream.hello.generation() == core_.generation()) {
          ResidualsAbsent(stream.hello.contributor());
        }
      }
    }
  }
  const std::shared_ptr<struct Snapshot> snapshot = open;
  if (!snapshot->posted.insert(chunk).second) return;
  if (core_.layout()->async()) snapshot->cuts.push_back(cut);
  options_.lanes->Post(chunk, [self = shared_from_this(), store = store_, snapshot, chunk] {
    const bool last = snapshot->Add([&](ShardFileWriter* writer) { return store->Save(chunk, writer); });
    if (last) self->options_.background->Post(0, [self, snapshot] { self->FinishSnapshot(snapshot); });
  });
}

void ServerJob::FinishSnapshot(std::shared_ptr<struct Snapshot> snapshot) {
  v1::SnapshotDone done;
  {
    absl::MutexLock lock(&snapshot->mutex);
    if (snapshot->status.ok()) {
      absl::StatusOr<v1::CheckpointFile> file = snapshot->writer->Finish();
      if (file.ok()) {
        *done.mutable_file() = *std::move(file);
        done.mutable_file()->set_shard(snapshot->shard);
      }
      snapshot->status = file.status();
    }
    if (!snapshot->status.ok()) done.set_error(snapshot->status.ToString());
    snapshot->writer = nullptr;
  }
  absl::MutexLock lock(&mutex_);
  if (done.has_file()) done.mutable_file()->mutable_cuts()->Add(snapshot->cuts.begin(), snapshot->cuts.end());
  SnapshotDone(snapshot, std::move(done));
}

void ServerJob::SnapshotDone(const std::shared_ptr<struct Snapshot>& snapshot, v1::SnapshotDone done) {
  auto it = snapshots_.find({snapshot->shard, snapshot->version});
  if (ended_ || it == snapshots_.end() || it->second != snapshot) return;  // abandoned
  snapshots_.erase(it);
  done.set_job_id(options_.job_id);
  done.set_timeline(snapshot->timeline);
  done.set_version(snapshot->version);
  done.set_shard(snapshot->shard);
  // Older versions of this shard need not be said again once a newer one is done.
  std::erase_if(snapshots_done_, [&](const v1::NodeMessage& m) {
    return m.snapshot_done().shard() == snapshot->shard && m.snapshot_done().version() + 8 < snapshot->version;
  });
  v1::NodeMessage message;
  *message.mutable_snapshot_done() = std::move(done);
  snapshots_done_.push_back(message);
  options_.to_scheduler(message);
}

void ServerJob::AbandonSnapshots() {
  mutex_.AssertHeld();
  snapshots_.clear();
  snapshots_done_.clear();
}

// ------------------------------------------------------------------------------------------------------ residuals

void ServerJob::AnnounceCheckpoint(const WorkerStream& stream, uint64_t version) {
  if (!stream.hello.residuals()) return;
  v1::ChunkFrame notice;
  notice.set_checkpoint(version);
  stream.stream->Write(EncodeFrame(notice, {}));
}

absl::Status ServerJob::OnResidual(StreamId id, const v1::ChunkHeader& header, Payload payload,
                                   std::shared_ptr<const void> receipt) {
  ASSIGN_OR_RETURN(const bool present, core_.OnResidual(id, header, payload.size()));
  if (!present) return absl::OkStatus();
  const auto open = snapshots_.find({core_.layout()->table().shard(header.chunk()), header.round()});
  const auto place = std::make_pair(header.chunk(), header.contributor());
  if (open == snapshots_.end() || open->second->residuals_left == 0 || open->second->residuals.contains(place)) {
    return absl::OkStatus();  // said again, of a checkpoint that is done already
  }
  SaveResidual(open->second, header.chunk(), header.contributor(), std::move(payload), std::move(receipt));
  return absl::OkStatus();
}

// The window of the stream moves when the values are in the file: no more than that of them waits for the disk.
void ServerJob::SaveResidual(const std::shared_ptr<struct Snapshot>& snapshot, uint64_t chunk, uint32_t contributor,
                             Payload values, std::shared_ptr<const void> receipt) {
  snapshot->residuals.emplace(chunk, contributor);
  --snapshot->residuals_left;
  const Range range = core_.layout()->table().range(chunk);
  options_.lanes->Post(chunk, [self = shared_from_this(), snapshot, chunk, contributor, range,
                               values = std::move(values), receipt = std::move(receipt)]() mutable {
    std::vector<float> whole(range.size());
    if (values.size() > 0) values.CopyTo(whole.data());
    values = Payload();
    const bool last = snapshot->Add(
        [&](ShardFileWriter* writer) { return writer->Write(ResidualSlot(contributor), range.begin, whole); });
    if (last) self->options_.background->Post(0, [self, snapshot] { self->FinishSnapshot(snapshot); });
    receipt.reset();
  });
}

void ServerJob::ResidualsAbsent(uint32_t contributor) {
  const ChunkTable& table = core_.layout()->table();
  for (const auto& [key, snapshot] : snapshots_) {
    if (snapshot->residuals_left == 0) continue;
    for (const uint64_t chunk : table.chunks_of(snapshot->shard)) {
      if (snapshot->residuals.contains({chunk, contributor})) continue;
      SaveResidual(snapshot, chunk, contributor, Payload(), nullptr);
    }
  }
}

void ServerJob::ResidualsLost() {
  const uint64_t start = core_.layout()->plan().start();
  std::vector<std::shared_ptr<struct Snapshot>> lost;
  for (const auto& [key, snapshot] : snapshots_) {
    if (snapshot->residuals_left > 0 && snapshot->version < start) lost.push_back(snapshot);
  }
  for (const auto& snapshot : lost) {
    v1::SnapshotDone done;
    done.set_error(absl::StrCat(snapshot->residuals_left, " residuals of chunks were lost with a worker"));
    SnapshotDone(snapshot, std::move(done));
  }
}

void ServerJob::ServeResidual(StreamId stream, uint64_t chunk, uint32_t contributor) {
  mutex_.AssertHeld();
  const auto it = streams_.find(stream);
  if (it == streams_.end() || source_ == nullptr) return;
  const Layout& layout = *core_.layout();
  const Range range = layout.table().range(chunk);
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_round(layout.plan().start());
  header.set_contributor(contributor);
  header.set_elements(range.size());
  header.set_residual(true);
  // Read when its turn comes: never more than a window of them is in memory.
  const auto make = [self = shared_from_this(), source = source_, range, contributor, ranks = layout.ranks(),
                     generation = layout.generation()] {
    auto values = source->LoadResidual(range, contributor, ranks);
    if (!values.ok()) {
      self->Problem(values.status(), generation);
      return WireValue();
    }
    auto kept = std::make_shared<const std::vector<float>>(*std::move(values));
    return WireValue{v1::F32, kept->size(), {kept->data(), kept->size() * sizeof(float), kept}};
  };
  if (it->second.queue->AddLater(std::move(header), make)) {
    options_.lanes->Post(chunk, [queue = it->second.queue] { queue->Flush(); });
  }
}

}  // namespace sluice
