// The commands of the `sluice` program. Each is a function of its arguments and of what it may touch: easy to call in
// tests.
#ifndef SLUICE_CLIENT_COMMANDS_H_
#define SLUICE_CLIENT_COMMANDS_H_

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/interrupt.h"
#include "client/progress.h"
#include "client/rpc.h"
#include "common/args.h"

namespace sluice {

enum ExitCode : int {
  kExitOk = 0,
  kExitJobFailed = 1,  // and whatever else went wrong in the work itself
  kExitUsage = 2,      // usage or spec
  kExitUnreachable = 3,
  kExitCancelled = 4,
  kExitInterrupted = 130,
};

// What the program may touch, given by main.
struct ClientEnvironment {
  std::ostream* out = nullptr;  // results
  std::ostream* err = nullptr;  // everything else
  bool out_is_terminal = false;
  int columns = 80;
  std::function<std::string(const std::string&)> getenv;  // "" for what is not set
  std::string program = "sluice";                         // as the user called it, for lines to be pasted
  std::string program_folder;                             // where the daemons lie
  Interrupt* interrupt = nullptr;
};

const std::vector<Command>& Commands();

// The whole program: `words` without the program's name.
int RunClient(const std::vector<std::string>& words, const ClientEnvironment& environment);

// Prints "sluice: <message>" to err; the exit code of the error.
int Report(const absl::Status& status, const ClientEnvironment& environment);
// A client of the scheduler that flags, environment or configuration name. Its notices become lines of `printer` where
// there is one, else lines of err.
absl::StatusOr<std::unique_ptr<SchedulerClient>> Connect(const Args& args, const ClientEnvironment& environment,
                                                         ProgressPrinter* printer = nullptr);
// "kjv-1 succeeded: 2000 rounds in 2m48s"; to err where it failed. The exit code.
int PrintEnd(const v1::JobStatus& status, const ClientEnvironment& environment);

// client/commands_jobs.cc
int RunSubmit(const Args& args, const ClientEnvironment& environment);
int RunWatch(const Args& args, const ClientEnvironment& environment);
int RunCancel(const Args& args, const ClientEnvironment& environment);
int RunCheckpoint(const Args& args, const ClientEnvironment& environment);
int RunValidate(const Args& args, const ClientEnvironment& environment);
// client/commands_show.cc
int RunList(const Args& args, const ClientEnvironment& environment);
int RunStatus(const Args& args, const ClientEnvironment& environment);
int RunLogs(const Args& args, const ClientEnvironment& environment);
// client/commands_health.cc
int RunHealth(const Args& args, const ClientEnvironment& environment);
// client/commands_model.cc
int RunExport(const Args& args, const ClientEnvironment& environment);
int RunSample(const Args& args, const ClientEnvironment& environment);
// client/commands_local.cc. `words`: the command line, for the line that says how to resume.
int RunLocal(const Args& args, const std::vector<std::string>& words, const ClientEnvironment& environment);

}  // namespace sluice

#endif  // SLUICE_CLIENT_COMMANDS_H_
