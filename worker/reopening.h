// When a stream that is kept open is opened again after it broke, and when its owner is to hear that this leads
// nowhere.
#ifndef SLUICE_WORKER_REOPENING_H_
#define SLUICE_WORKER_REOPENING_H_

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "sluice/v1/parameter.pb.h"

namespace sluice {

// Of one peer in one generation: plain state, not thread-safe.
class Reopening {
 public:
  struct Pace {
    absl::Duration first_delay, last_delay;  // between attempts: doubled from the first to the last
    absl::Duration accuse_after;             // of failing all the time
  };
  struct Outcome {
    absl::Status status;       // what the stream ended with: its refusal, where there was one
    bool unreachable = false;  // has failed for so long; again after as long
    bool refused = false;      // refuses for a reason that trying again does not mend; told once in kMaxRefusals
  };

  // The first attempt is due at once.
  explicit Reopening(const Pace& pace) : pace_(pace), delay_(pace.first_delay) {}

  absl::Time next() const { return next_; }  // attempt
  void Begin() { refusal_ = absl::OkStatus(); }
  // The peer said something: it is there.
  void Heard() { failing_since_ = absl::InfiniteFuture(); }
  // It does what it is for: the next attempt, should one be needed, is made soon.
  void Serves() { delay_ = pace_.first_delay; }
  void ForgetRefusals() { refusals_ = 0; }
  // It will not, and ends the stream next. `who`: "the server".
  void Refused(const v1::Refusal& refusal, const char* who) {
    refusal_ = absl::Status(static_cast<absl::StatusCode>(refusal.code()),
                            absl::StrCat(refusal.message(), " (", who, "'s generation is ", refusal.generation(), ")"));
  }
  Outcome Ended(const absl::Status& closed, absl::Time now) {
    Outcome outcome{.status = refusal_.ok() ? closed : refusal_};
    next_ = now + delay_;
    delay_ = std::min(delay_ * 2, pace_.last_delay);
    if (Lasting(outcome.status)) outcome.refused = ++refusals_ % kMaxRefusals == 0;
    if (failing_since_ == absl::InfiniteFuture()) failing_since_ = now;
    if (now - failing_since_ >= pace_.accuse_after) {
      outcome.unreachable = true;
      failing_since_ = now;
    }
    return outcome;
  }

 private:
  static constexpr int kMaxRefusals = 5;

  // Whether a refusal with this code stays the same however often it is tried.
  static bool Lasting(const absl::Status& status) {
    switch (status.code()) {
      case absl::StatusCode::kInvalidArgument:
      case absl::StatusCode::kOutOfRange:
      case absl::StatusCode::kFailedPrecondition:
      case absl::StatusCode::kUnimplemented:
      case absl::StatusCode::kPermissionDenied:
      case absl::StatusCode::kUnauthenticated:
        return true;
      default:
        return false;
    }
  }

  const Pace pace_;
  absl::Time next_ = absl::InfinitePast();
  absl::Duration delay_;
  absl::Time failing_since_ = absl::InfiniteFuture();
  absl::Status refusal_;  // as the present stream's refusal said
  int refusals_ = 0;      // lasting ones
};

}  // namespace sluice

#endif  // SLUICE_WORKER_REOPENING_H_
