// What a pipeline's stage does in a round, as a list: which microbatch goes forward or backward next. Pure functions;
// nothing here computes or waits.
//
// Stages 0..P-1 hold the model's layers in order. Forward of microbatch m on stage s needs the activations that stage
// s-1 made of m, backward the gradients that stage s+1 made of m. Every list does each microbatch forward, then
// backward, once, and all lists do forwards and backwards in ascending order of microbatches: so gradients add up in
// one order, and the bits do not depend on the schedule.
//
// GPipe: Huang et al. 2019, arXiv:1811.06965. One forward, one backward: Narayanan et al. 2019 (PipeDream) and 2021,
// arXiv:2104.04473.
#ifndef SLUICE_WORKER_PARALLEL_PIPELINE_SCHEDULE_H_
#define SLUICE_WORKER_PARALLEL_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace sluice {

enum class PipelineSchedule {
  kOneForwardOneBackward,  // as few microbatches in flight as keep all stages busy
  kGPipe,                  // all forwards, then all backwards
  kSequential,             // one microbatch in flight: plain model parallelism
};

struct PipelineStep {
  enum Kind { kForward, kBackward };
  Kind kind = kForward;
  uint32_t microbatch = 0;
  bool operator==(const PipelineStep&) const = default;
};

// Of stage `stage` < `stages`, `microbatches` >= 0; 2 * microbatches steps.
std::vector<PipelineStep> StageSteps(PipelineSchedule schedule, uint32_t stages, uint32_t stage, uint32_t microbatches);

// Microbatches whose activations the stage keeps at once, at most: forward done or under way, backward not done.
uint32_t MostInFlight(PipelineSchedule schedule, uint32_t stages, uint32_t stage, uint32_t microbatches);

// Share of a stage's time in which it has nothing to do, for stages and microbatches that all take the same time and
// transfers that take none: (P-1) / (M+P-1); sequential: (P-1) / P.
double IdealBubble(PipelineSchedule schedule, uint32_t stages, uint32_t microbatches);

}  // namespace sluice

#endif  // SLUICE_WORKER_PARALLEL_PIPELINE_SCHEDULE_H_
