// A group of ranks over plain sockets, the least that collectives over TCP can cost: no frames, no numbers, no copies
// besides the kernel's, nothing kept for a broken connection.
#ifndef SLUICE_BENCH_TCP_GROUP_H_
#define SLUICE_BENCH_TCP_GROUP_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/parallel/collectives.h"

namespace sluice {

// Connections on loopback between all pairs of n ranks: [i][j] is rank i's end of the one to j; -1: itself. To be made
// before the ranks' processes are forked.
absl::StatusOr<std::vector<std::vector<int>>> ConnectAll(uint32_t n);

// One rank's end. Not thread-safe. Does not close the sockets. What comes while it sends is put aside, so that ranks
// which all send do not wait for each other.
class TcpGroup : public PeerGroup {
 public:
  TcpGroup(uint32_t rank, std::vector<int> sockets);
  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return static_cast<uint32_t>(sockets_.size()); }
  absl::Status Send(uint32_t to, absl::Span<const float> values) override;
  absl::Status Receive(uint32_t from, absl::Span<float> values) override;

 private:
  struct Aside {
    std::vector<char> bytes;
    size_t begin = 0;
  };
  absl::Status PutAside();

  const uint32_t rank_;
  const std::vector<int> sockets_;  // by rank
  std::vector<Aside> aside_;        // by rank
};

}  // namespace sluice

#endif  // SLUICE_BENCH_TCP_GROUP_H_
