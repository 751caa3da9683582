// Showing a job's progress: one redrawn line on a terminal, plain lines (at most about one a second) elsewhere; events
// as lines of their own: what a queued job waits for, recoveries, rewinds.
#ifndef SLUICE_CLIENT_PROGRESS_H_
#define SLUICE_CLIENT_PROGRESS_H_

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

// "round 120/2000  6%  loss 2.345  validation loss 2.456  12.3k tokens/s  ETA 2m31s"; what is not known is left out.
std::string ProgressText(const v1::JobStatus& status);
// "41 ms: compute 88%, exposed communication 7%, waiting for others 4%, verdict 1%": the mean of the last seconds'
// rounds and all ranks; empty where no round has ended yet.
std::string RoundTimeText(const v1::JobStatus& status);
// The same of one rank's time.
std::string RoundTimeText(const v1::JobStatus& status, const v1::RoundTime& time);
// "1h02m", "2m31s", "14s"
std::string ShortDuration(absl::Duration duration);
// "950", "12.3k", "4.5M"
std::string ShortNumber(double value);
// What is counted a second: "tokens" or "samples" (models without tokens).
std::string UnitName(const v1::JobStatus& status);

// Thread-safe.
class ProgressPrinter {
 public:
  // columns: width of the terminal; used where `terminal`.
  ProgressPrinter(std::ostream* out, bool terminal, int columns) : out_(*out), terminal_(terminal), columns_(columns) {}

  void Update(const v1::JobStatus& status, absl::Time now);
  // A line of its own, above the redrawn one.
  void Line(const std::string& text);
  // Ends the redrawn line; the last progress is shown where plain lines left it out.
  void Finish();

 private:
  void Events(const v1::JobStatus& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Draw(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteLine(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::ostream& out_;
  const bool terminal_;
  const int columns_;

  absl::Mutex mutex_;                           // out_ too
  bool drawn_ ABSL_GUARDED_BY(mutex_) = false;  // the cursor stands at the end of a redrawn line
  bool seen_ ABSL_GUARDED_BY(mutex_) = false;
  v1::JobStatus last_ ABSL_GUARDED_BY(mutex_);
  std::string last_text_ ABSL_GUARDED_BY(mutex_);   // of the newest status
  std::string shown_text_ ABSL_GUARDED_BY(mutex_);  // printed last
  absl::Time shown_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace sluice

#endif  // SLUICE_CLIENT_PROGRESS_H_
