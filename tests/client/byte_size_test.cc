#include "client/byte_size.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(ByteSize, UnitsOfTenAndOfTwo) {
  const std::pair<const char*, uint64_t> cases[] = {{"1", 1},
                                                    {"4096", 4096},
                                                    {"12B", 12},
                                                    {"5GB", 5000000000},
                                                    {"500 MB", 500000000},
                                                    {"1.5kb", 1500},
                                                    {"2KiB", 2048},
                                                    {"3mib", 3 << 20},
                                                    {"1GiB", 1 << 30},
                                                    {"1TB", 1000000000000},
                                                    {"0.5KiB", 512},
                                                    {"2TiB", uint64_t{2} << 40},
                                                    {"4194304TiB", uint64_t{1} << 62}};
  for (const auto& [text, bytes] : cases) {
    const auto size = ParseByteSize(text);
    ASSERT_TRUE(size.ok()) << text << size.status();
    EXPECT_EQ(*size, bytes) << text;
  }
}

TEST(ByteSize, WhatIsNoSize) {
  for (const char* text : {"", "GB", "0", "-1", "5 G", "5GBB", "1.2.3MB", "1e9", "0.1", "1MB 2", "nan", "5000000TiB"}) {
    const auto size = ParseByteSize(text);
    EXPECT_EQ(size.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(size.status().message()).find("500MB"), std::string::npos);
  }
}

}  // namespace
}  // namespace sluice
