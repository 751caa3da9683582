// Round cores of all replicas against a small model of the servers on a seeded network: streams break, generations
// change in every phase. Values are hashes, so one parameter of a wrong version in one computation changes the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "tests/worker/test_plan.h"
#include "worker/round_core.h"

namespace sluice {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15 + b;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct HashValue : CommitValue {
  explicit HashValue(uint64_t h) : hash(h) {}
  uint64_t hash;
};

uint64_t Contribution(const std::vector<uint64_t>& parameters, uint64_t round, uint32_t replica, uint64_t chunk) {
  uint64_t h = Mix(round, replica);
  for (uint64_t p : parameters) h = Mix(h, p);
  return Mix(h, chunk);
}

struct Shape {
  uint32_t replicas, servers, shards;
  uint64_t chunk_elements, rounds, eval_every;
};

std::vector<uint64_t> Undisturbed(const Shape& shape, uint64_t chunks,
                                  const std::set<std::pair<uint64_t, uint32_t>>& empty) {
  std::vector<uint64_t> values;
  for (uint64_t c = 0; c < chunks; ++c) values.push_back(Mix(1, c));
  for (uint64_t r = 0; r < shape.rounds; ++r) {
    std::vector<uint64_t> next;
    for (uint64_t c = 0; c < chunks; ++c) {
      uint64_t h = values[c];
      for (uint32_t d = 0; d < shape.replicas; ++d) {
        h = Mix(h, empty.count({r, d}) ? 0 : Contribution(values, r, d, c));
      }
      next.push_back(h);
    }
    values = next;
  }
  return values;
}

// Servers, network, faults, and the worker's memory and compute, all driven by one seed.
class Cluster {
 public:
  explicit Cluster(uint64_t seed) : rng_(seed) {
    shape_ = {Draw(1, 3), Draw(1, 3), 0, Draw(1, 9), Draw(1, 5), Draw(1, 3)};
    const uint64_t chunks = (8 + shape_.chunk_elements - 1) / shape_.chunk_elements;
    shape_.shards = Draw(1, static_cast<uint32_t>(chunks));
    for (uint64_t c = 0; c < chunks; ++c) chunks_.push_back({0, Mix(1, c), 0, {}});
    for (uint64_t r = 0; r < shape_.rounds; ++r) {
      for (uint32_t d = 0; d < shape_.replicas; ++d) {
        if (Draw(0, 5) == 0) empty_.insert({r, d});
      }
    }
    for (uint32_t d = 0; d < shape_.replicas; ++d) workers_.push_back(std::make_unique<Worker>(this, d));
    NewGeneration();
    for (uint32_t i = Draw(0, 6); i > 0; --i) {
      At(Draw(0, 400), [this] { Draw(0, 1) ? NewGeneration() : BreakOne(); });
    }
  }

  // Returns what went wrong; empty: nothing.
  std::string Run() {
    for (int events = 0; !queue_.empty() && wrong_.empty(); ++events) {
      if (events > 200000) return "it does not end";
      Event event = queue_.top();
      queue_.pop();
      now_ = event.at;
      event.run();
    }
    if (!wrong_.empty()) return wrong_;
    for (const auto& worker : workers_) {
      if (worker->core.phase() != RoundCore::Phase::kFinished) return "hangs: " + worker->core.Describe();
    }
    std::vector<uint64_t> values;
    for (const Chunk& chunk : chunks_) values.push_back(chunk.value);
    if (values != Undisturbed(shape_, chunks_.size(), empty_)) return "the values are not those of the undisturbed run";
    for (const auto& worker : workers_) {
      if (worker->memory != values) return "a worker's parameters are not the servers'";
    }
    if (reports_.size() <
        shape_.replicas * (shape_.eval_every > shape_.rounds ? 1 : shape_.rounds / shape_.eval_every)) {
      return "evaluation reports are missing";
    }
    return "";
  }

  int early() const { return early_; }
  int declines() const { return declines_; }
  int generations() const { return static_cast<int>(generation_); }

 private:
  struct Event {
    uint64_t at, number;
    std::function<void()> run;
    bool operator<(const Event& other) const { return std::tie(at, number) > std::tie(other.at, other.number); }
  };
  struct Chunk {
    uint64_t version, value, previous;
    std::map<uint32_t, uint64_t> contributions;
  };

