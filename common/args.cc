#include "common/args.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

std::string Normal(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

const Flag* FindFlag(const Command& command, const std::string& name) {
  for (const Flag& flag : command.flags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

const Flag* FindLetter(const Command& command, char letter) {
  for (const Flag& flag : command.flags) {
    if (flag.letter == letter) return &flag;
  }
  return nullptr;
}

// How the user called it, and where more is said.
std::string Title(const Command& command) { return command.program ? command.name : "sluice " + command.name; }
std::string HelpLine(const Command& command) {
  return command.program ? absl::StrCat("`", command.name, " --help`")
                         : absl::StrCat("`sluice help ", command.name, "`");
}

std::string DidYouMean(const std::string& nearest, const std::string& prefix) {
  return nearest.empty() ? "" : absl::StrCat("; did you mean ", prefix, nearest, "?");
}

// Whether the word is a flag of some command that takes a value in the next word.
bool TakesNextWord(const std::vector<Command>& commands, const std::string& word) {
  if (word.find('=') != std::string::npos) return false;
  for (const Command& command : commands) {
    const Flag* flag = word.rfind("--", 0) == 0 ? FindFlag(command, Normal(word.substr(2))) : nullptr;
    if (flag != nullptr) return flag->kind != FlagKind::kBool;
  }
  return false;
}

absl::StatusOr<const Command*> FindCommand(const std::vector<Command>& commands, const std::vector<std::string>& words,
                                           size_t* at) {
  for (size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    if (words[i].size() > 1 && words[i][0] == '-') {
      if (TakesNextWord(commands, words[i])) ++i;
      continue;
    }
    *at = i;
    std::vector<std::string> names;
    for (const Command& command : commands) {
      if (command.name == words[i]) return &command;
      names.push_back(command.name);
    }
    return absl::InvalidArgumentError(absl::StrCat("unknown command '", words[i], "'",
                                                   DidYouMean(NearestName(words[i], names), ""),
                                                   "; `sluice help` lists them"));
  }
  return absl::InvalidArgumentError("a command is expected; `sluice help` lists them");
}

absl::Status CheckValue(const Flag& flag, const std::string& value) {
  if (flag.kind == FlagKind::kString) return absl::OkStatus();
  if (flag.kind == FlagKind::kBool) {
    if (value == "true" || value == "false") return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag.name, " takes no value but true and false, found '", value, "'"));
  }
  double number = 0;
  int64_t integer = 0;
  const bool parsed = flag.kind == FlagKind::kInteger ? absl::SimpleAtoi(value, &integer)
                                                      : absl::SimpleAtod(value, &number) && std::isfinite(number);
  if (flag.kind == FlagKind::kInteger) number = static_cast<double>(integer);
  if (!parsed || number < flag.minimum || number > flag.maximum) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag.name, ": ", flag.kind == FlagKind::kInteger ? "a whole number" : "a number", " from ",
                     flag.minimum, " to ", flag.maximum, " expected, found '", value, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

bool Args::Has(const std::string& flag) const {
  CHECK(FindFlag(*command_, flag) != nullptr, "{} has no flag --{}", command_->name, flag);
  return flags_.count(flag) > 0;
}

bool Args::Bool(const std::string& flag, bool otherwise) const {
  return Has(flag) ? flags_.at(flag).back() == "true" : otherwise;
}

std::string Args::String(const std::string& flag, std::string otherwise) const {
  return Has(flag) ? flags_.at(flag).back() : otherwise;
}

int64_t Args::Integer(const std::string& flag, int64_t otherwise) const {
  int64_t value = otherwise;
  if (Has(flag)) CHECK(absl::SimpleAtoi(flags_.at(flag).back(), &value));
  return value;
}

double Args::Number(const std::string& flag, double otherwise) const {
  double value = otherwise;
  if (Has(flag)) CHECK(absl::SimpleAtod(flags_.at(flag).back(), &value));
  return value;
}

std::vector<std::string> Args::List(const std::string& flag) const {
  return Has(flag) ? flags_.at(flag) : std::vector<std::string>{};
}

absl::StatusOr<Args> ParseArgs(const std::vector<Command>& commands, const std::vector<std::string>& words) {
  Args args;
  size_t command_at = 0;
  ASSIGN_OR_RETURN(args.command_, FindCommand(commands, words, &command_at));
  RETURN_IF_ERROR(args.Take(words, command_at));
  return args;
}

absl::StatusOr<Args> ParseArgs(const Command& command, const std::vector<std::string>& words) {
  Args args;
  args.command_ = &command;
  RETURN_IF_ERROR(args.Take(words, words.size()));
  return args;
}

// `command_at`: the word that is the command's name.
absl::Status Args::Take(const std::vector<std::string>& words, size_t command_at) {
  const Command& command = *command_;
  bool flags_ended = false;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (i == command_at) continue;
    if (flags_ended || word.size() < 2 || word[0] != '-') {
      arguments_.push_back(word);
      continue;
    }
    if (word == "--") {
      flags_ended = true;
      continue;
    }
    const Flag* flag = nullptr;
    std::string value;
    bool has_value = false;
    if (word[1] == '-') {
      const size_t equals = word.find('=');
      const std::string name = Normal(word.substr(2, equals == std::string::npos ? equals : equals - 2));
      flag = FindFlag(command, name);
      if (flag == nullptr) {
        std::vector<std::string> names;
        for (const Flag& f : command.flags) names.push_back(f.name);
        return absl::InvalidArgumentError(absl::StrCat(Title(command), " has no flag --", name,
                                                       DidYouMean(NearestName(name, names), "--"), "; ",
                                                       HelpLine(command), " lists them"));
      }
      has_value = equals != std::string::npos;
      if (has_value) value = word.substr(equals + 1);
    } else {
      flag = word.size() == 2 ? FindLetter(command, word[1]) : nullptr;
      if (flag == nullptr) {
        return absl::InvalidArgumentError(
            absl::StrCat(Title(command), " has no flag ", word, "; ", HelpLine(command), " lists them"));
      }
    }
    if (flag->kind == FlagKind::kBool) {
      if (!has_value) value = "true";
    } else if (!has_value) {
      if (i + 1 >= words.size()) {
        return absl::InvalidArgumentError(absl::StrCat("--", flag->name, " needs a value: ", flag->value));
      }
      value = words[++i];
      if (i == command_at) {
        return absl::InvalidArgumentError(absl::StrCat("--", flag->name, " needs a value: ", flag->value));
      }
    }
    RETURN_IF_ERROR(CheckValue(*flag, value));
    std::vector<std::string>& values = flags_[flag->name];
    if (command.program && !flag->repeated) values.clear();
    if (!values.empty() && !flag->repeated && flag->kind != FlagKind::kBool) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag->name, " is given twice"));
    }
    values.push_back(value);
  }
  if (arguments_.size() < command.min_arguments) {
    return absl::InvalidArgumentError(
        absl::StrCat("usage: ", Title(command), " ", command.arguments, "; ", HelpLine(command), " says more"));
  }
  if (arguments_.size() > command.max_arguments) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", arguments_[command.max_arguments],
                                                   "'; usage: ", Title(command), command.arguments.empty() ? "" : " ",
                                                   command.arguments));
  }
  return absl::OkStatus();
}

