#include "common/args.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "client/commands.h"

namespace sluice {
namespace {

const std::vector<Command>& TestCommands() {
  static const auto& commands = *new std::vector<Command>{
      {"run",
       "FILE [MORE]",
       "runs",
       "",
       {{"follow", FlagKind::kBool, "", "follows", 'f'},
        {"set", FlagKind::kString, "FIELD=VALUE", "sets", 0, true},
        {"rounds", FlagKind::kInteger, "N", "how many", 'n', false, 1, 100},
        {"rate", FlagKind::kNumber, "X", "how fast", 0, false, 0, 1},
        {"data_root", FlagKind::kString, "DIR", "where"}},
       1,
       2},
      {"list", "", "lists", "", {}, 0, 0},
  };
  return commands;
}

Args Parse(const std::vector<std::string>& words) {
  auto args = ParseArgs(TestCommands(), words);
  EXPECT_TRUE(args.ok()) << args.status();
  return args.ok() ? *args : Args();
}

std::string Refused(const std::vector<std::string>& words) {
  auto args = ParseArgs(TestCommands(), words);
  EXPECT_FALSE(args.ok());
  if (args.ok()) return "";
  EXPECT_EQ(args.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(args.status().message());
}

testing::AssertionResult Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

TEST(Args, FlagsInEveryForm) {
  const Args args =
      Parse({"run", "a.yaml", "--set", "x=1", "-f", "--rounds=7", "--set=y=2", "--rate", "0.5", "--data-root", "/d"});
  EXPECT_EQ(args.command().name, "run");
  EXPECT_EQ(args.arguments(), std::vector<std::string>{"a.yaml"});
  EXPECT_EQ(args.List("set"), (std::vector<std::string>{"x=1", "y=2"}));
  EXPECT_TRUE(args.Bool("follow"));
  EXPECT_EQ(args.Integer("rounds", 1), 7);
  EXPECT_EQ(args.Number("rate", 1), 0.5);
  EXPECT_EQ(args.String("data_root"), "/d");
  EXPECT_EQ(args.argument(1, "none"), "none");
}

TEST(Args, ProgramsHaveNoCommandAndTakeTheLastOfAFlag) {
  const Command program{.name = "sluice-test",
                        .summary = "tests",
                        .flags = {{"listen", FlagKind::kString, "HOST", "where"},
                                  {"shared_memory", FlagKind::kBool, "", "whether"},
                                  {"threads", FlagKind::kInteger, "N", "how many", 0, false, 0, 9}},
                        .program = true};
  auto args = ParseArgs(program, {"--listen=a", "--threads", "3", "--shared_memory=false", "--listen=b"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->String("listen"), "b");
  EXPECT_EQ(args->Integer("threads", 0), 3);
  EXPECT_FALSE(args->Bool("shared_memory", true));
  args = ParseArgs(program, {"--shared_memory=false", "--shared-memory"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_TRUE(args->Bool("shared_memory"));
  EXPECT_TRUE(ParseArgs(program, {})->Bool("shared_memory", true));
  for (const auto& [word, message] : std::vector<std::pair<std::string, std::string>>{
           {"--listn=a", "sluice-test has no flag --listn; did you mean --listen?; `sluice-test --help` lists them"},
           {"--threads=10", "--threads: a whole number from 0 to 9 expected, found '10'"},
           {"--shared_memory=no", "--shared_memory takes no value but true and false, found 'no'"},
           {"--listen", "--listen needs a value: HOST"},
           {"word", "unexpected argument 'word'; usage: sluice-test"}}) {
    EXPECT_EQ(ParseArgs(program, {word}).status().message(), message);
  }
  EXPECT_TRUE(Has(CommandHelp(program), "usage: sluice-test [FLAGS]"));
}

TEST(Args, FlagsBeforeTheCommandAndDefaults) {
  const Args args = Parse({"--rounds", "9", "run", "a"});
  EXPECT_EQ(args.Integer("rounds", 1), 9);
  EXPECT_FALSE(args.Has("follow"));
  EXPECT_EQ(args.String("data_root", "/x"), "/x");
  EXPECT_EQ(args.Number("rate", 0.25), 0.25);
}

TEST(Args, DashesEndFlags) {
  EXPECT_EQ(Parse({"run", "--", "--set", "-f"}).arguments(), (std::vector<std::string>{"--set", "-f"}));
  EXPECT_EQ(Parse({"run", "-", "-n", "3"}).arguments(), std::vector<std::string>{"-"});
  // A value may look like a flag or a command.
  EXPECT_EQ(Parse({"run", "a", "--data_root", "list"}).String("data_root"), "list");
  EXPECT_EQ(Parse({"run", "a", "--data_root=-x"}).String("data_root"), "-x");
}

TEST(Args, MistakesAreNamed) {
  EXPECT_TRUE(Has(Refused({"rnu", "a"}), "unknown command 'rnu'; did you mean run?"));
  EXPECT_TRUE(Has(Refused({"something"}), "unknown command 'something'"));
  EXPECT_FALSE(Has(Refused({"something"}), "did you mean"));
  EXPECT_TRUE(Has(Refused({}), "a command is expected"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--round", "3"}), "no flag --round; did you mean --rounds?"));
  EXPECT_TRUE(Has(Refused({"run", "a", "-x"}), "no flag -x"));
  EXPECT_TRUE(Has(Refused({"run", "a", "-fn"}), "no flag -fn"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rounds"}), "--rounds needs a value: N"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rounds", "0"}), "from 1 to 100 expected, found '0'"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rounds", "1.5"}), "a whole number"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rounds", "99999999999999999999"}), "a whole number"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rate=nan"}), "a number from 0 to 1"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rate=fast"}), "found 'fast'"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--rate=1", "--rate=1"}), "given twice"));
  EXPECT_TRUE(Has(Refused({"run", "a", "--follow=no"}), "takes no value"));
  EXPECT_TRUE(Has(Refused({"run"}), "usage: sluice run FILE [MORE]"));
  EXPECT_TRUE(Has(Refused({"run", "a", "b", "c"}), "unexpected argument 'c'"));
  EXPECT_TRUE(Has(Refused({"list", "x"}), "unexpected argument 'x'; usage: sluice list"));
}

TEST(Args, HelpNamesEveryFlagOfEveryCommand) {
  for (const Command& command : Commands()) {
    const std::string help = CommandHelp(command);
    EXPECT_TRUE(Has(OverviewHelp(Commands()), "  " + command.name + " "));
    EXPECT_TRUE(Has(help, "usage: sluice " + command.name));
    for (const Flag& flag : command.flags) {
      EXPECT_TRUE(Has(help, "--" + flag.name));
      EXPECT_FALSE(flag.help.empty());
      EXPECT_EQ(flag.value.empty(), flag.kind == FlagKind::kBool) << flag.name;
    }
  }
}

TEST(NearestName, NearOnesOnly) {
  EXPECT_EQ(NearestName("statsu", {"submit", "status"}), "status");
  EXPECT_EQ(NearestName("wach", {"watch", "list"}), "watch");
  EXPECT_EQ(NearestName("zzz", {"watch", "list"}), "");
  EXPECT_EQ(NearestName("", {"watch"}), "");
}

TEST(ShellQuote, OnlyWhereNeeded) {
  EXPECT_EQ(ShellQuote("train.rounds=5"), "train.rounds=5");
  EXPECT_EQ(ShellQuote("a b"), "'a b'");
  EXPECT_EQ(ShellQuote("it's"), "'it'\\''s'");
  EXPECT_EQ(ShellQuote(""), "''");
  EXPECT_EQ(ShellQuote("[1,2]"), "'[1,2]'");
}

}  // namespace
}  // namespace sluice
