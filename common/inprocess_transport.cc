#include "common/inprocess_transport.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/inprocess_connection.h"

namespace sluice {
namespace {

using inprocess::Connection;
using inprocess::Executor;
using inprocess::InProcessStream;
using inprocess::kAccepter;
using inprocess::kOpener;

std::pair<std::string, std::string> Unordered(const std::string& a, const std::string& b) {
  return a < b ? std::make_pair(a, b) : std::make_pair(b, a);
}

}  // namespace

struct InProcessNetwork::State {
  struct Accepting {
    uint64_t id;
    std::map<Plane, Acceptor> acceptors;
  };
  struct Live {
    std::shared_ptr<Connection> connection;
    uint64_t transport;  // that opened it
    uint64_t listener;   // that accepted it; 0: none
  };

  explicit State(const InProcessOptions& o) : options(o), executor(o.threads) {}

  std::shared_ptr<ByteStream> Open(uint64_t transport, const std::string& node, const std::string& address, Plane plane,
                                   std::shared_ptr<StreamHandler> handler);
  // Breaks the streams for which `which` holds and returns them.
  template <typename Which>
  std::vector<std::shared_ptr<Connection>> Break(const Which& which, const std::string& why);
  // Why `node` cannot open a stream to `address`; empty: it can.
  std::string Obstacle(const std::string& node, const std::string& address, Plane plane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void SetHeld(const std::string& a, const std::string& b, bool held);

  const InProcessOptions options;
  Executor executor;

  absl::Mutex mutex;  // taken before any Connection's
  uint64_t next_id ABSL_GUARDED_BY(mutex) = 1;
  std::map<std::string, Accepting> listeners ABSL_GUARDED_BY(mutex);
  std::vector<Live> live ABSL_GUARDED_BY(mutex);
  size_t prune_at ABSL_GUARDED_BY(mutex) = 64;
  std::map<std::tuple<std::string, std::string, Plane>, uint64_t> opened ABSL_GUARDED_BY(mutex);
  std::set<std::pair<std::string, std::string>> partitions ABSL_GUARDED_BY(mutex);
  std::set<std::string> killed ABSL_GUARDED_BY(mutex);
};

std::string InProcessNetwork::State::Obstacle(const std::string& node, const std::string& address, Plane plane) {
  if (killed.count(node) != 0) return absl::StrCat(node, " was killed");
  if (killed.count(address) != 0) return absl::StrCat(address, " was killed");
  if (partitions.count(Unordered(node, address)) != 0) return absl::StrCat(address, " is cut off from ", node);
  const auto listener = listeners.find(address);
  if (listener == listeners.end()) return absl::StrCat("nobody listens at ", address);
  if (listener->second.acceptors.count(plane) == 0) return absl::StrCat(address, " does not serve this plane");
  return "";
}

std::shared_ptr<ByteStream> InProcessNetwork::State::Open(uint64_t transport, const std::string& node,
                                                          const std::string& address, Plane plane,
                                                          std::shared_ptr<StreamHandler> handler) {
  absl::MutexLock lock(&mutex);
  if (live.size() >= prune_at) {
    live.erase(std::remove_if(live.begin(), live.end(), [](const Live& l) { return l.connection->BothClosed(); }),
               live.end());
    prune_at = 2 * live.size() + 64;
  }
  const uint64_t count = opened[{node, address, plane}]++;
  const uint64_t key = inprocess::DelayKey(options.delay_seed, node, address, plane, count);
  auto connection = std::make_shared<Connection>(&executor, node, address, plane, key, options.max_delay);
  const std::string obstacle = Obstacle(node, address, plane);
  if (obstacle.empty()) {
    const Accepting& accepting = listeners.find(address)->second;
    live.push_back({connection, transport, accepting.id});
    connection->Start(std::move(handler), accepting.acceptors.find(plane)->second);
  } else {
    live.push_back({connection, transport, 0});
    connection->Fail(std::move(handler), absl::UnavailableError(obstacle));
  }
  return std::make_shared<InProcessStream>(std::move(connection), kOpener);
}

template <typename Which>
std::vector<std::shared_ptr<Connection>> InProcessNetwork::State::Break(const Which& which, const std::string& why) {
  std::vector<std::shared_ptr<Connection>> broken;
  absl::MutexLock lock(&mutex);
  for (const Live& l : live) {
    if (!which(l)) continue;
    l.connection->Break(absl::UnavailableError(why));
    broken.push_back(l.connection);
  }
  return broken;
}

void InProcessNetwork::State::SetHeld(const std::string& a, const std::string& b, bool held) {
  absl::MutexLock lock(&mutex);
  if (held) {
    partitions.insert(Unordered(a, b));
  } else {
    partitions.erase(Unordered(a, b));
  }
  for (const Live& l : live) {
    if (Unordered(l.connection->opener(), l.connection->address()) == Unordered(a, b)) l.connection->SetHeld(held);
  }
}

namespace {

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<InProcessNetwork::State> state, uint64_t id, std::string node)
      : state_(std::move(state)), id_(id), node_(std::move(node)) {}