  struct Worker : RoundActions {
    Worker(Cluster* c, uint32_t i) : cluster(c), index(i), core(ProtocolRules(), this), memory(c->chunks_.size()) {}

    void OpenStreams(const std::shared_ptr<const Layout>& layout, const std::vector<ServerEnd>& servers) override {
      life.assign(servers.size(), 0);
      wants.assign(memory.size(), UINT64_MAX);
      for (size_t s = 0; s < servers.size(); ++s) OpenStream(layout->generation(), s);
    }
    void OpenStream(uint64_t generation, size_t server) {
      cluster->At(cluster->Draw(0, 20), [this, generation, server] {
        if (generation == core.generation() && server < life.size()) core.OnStreamUp(generation, server);
      });
    }
    void CloseStreams() override {
      for (uint64_t& l : life) ++l;
      ++epoch;
    }
    template <typename F>
    void Send(size_t server, F deliver) {
      // FIFO within one life of the stream; lost with it.
      uint64_t& last = last_sent[{server, epoch, life[server]}];
      last = std::max(last, cluster->now_ + cluster->Draw(0, 15));
      cluster->At(last - cluster->now_, [this, server, e = epoch, l = life[server], deliver] {
        if (e == epoch && l == life[server]) deliver();
      });
    }
    void Subscribe(size_t server, const v1::Subscribe& subscribe) override {
      Send(server, [this, server, subscribe] { cluster->OnSubscribe(this, server, subscribe); });
    }
    void Push(size_t server, const v1::ChunkHeader& header) override {
      const uint64_t hash = header.elements() == 0 ? 0 : gradients[header.chunk()];
      Send(server, [this, header, hash] { cluster->OnPush(index, header, hash); });
    }
    void Report(size_t server, const v1::RoundReport& report) override {
      if (server != 0) cluster->wrong_ = "a report to another server than the holder";
      Send(server, [this, report] {
        if (report.kind() == v1::RoundReport::EVALUATION) cluster->reports_.insert({report.round(), index});
      });
    }
    void Ask(size_t, const v1::LeaseRequest&) override { cluster->wrong_ = "a lease is asked for in sync"; }
    void Install(uint64_t generation, uint64_t chunk, uint64_t version,
                 std::shared_ptr<const CommitValue> value) override {
      cluster->At(cluster->Draw(0, cluster->Draw(0, 5) ? 8 : 80), [this, generation, chunk, version, value] {
        memory[chunk] = static_cast<const HashValue&>(*value).hash;
        core.OnInstalled(generation, chunk, version);
      });
    }
    void AllInPlace(uint64_t version) override {
      for (size_t c = 0; c < memory.size(); ++c) {
        if (core.installed(c) < static_cast<int64_t>(version)) cluster->wrong_ = "not all is in place";
      }
    }
    void StartCompute(uint64_t generation, uint64_t round) override {
      if (computing) cluster->wrong_ = "two pieces of work at once";
      computing = true;
      cancelled = false;
      gradients.clear();
      cluster->At(cluster->Draw(1, 10), [this, generation, round] { Forward(generation, round, 0, {}); });
    }
    // Reads a chunk when it may, the first one first.
    void Forward(uint64_t generation, uint64_t round, size_t chunk, std::vector<uint64_t> read) {
      if (cancelled) return Stop(generation);
      for (; chunk < memory.size() && core.InPlace(ElementsOf(chunk)); ++chunk) {
        if (core.installed(chunk) != static_cast<int64_t>(round)) cluster->wrong_ = "computes with another version";
        read.push_back(memory[chunk]);
        if (cluster->Draw(0, 1) == 0) break;  // and computes for a while
      }
      if (read.size() < memory.size()) {
        if (read.size() > 0) cluster->early_ += core.Describe().find("waits for") != std::string::npos;
        cluster->At(cluster->Draw(1, 10),
                    [this, generation, round, read] { Forward(generation, round, read.size(), read); });
        return;
      }
      const bool none = cluster->empty_.count({round, index}) > 0;
      core.OnBatch(generation, round, none ? 0 : 2);
      if (none) return Finish(generation, round);
      for (size_t c = 0; c < memory.size(); ++c) gradients.push_back(Contribution(read, round, index, c));
      Backward(generation, round, 8);
    }
    Range ElementsOf(size_t chunk) const {
      return {chunk * cluster->shape_.chunk_elements,
              std::min<uint64_t>(8, (chunk + 1) * cluster->shape_.chunk_elements)};
    }
    // Ranges of random sizes, last one first.
    void Backward(uint64_t generation, uint64_t round, uint64_t end) {
      cluster->At(cluster->Draw(1, 6), [this, generation, round, end] {
        if (cancelled && cluster->Draw(0, 2)) return Stop(generation);  // or it ends as it would have
        if (end == 0) return Finish(generation, round);
        const uint64_t begin = end - cluster->Draw(1, static_cast<uint32_t>(end));
        core.OnGradientReady(generation, round, {begin, end});
        Backward(generation, round, begin);
      });
    }
    void Finish(uint64_t generation, uint64_t round) {
      computing = false;
      core.OnComputed(generation, round, {.loss = 1, .count = 2});
    }
    void Stop(uint64_t generation) {
      computing = false;
      core.OnStopped(generation);
    }
    void StartEvaluation(uint64_t generation, uint64_t version) override {
      if (computing) cluster->wrong_ = "two pieces of work at once";
      computing = true;
      cancelled = false;
      const std::vector<uint64_t> before = memory;
      cluster->At(cluster->Draw(1, 20), [this, generation, version, before] {
        if (cancelled) return Stop(generation);
        if (memory != before) cluster->wrong_ = "parameters change during an evaluation";
        computing = false;
        core.OnEvaluated(generation, version, {.loss = 1, .count = 2});
      });
    }
    void CancelWork() override { cancelled = true; }

