// Named points in a worker's life at which a test may delay it, count, or kill it (by cutting its network off).
#ifndef SLUICE_WORKER_WORKER_HOOKS_H_
#define SLUICE_WORKER_WORKER_HOOKS_H_

#include <cstdint>
#include <string>

namespace sluice {

// Called on the worker's train thread without any lock held; may block. Must not destroy the node.
class WorkerHooks {
 public:
  virtual ~WorkerHooks() = default;
  virtual void BeforeCompute(const std::string& job, uint64_t generation, uint64_t round) {}
  // The push of a chunk for the round was issued (it may still wait in the stream's queue).
  virtual void AfterPush(const std::string& job, uint64_t generation, uint64_t round, uint64_t chunk) {}
  virtual void BeforeEvaluation(const std::string& job, uint64_t generation, uint64_t version) {}
};

}  // namespace sluice

#endif  // SLUICE_WORKER_WORKER_HOOKS_H_
