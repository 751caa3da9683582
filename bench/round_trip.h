// How long 1 KiB takes there and back, one at a time and with 64 under way, pinned as in transfer_nodes.h:
//
//   TCP          a ping-pong: every message is one send() and comes back by one send(), read to its end before the
//                next; with 64 under way, 64 are sent and then 64 are read.
//   stream       frames with a chunk each on the product's transport, answered by acknowledgements (stream_alone.h).
//   taken        the real PsClient and ServerNode, as the next one, until all pushes are acknowledged.
//   server       the real PsClient and ServerNode, streamed: a frame of a chunk leaves by itself; counting, summing,
//                SGD; its commit comes back with 1 KiB. One round is one chunk, or 64 of them. A round's report goes
//                with it, as always.
//   verdict      the same with one decision a round.
//
// What comes back is compared with what must come.
#ifndef SLUICE_BENCH_ROUND_TRIP_H_
#define SLUICE_BENCH_ROUND_TRIP_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/processes.h"

namespace sluice {

inline constexpr size_t kTripBytes = 1 << 10;
inline constexpr uint32_t kManyTrips = 64;  // under way

enum class TripPath { kTcp, kStream, kTaken, kServer, kVerdict };

// A serving and a working process, as long as this lives. One owner's thread; blocks.
class RoundTrips {
 public:
  // Forks; no thread and nothing of gRPC may exist yet.
  static absl::StatusOr<std::unique_ptr<RoundTrips>> Start();
  // Seconds a message (of all time, by their number), over at least `seconds`. DATA_LOSS: something else came back.
  absl::StatusOr<double> Measure(TripPath path, bool many, double seconds);

 private:
  struct Command;
  struct Reply;
  class Working;
  static absl::Status Serve(const Pipes& pipes);
  static absl::Status Work(const Pipes& pipes);

  Processes processes_;
};

}  // namespace sluice

#endif  // SLUICE_BENCH_ROUND_TRIP_H_
