// Explores seeds of the simulation, or replays one:
//   simulate [--first N] [--seeds N] [--off RULE]      exit 1 when a seed fails; the first failing seeds are printed
//   simulate --seed N [--off RULE] [--trace]
// With --async: jobs of train.mode async.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "tests/simulation/simulation.h"

namespace {

int Usage() {
  std::fprintf(stderr,
               "usage: simulate [--first N] [--seeds N] [--seed N] [--trace] [--off RULE] [--async]\n"
               "rules: fencing, dedup, kept_version, persist_first, verdict_carried, take_pairs, take_oldest\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace sluice;
  spdlog::set_level(spdlog::level::off);
  uint64_t first = 0, seeds = 1000, seed = 0;
  bool one = false, trace = false, async = false;
  ProtocolRules rules;
  std::map<std::string, bool*> names = {{"fencing", &rules.fencing},
                                        {"dedup", &rules.dedup},
                                        {"kept_version", &rules.kept_version},
                                        {"persist_first", &rules.persist_first},
                                        {"verdict_carried", &rules.verdict_carried},
                                        {"take_pairs", &rules.take_pairs},
                                        {"take_oldest", &rules.take_oldest}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--trace") {
      trace = true;
      continue;
    }
    if (flag == "--async") {
      async = true;
      continue;
    }
    if (i + 1 == argc) return Usage();
    const char* value = argv[++i];
    if (flag == "--first") {
      first = std::strtoull(value, nullptr, 10);
    } else if (flag == "--seeds") {
      seeds = std::strtoull(value, nullptr, 10);
    } else if (flag == "--seed") {
      seed = std::strtoull(value, nullptr, 10);
      one = true;
    } else if (flag == "--off" && names.contains(value)) {
      *names[value] = false;
    } else {
      return Usage();
    }
  }
  if (one) {
    const SimResult r = RunSeed(seed, rules, trace, async);
    std::printf("seed %lu: %s (%lu events, %d faults, %d generations, %d rewinds, %lu declines)\n", seed,
                r.failure.empty() ? "ok" : r.failure.c_str(), r.events, r.faults, r.generations, r.rewinds, r.declines);
    return r.failure.empty() ? 0 : 1;
  }
  const auto started = std::chrono::steady_clock::now();
  std::atomic<uint64_t> next{first}, events{0}, faults{0}, generations{0}, rewinds{0}, declines{0};
  std::mutex mutex;
  std::map<uint64_t, std::string> failures;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (uint64_t s; (s = next++) < first + seeds;) {
        const SimResult r = RunSeed(s, rules, false, async);
        events += r.events;
        faults += r.faults;
        generations += r.generations;
        rewinds += r.rewinds;
        declines += r.declines;
        if (r.failure.empty()) continue;
        std::lock_guard<std::mutex> lock(mutex);
        failures[s] = r.failure;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  int shown = 0;
  for (const auto& [s, failure] : failures) {
    if (++shown <= 10) std::printf("seed %lu: %s\n", s, failure.c_str());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::printf("%lu seeds, %zu failed, %lu events, %lu faults, %lu generations, %lu rewinds, %lu declines, %.1f s\n",
              seeds, failures.size(), events.load(), faults.load(), generations.load(), rewinds.load(), declines.load(),
              seconds);
  return failures.empty() ? 0 : 1;
}
