#include "common/wire_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/float_formats.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr v1::Encoding kLossy[] = {v1::BF16, v1::F16, v1::INT8, v1::TOP_K};
constexpr size_t kSizes[] = {1, 2, 3, 7, 255, 256, 257, 511, 1023, 1025, 4096, 65535, 65536, 65537, 140001};
const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

class WireFormatTest : public testing::Test {
 protected:
  WireFormatTest() : seed_(std::random_device()()), rng_(seed_) { RecordProperty("seed", static_cast<int>(seed_)); }
  ~WireFormatTest() override { ForceWireTarget(""); }

  // Any bits at all: denormals, NaNs with payloads, infinities.
  float Any() { return std::bit_cast<float>(static_cast<uint32_t>(rng_())); }
  // Finite, of magnitudes from far below to far above.
  float Some() {
    const float unit = static_cast<float>(rng_() % 2000001) / 1000000 - 1;
    return std::ldexp(unit, static_cast<int>(rng_() % 12) - 6);
  }
  std::vector<float> Values(size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = Some();
    return x;
  }

  std::vector<uint8_t> Encode(v1::Encoding encoding, const std::vector<float>& x, float* residual, size_t count = 0) {
    if (count == 0) count = (x.size() + 19) / 20;
    std::vector<uint8_t> out(encoding == v1::TOP_K ? MaxTopKBytes(x.size(), count) : EncodedBytes(encoding, x.size()));
    if (encoding == v1::TOP_K) {
      const size_t bytes = EncodeTopK(x.data(), residual, x.size(), count, out.data());
      EXPECT_LE(bytes, out.size());
      out.resize(bytes);
    } else {
      EncodeValues(encoding, x.data(), residual, x.size(), out.data());
    }
    return out;
  }
  // In slices cut at random places, also inside an element.
  Payload Cut(const std::vector<uint8_t>& bytes, size_t longest = 700) {
    std::vector<grpc::Slice> slices;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(bytes.size() - at, 1 + rng_() % longest);
      slices.emplace_back(bytes.data() + at, n);
      at += n;
    }
    return Payload(std::move(slices));
  }
  static Payload Whole(const std::vector<uint8_t>& bytes) { return Payload({grpc::Slice(bytes.data(), bytes.size())}); }
  std::vector<float> Decode(v1::Encoding encoding, const Payload& payload, size_t n) {
    std::vector<float> out(n, 77);
    DecodePayload(encoding, payload, n, out.data());
    return out;
  }

  const uint32_t seed_;
  std::mt19937 rng_;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_F(WireFormatTest, HalfFormatsRoundAsFloatFormatsDoes) {
  SCOPED_TRACE(seed_);
  std::vector<float> x;
  // Around every boundary of both formats: ties, subnormals, the largest values, NaNs, both signs.
  for (uint32_t high = 0; high < 65536; high += 7) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      x.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  for (uint32_t half = 0; half < 65536; ++half) {  // F16's values and what lies half way
    const float value = WidenF16(static_cast<uint16_t>(half));
    for (const int step : {0, 0x0fff, 0x1000, 0x1001}) {
      x.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + static_cast<uint32_t>(step)));
    }
  }
  for (int i = 0; i < 100000; ++i) x.push_back(Any());
  for (const std::string& target : WireTargets()) {
    SCOPED_TRACE(target);
    ForceWireTarget(target);
    for (const auto& [encoding, format] :
         {std::pair{v1::BF16, FloatFormat::kBF16}, std::pair{v1::F16, FloatFormat::kF16}}) {
      std::vector<uint8_t> expected(x.size() * 2);
      Narrow(format, x, expected.data());
      const std::vector<uint8_t> got = Encode(encoding, x, nullptr);
      ASSERT_TRUE(got == expected) << EncodingName(encoding);
      std::vector<float> wide(x.size());
      Widen(format, got.data(), absl::MakeSpan(wide));
      EXPECT_TRUE(SameBits(Decode(encoding, Whole(got), x.size()), wide)) << EncodingName(encoding);
    }
  }
}