  ~InProcessTransport() override {
    const auto own = [this](const InProcessNetwork::State::Live& l) { return l.transport == id_; };
    for (const auto& connection : state_->Break(own, absl::StrCat(node_, " ended"))) connection->AwaitClosed(kOpener);
  }

  std::shared_ptr<ByteStream> Open(const std::string& address, Plane plane,
                                   std::shared_ptr<StreamHandler> handler) override {
    return state_->Open(id_, node_, address, plane, std::move(handler));
  }

 private:
  const std::shared_ptr<InProcessNetwork::State> state_;
  const uint64_t id_;
  const std::string node_;
};

class InProcessListener : public Listener {
 public:
  InProcessListener(std::shared_ptr<InProcessNetwork::State> state, uint64_t id, std::string address)
      : state_(std::move(state)), id_(id), address_(std::move(address)) {}

  ~InProcessListener() override {
    {
      absl::MutexLock lock(&state_->mutex);
      state_->listeners.erase(address_);
    }
    const auto own = [this](const InProcessNetwork::State::Live& l) { return l.listener == id_; };
    for (const auto& connection : state_->Break(own, absl::StrCat(address_, " ended"))) {
      connection->AwaitClosed(kAccepter);
    }
  }

  const std::string& address() const override { return address_; }

 private:
  const std::shared_ptr<InProcessNetwork::State> state_;
  const uint64_t id_;
  const std::string address_;
};

}  // namespace

InProcessNetwork::InProcessNetwork(const InProcessOptions& options) : state_(std::make_shared<State>(options)) {}

InProcessNetwork::~InProcessNetwork() {
  for (const auto& connection : state_->Break([](const State::Live&) { return true; }, "the network ended")) {
    connection->AwaitClosed(kOpener);
    connection->AwaitClosed(kAccepter);
  }
  state_->executor.Stop();
}

std::unique_ptr<Transport> InProcessNetwork::MakeTransport(const std::string& node) {
  absl::MutexLock lock(&state_->mutex);
  return std::make_unique<InProcessTransport>(state_, state_->next_id++, node);
}

absl::StatusOr<std::unique_ptr<Listener>> InProcessNetwork::Listen(const std::string& address,
                                                                   std::map<Plane, Acceptor> acceptors) {
  absl::MutexLock lock(&state_->mutex);
  if (state_->listeners.count(address) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("somebody listens at ", address, " already"));
  }
  const uint64_t id = state_->next_id++;
  state_->listeners[address] = {id, std::move(acceptors)};
  return std::make_unique<InProcessListener>(state_, id, address);
}

void InProcessNetwork::Break(const std::string& a, const std::string& b) {
  const auto pair = Unordered(a, b);
  state_->Break(
      [&pair](const State::Live& l) { return Unordered(l.connection->opener(), l.connection->address()) == pair; },
      absl::StrCat("the connection of ", a, " and ", b, " broke"));
}

void InProcessNetwork::Partition(const std::string& a, const std::string& b) { state_->SetHeld(a, b, true); }

void InProcessNetwork::Heal(const std::string& a, const std::string& b) { state_->SetHeld(a, b, false); }

void InProcessNetwork::Kill(const std::string& node) {
  {
    absl::MutexLock lock(&state_->mutex);
    state_->killed.insert(node);
  }
  state_->Break(
      [&node](const State::Live& l) { return l.connection->opener() == node || l.connection->address() == node; },
      absl::StrCat(node, " was killed"));
}

uint64_t InProcessNetwork::bytes_written() const { return state_->executor.bytes_written; }

uint64_t InProcessNetwork::messages_written(Plane plane) const {
  return state_->executor.messages_written[static_cast<size_t>(plane)];
}

void InProcessNetwork::Revive(const std::string& node) {
  absl::MutexLock lock(&state_->mutex);
  state_->killed.erase(node);
}

}  // namespace sluice
