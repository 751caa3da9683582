// The state store in SQLite, and the lock that keeps a second scheduler off the same folder.
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status_macros.h"
#include "scheduler/state_store.h"

namespace sluice {
namespace {

constexpr int kSchemaVersion = 1;

constexpr char kSchema[] =
    "CREATE TABLE jobs (id TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE rounds (job TEXT NOT NULL, evaluation INTEGER NOT NULL, round INTEGER NOT NULL, record BLOB NOT NULL,"
    " PRIMARY KEY (job, evaluation, round)) WITHOUT ROWID;"
    "CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, event BLOB NOT NULL);"
    "CREATE INDEX events_by_job ON events (job, number);";

// An flock on a file that names the process that holds it; the kernel drops it with the process.
class FolderLock {
 public:
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(const std::string& folder) {
    const std::string path = folder + "/lock";
    const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor < 0) return ErrnoStatus(errno, "cannot open", path);
    auto lock = std::unique_ptr<FolderLock>(new FolderLock(descriptor));
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "cannot lock", path);
      char text[32] = {};
      const ssize_t n = pread(descriptor, text, sizeof(text) - 1, 0);
      std::string owner(text, n > 0 ? static_cast<size_t>(n) : 0);
      while (!owner.empty() && owner.back() == '\n') owner.pop_back();
      return absl::FailedPreconditionError(
          absl::StrCat("the state folder ", folder, " is in use by the scheduler with process id ",
                       owner.empty() ? "(unknown)" : owner, "; end that one or name another folder with --state_dir"));
    }
    const std::string pid = absl::StrCat(getpid(), "\n");
    if (ftruncate(descriptor, 0) != 0 || pwrite(descriptor, pid.data(), pid.size(), 0) < 0) {
      return ErrnoStatus(errno, "cannot write", path);
    }
    return lock;
  }
  ~FolderLock() { close(descriptor_); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  const int descriptor_;
};

class SqliteStore final : public StateStore {
 public:
  SqliteStore(std::unique_ptr<FolderLock> lock, std::string path) : lock_(std::move(lock)), path_(std::move(path)) {}
  ~SqliteStore() override { sqlite3_close_v2(db_); }

  absl::Status Open() {
    absl::MutexLock lock(&mutex_);
    if (sqlite3_open_v2(path_.c_str(), &db_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX,
                        nullptr) != SQLITE_OK) {
      return Error("opening");
    }
    sqlite3_extended_result_codes(db_, 1);
    RETURN_IF_ERROR(Run("PRAGMA journal_mode = WAL"));
    RETURN_IF_ERROR(Run("PRAGMA synchronous = FULL"));
    int version = 0, tables = 0;
    RETURN_IF_ERROR(Query("PRAGMA user_version", {}, [&](sqlite3_stmt* row) { version = sqlite3_column_int(row, 0); }));
    RETURN_IF_ERROR(Query("SELECT count(*) FROM sqlite_master", {},
                          [&](sqlite3_stmt* row) { tables = sqlite3_column_int(row, 0); }));
    if (version == kSchemaVersion) return absl::OkStatus();
    if (version != 0 || tables != 0) {
      return absl::FailedPreconditionError(absl::StrCat(path_, " has schema version ", version,
                                                        ", this scheduler reads ", kSchemaVersion,
                                                        "; run the scheduler that wrote it"));
    }
    return Transaction([&]() -> absl::Status {
      mutex_.AssertHeld();
      RETURN_IF_ERROR(Run(kSchema));
      return Run(absl::StrCat("PRAGMA user_version = ", kSchemaVersion));
    });
  }

  absl::StatusOr<std::vector<v1::StoredJob>> LoadJobs() override {
    absl::MutexLock lock(&mutex_);
    std::vector<v1::StoredJob> rows;
    bool legal = true;
    RETURN_IF_ERROR(
        Query("SELECT row FROM jobs", {}, [&](sqlite3_stmt* row) { legal &= Parse(row, 0, &rows.emplace_back()); }));
    if (!legal) return absl::DataLossError(absl::StrCat(path_, ": a row of table jobs cannot be read"));
    return rows;
  }

  absl::Status PutJob(const v1::StoredJob& row) override {
    absl::MutexLock lock(&mutex_);
    return Write([&] {
      mutex_.AssertHeld();
      return Query("INSERT OR REPLACE INTO jobs (id, row) VALUES (?1, ?2)",
                   {Text(row.status().job_id()), Blob(row.SerializeAsString())}, nullptr);
    });
  }

  absl::Status PutHistory(absl::Span<const HistoryEntry> entries) override {
    absl::MutexLock lock(&mutex_);
    if (entries.empty()) return broken_;
    return Write([&]() -> absl::Status {
      mutex_.AssertHeld();
      for (const HistoryEntry& entry : entries) {
        if (entry.has_record) {
          RETURN_IF_ERROR(
              Query("INSERT OR REPLACE INTO rounds (job, evaluation, round, record) VALUES (?1, ?2, ?3, ?4)",
                    {Text(entry.job_id), Integer(entry.record.evaluation() ? 1 : 0), Integer(entry.record.round()),
                     Blob(entry.record.SerializeAsString())},
                    nullptr));
        } else {
          RETURN_IF_ERROR(Query("INSERT INTO events (job, event) VALUES (?1, ?2)",
                                {Text(entry.job_id), Blob(entry.event.SerializeAsString())}, nullptr));
        }
      }
      return absl::OkStatus();
    });
  }

