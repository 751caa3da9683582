#include "worker/mail_boxes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

size_t CostOf(size_t payload_bytes) { return payload_bytes + kLetterCost; }

// How a letter is called in errors.
std::string Text(const v1::Letter& letter) {
  return absl::StrCat("letter ", letter.number(), " (", v1::Letter::Purpose_Name(letter.purpose()), ", round ",
                      letter.round(), ", from float ", letter.first(), " of ", letter.floats(), ")");
}

}  // namespace

size_t MessageCost(size_t floats) {
  const size_t letters = std::max<size_t>((floats + kLetterFloats - 1) / kLetterFloats, 1);
  return floats * sizeof(float) + letters * kLetterCost;
}

// ---------------------------------------------------------------- Outbox
void Outbox::Add(v1::Letter letter, BorrowedBytes bytes) {
  letter.set_number(++last_);
  const size_t cost = CostOf(bytes.size);
  cost_ += cost;
  unasked_ += cost;
  // Early enough that one who sends on and on never waits for an acknowledgement that was not asked for in time.
  if (unasked_ >= window_ / 4) {
    letter.set_ack(true);
    unasked_ = 0;
  }
  kept_.push_back({std::move(letter), std::move(bytes)});
}

void Outbox::AskForAck() {
  if (kept_.empty() || kept_.back().letter.ack()) return;
  unasked_ = 0;
  kept_.back().letter.set_ack(true);
  if (next_ == kept_.size()) ask_ = last_;
}

const Outbox::Sent* Outbox::Next() { return next_ < kept_.size() ? &kept_[next_++] : nullptr; }

absl::Status Outbox::Restart(uint64_t received, uint64_t taken) {
  if (received < taken || received > last_) {
    return absl::OutOfRangeError(absl::StrCat("it has received up to letter ", received, " and taken up to ", taken,
                                              ", but ", last_, " were sent"));
  }
  const absl::Status status = Acknowledge(taken);
  if (!status.ok()) return status;
  const uint64_t first = last_ + 1 - kept_.size();
  if (received + 1 < first) {
    return absl::OutOfRangeError(
        absl::StrCat("it has received up to letter ", received, ", but had taken up to ", first - 1));
  }
  next_ = static_cast<size_t>(received + 1 - first);
  // Where the question was a frame of its own, the stream that broke may have swallowed it.
  ask_ = next_ > 0 && kept_[next_ - 1].letter.ack() ? received : 0;
  return absl::OkStatus();
}

absl::Status Outbox::Acknowledge(uint64_t taken) {
  if (taken > last_) {
    return absl::OutOfRangeError(absl::StrCat("it has taken up to letter ", taken, ", but ", last_, " were sent"));
  }
  while (!kept_.empty() && kept_.front().letter.number() <= taken) {
    cost_ -= CostOf(kept_.front().bytes.size);
    kept_.pop_front();
    if (next_ > 0) --next_;
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- Inbox
absl::StatusOr<bool> Inbox::Add(v1::Letter letter, Payload payload) {
  if (letter.number() <= received_ && letter.number() > 0) return false;
  const auto wrong = [&letter](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(Text(letter), ": ", what...));
  };
  if (letter.number() != received_ + 1) return wrong("the next one is ", received_ + 1);
  if (letter.purpose() != v1::Letter::TENSOR && letter.purpose() != v1::Letter::STAGE) {
    return wrong("no such purpose: ", static_cast<int>(letter.purpose()));
  }
  if (letter.floats() > kMaxMessageFloats) return wrong("a message has at most ", kMaxMessageFloats, " floats");
  const uint64_t here = payload.size() / sizeof(float);
  if (payload.size() % sizeof(float) != 0 || here > kLetterFloats || (here == 0 && letter.floats() > 0) ||
      letter.first() > letter.floats() || here > letter.floats() - letter.first()) {
    return wrong("its payload is ", payload.size(), " bytes");
  }
  if (letter.first() > 0) {
    const bool follows = received_ > 0 && last_.purpose() == letter.purpose() && last_.round() == letter.round() &&
                         last_.floats() == letter.floats() && letter.first() == open_;
    if (!follows) return wrong("it follows ", received_ == 0 ? "nothing" : Text(last_));
  } else if (received_ > 0 && open_ < last_.floats()) {
    return wrong("the message before it ended at float ", open_, " of ", last_.floats());
  }
  const size_t cost = CostOf(payload.size());
  const uint64_t message = letter.first() > 0 ? message_ : letter.number();
  // One message may be larger than the window, where nothing else waits.
  if (cost_ > 0 && cost_ + cost > window_ && taken_ + 1 < message) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Text(letter), ": ", cost_, " bytes wait already, the window has ", window_));
  }
  cost_ += cost;
  received_ = letter.number();
  message_ = message;
  open_ = letter.first() + here;
  last_ = letter;
  waiting_.push_back({std::move(letter), std::move(payload)});
  return true;
}

absl::StatusOr<bool> Inbox::AckWanted(uint64_t number) {
  if (number == 0 || number > received_) {
    return absl::InvalidArgumentError(
        absl::StrCat("an acknowledgement of letter ", number, " is wanted, received are ", received_));
  }
  if (number <= taken_) return true;
  const uint64_t popped = received_ - waiting_.size();
  if (number > popped) {
    waiting_[number - popped - 1].letter.set_ack(true);
  } else {
    ack_at_ = popped;
  }
  return false;
}

Inbox::Waiting Inbox::Pop() {
  Waiting letter = std::move(waiting_.front());
  waiting_.pop_front();
  return letter;
}

bool Inbox::Taken(const Waiting& letter) {
  taken_ = letter.letter.number();
  cost_ -= CostOf(letter.payload.size());
  return letter.letter.ack() || taken_ == ack_at_;
}

}  // namespace sluice
