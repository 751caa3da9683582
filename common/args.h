// Command lines as data: commands of `sluice`, and daemons, with typed flags, parsed and checked in one place; the help
// text comes from the same tables. Pure.
#ifndef SLUICE_COMMON_ARGS_H_
#define SLUICE_COMMON_ARGS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

enum class FlagKind { kBool, kString, kInteger, kNumber };

struct Flag {
  std::string name;  // without dashes; '-' and '_' are the same on the command line
  FlagKind kind = FlagKind::kString;
  std::string
      value;  // what the help calls the value: "HOST:PORT"; empty with kBool (--flag, --flag=true, --flag=false)
  std::string help;
  char letter = 0;        // -f
  bool repeated = false;  // may be given several times
  double minimum = 0;     // kInteger, kNumber: smallest and largest value accepted
  double maximum = 9e15;
};

struct Command {
  std::string name;
  std::string arguments;  // "JOB|DIR FOLDER", for the help
  std::string summary;    // one line
  std::string details;    // further paragraphs of `sluice help NAME`
  std::vector<Flag> flags;
  size_t min_arguments = 0, max_arguments = 0;
  // One of its own, called `name`, and not a command of `sluice`. Of a flag given twice the last counts: a unit's or a
  // container's flags can be overridden behind them.
  bool program = false;
};

// A command line that was found right. Asking for a flag that the command does not have is our own bug (CHECK).
class Args {
 public:
  const Command& command() const { return *command_; }
  const std::vector<std::string>& arguments() const { return arguments_; }
  std::string argument(size_t i, std::string otherwise = "") const {
    return i < arguments_.size() ? arguments_[i] : otherwise;
  }

  bool Has(const std::string& flag) const;
  bool Bool(const std::string& flag, bool otherwise = false) const;
  std::string String(const std::string& flag, std::string otherwise = "") const;
  int64_t Integer(const std::string& flag, int64_t otherwise) const;
  double Number(const std::string& flag, double otherwise) const;
  std::vector<std::string> List(const std::string& flag) const;  // in the order given

 private:
  friend absl::StatusOr<Args> ParseArgs(const std::vector<Command>&, const std::vector<std::string>&);
  friend absl::StatusOr<Args> ParseArgs(const Command&, const std::vector<std::string>&);
  absl::Status Take(const std::vector<std::string>& words, size_t command_at);
  const Command* command_ = nullptr;
  std::vector<std::string> arguments_;
  std::map<std::string, std::vector<std::string>> flags_;
};

// `words`: the command line without the program's name. The command is the first word that is no flag; flags may stand
// anywhere (before the command too), as --flag=value or --flag value; "--" ends them; a lone "-" is an argument.
// INVALID_ARGUMENT says what is wrong, with the nearest known name. `commands` must outlive the result.
absl::StatusOr<Args> ParseArgs(const std::vector<Command>& commands, const std::vector<std::string>& words);
// Of a program, or a command whose name is not among `words`. `command` must outlive the result.
absl::StatusOr<Args> ParseArgs(const Command& command, const std::vector<std::string>& words);

std::string OverviewHelp(const std::vector<Command>& commands);
std::string CommandHelp(const Command& command);

// The member of `names` that `word` most likely meant; empty where none is near.
std::string NearestName(std::string_view word, const std::vector<std::string>& names);

// Quoted for a POSIX shell where that is needed.
std::string ShellQuote(const std::string& word);

}  // namespace sluice

#endif  // SLUICE_COMMON_ARGS_H_
