// The transport inside one process: the fake that ships with transport.h. Seeded delays, breaks, partitions, dead
// nodes.
//
//   InProcessNetwork network({.delay_seed = 7, .max_delay = absl::Milliseconds(2)});
//   auto listener = network.Listen("server-0", {{Plane::kParameter, acceptor}});
//   auto transport = network.MakeTransport("worker-0");
//   auto stream = transport->Open("server-0", Plane::kParameter, handler);
//   network.Break("worker-0", "server-0");
//
// Addresses and node names are one set of words: a node that listens should call its transport by its address, so that
// faults between two nodes meet the streams that either of them opened. Messages are passed on, not copied.
#ifndef SLUICE_COMMON_INPROCESS_TRANSPORT_H_
#define SLUICE_COMMON_INPROCESS_TRANSPORT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/transport.h"

namespace sluice {

struct InProcessOptions {
  uint64_t delay_seed = 0;
  // Every message waits a time drawn from [0, max_delay] after it was written, never overtaking an earlier one of its
  // direction. Drawn from (seed, opener, address, plane, how many such streams before, direction, message number).
  absl::Duration max_delay = absl::ZeroDuration();
  int threads = 4;  // that deliver events
};

// Thread-safe. Outlives the transports, listeners and streams made from it.
class InProcessNetwork {
 public:
  explicit InProcessNetwork(const InProcessOptions& options = {});
  ~InProcessNetwork();
  InProcessNetwork(const InProcessNetwork&) = delete;
  InProcessNetwork& operator=(const InProcessNetwork&) = delete;

  // Destroying the transport breaks the streams it opened and returns when none of their handlers runs or will run.
  std::unique_ptr<Transport> MakeTransport(const std::string& node);

  // ALREADY_EXISTS where `address` is taken. Destroying the listener breaks the streams it accepted and returns when
  // none of their handlers runs or will run. Neither may be destroyed by a handler.
  absl::StatusOr<std::unique_ptr<Listener>> Listen(const std::string& address, std::map<Plane, Acceptor> acceptors);

  // Ends every stream between the two with UNAVAILABLE at both ends; messages under way are lost. New ones may be
  // opened.
  void Break(const std::string& a, const std::string& b);

  // Nothing passes between the two until Heal: messages and closes wait and come afterwards; Open gets UNAVAILABLE.
  void Partition(const std::string& a, const std::string& b);
  void Heal(const std::string& a, const std::string& b);

  // As if the process died: breaks every stream that `node` opened or accepted; until Revive, Open from or to it gets
  // UNAVAILABLE. The objects of the node stay and learn of it by OnClosed.
  void Kill(const std::string& node);
  void Revive(const std::string& node);

  // Of all messages written so far.
  uint64_t bytes_written() const;
  // In both directions of streams of this plane.
  uint64_t messages_written(Plane plane) const;

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_INPROCESS_TRANSPORT_H_
