#include "common/host_sum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace sluice {
namespace {

v1::Plan PlanOf(const std::string& hosts, v1::TransferSpec::HostSum host_sum = v1::TransferSpec::AUTO) {
  v1::Plan plan;
  for (const char host : hosts) {
    plan.add_ranks()->set_host_id(host == '-' ? std::string() : std::string(1, host));
  }
  v1::JobSpec* spec = plan.mutable_spec();
  spec->mutable_train()->set_mode(v1::TrainSpec::SYNC);
  spec->mutable_transfer()->mutable_push()->mutable_f32();
  spec->mutable_transfer()->set_host_sum(host_sum);
  return plan;
}

// "0+2 2 3+..." of all ranks, each once.
std::string Sums(const v1::Plan& plan) {
  std::vector<std::string> words;
  ContributorSpan span;
  for (uint32_t rank = 0; rank < static_cast<uint32_t>(plan.ranks_size()); rank += span.count) {
    span = HostSumOf(plan, rank);
    words.push_back(span.count == 1 ? absl::StrCat(rank) : absl::StrCat(span.first, "+", span.count));
    for (uint32_t i = 0; i < span.count; ++i) EXPECT_EQ(HostSumOf(plan, rank + i), span);
  }
  return absl::StrJoin(words, " ");
}

TEST(HostSumTest, TheLargestSubtreesOfEachHost) {
  const std::map<std::string, std::string> cases = {
      {"a", "0"},
      {"aa", "0+2"},
      {"ab", "0 1"},
      {"abb", "0 1 2"},  // [1, 3) is no node of the tree
      {"aab", "0+2 2"},
      {"aaa", "0+3"},  // the root
      {"aaab", "0+2 2 3"},
      {"aaaab", "0+4 4"},
      {"bbbaa", "0+2 2 3 4"},
      {"aabbb", "0+2 2+2 4"},
      {"aaaabb", "0+4 4+2"},
      {"aabbbbb", "0+2 2+2 4+3"},
      {"aaabbbb", "0+2 2 3 4+3"},
      {"bbbbaaaa", "0+4 4+4"},
      {"abababab", "0 1 2 3 4 5 6 7"},
      {"aaaaaaaaa", "0+9"},
      {"aaaaaaaab", "0+8 8"},
      {"--", "0 1"},  // without a name no two ranks are on one host
      {"a-aa", "0 1 2+2"},
  };
  for (const auto& [hosts, sums] : cases) EXPECT_EQ(Sums(PlanOf(hosts)), sums) << hosts;
}

// A node of the tree of n leaves: at some level, by the rule "neighbours add, an odd last one passes up".
TEST(HostSumTest, EverySumIsANodeOfTheTree) {
  std::mt19937 random(3);
  for (int i = 0; i < 3000; ++i) {
    const uint32_t n = 1 + random() % 20;
    std::string hosts;
    while (hosts.size() < n) hosts.append(1 + random() % 9, static_cast<char>('a' + random() % 3));
    hosts.resize(n);
    std::set<std::pair<uint32_t, uint32_t>> nodes;  // first, count
    std::vector<std::pair<uint32_t, uint32_t>> level;
    for (uint32_t leaf = 0; leaf < n; ++leaf) level.emplace_back(leaf, 1);
    for (;;) {
      nodes.insert(level.begin(), level.end());
      if (level.size() == 1) break;
      std::vector<std::pair<uint32_t, uint32_t>> next;
      for (size_t at = 0; at < level.size(); at += 2) {
        next.emplace_back(level[at].first, level[at].second + (at + 1 < level.size() ? level[at + 1].second : 0));
      }
      level.swap(next);
    }
    const v1::Plan plan = PlanOf(hosts);
    for (uint32_t rank = 0; rank < n; ++rank) {
      const ContributorSpan span = HostSumOf(plan, rank);
      EXPECT_TRUE(nodes.contains({span.first, span.count})) << hosts << " " << rank;
      EXPECT_TRUE(rank >= span.first && rank < span.first + span.count);
      // The largest one: nothing that holds it is all on the host.
      for (const auto& [first, count] : nodes) {
        if (first > span.first || first + count < span.first + span.count || count == span.count) continue;
        EXPECT_NE(hosts.substr(first, count), std::string(count, hosts[rank])) << hosts << " " << rank;
      }
    }
  }
}

TEST(HostSumTest, OffWhereItMakesNoSense) {
  EXPECT_EQ(Sums(PlanOf("aa", v1::TransferSpec::OFF)), "0 1");
  EXPECT_EQ(Sums(PlanOf("aa", v1::TransferSpec::HOST_SUM_UNSPECIFIED)), "0 1");
  v1::Plan plan = PlanOf("aa");
  plan.mutable_spec()->mutable_train()->set_mode(v1::TrainSpec::ASYNC);
  EXPECT_EQ(Sums(plan), "0 1");
  plan = PlanOf("aa");
  plan.mutable_spec()->mutable_transfer()->mutable_push()->mutable_bf16();
  EXPECT_EQ(Sums(plan), "0 1");
}

TEST(HostSumTest, ShardsWhoseServerIsOnTheHostAreLeftOut) {
  for (const v1::TransferSpec::HostSum host_sum : {v1::TransferSpec::AUTO, v1::TransferSpec::ON}) {
    v1::Plan plan = PlanOf("aab", host_sum);
    for (const char* host : {"a", "b", ""}) plan.add_chains()->add_members()->set_host_id(host);
    const bool on = host_sum == v1::TransferSpec::ON;
    EXPECT_EQ(SummedOnHost(plan, HostSumOf(plan, 0), 0), on);
    EXPECT_TRUE(SummedOnHost(plan, HostSumOf(plan, 0), 1));
    EXPECT_EQ(SummedOnHost(plan, HostSumOf(plan, 0), 2), on) << "nobody knows where that one is";
    EXPECT_FALSE(SummedOnHost(plan, HostSumOf(plan, 2), 0)) << "alone";
  }
}

}  // namespace
}  // namespace sluice
