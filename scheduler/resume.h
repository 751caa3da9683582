// What a job may change against the checkpoint that it goes on from, and what it says of it. Pure functions.
#ifndef SLUICE_SCHEDULER_RESUME_H_
#define SLUICE_SCHEDULER_RESUME_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "sluice/v1/checkpoint.pb.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

// What a resumed job begins from; read by the shell, which knows files.
struct ResumeFrom {
  std::string directory;  // the published folder, absolute
  v1::CheckpointManifest manifest;
};

// Whether the job can go on from there. Its layout (everything in `parallel`) may be another one, so may data, learning
// rate and rounds; model, optimizer and, of an async job, batch and what its chunks have seen may not.
// FAILED_PRECONDITION names what cannot change. `spec`: valid, `parameters`: of its model.
absl::Status CheckResume(const v1::JobSpec& spec, uint64_t parameters, const ResumeFrom& from);

// What the checkpoint's workers had left out of their gradients: goes on with the ranks that there are now, or is
// dropped, which is said.
void ResumeResiduals(const ResumeFrom& from, const v1::JobSpec& spec, v1::CheckpointRef* begins, v1::JobStatus* status);

// Says where the job's layout or batch is another one than the checkpoint's: from there on sums are taken in another
// order, or the data goes on at another place.
void ResumeLayout(const ResumeFrom& from, const v1::JobSpec& spec, v1::JobStatus* status);

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_RESUME_H_