    Cluster* const cluster;
    const uint32_t index;
    RoundCore core;
    std::vector<uint64_t> memory, gradients;
    std::vector<uint64_t> wants;  // the server's side of the subscription
    std::vector<uint64_t> life;   // of each stream
    uint64_t epoch = 0;
    std::map<std::tuple<size_t, uint64_t, uint64_t>, uint64_t> last_sent, last_received;
    bool computing = false, cancelled = false;
  };

  uint32_t Draw(uint32_t low, uint32_t high) { return std::uniform_int_distribution<uint32_t>(low, high)(rng_); }
  void At(uint64_t delay, std::function<void()> run) { queue_.push({now_ + delay, number_++, std::move(run)}); }

  size_t ServerOf(uint64_t chunk) const { return chunk % shape_.shards % shape_.servers; }

  void NewGeneration() {
    ++generation_;
    uint64_t start = UINT64_MAX;
    for (Chunk& chunk : chunks_) {
      start = std::min(start, chunk.version);
      chunk.contributions.clear();
    }
    const auto layout = TestPlan{.replicas = shape_.replicas,
                                 .servers = shape_.servers,
                                 .shards = shape_.shards,
                                 .chunk_elements = shape_.chunk_elements,
                                 .rounds = shape_.rounds,
                                 .eval_every = shape_.eval_every,
                                 .generation = generation_,
                                 .start = start}
                            .Make();
    for (auto& worker : workers_) {
      At(Draw(0, 40), [w = worker.get(), layout] { w->core.OnPlan(layout, w->index); });
    }
  }

  void BreakOne() {
    Worker& worker = *workers_[Draw(0, shape_.replicas - 1)];
    if (worker.life.empty() || worker.core.phase() == RoundCore::Phase::kStopping) return;
    const size_t server = Draw(0, static_cast<uint32_t>(worker.life.size()) - 1);
    ++worker.life[server];
    for (size_t c = 0; c < chunks_.size(); ++c) {
      if (ServerOf(c) == server) worker.wants[c] = UINT64_MAX;
    }
    worker.core.OnStreamDown(worker.core.generation(), server);
    worker.OpenStream(worker.core.generation(), server);
  }

