// Real ServerNodes over the in-process transport (workers' streams also over gRPC), with a scheduler that does what the
// test says and streams that the test writes itself.
#ifndef SLUICE_TESTS_SERVER_NODE_RIG_H_
#define SLUICE_TESTS_SERVER_NODE_RIG_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/grpc_transport.h"
#include "common/inprocess_transport.h"
#include "server/server_node.h"
#include "server/services.h"
#include "tests/server/server_test_plan.h"

namespace sluice {

inline constexpr absl::Duration kNodeRigPatience = absl::Seconds(60);  // of waits that take milliseconds

// A worker's end of one stream to one server: keeps what comes. Thread-safe.
class StreamEnd : public StreamHandler {
 public:
  explicit StreamEnd(std::function<void()> on_closed = nullptr) : on_closed_(std::move(on_closed)) {}
  void OnMessage(grpc::ByteBuffer message) override;
  void OnClosed(const absl::Status& status) override;

  void Write(const v1::ChunkFrame& control, const std::vector<std::vector<float>>& payload = {});
  void WriteBytes(const std::string& bytes);

  // Whether the value came; a stream that closes first is a false.
  bool AwaitValue(uint64_t chunk, uint64_t version);
  std::vector<float> value(uint64_t chunk, uint64_t version);
  // Versions of the chunk in the order in which they came.
  std::vector<uint64_t> versions(uint64_t chunk);
  bool AwaitAck(uint64_t bytes);
  std::vector<uint64_t> acks();  // all, in order
  // What the stream closed with.
  absl::Status AwaitClosed();
  std::optional<v1::Refusal> refusal();
  bool closed();

  std::shared_ptr<ByteStream> stream;  // set by the rig

 private:
  bool Await(const std::function<bool()>& ready);

  const std::function<void()> on_closed_;
  absl::Mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<float>> values_ ABSL_GUARDED_BY(mutex_);  // (chunk, version)
  std::map<uint64_t, std::vector<uint64_t>> versions_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> acks_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Refusal> refusal_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
};

struct NodeRigOptions {
  uint32_t servers = 1;
  int lanes = 1;
  uint64_t delay_seed = 0;
  absl::Duration max_delay = absl::ZeroDuration();
  std::string checkpoint_root = {};
  uint64_t memory_limit = 0;
  bool grpc = false;  // workers' streams over loopback; all else stays in the process
  absl::Duration hello_patience = ServerOptions().hello_patience;
};

class NodeRig {
 public:
  // Returns once every server has registered. They are server-0, ..., as ServerTestPlan names them.
  explicit NodeRig(const NodeRigOptions& options);
  ~NodeRig();

  ServerNode& node(uint32_t server) { return *servers_[server].node; }
  InProcessNetwork& network() { return network_; }
  Transport* transport() { return workers_.get(); }
  // By which workers reach the server.
  const std::string& address(uint32_t server) const {
    return servers_[server].grpc != nullptr ? servers_[server].grpc->address() : servers_[server].listener->address();
  }

  // To all servers.
  void Send(const v1::SchedulerMessage& message);
  void SendPlan(const std::shared_ptr<const Layout>& layout);
  void SendFence(const std::string& job, uint64_t generation);
  void SendEnd(const std::string& job);
  // Ends the servers' sessions; they register again.
  void BreakSessions();

  // Of everything the servers ever said.
  std::vector<v1::NodeMessage> messages();
  // Waits until `ready` of them.
  bool Await(const std::function<bool(const std::vector<v1::NodeMessage>&)>& ready);
  // The first NodeProblem.
  v1::NodeProblem AwaitProblem();

  std::shared_ptr<StreamEnd> Open(uint32_t server, std::function<void()> on_closed = nullptr);
  // ... and says hello.
  std::shared_ptr<StreamEnd> Open(uint32_t server, const v1::StreamHello& hello);

 private:
  class SchedulerEnd;
  struct Server {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<ServerNode> node;
    std::unique_ptr<Listener> listener;
    ParameterServiceImpl service;
    std::unique_ptr<GrpcServer> grpc;
  };

  InProcessNetwork network_;
  absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<ByteStream>> sessions_ ABSL_GUARDED_BY(mutex_);  // registered
  std::vector<v1::NodeMessage> messages_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Listener> scheduler_;
  std::deque<Server> servers_;
  std::unique_ptr<Transport> workers_;
};

v1::StreamHello NodeRigHello(const Layout& layout, uint32_t contributor);
v1::ChunkFrame NodeRigSubscribe(const Layout& layout, uint64_t version);
v1::ChunkHeader NodeRigHeader(const Layout& layout, uint64_t round, uint32_t contributor, uint64_t chunk, double count);

// All workers of one plan, played by the test: every gradient is a pure function of (round, contributor, element), some
// are empty.
class WorkersEnd {
 public:
  // Opens all streams of the generation and subscribes from the plan's start. `seed` decides the order of pushing.
  WorkersEnd(NodeRig* rig, std::shared_ptr<const Layout> layout, uint64_t seed);

  static float Gradient(uint64_t round, uint32_t contributor, uint64_t element);
  static double Count(uint64_t round, uint32_t contributor);  // 0: nothing to contribute

  // Rounds [from, to): waits for each one's values, pushes. False with a failure where something did not come.
  bool Train(uint64_t from, uint64_t to);
  // Pushes only the contributions of `round` for which the predicate says so, and the reports.
  void Push(uint64_t round, const std::function<bool(uint32_t contributor, uint64_t chunk)>& which);
  // The whole space at a version that was served to contributor 0.
  std::vector<float> Values(uint64_t version);
  StreamEnd& stream(uint32_t contributor, uint64_t chunk) { return *streams_[contributor][ServerOf(chunk)]; }

 private:
  std::string ServerOf(uint64_t chunk) const;

  NodeRig* const rig_;
  const std::shared_ptr<const Layout> layout_;
  uint64_t random_;
  std::vector<std::map<std::string, std::shared_ptr<StreamEnd>>> streams_;  // by contributor, by server
};

}  // namespace sluice

#endif  // SLUICE_TESTS_SERVER_NODE_RIG_H_
