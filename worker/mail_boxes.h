// The two ends of one direction of mail between two ranks in one generation (worker/peer_mail.h): plain state, no
// threads, locks or I/O.
//
// A message is sent as letters of up to 1 MiB, numbered from 1. What is sent is kept until the receiver's model has
// taken it, and the window counts that: so both ends together hold no more than a window, or one message.
#ifndef SLUICE_WORKER_MAIL_BOXES_H_
#define SLUICE_WORKER_MAIL_BOXES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/frame.h"
#include "sluice/v1/peer.pb.h"

namespace sluice {

inline constexpr size_t kLetterFloats = kMaxFramePayload / sizeof(float);
inline constexpr size_t kMaxMessageFloats = size_t{1} << 28;
// What a letter counts for besides its payload: many empty ones fill a window too.
inline constexpr size_t kLetterCost = 1024;  // bytes

// Bytes that a message of so many floats takes up of a window.
size_t MessageCost(size_t floats);

class Outbox {
 public:
  explicit Outbox(size_t window) : window_(window) {}

  // Whether a message of so many floats may be added: it fits into the window, or nothing else is under way.
  bool HasRoom(size_t floats) const { return kept_.empty() || cost_ + MessageCost(floats) <= window_; }
  // The next letter of a message: `letter` but for number and ack. `bytes` stay until it has been taken.
  void Add(v1::Letter letter, BorrowedBytes bytes);
  // Before waiting for room: the last letter's taking must become known.
  void AskForAck();

  struct Sent {
    v1::Letter letter;
    BorrowedBytes bytes;
  };
  // The next letter for the present stream, null if there is none. Valid until the next call of anything else.
  const Sent* Next();
  // When there is none: number of a sent letter whose acknowledgement is to be asked for, once; 0: none.
  uint64_t NextAsk() { return std::exchange(ask_, 0); }
  // A new stream begins, on which the receiver has said what it has. OUT_OF_RANGE: more than was ever sent, or less
  // than it has taken.
  absl::Status Restart(uint64_t received, uint64_t taken);
  // Letters up to `taken` need not be kept. OUT_OF_RANGE as above.
  absl::Status Acknowledge(uint64_t taken);

  uint64_t last() const { return last_; }
  size_t kept() const { return kept_.size(); }
  size_t cost() const { return cost_; }

 private:
  const size_t window_;
  std::deque<Sent> kept_;  // in order, the last one is letter last_
  size_t next_ = 0;        // index in kept_ of the first one that has not gone to the present stream
  uint64_t last_ = 0;
  size_t cost_ = 0;     // of kept_
  uint64_t ask_ = 0;    // for NextAsk
  size_t unasked_ = 0;  // cost since the last letter that asks for an acknowledgement
};

class Inbox {
 public:
  explicit Inbox(size_t window) : window_(window) {}

  // A letter has come. False: it is a copy and was dropped. INVALID_ARGUMENT: it cannot be, and why;
  // RESOURCE_EXHAUSTED: a sender that kept to the window would not have sent it.
  absl::StatusOr<bool> Add(v1::Letter letter, Payload payload);
  // Whether an acknowledgement is due at once; else it is when letter `number` is taken. INVALID_ARGUMENT: it has not
  // come.
  absl::StatusOr<bool> AckWanted(uint64_t number);

  struct Waiting {
    v1::Letter letter;
    Payload payload;
  };
  bool empty() const { return waiting_.empty(); }
  const v1::Letter& front() const { return waiting_.front().letter; }
  // Takes the first one out; to be followed by Taken when its payload has been read.
  Waiting Pop();
  // Returns whether an acknowledgement is due.
  bool Taken(const Waiting& letter);

  uint64_t received() const { return received_; }
  uint64_t taken() const { return taken_; }
  size_t cost() const { return cost_; }

 private:
  const size_t window_;
  std::deque<Waiting> waiting_;  // in order of numbers
  uint64_t received_ = 0, taken_ = 0;
  uint64_t ack_at_ = 0;   // asked for while the letter was being read
  size_t cost_ = 0;       // of letters received and not taken
  v1::Letter last_;       // received
  uint64_t open_ = 0;     // floats of its message that have come
  uint64_t message_ = 0;  // number of the first letter of last_'s message
};

}  // namespace sluice

#endif  // SLUICE_WORKER_MAIL_BOXES_H_