TEST_F(WireFormatTest, Int8IsItsDefinition) {
  SCOPED_TRACE(seed_);
  for (const std::string& target : WireTargets()) {
    SCOPED_TRACE(target);
    ForceWireTarget(target);
    for (const size_t n : kSizes) {
      std::vector<float> x = Values(n);
      if (n > 300) std::fill(x.begin(), x.begin() + 256, 0.0f);
      const std::vector<uint8_t> bytes = Encode(v1::INT8, x, nullptr);
      ASSERT_EQ(bytes.size(), n + (n + 255) / 256 * 4);
      const std::vector<float> got = Decode(v1::INT8, Whole(bytes), n);
      for (size_t first = 0; first < n; first += 256) {
        const size_t last = std::min(n, first + 256);
        float largest = 0;
        for (size_t i = first; i < last; ++i) largest = std::max(largest, std::abs(x[i]));
        const float scale = largest / 127;
        float stored;
        std::memcpy(&stored, bytes.data() + first / 256 * 260, sizeof(stored));
        ASSERT_EQ(stored, scale);
        for (size_t i = first; i < last; ++i) {
          const float code = scale == 0 ? 0 : std::nearbyint(std::clamp(x[i] / scale, -127.0f, 127.0f));
          ASSERT_EQ(got[i], code * scale) << i << " of " << n;
        }
      }
    }
  }
}

TEST_F(WireFormatTest, Int8AtTheEndsOfTheRange) {
  const float largest = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  for (const std::string& target : WireTargets()) {
    SCOPED_TRACE(target);
    ForceWireTarget(target);
    for (const float top : {largest, std::nextafter(largest, 0.0f), 0x1p-126f, 0x1.8p-130f, 200 * least, least, 0.0f}) {
      std::vector<float> x = {top, -top, top / 2, 0};
      std::vector<float> residual(4, 0);
      const std::vector<float> got = Decode(v1::INT8, Whole(Encode(v1::INT8, x, residual.data())), 4);
      for (size_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(std::isfinite(got[i])) << top;
        ASSERT_EQ(static_cast<double>(got[i]) + residual[i], static_cast<double>(x[i])) << top << " " << i;
      }
    }
  }
}

TEST_F(WireFormatTest, TopKTakesTheLargest) {
  SCOPED_TRACE(seed_);
  for (const size_t n : kSizes) {
    for (const size_t count : {size_t{1}, (n + 99) / 100, (n + 15) / 16, (n + 1) / 2, n - n / 100, n}) {
      SCOPED_TRACE(absl::StrCat(count, " of ", n));
      std::vector<float> x = Values(n);
      for (size_t i = 0; i < n; i += 3) x[i] = i % 2 == 0 ? 0.5f : -0.5f;  // many ties
      std::vector<size_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::abs(x[a]) > std::abs(x[b]); });
      std::vector<float> expected(n, 0);
      for (size_t i = 0; i < count; ++i) expected[order[i]] = x[order[i]];
      const std::vector<uint8_t> bytes = Encode(v1::TOP_K, x, nullptr, count);
      ASSERT_TRUE(CheckTopK(bytes.data(), n).ok());
      const Payload payload = Cut(bytes);
      const absl::StatusOr<size_t> length = LengthInPayload(v1::TOP_K, n, payload, 0);
      ASSERT_TRUE(length.ok()) << length.status();
      ASSERT_EQ(*length, bytes.size());
      ASSERT_TRUE(SameBits(Decode(v1::TOP_K, payload, n), expected));
      if (n >= 16384 && count == (n + 99) / 100) {
        EXPECT_LT(bytes.size(), 0.0152 * 4 * n);
      }
    }
  }
}

TEST_F(WireFormatTest, TargetsGiveTheSameBits) {
  SCOPED_TRACE(seed_);
  for (const v1::Encoding encoding : kLossy) {
    for (const size_t n : kSizes) {
      std::vector<float> x(n), before = Values(n);
      for (float& v : x) v = rng_() % 50 == 0 ? Any() : Some();
      std::vector<uint8_t> first;
      std::vector<float> first_left, first_values;
      for (const std::string& target : WireTargets()) {
        ForceWireTarget(target);
        std::vector<float> left = before;
        const std::vector<uint8_t> bytes = Encode(encoding, x, left.data());
        const std::vector<float> values = Decode(encoding, Whole(bytes), n);
        if (first.empty()) {
          first = bytes, first_left = left, first_values = values;
          continue;
        }
        ASSERT_TRUE(bytes == first && SameBits(left, first_left) && SameBits(values, first_values))
            << EncodingName(encoding) << " " << n << " " << target;
      }
    }
  }
}

