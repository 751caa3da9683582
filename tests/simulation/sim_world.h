// Simulated time, processes and connections. One queue of events; a seed decides every delay, loss and fault, so that a
// run replays from its seed.
#ifndef SLUICE_TESTS_SIMULATION_SIM_WORLD_H_
#define SLUICE_TESTS_SIMULATION_SIM_WORLD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace sluice {

// One life of a process: events that belong to it are dropped once it is over.
struct Life {
  bool up = true;
};
using LifeRef = std::shared_ptr<Life>;

// What a run found wrong.
struct Violation {
  std::string what;
};

inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9E3779B97F4A7C15u + b + 0x632BE59BD9B4E019u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
template <typename... Rest>
uint64_t Mix(uint64_t a, uint64_t b, Rest... rest) {
  return Mix(Mix(a, b), rest...);
}

class World {
 public:
  World(uint64_t seed, bool trace) : rng_(seed), trace_(trace) {}

  absl::Time now() const { return now_; }
  uint64_t events() const { return events_; }
  bool tracing() const { return trace_; }
  void Log(const std::string& text);

  double Random() { return std::uniform_real_distribution<double>(0, 1)(rng_); }
  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(rng_); }
  bool Chance(double p) { return Random() < p; }
  // Of a message: up to 2 ms, one in ten up to 10 ms.
  absl::Duration Delay() { return absl::Milliseconds(Chance(.1) ? Random() * 10 : Random() * 2); }

  // Runs `what` after `delay`, unless the life is over by then.
  void After(absl::Duration delay, const LifeRef& life, std::function<void()> what);
  // Runs the next event; false when there is none.
  bool Step();

 private:
  struct Event {
    absl::Time at;
    uint64_t sequence;
    LifeRef life;
    std::function<void()> what;
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return std::make_pair(a.at, a.sequence) > std::make_pair(b.at, b.sequence);
    }
  };

  std::mt19937_64 rng_;
  const bool trace_;
  absl::Time now_ = absl::UnixEpoch();
  uint64_t sequence_ = 0, events_ = 0;
  std::priority_queue<Event, std::vector<Event>, Later> queue_;
};

// One direction-pair of ordered messages between two lives, as a transport stream: FIFO each way; a break loses what is
// under way and tells both ends a little later.
class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(World* world, LifeRef a, LifeRef b) : world_(world), a_(std::move(a)), b_(std::move(b)) {}

  // Each is called at most once and let go. What they hold often holds the link: ForgetHandlers ends that.
  std::function<void()> on_a_closed, on_b_closed;
  void ForgetHandlers() { on_a_closed = on_b_closed = nullptr; }

  // Runs `deliver` at the other end in order.
  void ToB(std::function<void()> deliver) { Send(&next_b_, b_, std::move(deliver)); }
  void ToA(std::function<void()> deliver) { Send(&next_a_, a_, std::move(deliver)); }
  // Loses what is under way (or, with `graceful`, delivers it first) and tells both ends.
  void Break(bool graceful);
  // Nothing passes until Thaw; then it all arrives (a partition, or a stopped process).
  void Freeze(absl::Time until) { frozen_until_ = until; }
  bool open() const { return open_; }
  const LifeRef& a() const { return a_; }
  const LifeRef& b() const { return b_; }

 private:
  void Send(absl::Time* next, const LifeRef& to, std::function<void()> deliver);

  World* const world_;
  const LifeRef a_, b_;
  bool open_ = true, deliver_rest_ = false;
  absl::Time next_a_ = absl::InfinitePast(), next_b_ = absl::InfinitePast(), frozen_until_ = absl::InfinitePast();
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SIMULATION_SIM_WORLD_H_
