// The lease book by hand: who gets which positions, what returns, what is recorded and evaluated when.
#include "server/lease_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/server/server_test_plan.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;

v1::RoundReport Report(v1::RoundReport::Kind kind = v1::RoundReport::TRAIN, double loss = 1, double count = 2) {
  v1::RoundReport report;
  report.set_kind(kind);
  report.set_loss_sum(loss);
  report.set_count(count);
  return report;
}

class LeaseBookTest : public ::testing::Test {
 protected:
  // 2 replicas, batch 4: leases of 2 positions.
  LeaseBookTest() {
    plan_.stream = plan_.async = true;
    plan_.rounds = 4;
  }
  void Make(const std::vector<v1::ChunkCut>& cuts = {}) { book_ = std::make_unique<LeaseBook>(plan_.Make(), cuts); }
  void NewGeneration() {
    ++plan_.generation;
    numbers_.clear();
    book_->NewGeneration(plan_.Make());
  }
  absl::Status AskAgain(uint32_t contributor, uint64_t stream) {
    v1::LeaseRequest request;
    request.set_contributor(contributor);
    request.set_number(numbers_[contributor]);
    return book_->OnRequest(request, stream);
  }
  absl::Status TryAsk(uint32_t contributor, const std::optional<v1::RoundReport>& report = std::nullopt) {
    v1::LeaseRequest request;
    request.set_contributor(contributor);
    request.set_number(++numbers_[contributor]);
    if (report.has_value()) *request.mutable_report() = *report;
    return book_->OnRequest(request, contributor);
  }
  // "0+2" positions, "e1 0/2" an evaluation's slice, "-" nothing yet.
  std::string Ask(uint32_t contributor, const std::optional<v1::RoundReport>& report = std::nullopt) {
    const absl::Status status = TryAsk(contributor, report);
    EXPECT_TRUE(status.ok()) << status;
    return Said(contributor);
  }
  std::string Said(uint64_t stream) {
    std::string out = "-";
    for (const auto& [to, lease] : book_->TakeAnswers()) {
      if (to != stream) {
        late_[to] = Text(lease);
        continue;
      }
      out = Text(lease);
    }
    return out;
  }
  static std::string Text(const v1::Lease& lease) {
    return lease.positions() > 0 ? absl::StrCat(lease.position(), "+", lease.positions())
                                 : absl::StrCat("e", lease.version(), " ", lease.slice(), "/", lease.slices());
  }

  ServerTestPlan plan_;
  std::unique_ptr<LeaseBook> book_;
  std::map<uint32_t, uint64_t> numbers_;
  std::map<uint64_t, std::string> late_;  // answers to others, by stream
};

TEST_F(LeaseBookTest, PositionsAreLeasedInOrderAndRecordedByRounds) {
  Make();
  EXPECT_EQ(Ask(0), "0+2");
  EXPECT_EQ(Ask(1), "2+2");
  v1::RoundReport report = Report(v1::RoundReport::TRAIN, 6, 2);
  report.set_staleness_sum(6);
  report.set_staleness_count(4);
  report.set_staleness_max(3);
  EXPECT_EQ(Ask(0, report), "4+2");  // nobody waits for contributor 1
  EXPECT_TRUE(book_->TakeRecords().empty());
  report = Report(v1::RoundReport::TRAIN, 2, 2);
  report.set_staleness_count(4);
  report.set_nonfinite(true);
  EXPECT_EQ(Ask(0, report), "e1 0/2");  // 4 positions are consumed; eval_every is 1
  const std::vector<v1::RoundRecord> records = book_->TakeRecords();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].round(), 0u);
  EXPECT_EQ(records[0].loss(), 2);
  EXPECT_EQ(records[0].count(), 4);
  EXPECT_EQ(records[0].staleness_mean(), .75);
  EXPECT_EQ(records[0].staleness_max(), 3u);
  EXPECT_TRUE(records[0].skipped());
  EXPECT_THAT(records[0].nonfinite_contributors(), ElementsAre(0));
}

