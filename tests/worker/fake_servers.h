// Parameter servers for the tests of the worker: they speak the data plane over the in-process transport and check that
// every contribution was computed from parameters of exactly one version.
//
// Element i has the value 1000 v + i mod 100 at version v (CheckedValue); a worker's contribution to round r must be r
// + i mod 7 (CheckedGradient) for every element, whatever its samples.
#ifndef SLUICE_TESTS_WORKER_FAKE_SERVERS_H_
#define SLUICE_TESTS_WORKER_FAKE_SERVERS_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/inprocess_transport.h"
#include "common/layout.h"

namespace sluice {

inline float CheckedValue(uint64_t version, uint64_t element) {
  return static_cast<float>(1000 * version + element % 100);
}
inline float CheckedGradient(uint64_t round, uint64_t element) { return static_cast<float>(round + element % 7); }

// All servers of one job. Thread-safe.
class FakeServers {
 public:
  FakeServers(InProcessNetwork* network, std::shared_ptr<const Layout> layout);

  // A new generation with the same servers: Fence takes nothing of the old one any more and returns the lowest version,
  // from which the new one starts; SetLayout drops contributions and closes the old streams.
  uint64_t Fence();
  void SetLayout(std::shared_ptr<const Layout> layout);
  uint64_t MinVersion();
  // Waits until every chunk has reached the version.
  bool AwaitVersion(uint64_t version, absl::Duration patience);
  // ... and the holder has reports of this kind and round from all contributors; adds up loss and count.
  bool AwaitReports(v1::RoundReport::Kind kind, uint64_t round, absl::Duration patience, double* loss, double* count);
  // What a worker did wrong; empty: nothing.
  std::string wrong();
  uint64_t empty_contributions();

 private:
  struct Chunk {
    uint64_t version = 0;
    std::set<uint32_t> contributors;
  };
  struct Client {
    std::shared_ptr<ByteStream> stream;
    std::string server;
    v1::StreamHello hello;
    uint64_t taken = 0;  // payload bytes
    std::map<uint64_t, uint64_t> wants;
  };
  class Handler;

  void OnFrame(const std::shared_ptr<Client>& client, const ParsedFrame& frame);
  void OnPush(const v1::ChunkHeader& header, const Payload& payload) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Serve(Client& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t Lowest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool At(uint64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  std::shared_ptr<const Layout> layout_ ABSL_GUARDED_BY(mutex_);
  bool fenced_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Client>> clients_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, uint64_t>, std::map<uint32_t, v1::RoundReport>> reports_ ABSL_GUARDED_BY(mutex_);
  std::string wrong_ ABSL_GUARDED_BY(mutex_);
  uint64_t empty_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<Listener>> listeners_;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_FAKE_SERVERS_H_
