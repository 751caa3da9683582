// Contributions that are the sum of a host's ranks: of three contributors ranks 0 and 1 share a host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/shard_core.h"
#include "tests/server/core_rig.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kServerOf[] = {0, 1, 0, 0};  // by chunk

class ShardCoreHostsTest : public ::testing::Test {
 protected:
  ShardCoreHostsTest() { rig_.Plan(ServerTestPlan{.replicas = 3, .hosts = {"a", "a", "b"}}.Make()); }

  absl::Status Push(uint32_t contributor, uint32_t contributors, uint64_t chunk = 0, double value = 3,
                    double count = 4) {
    return rig_.Push(kServerOf[chunk], 1, 0, contributor, chunk, value, count, contributors);
  }

  CoreRig rig_{2};
};

TEST_F(ShardCoreHostsTest, ASumStandsForAllOfItsRanks) {
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    ASSERT_EQ(Push(0, 2, chunk), absl::OkStatus());
    ASSERT_EQ(Push(0, 2, chunk, 99), absl::OkStatus()) << "a second copy is dropped";
    ASSERT_EQ(Push(2, 1, chunk, 3, 2), absl::OkStatus());
  }
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_EQ(rig_.Report(0, 1, 0, rank, 3, 2), absl::OkStatus());
  rig_.Run();
  // The sum of 6 over 6 samples.
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    EXPECT_EQ(rig_.core(kServerOf[chunk]).version(chunk), 1u);
    EXPECT_NEAR(rig_.value(chunk), 1000.0 + static_cast<double>(chunk) - 1, 1e-6);
  }
  EXPECT_EQ(rig_.records().at(0).count(), 6);
}

TEST_F(ShardCoreHostsTest, OnlyWhatThePlanNames) {
  EXPECT_THAT(Push(0, 1).message(), HasSubstr("it is part of that of 2 ranks from 0 on"));
  EXPECT_THAT(Push(1, 1).message(), HasSubstr("it is part of that of 2 ranks from 0 on"));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(0, 3)));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(2, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, UINT32_MAX)));
  EXPECT_EQ(Push(2, 0), absl::OkStatus());
  v1::ChunkHeader header;
  header.set_generation(1);
  header.set_contributors(2);
  header.set_elements(2);
  header.add_nonfinite_contributors(2);
  ASSERT_EQ(rig_.Hello(0, 1, 0), absl::OkStatus());
  EXPECT_THAT(rig_.core(0).OnPush(CoreRig::Stream(1, 0), header, nullptr, 8).message(),
              HasSubstr("contributor 2 is no part of the sum of 2 from 0 on"));
}

}  // namespace
}  // namespace sluice
