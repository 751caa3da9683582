// ServerJob in an async job: contributions are applied and answered on their chunks' lanes, leases go out on the
// streams.
#include <utility>

#include "common/frame.h"
#include "common/log.h"
#include "server/server_job.h"

namespace sluice {

void ServerJob::ApplyContribution(StreamId stream, const v1::ChunkHeader& answer, const ContributionUpdate& update,
                                  ContributionRef value) {
  mutex_.AssertHeld();
  std::shared_ptr<CommitQueue> queue;
  if (auto it = streams_.find(stream); it != streams_.end()) queue = it->second.queue;
  options_.lanes->Post(answer.chunk(), [id = options_.job_id, lanes = options_.lanes, store = store_, queue,
                                        answer = v1::ChunkHeader(answer), update, value = std::move(value)]() mutable {
    Payload payload;
    if (value != nullptr) payload = static_cast<const PayloadContribution*>(value.get())->payload;
    if (!store->ApplyContribution(answer.chunk(), update, payload)) {
      answer.set_nonfinite(true);
      LOG_WARN("job {} chunk {}: the contribution of positions [{}, {}) is not finite, the chunk keeps its value", id,
               answer.chunk(), answer.position(), answer.position() + answer.positions());
    }
    // Its sender's window moves when the answer leaves: what waits for a slow reader is what its window lets in.
    std::shared_ptr<const void> receipt;
    if (value != nullptr) receipt = static_cast<const PayloadContribution*>(value.get())->receipt;
    payload = Payload();
    value.reset();
    SendAnswer(lanes, *store, queue, answer, std::move(receipt));
  });
}

void ServerJob::Answer(StreamId stream, const v1::ChunkHeader& answer) {
  mutex_.AssertHeld();
  auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  options_.lanes->Post(answer.chunk(), [lanes = options_.lanes, store = store_, queue = it->second.queue, answer] {
    SendAnswer(lanes, *store, queue, answer);
  });
}

// On the chunk's lane.
void ServerJob::SendAnswer(Lanes* lanes, ChunkStore& store, const std::shared_ptr<CommitQueue>& queue,
                           const v1::ChunkHeader& answer, std::shared_ptr<const void> receipt) {
  absl::StatusOr<WireValue> value = store.GetWire(answer.chunk(), answer.round());
  if (queue == nullptr || !value.ok()) return;  // could not be loaded: the job fails by the problem reported
  if (queue->Add(answer, *std::move(value), std::move(receipt)))
    lanes->Post(answer.chunk(), [queue] { queue->Flush(); });
}

void ServerJob::SendLease(StreamId stream, const v1::Lease& lease) {
  mutex_.AssertHeld();
  auto it = streams_.find(stream);
  if (it == streams_.end()) return;  // asked again when the stream opens
  v1::ChunkFrame frame;
  *frame.mutable_lease() = lease;
  it->second.stream->Write(EncodeFrame(frame, {}));
}

}  // namespace sluice
