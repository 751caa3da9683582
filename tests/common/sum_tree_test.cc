#include "common/sum_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "common/optimizer.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;

constexpr size_t kElements = 61;  // odd: kernels have a tail

// The values as bytes in slices cut at random places, also inside an element.
Payload Cut(const std::vector<float>& values, std::mt19937* rng) {
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t n = std::min<size_t>(bytes.size() - at, 1 + (*rng)() % 90);
    slices.emplace_back(bytes.data() + at, n);
    at += n;
  }
  return Payload(std::move(slices));
}

// The definition: level by level, neighbours (0,1), (2,3), ...; an odd last one passes up; absent (+) x = x.
std::vector<float> Reference(std::vector<std::vector<float>> row) {
  while (row.size() > 1) {
    std::vector<std::vector<float>> next;
    for (size_t i = 0; i < row.size(); i += 2) {
      if (i + 1 == row.size() || row[i + 1].empty()) {
        next.push_back(row[i]);
      } else if (row[i].empty()) {
        next.push_back(row[i + 1]);
      } else {
        std::vector<float> sum(row[i].size());
        for (size_t k = 0; k < sum.size(); ++k) sum[k] = row[i][k] + row[i + 1][k];
        next.push_back(sum);
      }
    }
    row = std::move(next);
  }
  return row[0];
}

std::vector<std::vector<float>> Contributions(uint32_t n, std::mt19937* rng) {
  std::vector<std::vector<float>> all(n);
  for (auto& c : all) {
    c.resize(kElements);
    // Magnitudes far apart: every other order of addition gives other bits.
    for (float& x : c) {
      x = std::ldexp(static_cast<float>((*rng)()) / 4294967296.0f - 0.5f, static_cast<int>((*rng)() % 40) - 20);
    }
  }
  return all;
}

// The sum, read in pieces; empty where it is absent.
std::vector<float> Result(const SumTree& tree) {
  std::vector<float> out;
  if (tree.absent()) return out;
  SumReader reader(tree);
  float scratch[SumReader::kUnit];
  for (size_t at = 0, n; at < tree.elements(); at = out.size()) {
    const size_t most = std::min<size_t>(37, tree.elements() - at);
    const void* const values = reader.Next(most, scratch, &n);
    EXPECT_TRUE(n == most || n % SumReader::kUnit == 0) << n << " of " << most;
    out.resize(at + n);
    std::memcpy(out.data() + at, values, n * sizeof(float));
  }
  return out;
}

void ExpectSameBits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  if (want.empty()) return;
  EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0);
}

TEST(SumTree, EveryArrivalOrderGivesTheSameBits) {
  std::mt19937 rng(7);
  for (uint32_t n = 1; n <= 6; ++n) {
    const auto all = Contributions(n, &rng);
    for (uint32_t empties = 0; empties < (1u << n); empties = empties * 2 + 1) {
      for (uint32_t shift = 0; shift < n; ++shift) {
        std::vector<std::vector<float>> some = all;
        for (uint32_t i = 0; i < n; ++i) {
          if ((empties >> ((i + shift) % n)) & 1) some[i].clear();
        }
        const std::vector<float> want = Reference(some);
        std::vector<uint32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        SumTree tree(kElements, BufferPool::Make());
        do {
          tree.Reset(n);
          for (uint32_t i : order) {
            EXPECT_FALSE(tree.complete());
            tree.Add(i, some[i].empty() ? Payload() : Cut(some[i], &rng));
          }
          ASSERT_TRUE(tree.complete());
          ExpectSameBits(Result(tree), want);
          if (HasFailure()) FAIL() << n << " contributors, empties " << empties << " shifted by " << shift;
        } while (std::next_permutation(order.begin(), order.end()));
      }
    }
  }
}

