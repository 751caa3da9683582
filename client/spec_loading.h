// From the command line to a checked JobSpec: file or --text, --set, sizes that the data decides, defaults, ranges; and
// the address of the scheduler.
#ifndef SLUICE_CLIENT_SPEC_LOADING_H_
#define SLUICE_CLIENT_SPEC_LOADING_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/job.pb.h"

namespace sluice {

struct SpecSource {
  std::string path;                   // the spec's file; or
  std::string text;                   // a text, trained on with DefaultTextSpec; or
  std::string tokens;                 // token files, trained on with DefaultTokenFileSpec; or
  const v1::JobSpec* base = nullptr;  // a spec from elsewhere (a checkpoint's)
  std::vector<std::string> sets;      // "train.rounds=500", applied in order after the file
  std::string name;                   // replaces the spec's; empty: as it is
  std::string data_cache;             // folder where tokenized texts are kept; empty: nowhere
  std::optional<v1::InitSpec> init;   // replaces the spec's
};

enum class DataPaths {
  kOfFile,     // relative paths in the file start at the file's folder where that has them, else at the working folder
  kOfCluster,  // relative paths stay as they are (workers resolve them) unless the file is there from the working
               // folder
};

// Errors are INVALID_ARGUMENT or what the file system says; spec errors as ParseJobSpec and ValidateJobSpec give them.
// Data that this machine can read is opened and checked, and fills in vocabulary, inputs, classes and a table's schema
// (which is the checkpoint's where the job begins from one); with kOfFile data that cannot be read is an error. So with
// init.path, a resume excepted: a GPT-2 folder is checked, all but its weights' values, and fills in the model's sizes
// that the spec leaves out (with `text`: all of them); a folder of checkpoints or a run folder stands for its newest
// checkpoint.
absl::StatusOr<v1::JobSpec> LoadSpec(const SpecSource& source, DataPaths paths);

// Lower-case letters, digits and '-', at most 40 of them, made from any text; "job" where nothing remains.
std::string JobNameFrom(const std::string& text);

// An init.path by --init or --resume DIR: absolute. With `resume` `folder` may be a checkpoint, a folder of checkpoints
// (the newest is taken) or a run folder of `sluice local`; NOT_FOUND where there is none.
absl::StatusOr<std::string> CheckpointFolder(const std::string& folder);

// The spec of a job that goes on from a checkpoint without a spec of its own: the one that made it, without what it
// began from and without its folder of checkpoints.
absl::StatusOr<v1::JobSpec> SpecOfCheckpoint(const std::string& folder);
v1::JobSpec ToGoOnWith(v1::JobSpec spec);

struct SchedulerAddress {
  std::string address, source;
};
// `flag`: --scheduler, may be empty. `getenv` returns "" for what is not set.
absl::StatusOr<SchedulerAddress> FindScheduler(const std::string& flag,
                                               const std::function<std::string(const std::string&)>& getenv);

}  // namespace sluice

#endif  // SLUICE_CLIENT_SPEC_LOADING_H_
