// A node's end of the control plane: keeps one Session stream to the scheduler open for as long as it lives, registers
// on every opening, sends heartbeats, reconnects with a short growing delay (50 ms to 1 s).
#ifndef SLUICE_COMMON_SESSION_H_
#define SLUICE_COMMON_SESSION_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/transport.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

class Session {
 public:
  struct Callbacks {
    // What to say on (re-)opening. Called on a session thread.
    std::function<v1::Register()> make_register;
    // Everything that comes down, Welcome included, in order, one at a time. After Welcome the owner sends again what
    // the scheduler may have missed (ShardProgress, SnapshotDone, ...).
    std::function<void(const v1::SchedulerMessage&)> on_message;
    // The scheduler refused this node for good (another protocol version, superseded by a newer incarnation): the
    // process should end. Not called for breaks, which are retried for ever.
    std::function<void(const absl::Status&)> on_refused;
  };

  // Starts connecting at once. Thread-safe.
  static std::unique_ptr<Session> Start(Transport* transport, std::string scheduler_address, Callbacks callbacks);
  virtual ~Session() = default;  // closes the stream and joins; no callback after it

  // Queues a message; dropped where there is no open, registered stream (owners repeat on Welcome).
  virtual void Send(const v1::NodeMessage& message) = 0;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_SESSION_H_