// Encoded contributions are decoded to float32 and then added in the same shape.
TEST(SumTree, EncodedContributionsAddAsWhatTheyDecodeTo) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  for (const v1::Encoding encoding : {v1::BF16, v1::F16, v1::INT8, v1::TOP_K}) {
    for (int run = 0; run < 60; ++run) {
      const uint32_t n = 1 + rng() % 9;
      const size_t elements = 1 + rng() % 700;
      std::vector<std::vector<float>> decoded(n);
      std::vector<Payload> payloads(n);
      for (uint32_t i = 0; i < n; ++i) {
        if (rng() % 4 == 0) continue;
        std::vector<float> x(elements);
        for (float& v : x) v = std::ldexp(static_cast<float>(rng() % 2001) - 1000, static_cast<int>(rng() % 8) - 10);
        const size_t count = 1 + rng() % elements;
        std::vector<uint8_t> bytes(MaxTopKBytes(elements, elements));
        if (encoding == v1::TOP_K) {
          bytes.resize(EncodeTopK(x.data(), nullptr, elements, count, bytes.data()));
        } else {
          bytes.resize(EncodedBytes(encoding, elements));
          EncodeValues(encoding, x.data(), nullptr, elements, bytes.data());
        }
        std::vector<grpc::Slice> slices;
        for (size_t at = 0; at < bytes.size();) {
          const size_t some = std::min<size_t>(bytes.size() - at, 1 + rng() % 300);
          slices.emplace_back(bytes.data() + at, some);
          at += some;
        }
        payloads[i] = Payload(std::move(slices));
        decoded[i].resize(elements);
        DecodePayload(encoding, payloads[i], elements, decoded[i].data());
      }
      const std::vector<float> want = Reference(decoded);
      std::vector<uint32_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), rng);
      SumTree tree(elements, BufferPool::Make(), encoding);
      tree.Reset(n);
      for (uint32_t i : order) tree.Add(i, payloads[i]);
      ExpectSameBits(Result(tree), want);
      ASSERT_FALSE(testing::Test::HasFailure())
          << EncodingName(encoding) << ", " << n << " contributors of " << elements;
    }
  }
}

TEST(SumTree, NamesWhoSentNonFiniteValuesInAnyEncoding) {
  for (const v1::Encoding encoding : {v1::BF16, v1::F16, v1::INT8, v1::TOP_K}) {
    for (const uint32_t who : {0u, 1u, 2u}) {
      SumTree tree(kElements, BufferPool::Make(), encoding);
      tree.Reset(3);
      for (uint32_t i = 0; i < 3; ++i) {
        std::vector<float> x(kElements, 1);
        if (i == who) x[40] = std::numeric_limits<float>::quiet_NaN();
        std::vector<uint8_t> bytes(MaxTopKBytes(kElements, kElements));
        if (encoding == v1::TOP_K) {
          bytes.resize(EncodeTopK(x.data(), nullptr, kElements, 3, bytes.data()));
        } else {
          bytes.resize(EncodedBytes(encoding, kElements));
          EncodeValues(encoding, x.data(), nullptr, kElements, bytes.data());
        }
        tree.Add(i, Payload({grpc::Slice(bytes.data(), bytes.size())}));
      }
      EXPECT_FALSE(AllFinite(Result(tree).data(), kElements)) << EncodingName(encoding);
      EXPECT_THAT(tree.nonfinite(), ElementsAre(who)) << EncodingName(encoding);
    }
  }
}

TEST(SumTree, RandomOrdersOfManyContributors) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  for (int run = 0; run < 400; ++run) {
    const uint32_t n = 1 + rng() % 33;
    auto some = Contributions(n, &rng);
    for (auto& c : some) {
      if (rng() % 4 == 0) c.clear();
    }
    const std::vector<float> want = Reference(some);
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    SumTree tree(kElements, BufferPool::Make());
    tree.Reset(n);
    for (uint32_t i : order) tree.Add(i, some[i].empty() ? Payload() : Cut(some[i], &rng));
    ExpectSameBits(Result(tree), want);
  }
}

TEST(SumTree, NamesWhoSentNonFiniteValues) {
  std::mt19937 rng(3);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (uint32_t n = 1; n <= 7; ++n) {
      for (uint32_t who = 0; who < n; ++who) {
        for (const size_t where : {size_t{0}, kElements / 2, kElements - 1}) {
          auto all = Contributions(n, &rng);
          all[who][where] = bad;
          std::vector<uint32_t> order(n);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), rng);
          SumTree tree(kElements, BufferPool::Make());
          tree.Reset(n);
          for (uint32_t i : order) tree.Add(i, Cut(all[i], &rng));
          EXPECT_THAT(tree.nonfinite(), ElementsAre(who)) << n << " contributors";
        }
      }
    }
  }
}

