// The accepting end of the peer plane: streams that other workers of a job opened to this one. So far they carry
// contributions to the sums that this rank makes for its host (docs/host_sums.md).
#ifndef SLUICE_WORKER_PEER_STREAM_H_
#define SLUICE_WORKER_PEER_STREAM_H_

#include <functional>
#include <memory>
#include <string>

#include "common/transport.h"
#include "worker/worker_job.h"

namespace sluice {

// The job of this id that the node works for or is about to; null: none.
using FindJob = std::function<std::shared_ptr<WorkerJob>(const std::string& job_id)>;

// `shared_memory`: whether this node maps the memory of others. What `find` needs outlives the listener.
Acceptor MakePeerAcceptor(FindJob find, bool shared_memory);

}  // namespace sluice

#endif  // SLUICE_WORKER_PEER_STREAM_H_
