// One contract for both stores; what only the one on disk must do.
#include "scheduler/state_store.h"

#include <gtest/gtest.h>
#include <sqlite3.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

v1::StoredJob Row(const std::string& id, uint64_t generation) {
  v1::StoredJob row;
  row.set_sequence(1);
  row.mutable_status()->set_job_id(id);
  row.set_generation(generation);
  row.mutable_status()->set_message(std::string("zero \0 inside", 13));
  return row;
}

HistoryEntry Round(const std::string& job, uint64_t round, double loss, bool evaluation = false) {
  HistoryEntry entry;
  entry.job_id = job;
  entry.has_record = true;
  entry.record.set_job_id(job);
  entry.record.set_round(round);
  entry.record.set_loss(loss);
  entry.record.set_evaluation(evaluation);
  return entry;
}

HistoryEntry Told(const std::string& job, const std::string& text) {
  HistoryEntry entry;
  entry.job_id = job;
  entry.event.set_text(text);
  return entry;
}

enum class Kind { kMemory, kSqlite };

class StateStoreContract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { Open(); }
  void Open() {
    store_.reset();
    if (GetParam() == Kind::kMemory) {
      memory_ = std::make_unique<MemoryStore>();
    } else {
      auto store = OpenSqliteStore(folder_ / "state");
      ASSERT_TRUE(store.ok()) << store.status();
      store_ = *std::move(store);
    }
  }
  StateStore& store() { return GetParam() == Kind::kMemory ? *memory_ : *store_; }

  TemporaryFolder folder_;
  std::unique_ptr<MemoryStore> memory_;
  std::unique_ptr<StateStore> store_;
};

TEST_P(StateStoreContract, JobsAreReplacedById) {
  EXPECT_TRUE(store().LoadJobs()->empty());
  ASSERT_TRUE(store().PutJob(Row("a-1", 1)).ok());
  ASSERT_TRUE(store().PutJob(Row("b-1", 1)).ok());
  ASSERT_TRUE(store().PutJob(Row("a-1", 5)).ok());
  const auto rows = store().LoadJobs();
  ASSERT_TRUE(rows.ok());
  ASSERT_EQ(rows->size(), 2u);
  for (const v1::StoredJob& row : *rows) {
    EXPECT_EQ(row.generation(), row.status().job_id() == "a-1" ? 5u : 1u);
    EXPECT_EQ(row.status().message().size(), 13u);
  }
}

TEST_P(StateStoreContract, HistoryIsOrderedAndReplaced) {
  ASSERT_TRUE(store()
                  .PutHistory({Round("a", 2, 0.2), Told("a", "one"), Round("a", 1, 0.1), Round("a", 2, 0.9, true),
                               Round("b", 7, 0.7), Told("a", "two")})
                  .ok());
  ASSERT_TRUE(store().PutHistory({Round("a", 2, 0.3)}).ok());
  const auto history = store().LoadHistory("a");
  ASSERT_TRUE(history.ok());
  ASSERT_EQ(history->records_size(), 3);
  EXPECT_EQ(history->records(0).round(), 1u);
  EXPECT_EQ(history->records(1).loss(), 0.3);
  EXPECT_TRUE(history->records(2).evaluation());
  ASSERT_EQ(history->events_size(), 2);
  EXPECT_EQ(history->events(1).text(), "two");
  EXPECT_EQ(*store().TrainRounds("a"), (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(store().LoadHistory("nobody")->records_size(), 0);
}

TEST_P(StateStoreContract, ThinningLeavesMultiplesTheNewestAndEvaluations) {
  std::vector<HistoryEntry> entries;
  for (uint64_t r = 0; r < 11; ++r) entries.push_back(Round("a", r, 1));
  entries.push_back(Round("a", 3, 1, true));
  entries.push_back(Round("b", 3, 1));
  ASSERT_TRUE(store().PutHistory(entries).ok());
  ASSERT_TRUE(store().ThinRounds("a", 4, 10).ok());
  EXPECT_EQ(*store().TrainRounds("a"), (std::vector<uint64_t>{0, 4, 8, 10}));
  EXPECT_EQ(store().LoadHistory("a")->records_size(), 5);
  EXPECT_EQ(*store().TrainRounds("b"), (std::vector<uint64_t>{3}));
}

INSTANTIATE_TEST_SUITE_P(Stores, StateStoreContract, testing::Values(Kind::kMemory, Kind::kSqlite),
                         [](const auto& info) { return info.param == Kind::kMemory ? "Memory" : "Sqlite"; });

TEST(SqliteStore, SurvivesItsOwner) {
  TemporaryFolder folder;
  {
    auto store = OpenSqliteStore(folder.path());
    ASSERT_TRUE(store.ok());
    ASSERT_TRUE((*store)->PutJob(Row("a-1", 3)).ok());
    ASSERT_TRUE((*store)->PutHistory({Round("a-1", 0, 2.5)}).ok());
  }
  auto store = OpenSqliteStore(folder.path());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ((*store)->LoadJobs()->size(), 1u);
  EXPECT_EQ((*store)->LoadHistory("a-1")->records(0).loss(), 2.5);
}

TEST(SqliteStore, ASecondOwnerIsRefusedByFolderAndProcess) {
  TemporaryFolder folder;
  auto store = OpenSqliteStore(folder.path());
  ASSERT_TRUE(store.ok());
  const auto second = OpenSqliteStore(folder.path());
  ASSERT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  const std::string text(second.status().message());
  EXPECT_NE(text.find(folder.path()), std::string::npos) << text;
  EXPECT_NE(text.find(absl::StrCat("process id ", getpid())), std::string::npos) << text;
  ASSERT_TRUE((*store)->PutJob(Row("a-1", 1)).ok()) << "the first one is not disturbed";
}

TEST(SqliteStore, AnotherSchemaIsRefused) {
  TemporaryFolder folder;
  { ASSERT_TRUE(OpenSqliteStore(folder.path()).ok()); }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((folder / "state.sqlite").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "PRAGMA user_version = 99", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  const auto store = OpenSqliteStore(folder.path());
  ASSERT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(store.status().message().find("99"), absl::string_view::npos);
}

TEST(SqliteStore, GarbageIsNoDatabase) {
  TemporaryFolder folder;
  Spill(folder / "state.sqlite", std::string(5000, 'x'));
  const auto store = OpenSqliteStore(folder.path());
  ASSERT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
  EXPECT_NE(store.status().message().find("state.sqlite"), absl::string_view::npos);
}

TEST(SqliteStore, ABrokenRowIsDataLoss) {
  TemporaryFolder folder;
  { ASSERT_TRUE(OpenSqliteStore(folder.path()).ok()); }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((folder / "state.sqlite").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "INSERT INTO jobs VALUES ('a', x'ffffff')", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  auto store = OpenSqliteStore(folder.path());
  ASSERT_TRUE(store.ok());
  EXPECT_EQ((*store)->LoadJobs().status().code(), absl::StatusCode::kDataLoss);
}

TEST(MemoryStore, RefusesEverythingAfterAFailedWrite) {
  MemoryStore store;
  ASSERT_TRUE(store.PutJob(Row("a", 1)).ok());
  store.FailWrites(absl::ResourceExhaustedError("disk is full"));
  EXPECT_EQ(store.PutJob(Row("b", 1)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(store.PutHistory({Round("a", 0, 1)}).ok());
  EXPECT_EQ(store.LoadJobs()->size(), 1u);
}

}  // namespace
}  // namespace sluice