TEST_F(WireFormatTest, WhatIsSentAndWhatIsLeftAddUpToWhatWas) {
  SCOPED_TRACE(seed_);
  constexpr size_t kN = 3001;
  for (const v1::Encoding encoding : kLossy) {
    std::vector<float> residual(kN, 0);
    std::vector<double> wanted(kN, 0), sent(kN, 0), size(kN, 0);
    for (int round = 0; round < 200; ++round) {
      const std::vector<float> x = Values(kN);
      const std::vector<float> got = Decode(encoding, Cut(Encode(encoding, x, residual.data())), kN);
      for (size_t i = 0; i < kN; ++i) {
        wanted[i] += x[i];
        sent[i] += got[i];
        size[i] += std::abs(x[i]);
      }
    }
    double left = 0;
    for (size_t i = 0; i < kN; ++i) {
      ASSERT_NEAR(sent[i] + residual[i], wanted[i], 1e-6 * size[i]) << EncodingName(encoding) << " " << i;
      left += std::abs(residual[i]);
    }
    EXPECT_GT(left, 0) << EncodingName(encoding);  // it is lossy, else this shows nothing
  }
}

TEST_F(WireFormatTest, WhatIsNotFiniteArrivesAndDoesNotStay) {
  constexpr size_t kN = 700;
  for (const std::string& target : WireTargets()) {
    ForceWireTarget(target);
    for (const v1::Encoding encoding : kLossy) {
      for (const float bad : {kNan, -kNan, kInf, -kInf}) {
        for (const bool all : {false, true}) {
          SCOPED_TRACE(absl::StrCat(target, " ", EncodingName(encoding), " ", bad, all ? " everywhere" : ""));
          std::vector<float> x = Values(kN), residual = Values(kN);
          x[300] = bad;
          if (all) std::fill(x.begin(), x.end(), bad);
          const std::vector<uint8_t> bytes = Encode(encoding, x, residual.data());
          EXPECT_TRUE(std::all_of(residual.begin(), residual.end(), [](float r) { return std::isfinite(r); }));
          EXPECT_FALSE(std::isfinite(Decode(encoding, Whole(bytes), kN)[all ? 0 : 300]));
          std::vector<float> sum(kN, 1);
          EXPECT_FALSE(AddPayload(encoding, Cut(bytes), kN, sum.data()));
        }
      }
    }
  }
}

TEST_F(WireFormatTest, AddingIsDecodingAndAdding) {
  SCOPED_TRACE(seed_);
  for (const v1::Encoding encoding : {v1::F32, v1::BF16, v1::F16, v1::INT8, v1::TOP_K}) {
    for (const size_t n : kSizes) {
      const std::vector<float> x = Values(n), base = Values(n);
      const std::vector<uint8_t> bytes = Encode(encoding, x, nullptr);
      const std::vector<float> values = Decode(encoding, Whole(bytes), n);
      std::vector<float> expected(n), sum = base;
      for (size_t i = 0; i < n; ++i) expected[i] = base[i] + values[i];
      EXPECT_TRUE(AddPayload(encoding, Cut(bytes, n < 2000 ? 5 : 3000), n, sum.data()));
      ASSERT_TRUE(SameBits(sum, expected)) << EncodingName(encoding) << " " << n;
      ASSERT_TRUE(SameBits(Decode(encoding, Cut(bytes, n < 2000 ? 5 : 3000), n), values));
    }
  }
}

