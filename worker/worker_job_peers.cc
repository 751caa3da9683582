// WorkerJob as one of several ranks of a replica: its part of the model, mail to the others.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/worker_job.h"

namespace sluice {

bool WorkerJob::SamePart(const Layout& layout, uint32_t rank) const {
  const Mesh::Place place = layout.mesh().place(rank);
  return place.stage == place_.stage && place.tensor == place_.tensor;
}

ModelPart WorkerJob::Part() {
  absl::MutexLock lock(&mutex_);
  const v1::JobSpec& spec = layout_->plan().spec();
  ModelPart part{
      .mesh = layout_->mesh(), .place = place_, .recompute = spec.train().recompute(), .seed = spec.train().seed()};
  switch (spec.parallel().schedule()) {
    case v1::ParallelSpec::GPIPE:
      part.schedule = PipelineSchedule::kGPipe;
      break;
    case v1::ParallelSpec::SEQUENTIAL:
      part.schedule = PipelineSchedule::kSequential;
      break;
    default:
      part.schedule = PipelineSchedule::kOneForwardOneBackward;
  }
  part.tensor = tensor_.has_value() ? &*tensor_ : nullptr;
  part.stages = stages_.has_value() ? &*stages_ : nullptr;
  return part;
}

PeerMailOptions WorkerJob::MailOptions() {
  PeerMailOptions mail;
  mail.job_id = id_;
  mail.node = options_.node;
  mail.transport = options_.transport;
  mail.shared_memory = options_.shared_memory;
  mail.on_unreachable = [this](uint64_t generation, const MailPeer& peer, const absl::Status& status) {
    OnPeerUnreachable(generation, peer, status);
  };
  mail.on_refused = [this](uint64_t generation, const MailPeer& peer, const absl::Status& status) {
    OnPeerRefused(generation, peer, status);
  };
  return mail;
}

void WorkerJob::Accuse(uint64_t generation, const v1::NodeId& node, const absl::Status& status) {
  v1::NodeMessage message;
  v1::PeerAccusation* const accusation = message.mutable_accusation();
  accusation->set_job_id(id_);
  accusation->set_generation(generation);
  *accusation->mutable_peer() = node;
  accusation->set_message(status.ToString());
  options_.send(message);
}

void WorkerJob::OnPeerUnreachable(uint64_t generation, const MailPeer& peer, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || generation != core_.generation()) return;
  }
  LOG_WARN("job {} generation {}: rank {}, worker {} at {}, cannot be reached: {}", id_, generation, peer.rank,
           peer.node.name(), peer.address, status.ToString());
  Accuse(generation, peer.node, status);
}

void WorkerJob::OnPeerRefused(uint64_t generation, const MailPeer& peer, const absl::Status& status) {
  std::string what;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || generation != core_.generation()) return;
    what = absl::StrCat("rank ", peer.rank, " (", peer.node.name(), ") keeps refusing mail of rank ", core_.rank(),
                        " (", options_.node.name(), ") in generation ", generation);
  }
  Problem(Annotate(status, what));
}

}  // namespace sluice