// Subtrees that were summed elsewhere, with the same code: the same bits, in any order, and the same names.
TEST(SumTree, SubtreesAsOneContribution) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  for (int run = 0; run < 600; ++run) {
    const uint32_t n = 1 + rng() % 20;
    auto all = Contributions(n, &rng);
    for (auto& c : all) {
      if (rng() % 4 == 0) c.clear();
    }
    const bool bad = rng() % 3 == 0;
    const uint32_t who = rng() % n;
    if (bad) {
      if (all[who].empty()) all[who].resize(kElements);
      all[who][7] = std::numeric_limits<float>::quiet_NaN();
    }
    const std::vector<float> want = Reference(all);
    std::vector<std::pair<uint32_t, Payload>> pieces;
    std::vector<SubtreeSum> of(n);
    for (uint32_t first = 0; first < n;) {
      uint32_t count = 1;
      while (first % (2 * count) == 0 && rng() % 2 == 0) count *= 2;
      count = std::min(count, n - first);
      SumTree part(kElements, BufferPool::Make());
      part.Reset(count);
      for (uint32_t i = 0; i < count; ++i) part.Add(i, all[first + i].empty() ? Payload() : Cut(all[first + i], &rng));
      of[first].contributors = count;
      for (const uint32_t member : part.found_nonfinite()) of[first].nonfinite.push_back(first + member);
      if (part.absent()) {
        pieces.emplace_back(first, Payload());
      } else {
        const std::shared_ptr<float[]> sum = part.ToBuffer();
        pieces.emplace_back(first, Cut(std::vector<float>(sum.get(), sum.get() + kElements), &rng));
      }
      for (uint32_t i = 1; i < count; ++i) pieces.emplace_back(first + i, Payload());
      first += count;
    }
    std::shuffle(pieces.begin(), pieces.end(), rng);
    SumTree tree(kElements, BufferPool::Make());
    tree.Reset(n);
    for (auto& [at, payload] : pieces) tree.Add(at, std::move(payload), of[at]);
    if (tree.absent()) {
      EXPECT_TRUE(want.empty());
      continue;
    }
    if (bad) {
      // One that met no other within its subtree may have been taken for all of it.
      EXPECT_THAT(tree.nonfinite(), ::testing::Contains(who));
    } else {
      ExpectSameBits(Result(tree), want);
      EXPECT_THAT(tree.found_nonfinite(), ::testing::IsEmpty());
    }
  }
}

TEST(SumTree, OverflowOfFiniteValuesIsEverybodys) {
  std::mt19937 rng(3);
  const std::vector<float> huge(kElements, 3e38f);
  SumTree tree(kElements, BufferPool::Make());
  tree.Reset(3);
  tree.Add(2, Cut(huge, &rng));
  tree.Add(1, Payload());
  tree.Add(0, Cut(huge, &rng));
  EXPECT_THAT(tree.nonfinite(), ElementsAre(0, 2));
}

TEST(SumTree, ALoneContributionIsReadWhereItLies) {
  std::mt19937 rng(3);
  std::vector<float> values(100000);
  for (float& x : values) x = static_cast<float>(rng());
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += 65521) slices.emplace_back(bytes.substr(at, 65521));
  auto pool = BufferPool::Make();
  SumTree tree(values.size(), pool);
  tree.Reset(3);
  tree.Add(1, Payload());
  tree.Add(2, Payload(slices));
  tree.Add(0, Payload());
  ExpectSameBits(Result(tree), values);
  EXPECT_EQ(pool->mapped_bytes(), 0u);
  // Crumbs of larger buffers are copied and let go.
  tree.Reset(1);
  std::vector<grpc::Slice> crumbs;
  for (size_t at = 0; at < bytes.size(); at += 1000) crumbs.emplace_back(bytes.substr(at, 1000));
  tree.Add(0, Payload(crumbs));
  ExpectSameBits(Result(tree), values);
  EXPECT_GT(pool->mapped_bytes(), 0u);
}

TEST(SumTree, BuffersGoBackToThePool) {
  std::mt19937 rng(3);
  auto pool = BufferPool::Make();
  SumTree tree(100000, pool);
  const std::vector<float> ones(100000, 1);
  size_t mapped = 0;
  for (int round = 0; round < 20; ++round) {
    tree.Reset(4);
    for (uint32_t i = 0; i < 4; ++i) {
      tree.Add(i, Payload({grpc::Slice(ones.data(), ones.size() * sizeof(float))}));
    }
    EXPECT_EQ(Result(tree)[99999], 4);
    if (round == 0) mapped = pool->mapped_bytes();
    EXPECT_EQ(pool->mapped_bytes(), mapped);
  }
}

}  // namespace
}  // namespace sluice
