#include "worker/parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sluice {
namespace {

constexpr PipelineSchedule kAll[] = {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kGPipe,
                                     PipelineSchedule::kSequential};

std::string Text(const std::vector<PipelineStep>& steps) {
  std::string text;
  for (const PipelineStep& step : steps) {
    text += (step.kind == PipelineStep::kForward ? " F" : " B") + std::to_string(step.microbatch);
  }
  return text;
}

// All stages in lock step: in each tick every stage does its next step if what it needs was made in an earlier tick.
struct LockStep {
  bool ended = false;
  uint64_t ticks = 0;
  std::vector<uint32_t> most_in_flight;  // by stage
};

LockStep RunAll(PipelineSchedule schedule, uint32_t stages, uint32_t microbatches) {
  std::vector<std::vector<PipelineStep>> lists;
  for (uint32_t s = 0; s < stages; ++s) lists.push_back(StageSteps(schedule, stages, s, microbatches));
  std::vector<size_t> at(stages, 0);
  std::vector<uint32_t> forwards(stages, 0), backwards(stages, 0);  // done; they come in order
  LockStep run;
  run.most_in_flight.resize(stages);
  for (;; ++run.ticks) {
    std::vector<uint32_t> now;
    for (uint32_t s = 0; s < stages; ++s) {
      if (at[s] == lists[s].size()) continue;
      const PipelineStep step = lists[s][at[s]];
      const bool forward = step.kind == PipelineStep::kForward;
      const bool ready = forward
                             ? s == 0 || forwards[s - 1] > step.microbatch
                             : forwards[s] > step.microbatch && (s + 1 == stages || backwards[s + 1] > step.microbatch);
      if (ready) now.push_back(s);
    }
    if (now.empty()) break;
    for (const uint32_t s : now) {
      const PipelineStep step = lists[s][at[s]++];
      ++(step.kind == PipelineStep::kForward ? forwards : backwards)[s];
      run.most_in_flight[s] = std::max(run.most_in_flight[s], forwards[s] - backwards[s]);
    }
  }
  run.ended = true;
  for (uint32_t s = 0; s < stages; ++s) run.ended = run.ended && at[s] == lists[s].size();
  return run;
}

TEST(PipelineScheduleTest, Examples) {
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kOneForwardOneBackward, 3, 0, 4)), " F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kOneForwardOneBackward, 3, 1, 4)), " F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kOneForwardOneBackward, 3, 2, 4)), " F0 B0 F1 B1 F2 B2 F3 B3");
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kGPipe, 3, 1, 3)), " F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kSequential, 3, 1, 3)), " F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(Text(StageSteps(PipelineSchedule::kOneForwardOneBackward, 5, 0, 2)), " F0 F1 B0 B1");
  for (const PipelineSchedule schedule : kAll) EXPECT_TRUE(StageSteps(schedule, 3, 1, 0).empty());
}

// Thousands of pipelines: each microbatch forward then backward, once, in order; nobody waits for ever.
TEST(PipelineScheduleTest, EveryMicrobatchOnceAndNoDeadlock) {
  for (const PipelineSchedule schedule : kAll) {
    for (uint32_t stages = 1; stages <= 24; ++stages) {
      for (uint32_t microbatches = 0; microbatches <= 48; ++microbatches) {
        for (uint32_t s = 0; s < stages; ++s) {
          uint32_t forwards = 0, backwards = 0;
          for (const PipelineStep& step : StageSteps(schedule, stages, s, microbatches)) {
            uint32_t& next = step.kind == PipelineStep::kForward ? forwards : backwards;
            ASSERT_EQ(step.microbatch, next++);
            ASSERT_LE(backwards, forwards);
          }
          ASSERT_EQ(forwards, microbatches);
          ASSERT_EQ(backwards, microbatches);
        }
        const LockStep run = RunAll(schedule, stages, microbatches);
        ASSERT_TRUE(run.ended) << stages << " stages, " << microbatches << " microbatches";
        for (uint32_t s = 0; s < stages; ++s) {
          ASSERT_EQ(run.most_in_flight[s], MostInFlight(schedule, stages, s, microbatches))
              << "stage " << s << " of " << stages << ", " << microbatches << " microbatches";
        }
      }
    }
  }
}

TEST(PipelineScheduleTest, OneForwardOneBackwardKeepsNoMoreThanTheStagesBehind) {
  for (uint32_t stages = 1; stages <= 24; ++stages) {
    for (uint32_t microbatches = 1; microbatches <= 48; ++microbatches) {
      for (uint32_t s = 0; s < stages; ++s) {
        EXPECT_EQ(MostInFlight(PipelineSchedule::kOneForwardOneBackward, stages, s, microbatches),
                  std::min(stages - s, microbatches));
      }
    }
  }
}

// With steps that take a tick each, the time is what the bubble's formula says.
TEST(PipelineScheduleTest, TheBubbleIsTheIdealOne) {
  for (const PipelineSchedule schedule : kAll) {
    for (uint32_t stages = 1; stages <= 12; ++stages) {
      for (uint32_t microbatches = 1; microbatches <= 24; ++microbatches) {
        const double ticks = static_cast<double>(RunAll(schedule, stages, microbatches).ticks);
        EXPECT_NEAR(1 - 2.0 * microbatches / ticks, IdealBubble(schedule, stages, microbatches), 1e-12)
            << stages << " stages, " << microbatches << " microbatches";
      }
    }
  }
}

}  // namespace
}  // namespace sluice
