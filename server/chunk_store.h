// The data of one job on one server: values at v and v-1, optimizer slots, sums. All calls on one chunk come from its
// lane, in order; different chunks are independent.
//
// Values are immutable and ref-counted: apply writes a new buffer, so a commit under way to a slow reader keeps its
// bytes.
#ifndef SLUICE_SERVER_CHUNK_STORE_H_
#define SLUICE_SERVER_CHUNK_STORE_H_

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/buffer_pool.h"
#include "common/checkpoint.h"
#include "common/gpt2_folder.h"
#include "common/layout.h"
#include "common/optimizer.h"
#include "common/shared_memory.h"
#include "common/sum_tree.h"
#include "server/shard_core.h"

namespace sluice {

// A pushed contribution as it came. `receipt` is let go of when the payload has been handed on, or dropped.
struct PayloadContribution : Contribution {
  PayloadContribution(Payload p, uint64_t pinned, std::shared_ptr<const void> r = nullptr)
      : Contribution(pinned), payload(std::move(p)), receipt(std::move(r)) {}
  const Payload payload;
  const std::shared_ptr<const void> receipt;
  SubtreeSum of;
};

// Where first values come from: one reader for all chunks of a job.
class ChunkSource {
 public:
  // Opens the plan's checkpoint, or its spec.init folder, or nothing (initial values by Philox). A relative init path
  // counts from data_root, an absolute one must lie under it or under checkpoint_root (PERMISSION_DENIED); an empty
  // data_root: as it is. Reads all of a checkpoint: DATA_LOSS names a file whose checksum is wrong. Thread-safe
  // afterwards.
  static absl::StatusOr<std::shared_ptr<const ChunkSource>> Open(const Layout& layout, const std::string& data_root,
                                                                 const std::string& checkpoint_root);

  // Fills value and slots (zero unless the checkpoint has them) of the range.
  absl::Status Load(const Layout& layout, Range range, float* value, const std::vector<float*>& slots) const;
  // What rank `rank` of `ranks` had left out of its gradients, as the plan's checkpoint has it: of its ranks i those
  // with i mod ranks = rank, added up. Empty where there is none.
  absl::StatusOr<std::vector<float>> LoadResidual(Range range, uint32_t rank, uint32_t ranks) const;
  // Of an async job's checkpoint: what each chunk holds, by chunk; else empty.
  std::vector<v1::ChunkCut> Cuts() const;

 private:
  std::unique_ptr<CheckpointReader> checkpoint_;
  bool resume_ = false;  // slots too
  std::unique_ptr<Gpt2FolderReader> gpt2_;
  std::vector<std::string> slot_names_;
};

struct ChunkValue {
  std::shared_ptr<const float[]> data;
  uint64_t elements = 0;
};

// A chunk's value as it travels to workers.
struct WireValue {
  v1::Encoding encoding = v1::F32;
  uint64_t elements = 0;
  BorrowedBytes bytes;
};

class ChunkStore {
 public:
  // Thread-safe to construct chunks of; `layout` is that of the newest plan and may be replaced by one of the same job.
  // `share`: values lie in memory that workers of this host may map, where the system has such.
  explicit ChunkStore(std::shared_ptr<const Layout> layout, bool share = false);
  // Where the values lie; null: not shared.
  const std::shared_ptr<const SharedRegion>& region() const { return region_; }

  // Bytes that an element of this job needs on a server: value, previous, slots, with VERDICT sums, and the encodings
  // of value and previous where workers pull another than F32.
  static uint64_t BytesPerElement(const v1::JobSpec& spec);

  // The chunk's lane only from here on. The first call on a chunk.
  absl::Status Load(const ChunkSource& source, uint64_t chunk, uint64_t version);
  void Drop(uint64_t chunk);
  void Add(uint64_t chunk, uint32_t contributor, uint32_t contributors, Payload payload, const SubtreeSum& of = {});
  void DiscardSum(uint64_t chunk);
  SumResult Finish(uint64_t chunk, uint32_t contributors);
  void Apply(uint64_t chunk, const v1::Verdict& verdict, bool skip_nonfinite);
  // Async: one contribution (empty: none) makes version update.version + 1; the one before is not kept. Returns whether
  // it was finite; if not, the value stays.
  bool ApplyContribution(uint64_t chunk, const ContributionUpdate& update, const Payload& payload);
  void DropPrevious(uint64_t chunk);
  // NOT_FOUND where neither v nor v-1 is `version`.
  absl::StatusOr<ChunkValue> Get(uint64_t chunk, uint64_t version);
  // The same in the job's pull encoding: the value's own memory, or an encoding of it that is made once and shared by
  // all receivers.
  absl::StatusOr<WireValue> GetWire(uint64_t chunk, uint64_t version);
  absl::Status Save(uint64_t chunk, ShardFileWriter* writer);

  size_t mapped_bytes() const { return values_->mapped_bytes() + pool_->mapped_bytes(); }

 private:
  struct Chunk {
    uint64_t version = 0;
    std::shared_ptr<float[]> value, previous;
    std::shared_ptr<float[]> wire, previous_wire;  // their encodings, once asked for; none with F32
    std::vector<std::shared_ptr<float[]>> slots;
    std::unique_ptr<SumTree> sum;
    bool open = false;   // sum has been reset for the open round
    bool finite = true;  // the sum, as Finish found it
  };
  Chunk* Find(uint64_t chunk);
  // Writes the updated value of the chunk to `next`; slots in place. `sum`: null, or its reader at the beginning.
  void Update(Chunk* c, Range range, const UpdateRule& rule, float scale, SumReader* sum, float* next);
  SumTree* Open(Chunk* c, uint64_t chunk, uint32_t contributors);

  const std::shared_ptr<const Layout> layout_;
  const std::vector<std::string> slot_names_;
  const v1::Encoding push_encoding_, pull_encoding_;
  const std::shared_ptr<const SharedRegion> region_;
  const std::shared_ptr<BufferPool> values_, pool_;  // pool_: slots, sums and encodings
  absl::Mutex mutex_;                                // of the table alone
  std::unordered_map<uint64_t, std::unique_ptr<Chunk>> chunks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice

#endif  // SLUICE_SERVER_CHUNK_STORE_H_