TEST_F(LeaseBookTest, TheSameRequestGetsTheSameLease) {
  Make();
  EXPECT_EQ(Ask(0), "0+2");
  ASSERT_TRUE(AskAgain(0, 77).ok());
  EXPECT_EQ(Said(77), "0+2");
  EXPECT_EQ(Ask(1), "2+2");
  EXPECT_EQ(book_->leased(), 4u);
}

TEST_F(LeaseBookTest, AWaitingRequestIsAnsweredOnTheNewestStreamThatAsked) {
  plan_.rounds = 1;
  Make();
  EXPECT_EQ(Ask(0), "0+2");
  EXPECT_EQ(Ask(1), "2+2");
  EXPECT_EQ(Ask(0, Report()), "-");  // nothing is left, but the job is not consumed yet
  ASSERT_TRUE(AskAgain(0, 50).ok());
  ASSERT_TRUE(AskAgain(0, 3).ok());  // late, of a stream that broke
  EXPECT_EQ(Ask(1, Report()), "e1 1/2");
  EXPECT_EQ(late_[50], "e1 0/2");
}

TEST_F(LeaseBookTest, LeasesOfAnEndedGenerationReturn) {
  Make();
  EXPECT_EQ(Ask(0), "0+2");
  EXPECT_EQ(Ask(1), "2+2");
  EXPECT_EQ(Ask(1, Report()), "4+2");
  NewGeneration();
  EXPECT_EQ(book_->leased(), 0u);
  EXPECT_EQ(book_->consumed().size(), 2u);
  EXPECT_EQ(Ask(1), "0+2");
  EXPECT_EQ(Ask(0), "4+2");
  EXPECT_EQ(Ask(0, Report()), "e1 0/2");
  NewGeneration();  // the slice was not done
  EXPECT_EQ(Ask(1), "e1 0/2");
  EXPECT_EQ(Ask(0), "e1 1/2");
  EXPECT_EQ(Ask(0, Report(v1::RoundReport::EVALUATION, 3, 3)), "0+2");
  NewGeneration();  // slice 0 was not done, slice 1 was
  EXPECT_EQ(Ask(1), "e1 0/2");
  EXPECT_EQ(Ask(0), "0+2");
  book_->TakeRecords();
  EXPECT_EQ(Ask(1, Report(v1::RoundReport::EVALUATION, 5, 1)), "6+2");
  const auto records = book_->TakeRecords();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_TRUE(records[0].evaluation());
  EXPECT_EQ(records[0].round(), 1u);
  EXPECT_EQ(records[0].loss(), 2);
}

TEST_F(LeaseBookTest, ACheckpointsOpenLeasesComeFirstAndAreCutWhereItsChunksDisagree) {
  plan_.start = 1;
  plan_.checkpoint.emplace().set_version(1);
  std::vector<v1::ChunkCut> cuts;
  for (uint64_t chunk = 0; chunk < plan_.Make()->table().chunks(); ++chunk) {
    v1::ChunkCut& cut = cuts.emplace_back();
    cut.set_chunk(chunk);
    // [0, 2) everywhere; one chunk has [2, 4), another [4, 6), a third [4, 5): its job leased other parts.
    const std::vector<std::pair<uint64_t, uint64_t>> ranges =
        chunk == 1   ? std::vector<std::pair<uint64_t, uint64_t>>{{0, 4}}
        : chunk == 2 ? std::vector<std::pair<uint64_t, uint64_t>>{{0, 2}, {4, 5}}
                     : std::vector<std::pair<uint64_t, uint64_t>>{{0, 2}, {4, 6}};
    for (const auto& [begin, end] : ranges) {
      cut.add_applied()->set_begin(begin);
      cut.mutable_applied()->rbegin()->set_end(end);
    }
  }
  Make(cuts);
  EXPECT_EQ(book_->consumed().size(), 2u);
  EXPECT_EQ(Ask(0), "2+2");
  EXPECT_EQ(Ask(1), "4+1");
  EXPECT_EQ(Ask(1, Report()), "5+1");
  EXPECT_EQ(Ask(0, Report()), "e1 0/2");  // the version that it begins from is evaluated as in sync
  EXPECT_EQ(Ask(1, Report()), "e1 1/2");
  EXPECT_EQ(Ask(1, Report(v1::RoundReport::EVALUATION)), "6+2");
}