  absl::StatusOr<v1::GetHistoryResponse> LoadHistory(const std::string& job_id) override {
    absl::MutexLock lock(&mutex_);
    v1::GetHistoryResponse response;
    bool legal = true;
    RETURN_IF_ERROR(Query("SELECT record FROM rounds WHERE job = ?1 ORDER BY evaluation, round", {Text(job_id)},
                          [&](sqlite3_stmt* row) { legal &= Parse(row, 0, response.add_records()); }));
    RETURN_IF_ERROR(Query("SELECT event FROM events WHERE job = ?1 ORDER BY number", {Text(job_id)},
                          [&](sqlite3_stmt* row) { legal &= Parse(row, 0, response.add_events()); }));
    if (!legal) return absl::DataLossError(absl::StrCat(path_, ": history of job ", job_id, " cannot be read"));
    return response;
  }

  absl::StatusOr<std::vector<uint64_t>> TrainRounds(const std::string& job_id) override {
    absl::MutexLock lock(&mutex_);
    std::vector<uint64_t> rounds;
    RETURN_IF_ERROR(
        Query("SELECT round FROM rounds WHERE job = ?1 AND evaluation = 0 ORDER BY round", {Text(job_id)},
              [&](sqlite3_stmt* row) { rounds.push_back(static_cast<uint64_t>(sqlite3_column_int64(row, 0))); }));
    return rounds;
  }

  absl::Status ThinRounds(const std::string& job_id, uint64_t stride, uint64_t keep) override {
    absl::MutexLock lock(&mutex_);
    return Write([&] {
      mutex_.AssertHeld();
      return Query("DELETE FROM rounds WHERE job = ?1 AND evaluation = 0 AND round % ?2 != 0 AND round != ?3",
                   {Text(job_id), Integer(stride), Integer(keep)}, nullptr);
    });
  }

 private:
  struct Value {
    enum Kind { kInteger, kText, kBlob } kind;
    int64_t integer = 0;
    std::string bytes;
  };
  static Value Text(std::string text) { return {Value::kText, 0, std::move(text)}; }
  static Value Blob(std::string bytes) { return {Value::kBlob, 0, std::move(bytes)}; }
  static Value Integer(uint64_t n) { return {Value::kInteger, static_cast<int64_t>(n), ""}; }

  static bool Parse(sqlite3_stmt* row, int column, google::protobuf::MessageLite* message) {
    return message->ParseFromArray(sqlite3_column_blob(row, column), sqlite3_column_bytes(row, column));
  }

  absl::Status Error(const std::string& what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int code = db_ != nullptr ? sqlite3_extended_errcode(db_) : SQLITE_NOMEM;
    const std::string text = absl::StrCat(path_, ": ", what, ": ", db_ != nullptr ? sqlite3_errmsg(db_) : "no memory");
    switch (code & 0xff) {
      case SQLITE_FULL:
      case SQLITE_NOMEM:
        return absl::ResourceExhaustedError(text);
      case SQLITE_CORRUPT:
      case SQLITE_NOTADB:
      case SQLITE_IOERR:
        return absl::DataLossError(text);
      case SQLITE_PERM:
      case SQLITE_READONLY:
        return absl::PermissionDeniedError(text);
      case SQLITE_BUSY:
      case SQLITE_LOCKED:
        return absl::FailedPreconditionError(absl::StrCat(text, "; another process has the file open"));
      case SQLITE_CANTOPEN:
        return absl::NotFoundError(text);
      default:
        return absl::InternalError(text);
    }
  }

  // Statements without values and rows; several may stand in one string.
  absl::Status Run(const std::string& sql) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK ? absl::OkStatus() : Error(sql);
  }

  template <typename OnRow>
  absl::Status Query(const char* sql, const std::vector<Value>& values, OnRow on_row)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    sqlite3_stmt* statement = nullptr;
    if (sqlite3_prepare_v2(db_, sql, -1, &statement, nullptr) != SQLITE_OK) return Error(sql);
    absl::Cleanup finalize = [&] { sqlite3_finalize(statement); };
    for (int i = 0; i < static_cast<int>(values.size()); ++i) {
      const Value& v = values[i];
      const int size = static_cast<int>(v.bytes.size());
      if (v.kind == Value::kInteger) sqlite3_bind_int64(statement, i + 1, v.integer);
      if (v.kind == Value::kText) sqlite3_bind_text(statement, i + 1, v.bytes.data(), size, SQLITE_STATIC);
      if (v.kind == Value::kBlob) sqlite3_bind_blob(statement, i + 1, v.bytes.data(), size, SQLITE_STATIC);
    }
    for (;;) {
      const int code = sqlite3_step(statement);
      if (code == SQLITE_DONE) return absl::OkStatus();
      if (code != SQLITE_ROW) return Error(sql);
      if constexpr (!std::is_same_v<OnRow, std::nullptr_t>) on_row(statement);
    }
  }

  template <typename Body>
  absl::Status Transaction(Body body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    RETURN_IF_ERROR(Run("BEGIN IMMEDIATE"));
    absl::Status status = body();
    if (status.ok()) status = Run("COMMIT");
    if (!status.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return status;
  }

  template <typename Body>
  absl::Status Write(Body body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (broken_.ok()) broken_ = Transaction(body);
    return broken_;
  }

  const std::unique_ptr<FolderLock> lock_;
  const std::string path_;
  absl::Mutex mutex_;
  sqlite3* db_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<StateStore>> OpenSqliteStore(const std::string& folder) {
  RETURN_IF_ERROR(MakeDirectories(folder));
  ASSIGN_OR_RETURN(std::unique_ptr<FolderLock> lock, FolderLock::Take(folder));
  auto store = std::make_unique<SqliteStore>(std::move(lock), folder + "/state.sqlite");
  RETURN_IF_ERROR(store->Open());
  return std::unique_ptr<StateStore>(std::move(store));
}

}  // namespace sluice
