// A group of ranks in one process: what they say to each other goes through queues.
#ifndef SLUICE_TESTS_WORKER_MAILROOM_H_
#define SLUICE_TESTS_WORKER_MAILROOM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/parallel/collectives.h"

namespace sluice {

// Messages of all ranks of a group in one process; from one rank to another no more than `room` wait.
class Mailroom {
 public:
  Mailroom(uint32_t ranks, size_t room) : ranks_(ranks), room_(room) {}

  class Rank : public PeerGroup {
   public:
    Rank(Mailroom* room, uint32_t rank) : room_(room), rank_(rank) {}
    uint32_t rank() const override { return rank_; }
    uint32_t size() const override { return room_->ranks_; }
    absl::Status Send(uint32_t to, absl::Span<const float> values) override {
      return room_->Put(rank_, to, {values.begin(), values.end()});
    }
    absl::Status Receive(uint32_t from, absl::Span<float> values) override { return room_->Take(from, rank_, values); }

   private:
    Mailroom* const room_;
    const uint32_t rank_;
  };

  // Every send and receive from now on fails, those that wait too.
  void Break() {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }
  size_t messages() const {
    absl::MutexLock lock(&mutex_);
    return messages_;
  }
  // Of the rank that sent the most.
  size_t most_floats() const {
    absl::MutexLock lock(&mutex_);
    size_t most = 0;
    for (const auto& [rank, floats] : floats_) most = std::max(most, floats);
    return most;
  }
  bool empty() const {
    absl::MutexLock lock(&mutex_);
    for (const auto& [link, waiting] : waiting_) {
      if (!waiting.empty()) return false;
    }
    return true;
  }

 private:
  using Link = std::pair<uint32_t, uint32_t>;

  absl::Status Put(uint32_t from, uint32_t to, std::vector<float> values) {
    EXPECT_NE(from, to);
    absl::MutexLock lock(&mutex_);
    std::deque<std::vector<float>>& waiting = waiting_[{from, to}];
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return broken_ || waiting.size() < room_; };
    mutex_.Await(absl::Condition(&ready));
    if (broken_) return absl::CancelledError("broken");
    ++messages_;
    floats_[from] += values.size();
    waiting.push_back(std::move(values));
    return absl::OkStatus();
  }
  absl::Status Take(uint32_t from, uint32_t to, absl::Span<float> values) {
    absl::MutexLock lock(&mutex_);
    std::deque<std::vector<float>>& waiting = waiting_[{from, to}];
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return broken_ || !waiting.empty(); };
    mutex_.Await(absl::Condition(&ready));
    if (broken_) return absl::CancelledError("broken");
    EXPECT_EQ(waiting.front().size(), values.size());
    if (waiting.front().size() == values.size()) {
      std::copy(waiting.front().begin(), waiting.front().end(), values.begin());
    }
    waiting.pop_front();
    return absl::OkStatus();
  }

  const uint32_t ranks_;
  const size_t room_;
  mutable absl::Mutex mutex_;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Link, std::deque<std::vector<float>>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, size_t> floats_ ABSL_GUARDED_BY(mutex_);
  size_t messages_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_MAILROOM_H_