std::string OverviewHelp(const std::vector<Command>& commands) {
  std::string text =
      "sluice trains models with parameter servers.\n\n"
      "usage: sluice COMMAND [ARGUMENTS] [FLAGS]\n\n";
  size_t width = 0;
  for (const Command& c : commands) width = std::max(width, c.name.size());
  for (const Command& c : commands) {
    absl::StrAppend(&text, "  ", c.name, std::string(width + 2 - c.name.size(), ' '), c.summary, "\n");
  }
  absl::StrAppend(
      &text,
      "\n`sluice help COMMAND` says more. JOB is an id (kjv-3), a unique prefix of one, or \"latest\".\n"
      "The scheduler is found by --scheduler, then SLUICE_SCHEDULER, then ~/.config/sluice/config.yaml\n"
      "(\"scheduler: HOST:PORT\"), then 127.0.0.1:7700.\n"
      "Exit codes: 0 ok, 1 job failed, 2 usage or spec, 3 scheduler unreachable, 4 cancelled, 130 interrupted.\n");
  return text;
}

std::string CommandHelp(const Command& command) {
  std::string text = absl::StrCat("usage: ", Title(command), command.arguments.empty() ? "" : " ", command.arguments,
                                  command.flags.empty() ? "" : " [FLAGS]", "\n\n", command.summary, "\n");
  if (!command.details.empty()) absl::StrAppend(&text, "\n", command.details, "\n");
  if (command.flags.empty()) return text;
  std::vector<std::string> left;
  size_t width = 0;
  for (const Flag& flag : command.flags) {
    left.push_back(absl::StrCat("--", flag.name, flag.value.empty() ? "" : " ", flag.value,
                                flag.letter != 0 ? absl::StrCat(", -", std::string(1, flag.letter)) : ""));
    width = std::max(width, left.back().size());
  }
  absl::StrAppend(&text, "\n");
  for (size_t i = 0; i < left.size(); ++i) {
    absl::StrAppend(&text, "  ", left[i], std::string(width + 2 - left[i].size(), ' '), command.flags[i].help, "\n");
  }
  return text;
}

std::string NearestName(std::string_view word, const std::vector<std::string>& names) {
  std::string best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    // Edit distance (insert, delete, replace, swap of neighbours).
    std::vector<std::vector<size_t>> d(word.size() + 1, std::vector<size_t>(name.size() + 1));
    for (size_t i = 0; i <= word.size(); ++i) {
      for (size_t j = 0; j <= name.size(); ++j) {
        if (i == 0 || j == 0) {
          d[i][j] = i + j;
          continue;
        }
        d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (word[i - 1] != name[j - 1])});
        if (i > 1 && j > 1 && word[i - 1] == name[j - 2] && word[i - 2] == name[j - 1]) {
          d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
      }
    }
    if (d[word.size()][name.size()] < best_distance) {
      best_distance = d[word.size()][name.size()];
      best = name;
    }
  }
  return best;
}

std::string ShellQuote(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("-_./=:,+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace sluice