TEST_F(LeaseBookTest, ACheckpointWithoutCutsHasSeenAllBeforeIt) {
  plan_.start = 2;
  plan_.checkpoint.emplace().set_version(2);
  Make();
  EXPECT_EQ(book_->consumed().ranges(), (std::vector<Range>{{0, 8}}));
  EXPECT_EQ(Ask(0), "e2 0/2");  // as in sync: again, from the checkpoint
  EXPECT_EQ(Ask(1), "e2 1/2");
  EXPECT_EQ(Ask(0, Report(v1::RoundReport::EVALUATION)), "8+2");
}

TEST_F(LeaseBookTest, WhatBreaksTheProtocolChangesNothing) {
  Make();
  v1::LeaseRequest request;
  request.set_contributor(2);
  request.set_number(1);
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kOutOfRange);
  request.set_contributor(0);
  request.set_number(0);
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kFailedPrecondition);
  request.set_number(2);
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Ask(0), "0+2");
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kInvalidArgument);  // no report
  *request.mutable_report() = Report(v1::RoundReport::EVALUATION);
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kInvalidArgument);
  *request.mutable_report() = Report(v1::RoundReport::TRAIN, NAN, INFINITY);
  EXPECT_EQ(book_->OnRequest(request, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(book_->consumed().size(), 0u);
  *request.mutable_report() = Report(v1::RoundReport::TRAIN, NAN);  // a loss may be anything
  EXPECT_TRUE(book_->OnRequest(request, 1).ok());
  EXPECT_EQ(book_->consumed().size(), 2u);
}

// Any replicas and batch, contributors of any speed, generations ending at any moment: each position is consumed once.
TEST_F(LeaseBookTest, EveryPositionIsConsumedOnceWhateverHappens) {
  std::mt19937 random(11);
  const auto draw = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  for (int run = 0; run < 300; ++run) {
    plan_ = ServerTestPlan{.replicas = static_cast<uint32_t>(1 + draw(4)), .rounds = 1 + draw(6)};
    plan_.stream = plan_.async = true;
    plan_.batch = static_cast<uint32_t>(1 + draw(7));
    numbers_.clear();
    Make();
    std::map<uint32_t, v1::Lease> at_work;
    std::map<uint64_t, int> times;  // position -> reported done
    std::vector<v1::RoundRecord> records;
    const uint64_t all = plan_.rounds * plan_.batch;
    const auto done = [&] {
      return !records.empty() && records.back().evaluation() && records.back().round() == plan_.rounds;
    };
    for (int step = 0; step < 5000 && !done(); ++step) {
      const uint32_t c = static_cast<uint32_t>(draw(plan_.replicas));
      if (draw(40) == 0) {
        NewGeneration();
        at_work.clear();
      } else if (auto lease = at_work.find(c); lease != at_work.end()) {
        const bool train = lease->second.positions() > 0;
        for (uint64_t p = 0; p < lease->second.positions(); ++p) ++times[lease->second.position() + p];
        at_work.erase(lease);
        ASSERT_TRUE(TryAsk(c, Report(train ? v1::RoundReport::TRAIN : v1::RoundReport::EVALUATION)).ok());
      } else if (numbers_[c] == 0) {
        ASSERT_TRUE(TryAsk(c).ok());
      }
      for (const auto& [stream, answer] : book_->TakeAnswers()) {
        ASSERT_TRUE(at_work.emplace(static_cast<uint32_t>(stream), answer).second);
      }
      for (const v1::RoundRecord& record : book_->TakeRecords()) records.push_back(record);
    }
    ASSERT_TRUE(done()) << book_->Describe();
    ASSERT_EQ(times.size(), all);
    for (const auto& [position, n] : times) EXPECT_EQ(n, 1) << position;
    uint64_t round = 0;
    for (const v1::RoundRecord& record : records) round += !record.evaluation() && record.round() == round;
    EXPECT_EQ(round, plan_.rounds);
  }
}

}  // namespace
}  // namespace sluice
