// What a measurement says about itself: the machine, the cores, CPU time, quartiles. How a bench begins and ends.
#ifndef SLUICE_BENCH_MEASURE_H_
#define SLUICE_BENCH_MEASURE_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace sluice {

struct Quartiles {
  double low = 0, median = 0, high = 0;
  // How far the quartiles lie apart, as a part of the median.
  double Spread() const { return median > 0 ? (high - low) / median : 0; }
};

// Interpolated between the neighbours, as numpy does. `values` must not be empty.
Quartiles QuartilesOf(std::vector<double> values);

// Pins this process, and threads it starts later, to the index-th core that it may use; false where there are not so
// many.
bool PinToCore(int index);

// User and system seconds of all threads of this process so far.
double CpuSeconds();

// "2026-01-31, 2 cores, AMD EPYC".
std::string DateAndMachine();

// "real-time priority" under SCHED_FIFO or SCHED_RR, else "normal priority": whether other programs on these cores were
// in the way.
std::string PriorityName();

// Log to stderr from warnings on, malloc as in daemons; then `measure`. An error goes to stderr under the program's
// name. The exit code: 0, 2 for INVALID_ARGUMENT (of flags), else 1.
int RunBench(const char* program, absl::FunctionRef<absl::Status()> measure);

}  // namespace sluice

#endif  // SLUICE_BENCH_MEASURE_H_
