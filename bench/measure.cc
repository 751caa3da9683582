#include "bench/measure.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/rpc.h"

namespace sluice {

Quartiles QuartilesOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    const double place = part * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(place), above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {at(0.25), at(0.5), at(0.75)};
}

bool PinToCore(int index) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  return false;
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

std::string DateAndMachine() {
  std::string model = "unknown CPU";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    model = std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
    break;
  }
  return absl::StrCat(absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone()), ", ",
                      std::thread::hardware_concurrency(), " cores, ", model);
}

std::string PriorityName() {
  const int policy = sched_getscheduler(0) & ~SCHED_RESET_ON_FORK;
  return policy == SCHED_FIFO || policy == SCHED_RR ? "real-time priority" : "normal priority";
}

int RunBench(const char* program, absl::FunctionRef<absl::Status()> measure) {
  InitLog("bench", "warn");
  TuneMalloc();
  const absl::Status status = measure();
  if (!status.ok()) std::fprintf(stderr, "%s: %s\n", program, std::string(status.message()).c_str());
  return status.ok() ? 0 : absl::IsInvalidArgument(status) ? 2 : 1;
}

}  // namespace sluice
