#include "common/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(FileTest, AtomicWriteReplacesAndLeavesNothingBeside) {
  const TemporaryFolder folder;
  const std::string path = folder / "state";
  for (const std::string& contents : {std::string("one"), std::string(), std::string(3 << 20, 'x')}) {
    ASSERT_TRUE(WriteFileAtomically(path, contents).ok());
    EXPECT_EQ(*ReadFile(path, 4 << 20), contents);
    EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("state"));
  }
}

TEST(FileTest, ErrorsNamePathAndReason) {
  const TemporaryFolder folder;
  const std::string missing = folder / "missing";
  absl::Status status = ReadFile(missing, 10).status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(Text(status), testing::AllOf(HasSubstr(missing), HasSubstr("No such file")));

  status = ReadFile(folder.path(), 10).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Text(status), HasSubstr("found a folder"));

  Spill(folder / "big", "0123456789");
  status = ReadFile(folder / "big", 9).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(Text(status), testing::AllOf(HasSubstr("10 bytes"), HasSubstr("at most 9")));
  EXPECT_EQ(*ReadFile(folder / "big", 10), "0123456789");

  status = WriteFileAtomically(folder / "none/state", "x");
  EXPECT_TRUE(absl::IsNotFound(status));
  status = MakeDirectories(folder / "big/below");
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("big"));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeDirectories(folder / "big")));
  EXPECT_TRUE(absl::IsNotFound(ListDirectory(missing).status()));
  EXPECT_TRUE(absl::IsNotFound(Rename(missing, folder / "other")));

  // A named pipe does not keep the reader.
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(InputFile::Open(folder / "pipe").status()));
}

TEST(FileTest, ReadsExactlyWhatIsAskedFor) {
  const TemporaryFolder folder;
  Spill(folder / "f", "0123456789");
  const auto file = *InputFile::Open(folder / "f");
  EXPECT_EQ(file->size(), 10u);
  char bytes[10];
  ASSERT_TRUE(file->Read(7, bytes, 3).ok());
  EXPECT_EQ(std::string(bytes, 3), "789");
  EXPECT_TRUE(file->Read(10, bytes, 0).ok());
  const absl::Status status = file->Read(7, bytes, 4);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(Text(status), HasSubstr("ends at byte 10"));
}

TEST(FileTest, Crc32IsZlibs) {
  const TemporaryFolder folder;
  for (const size_t n : {0, 1, 1 << 20, (1 << 20) + 1, 3000001}) {
    std::string contents(n, 'a');
    for (size_t i = 0; i < n; ++i) contents[i] = static_cast<char>(i * i);
    Spill(folder / "f", contents);
    EXPECT_EQ(*(*InputFile::Open(folder / "f"))->Crc32(),
              crc32(0, reinterpret_cast<const Bytef*>(contents.data()), static_cast<uInt>(n)));
  }
}

TEST(FileTest, WritesAtAnyOffset) {
  const TemporaryFolder folder;
  Spill(folder / "f", "older and longer than the new contents");
  {
    const auto file = *OutputFile::Create(folder / "f");
    ASSERT_TRUE(file->Reserve(6).ok());
    ASSERT_TRUE(file->Write(3, "def", 3).ok());
    ASSERT_TRUE(file->Write(0, "abc", 3).ok());
    ASSERT_TRUE(file->Sync().ok());
  }
  EXPECT_EQ(Slurp(folder / "f"), "abcdef");
}

TEST(FileTest, ANewFileIsNotTheOneThatAnEarlierWriterHolds) {
  const TemporaryFolder folder;
  const auto earlier = *OutputFile::Create(folder / "f");
  const auto later = *OutputFile::Create(folder / "f");
  ASSERT_TRUE(later->Write(0, "new", 3).ok());
  ASSERT_TRUE(earlier->Write(0, "old", 3).ok());
  EXPECT_EQ(Slurp(folder / "f"), "new");
}

TEST(FileTest, FullDisk) {
  const TemporaryFolder folder;
  Spill(folder / "state", "before");
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status written = WriteFileAtomically(folder / "state", std::string(5000, 'x'));
  absl::Status reserved;
  {
    const auto file = *OutputFile::Create(folder / "large");
    reserved = file->Reserve(5000);
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_TRUE(absl::IsResourceExhausted(written)) << written;
  EXPECT_THAT(Text(written), HasSubstr(folder / "state"));
  EXPECT_TRUE(absl::IsResourceExhausted(reserved)) << reserved;
  EXPECT_EQ(Slurp(folder / "state"), "before");
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("large", "state"));
}

TEST(FileTest, Folders) {
  const TemporaryFolder folder;
  ASSERT_TRUE(MakeDirectories(folder / "a/b/c").ok());
  ASSERT_TRUE(MakeDirectories(folder / "a/b/c/").ok());
  Spill(folder / "a/b/f", "x");
  EXPECT_THAT(*ListDirectory(folder / "a/b"), ElementsAre("c", "f"));
  EXPECT_TRUE(SyncDirectory(folder / "a").ok());
  ASSERT_TRUE(Rename(folder / "a", folder / "z").ok());
  EXPECT_FALSE(PathExists(folder / "a"));
  EXPECT_TRUE(PathExists(folder / "z/b/f"));
  ASSERT_TRUE(MakeDirectories(folder / "y/x").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Rename(folder / "z", folder / "y")));
  ASSERT_TRUE(RemoveTree(folder / "z").ok());
  ASSERT_TRUE(RemoveTree(folder / "z").ok());
  ASSERT_TRUE(RemoveTree(folder / "y").ok());
  EXPECT_THAT(*ListDirectory(folder.path()), IsEmpty());
}

TEST(FileTest, PathParts) {
  EXPECT_EQ(ParentDirectory("a/b/c"), "a/b");
  EXPECT_EQ(ParentDirectory("a/b/c//"), "a/b");
  EXPECT_EQ(ParentDirectory("a//c"), "a");
  EXPECT_EQ(ParentDirectory("c"), ".");
  EXPECT_EQ(ParentDirectory("/c"), "/");
  EXPECT_EQ(ParentDirectory("/"), "/");
  EXPECT_EQ(ParentDirectory(""), ".");
  EXPECT_EQ(BaseName("a/b/c"), "c");
  EXPECT_EQ(BaseName("a/b/c//"), "c");
  EXPECT_EQ(BaseName("c"), "c");
  EXPECT_EQ(BaseName("/"), "");
}

}  // namespace
}  // namespace sluice
