#include "client/commands.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/spec_loading.h"
#include "common/model_layout.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace sluice {
namespace {

std::vector<Flag> With(std::vector<Flag> flags, const std::vector<Flag>& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

std::vector<Command> MakeCommands() {
  const std::vector<Flag> remote = {
      {"scheduler", FlagKind::kString, "HOST:PORT", "the scheduler's address"},
      {"timeout", FlagKind::kNumber, "SECONDS", "how long to try to reach the scheduler (30)", 0, false, 0, 1e7},
  };
  const Flag set = {"set", FlagKind::kString, "FIELD=VALUE", "overrides a field of the spec: train.rounds=500", 0,
                    true};
  const Flag name = {"name", FlagKind::kString, "NAME", "the job's name, in place of the spec's"};
  const Flag init = {"init", FlagKind::kString, "DIR", "begin with the parameters of a checkpoint or a GPT-2 folder"};
  const Flag json = {"json", FlagKind::kBool, "", "protobuf's JSON form"};
  const Flag temperature = {"temperature", FlagKind::kNumber, "T", "0: the likeliest always (0.8)", 0, false, 0, 1e6};
  const Flag sample_seed = {"seed", FlagKind::kInteger, "N", "the same seed draws the same tokens (1)", 0, false, 0};

  const Flag tokenizer = {"tokenizer", FlagKind::kString, "DIR",
                          "folder of vocab.json and merges.txt (the model's own)"};

  std::vector<Command> commands;
  commands.push_back(
      {"local",
       "[SPEC]",
       "train on this machine: starts scheduler, servers and workers, ends them afterwards",
       "SPEC is a .yaml, .json or .textproto file; without one, --text FILE trains a small byte-level GPT on a text\n"
       "(a file, a folder or a 'PATTERN'), --tokens FILE one on token files, --images and --labels a classifier of "
       "IDX\n"
       "images, --csv and --label one of a table's rows: model, batch and rounds are chosen by the data "
       "(docs/text.md,\n"
       "docs/tables_and_images.md), and the spec is printed.\n"
       "Everything lies in ./sluice-runs/NAME-N/: logs, state, checkpoints, export. A daemon that dies is started\n"
       "again and training goes on. Ctrl-C makes a checkpoint, ends everything and prints how to resume; a second\n"
       "Ctrl-C does not wait for the checkpoint.",
       {{"text", FlagKind::kString, "FILE", "train a small byte-level GPT on this text, without a spec"},
        {"tokens", FlagKind::kString, "FILE", "train a small GPT on these token files, without a spec"},
        {"images", FlagKind::kString, "FILE", "train a classifier on these IDX images, without a spec"},
        {"labels", FlagKind::kString, "FILE", "the images' labels (IDX)"},
        {"validation_images", FlagKind::kString, "FILE", "validate on these (otherwise a tenth is held out)"},
        {"validation_labels", FlagKind::kString, "FILE", "their labels"},
        {"csv", FlagKind::kString, "FILE", "train a classifier on this table, without a spec"},
        {"label", FlagKind::kString, "COLUMN", "the class's column: its name, or its index from 0 (-1: the last)"},
        {"validation_csv", FlagKind::kString, "FILE", "validate on this table (otherwise a tenth is held out)"},
        set,
        name,
        {"workers", FlagKind::kInteger, "N",
         "worker processes (as many as the spec has ranks: parallel.data x pipeline x tensor)", 0, false, 1, 64},
        {"servers", FlagKind::kInteger, "N", "server processes (1)", 0, false, 1, 64},
        {"threads", FlagKind::kInteger, "N", "threads of a worker (cores / workers)", 0, false, 1, 1024},
        {"device", FlagKind::kString, "KIND", "cpu or fake_device (cpu)"},
        {"resume", FlagKind::kString, "DIR", "go on from a checkpoint or from the newest one of a run folder"},
        init,
        {"runs", FlagKind::kString, "DIR", "where run folders are made (./sluice-runs)"},
        {"sample_bytes", FlagKind::kInteger, "N", "bytes sampled from the trained model (300)", 0, false, 0, 1e6},
        {"no_export", FlagKind::kBool, "", "leave the exported folder out"}},
       0,
       1});
  commands.push_back(
      {"submit", "[SPEC]", "hand a job to the scheduler and print its id",
       "Without SPEC, --resume goes on with the spec of the job or checkpoint itself, as --set changes it: also in\n"
       "another layout (--set parallel.tensor=2, parallel.pipeline, parallel.data). Relative data paths mean files "
       "below the workers' --data_root, unless the file is there from the working\n"
       "folder. With -f the job is followed as `watch` does; Ctrl-C detaches.",
       With({{"follow", FlagKind::kBool, "", "follow the job until it ends", 'f'},
             set,
             name,
             {"resume", FlagKind::kString, "JOB|DIR", "go on from a job's newest checkpoint, or from a folder's"},
             init},
            remote),
       0, 1});
  commands.push_back({"watch", "[JOB]", "show a job's progress until it ends (latest)",
                      "Ctrl-C detaches; the job goes on. The exit code is the job's: 0, 1 failed, 4 cancelled.", remote,
                      0, 1});
  commands.push_back({"list", "", "list the scheduler's jobs", "", With({json}, remote), 0, 0});
  commands.push_back(
      {"status", "[JOB]", "show one job; without JOB the cluster's nodes and jobs", "", With({json}, remote), 0, 1});
  commands.push_back({"logs", "[JOB]", "print a job's events and its metrics round by round (latest)", "",
                      With({json}, remote), 0, 1});
  commands.push_back({"cancel", "JOB", "end a job", "",
                      With({{"checkpoint", FlagKind::kBool, "", "publish a checkpoint first"}}, remote), 1, 1});
  commands.push_back(
      {"checkpoint", "JOB", "publish a checkpoint of a running job and print its folder", "", remote, 1, 1});
  commands.push_back(
      {"export", "JOB|DIR FOLDER", "write a job's newest checkpoint as a folder for other programs",
       "DIR is a published checkpoint or a GPT-2 folder to be converted (no scheduler is needed then). FOLDER must\n"
       "not exist. A GPT-2: config.json and model.safetensors by Hugging Face's names, or with a model over\n"
       "--max_shard_size several model-00001-of-0000N.safetensors and model.safetensors.index.json, and the tokenizer\n"
       "(vocab.json, merges.txt) where it can be read here; BF16 and F16 round to nearest even. Other models: F32 by\n"
       "PyTorch's names (nn.Sequential, nn.Linear), with the names of the classes and what standardizes the features.",
       With({{"dtype", FlagKind::kString, "DTYPE", "F32, BF16 or F16 (F32)"},
             {"max_shard_size", FlagKind::kString, "SIZE", "most bytes of weights in one file: 500MB, 2GiB (5GB)"},
             tokenizer},
            remote),
       2, 2});
  commands.push_back(
      {"sample", "JOB|DIR", "draw text from a model: a job, a checkpoint or an exported folder",
       "A running job answers from its newest published checkpoint. Models of bytes, and those whose tokenizer can be\n"
       "read here, take and print text, whole UTF-8 characters only; others take and print token ids.",
       With({tokenizer,
             {"prompt", FlagKind::kString, "TEXT", "text to go on from (a line feed)"},
             {"tokens", FlagKind::kString, "IDS", "the same as token ids: \"3 14 15\""},
             {"bytes", FlagKind::kInteger, "N", "how many bytes, or tokens, to draw (300)", 'n', false, 0, 1e9},
             temperature,
             {"top_k", FlagKind::kInteger, "K", "draw among the K likeliest tokens (0: all)", 0, false, 0, 1e9},
             {"top_p", FlagKind::kNumber, "P", "draw among the likeliest that have a share of P (1: all)", 0, false, 0,
              1},
             sample_seed,
             {"threads", FlagKind::kInteger, "N", "threads to compute with (1)", 0, false, 1, 1024},
             {"logits", FlagKind::kBool, "", "print the logits of the next token as a JSON array instead"}},
            remote),
       1, 1});
  commands.push_back(
      {"validate",
       "SPEC",
       "check a spec, and the data where it can be read",
       "Of a spec with parallel.tensor or parallel.pipeline it also prints what each rank holds, pushes and says\n"
       "to others in a round (docs/parallel.md).",
       {{"print", FlagKind::kBool, "", "print it as YAML with every default filled in"}, set, name},
       1,
       1});
  commands.push_back(
      {"health",
       "[HOST:PORT]",
       "ask a daemon whether it serves (the scheduler)",
       "Any daemon's address: of a scheduler, server or worker. Exit codes: 0 it serves, 1 it answers and\n"
       "does not serve, 3 it cannot be reached.",
       {{"scheduler", FlagKind::kString, "HOST:PORT", "the scheduler's address"},
        {"timeout", FlagKind::kNumber, "SECONDS", "how long to wait for the answer (5)", 0, false, 0.01, 1e7}},
       0,
       1});
  commands.push_back({"version", "", "print the version", "", {}, 0, 0});
  commands.push_back({"help", "[COMMAND]", "explain a command", "", {}, 0, 1});
  return commands;
}

int Help(const std::string& topic, const ClientEnvironment& environment) {
  if (topic.empty()) {
    *environment.out << OverviewHelp(Commands());
    return kExitOk;
  }
  std::vector<std::string> names;
  for (const Command& command : Commands()) {
    names.push_back(command.name);
    if (command.name != topic) continue;
    *environment.out << CommandHelp(command);
    return kExitOk;
  }
  const std::string nearest = NearestName(topic, names);
  return Report(
      absl::InvalidArgumentError(absl::StrCat("unknown command '", topic, "'", nearest.empty() ? "" : "; did you mean ",
                                              nearest, nearest.empty() ? "" : "?")),
      environment);
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command>& commands = *new std::vector<Command>(MakeCommands());
  return commands;
}

int Report(const absl::Status& status, const ClientEnvironment& environment) {
  *environment.err << "sluice: " << status.message() << std::endl;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kUnauthenticated:
      return kExitUsage;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kCancelled:
      return environment.interrupt->count() > 0 ? kExitInterrupted : kExitJobFailed;
    default:
      return kExitJobFailed;
  }
}

absl::StatusOr<std::unique_ptr<SchedulerClient>> Connect(const Args& args, const ClientEnvironment& environment,
                                                         ProgressPrinter* printer) {
  ASSIGN_OR_RETURN(const SchedulerAddress found, FindScheduler(args.String("scheduler"), environment.getenv));
  SchedulerClient::Options options;
  options.address = found.address;
  options.address_source = found.source;
  options.timeout = absl::Seconds(args.Number("timeout", 30));
  options.interrupt = environment.interrupt;
  options.notice = [printer, &environment](const std::string& text) {
    if (printer != nullptr && environment.out_is_terminal) {
      printer->Line(text);
    } else {
      *environment.err << "sluice: " << text << std::endl;
    }
  };
  return std::make_unique<SchedulerClient>(std::move(options));
}

int PrintEnd(const v1::JobStatus& status, const ClientEnvironment& environment) {
  const double seconds = status.ended_unix_seconds() - status.started_unix_seconds();
  const std::string took = status.started_unix_seconds() > 0 && seconds >= 0
                               ? absl::StrCat(" in ", ShortDuration(absl::Seconds(seconds)))
                               : "";
  const std::string rounds = absl::StrCat(status.rounds_done(), " rounds", took);
  const bool says_more = !status.message().empty() && status.message() != StateName(status.state());
  const std::string why = says_more ? absl::StrCat(": ", status.message()) : "";
  switch (status.state()) {
    case v1::SUCCEEDED:
      *environment.out << status.job_id() << " succeeded: " << rounds << std::endl;
      if (status.has_last_evaluation()) {
        *environment.out << absl::StreamFormat("validation loss %.4f", status.last_evaluation().loss());
        if (ClassifierSizesOf(status.spec().model()).has_value()) {
          *environment.out << absl::StreamFormat(", accuracy %.4f", status.last_evaluation().accuracy());
        }
        *environment.out << std::endl;
      }
      return kExitOk;
    case v1::CANCELLED:
      *environment.err << "sluice: " << status.job_id() << " was cancelled after " << rounds << why << std::endl;
      return kExitCancelled;
    case v1::FAILED:
      *environment.err << "sluice: " << status.job_id() << " failed after " << rounds << why << std::endl;
      return kExitJobFailed;
    default:
      *environment.err << "sluice: " << status.job_id() << " is " << StateName(status.state()) << why << std::endl;
      return kExitJobFailed;
  }
}

int RunClient(const std::vector<std::string>& words, const ClientEnvironment& environment) {
  if (words.empty()) {
    *environment.err << OverviewHelp(Commands());
    return kExitUsage;
  }
  // "help" in its forms: sluice --help, sluice CMD --help, sluice -h.
  const auto end = std::find(words.begin(), words.end(), "--");
  if (std::any_of(words.begin(), end, [](const std::string& w) { return w == "--help" || w == "-h"; })) {
    return Help(words[0][0] == '-' || words[0] == "help" ? "" : words[0], environment);
  }
  if (words[0] == "--version") {
    *environment.out << "sluice " << kVersion << " (protocol " << kProtocolVersion << ")" << std::endl;
    return kExitOk;
  }
  const auto args = ParseArgs(Commands(), words);
  if (!args.ok()) return Report(args.status(), environment);
  const std::string& name = args->command().name;
  if (name == "help") return Help(args->argument(0), environment);
  if (name == "version") return RunClient({"--version"}, environment);
  if (name == "local") return RunLocal(*args, words, environment);
  using Run = int (*)(const Args&, const ClientEnvironment&);
  const std::vector<std::pair<std::string, Run>> table = {
      {"submit", RunSubmit}, {"watch", RunWatch},       {"list", RunList},     {"status", RunStatus},
      {"logs", RunLogs},     {"cancel", RunCancel},     {"export", RunExport}, {"checkpoint", RunCheckpoint},
      {"sample", RunSample}, {"validate", RunValidate}, {"health", RunHealth},
  };
  for (const auto& [command, run] : table) {
    if (command == name) return run(*args, environment);
  }
  return Report(absl::InternalError(absl::StrCat("command ", name, " is not in the table")), environment);
}

}  // namespace sluice
