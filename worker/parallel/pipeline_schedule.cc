#include "worker/parallel/pipeline_schedule.h"

#include <algorithm>

namespace sluice {
namespace {

// Forwards that a stage is ahead of its backwards when the first backward comes.
uint32_t Warmup(PipelineSchedule schedule, uint32_t stages, uint32_t stage, uint32_t microbatches) {
  switch (schedule) {
    case PipelineSchedule::kOneForwardOneBackward:
      return std::min(stages - stage - 1, microbatches);
    case PipelineSchedule::kGPipe:
      return microbatches;
    case PipelineSchedule::kSequential:
      break;
  }
  return 0;
}

}  // namespace

std::vector<PipelineStep> StageSteps(PipelineSchedule schedule, uint32_t stages, uint32_t stage,
                                     uint32_t microbatches) {
  std::vector<PipelineStep> steps;
  steps.reserve(size_t{2} * microbatches);
  const uint32_t ahead = Warmup(schedule, stages, stage, microbatches);
  for (uint32_t m = 0; m < ahead; ++m) steps.push_back({PipelineStep::kForward, m});
  for (uint32_t m = 0; m < microbatches; ++m) {
    if (m + ahead < microbatches) steps.push_back({PipelineStep::kForward, m + ahead});
    steps.push_back({PipelineStep::kBackward, m});
  }
  return steps;
}

uint32_t MostInFlight(PipelineSchedule schedule, uint32_t stages, uint32_t stage, uint32_t microbatches) {
  return std::min(Warmup(schedule, stages, stage, microbatches) + 1, microbatches);
}

double IdealBubble(PipelineSchedule schedule, uint32_t stages, uint32_t microbatches) {
  if (microbatches == 0) return 0;
  const double idle = stages - 1;
  return idle / (schedule == PipelineSchedule::kSequential ? stages : microbatches + idle);
}

}  // namespace sluice
