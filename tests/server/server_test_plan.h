// Small plans for the tests of the server.
#ifndef SLUICE_TESTS_SERVER_SERVER_TEST_PLAN_H_
#define SLUICE_TESTS_SERVER_SERVER_TEST_PLAN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/layout.h"

namespace sluice {

// Where a replica is several ranks: the smallest GPT that they share. Else an MLP of 3 inputs and 2 classes: 8
// parameters (bias [2], weight [2, 3]), with a hidden layer of `hidden` more.
struct ServerTestPlan {
  std::string job = "job-1";
  uint32_t replicas = 2;
  uint32_t servers = 2;  // named server-0, ..., addressed by their names; shard k on server k mod servers
  uint32_t shards = 3;
  uint64_t chunk_elements = 2;
  uint64_t norm_block = 4;
  uint64_t rounds = 5;
  uint64_t checkpoint_every = 100;
  uint64_t generation = 1;
  uint64_t timeline = 1;
  uint64_t start = 0;
  uint64_t hidden = 0;
  bool stream = false;
  bool async = false;  // with `stream`
  v1::TrainSpec::StalenessScale staleness_scale = v1::TrainSpec::NONE;
  uint32_t batch = 4;
  double clip_norm = 0;
  std::optional<v1::Verdict> verdict = {};
  std::optional<v1::CheckpointRef> checkpoint = {};
  std::string init_path = {};
  std::vector<std::string> hosts = {};  // of the ranks; servers are on others
  uint32_t pipeline = 1, tensor = 1;
  bool sequence_parallel = false;

  v1::Plan Proto() const;
  std::shared_ptr<const Layout> Make() const;
};

// role-number, life 1.
v1::NodeId ServerTestNode(const std::string& role, uint32_t number);

}  // namespace sluice

#endif  // SLUICE_TESTS_SERVER_SERVER_TEST_PLAN_H_
