// Refusals that trying again does not mend.
#ifndef SLUICE_WORKER_REFUSALS_H_
#define SLUICE_WORKER_REFUSALS_H_

#include "absl/status/status.h"

namespace sluice {

// So many of them in a row are told to the owner of a stream that is opened again and again.
inline constexpr int kMaxRefusals = 5;

// Whether a refusal with this code stays the same however often it is tried.
inline bool LastingRefusal(const absl::Status& status) {
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

}  // namespace sluice

#endif  // SLUICE_WORKER_REFUSALS_H_