  void OnSubscribe(Worker* worker, size_t server, const v1::Subscribe& subscribe) {
    if (subscribe.generation() != generation_) return;
    std::vector<bool> covered(chunks_.size());
    for (const v1::Want& want : subscribe.wants()) {
      for (uint64_t c = want.first_chunk(); c < want.first_chunk() + want.chunks(); ++c) {
        if (ServerOf(c) != server) continue;
        if (covered[c]) wrong_ = "a chunk is subscribed twice";
        covered[c] = true;
        worker->wants[c] = want.version();
        Serve(worker, c);
      }
    }
    for (size_t c = 0; c < chunks_.size(); ++c) {
      if (ServerOf(c) == server && !covered[c]) wrong_ = "a chunk is not subscribed";
    }
  }

  void Serve(Worker* worker, uint64_t c) {
    const Chunk& chunk = chunks_[c];
    uint64_t& want = worker->wants[c];
    if (want == UINT64_MAX) return;
    if (want + 1 < chunk.version) wrong_ = "a version is gone";
    for (; want <= chunk.version; ++want) Commit(worker, c, want, want == chunk.version ? chunk.value : chunk.previous);
  }

  void Commit(Worker* worker, uint64_t c, uint64_t version, uint64_t value) {
    v1::ChunkHeader header;
    header.set_chunk(c);
    header.set_generation(generation_);
    header.set_round(version);
    header.set_elements(std::min<uint64_t>(8, (c + 1) * shape_.chunk_elements) - c * shape_.chunk_elements);
    const size_t server = ServerOf(c);
    uint64_t& last = worker->last_received[{server, worker->epoch, worker->life[server]}];
    last = std::max(last, now_ + Draw(0, 15));
    At(last - now_, [this, worker, server, e = worker->epoch, l = worker->life[server], header, value] {
      if (e != worker->epoch || l != worker->life[server]) return;
      const absl::Status status = worker->core.OnCommit(header, std::make_shared<HashValue>(value));
      if (!status.ok()) wrong_ = status.ToString();
    });
  }

  void OnPush(uint32_t contributor, const v1::ChunkHeader& header, uint64_t hash) {
    if (header.generation() != generation_) return;
    Chunk& chunk = chunks_[header.chunk()];
    if (header.round() > chunk.version) wrong_ = "a push ahead of the chunk";
    if (header.round() < chunk.version || chunk.contributions.contains(contributor)) return;
    if (header.elements() > 0 && Draw(0, 7) == 0) return Decline(workers_[contributor].get(), header);
    chunk.contributions.emplace(contributor, hash);
    if (chunk.contributions.size() < shape_.replicas) return;
    chunk.previous = chunk.value;
    for (const auto& [who, what] : chunk.contributions) chunk.value = Mix(chunk.value, what);
    chunk.contributions.clear();
    ++chunk.version;
    for (auto& worker : workers_) Serve(worker.get(), header.chunk());
  }

  // Asks for it some time later, unless the stream breaks.
  void Decline(Worker* worker, const v1::ChunkHeader& header) {
    ++declines_;
    v1::Later later;
    later.add_again()->set_chunk(header.chunk());
    later.mutable_again(0)->set_round(header.round());
    const size_t server = ServerOf(header.chunk());
    At(Draw(0, 80), [this, worker, server, e = worker->epoch, l = worker->life[server], later] {
      if (e != worker->epoch || l != worker->life[server]) return;
      const absl::Status status = worker->core.OnLater(generation_, later);
      if (!status.ok()) wrong_ = status.ToString();
    });
  }

  std::mt19937_64 rng_;
  Shape shape_;
  std::set<std::pair<uint64_t, uint32_t>> empty_;  // (round, replica) without targets
  std::priority_queue<Event> queue_;
  uint64_t now_ = 0, number_ = 0, generation_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::set<std::pair<uint64_t, uint32_t>> reports_;
  int declines_ = 0;
  int early_ = 0;  // forwards that had read some chunks and waited for others
  std::string wrong_;
};

TEST(RoundCoreRandomTest, EveryDisturbedRunEndsLikeTheUndisturbedOne) {
  int generations = 0, early = 0, declines = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Cluster cluster(seed);
    ASSERT_EQ(cluster.Run(), "") << "seed " << seed;
    generations += cluster.generations();
    early += cluster.early();
    declines += cluster.declines();
  }
  EXPECT_GT(declines, 3000) << "no contribution is declined";
  EXPECT_GT(early, 3000) << "no forward begins before everything is there";
  EXPECT_GT(generations, 5000) << "the faults do not happen";
}

}  // namespace
}  // namespace sluice