TEST_F(WireFormatTest, LengthsComeFromTheHeaderAndTheCounts) {
  const auto length = [](v1::Encoding encoding, uint64_t elements, size_t bytes, size_t offset) {
    const std::string zeros(bytes, '\0');
    return LengthInPayload(encoding, elements, Payload({grpc::Slice(zeros)}), offset);
  };
  EXPECT_EQ(*length(v1::F32, 10, 50, 10), 40u);
  EXPECT_EQ(*length(v1::BF16, 10, 50, 10), 20u);
  EXPECT_EQ(*length(v1::F16, 10, 50, 10), 20u);
  EXPECT_EQ(*length(v1::INT8, 300, 320, 0), 308u);
  EXPECT_EQ(*length(v1::TOP_K, 70000, 9, 1), 8u);  // no values
  EXPECT_EQ(*length(v1::TOP_K, 0, 0, 0), 0u);
  for (const v1::Encoding encoding : {v1::F32, v1::BF16, v1::F16, v1::INT8, v1::TOP_K}) {
    for (const uint64_t elements : {uint64_t{1} << 20, uint64_t{1} << 40, uint64_t{1} << 63, UINT64_MAX}) {
      EXPECT_THAT(length(encoding, elements, 50, 0).status().message(), HasSubstr("payload bytes left"))
          << EncodingName(encoding) << " " << elements;
    }
  }
  EXPECT_THAT(length(static_cast<v1::Encoding>(9), 1, 50, 0).status().message(), HasSubstr("encoding 9"));

  std::vector<uint8_t> top(4 + 6);
  top[0] = 1;
  EXPECT_EQ(*LengthInPayload(v1::TOP_K, 100, Whole(top), 0), 10u);
  top[0] = 2;
  EXPECT_FALSE(LengthInPayload(v1::TOP_K, 100, Whole(top), 0).ok());
  top[0] = 101;
  EXPECT_THAT(LengthInPayload(v1::TOP_K, 100, Whole(top), 0).status().message(), HasSubstr("101 values of 100"));
}

TEST_F(WireFormatTest, WrongPlacesAreFound) {
  const auto block = [](uint32_t count, std::vector<uint16_t> places) {
    std::vector<uint8_t> bytes(4 + places.size() * 2 + count * 4);
    std::memcpy(bytes.data(), &count, 4);
    std::memcpy(bytes.data() + 4, places.data(), places.size() * 2);
    return bytes;
  };
  EXPECT_TRUE(CheckTopK(block(3, {0, 5, 99}).data(), 100).ok());
  EXPECT_THAT(CheckTopK(block(3, {0, 5, 5}).data(), 100).message(), HasSubstr("ascending"));
  EXPECT_THAT(CheckTopK(block(3, {0, 5, 100}).data(), 100).message(), HasSubstr("below 100"));
  // 50 of 100: a bitmap of 13 bytes.
  std::vector<uint8_t> map(4 + 13 + 200);
  map[0] = 50;
  std::fill_n(map.begin() + 4, 6, 0xff);
  map[10] = 3;
  EXPECT_TRUE(CheckTopK(map.data(), 100).ok());
  map[10] = 7;
  EXPECT_THAT(CheckTopK(map.data(), 100).message(), HasSubstr("51 bits"));
  map[10] = 1;
  map[16] = 0x10;
  EXPECT_THAT(CheckTopK(map.data(), 100).message(), HasSubstr("past the end"));
}

TEST_F(WireFormatTest, DensityDecaysFromAllToItsEnd) {
  v1::TopKFormat format;
  format.set_density(0.01);
  EXPECT_EQ(TopKDensity(format, 0), 0.01);
  format.set_warmup_rounds(200);
  EXPECT_EQ(TopKDensity(format, 0), 1);
  EXPECT_NEAR(TopKDensity(format, 100), 0.1, 1e-9);
  EXPECT_EQ(TopKDensity(format, 200), 0.01);
  for (uint64_t r = 0; r < 200; ++r) EXPECT_GT(TopKDensity(format, r), TopKDensity(format, r + 1));
  EXPECT_EQ(TopKCount(0.01, 1), 1u);
  EXPECT_EQ(TopKCount(0.01, 101), 2u);
  EXPECT_EQ(TopKCount(1, 101), 101u);
}

}  // namespace
}  // namespace sluice
