// Small plans for the tests of the worker.
#ifndef SLUICE_TESTS_WORKER_TEST_PLAN_H_
#define SLUICE_TESTS_WORKER_TEST_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/layout.h"

namespace sluice {

// An MLP of 8 parameters (bias [2], weight [2, 3]); where a replica is several ranks the smallest GPT that they share.
struct TestPlan {
  uint32_t replicas = 1;
  uint32_t pipeline = 1;
  uint32_t tensor = 1;
  uint32_t servers = 2;  // named server-0, ..., addressed by their names
  uint32_t shards = 2;   // shard k on server k mod servers
  uint64_t chunk_elements = 3;
  uint64_t rounds = 3;
  uint64_t eval_every = 100;
  uint64_t generation = 1;
  uint64_t timeline = 1;
  uint64_t start = 0;
  uint32_t batch = 4;
  uint32_t microbatches = 1;
  bool async = false;
  double clip_norm = 0;
  uint64_t hidden = 0;                      // width of a hidden layer, if not 0: more parameters
  std::vector<std::string> hosts = {};      // of the ranks; servers are on others
  std::vector<std::string> addresses = {};  // of the ranks; else they are addressed by their names

  // Ranks are worker-0, ... (incarnation 1).
  std::shared_ptr<const Layout> Make() const;
};

v1::NodeId TestNode(const std::string& role, uint32_t number);

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_TEST_PLAN_H_
