#include "tests/server/node_rig.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "common/log.h"
#include "common/version.h"

namespace sluice {

// ------------------------------------------------------------------------------------------------------ StreamEnd

void StreamEnd::OnMessage(grpc::ByteBuffer message) {
  absl::StatusOr<ParsedFrame> frame = ParseFrame(std::move(message));
  CHECK(frame.ok(), "{}", frame.status().ToString());
  absl::MutexLock lock(&mutex_);
  if (frame->control.has_ack()) {
    CHECK(acks_.empty() || frame->control.ack().bytes() >= acks_.back());
    acks_.push_back(frame->control.ack().bytes());
  }
  if (frame->control.has_refusal()) refusal_ = frame->control.refusal();
  size_t offset = 0;
  for (const v1::ChunkHeader& header : frame->control.header()) {
    std::vector<float> values(header.elements());
    frame->payload.Sub(offset, values.size() * sizeof(float)).CopyTo(values.data());
    offset += values.size() * sizeof(float);
    versions_[header.chunk()].push_back(header.round());
    values_[{header.chunk(), header.round()}] = std::move(values);
  }
  CHECK(offset == frame->payload.size());
}

void StreamEnd::OnClosed(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = status;
  }
  if (on_closed_) on_closed_();
}

void StreamEnd::Write(const v1::ChunkFrame& control, const std::vector<std::vector<float>>& payload) {
  std::vector<BorrowedBytes> bytes;
  for (const std::vector<float>& values : payload) {
    auto copy = std::make_shared<std::vector<float>>(values);
    bytes.push_back({copy->data(), copy->size() * sizeof(float), copy});
  }
  stream->Write(EncodeFrame(control, bytes));
}

void StreamEnd::WriteBytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  stream->Write(grpc::ByteBuffer(&slice, 1));
}

bool StreamEnd::Await(const std::function<bool()>& ready) {
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_.has_value() || ready(); };
  mutex_.AwaitWithTimeout(absl::Condition(&done), kNodeRigPatience);
  return ready();
}

bool StreamEnd::AwaitValue(uint64_t chunk, uint64_t version) {
  absl::MutexLock lock(&mutex_);
  return Await([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return values_.contains({chunk, version}); });
}

std::vector<float> StreamEnd::value(uint64_t chunk, uint64_t version) {
  absl::MutexLock lock(&mutex_);
  auto it = values_.find({chunk, version});
  return it == values_.end() ? std::vector<float>() : it->second;
}

std::vector<uint64_t> StreamEnd::versions(uint64_t chunk) {
  absl::MutexLock lock(&mutex_);
  return versions_[chunk];
}

bool StreamEnd::AwaitAck(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  return Await([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !acks_.empty() && acks_.back() >= bytes; });
}

std::vector<uint64_t> StreamEnd::acks() {
  absl::MutexLock lock(&mutex_);
  return acks_;
}

absl::Status StreamEnd::AwaitClosed() {
  absl::MutexLock lock(&mutex_);
  Await([] { return false; });
  return closed_ ? *closed_ : absl::DeadlineExceededError("the stream stays open");
}

std::optional<v1::Refusal> StreamEnd::refusal() {
  absl::MutexLock lock(&mutex_);
  return refusal_;
}

bool StreamEnd::closed() {
  absl::MutexLock lock(&mutex_);
  return closed_.has_value();
}

// -------------------------------------------------------------------------------------------------------- NodeRig

class NodeRig::SchedulerEnd : public StreamHandler {
 public:
  SchedulerEnd(NodeRig* rig, std::shared_ptr<ByteStream> stream) : rig_(rig), stream_(std::move(stream)) {}

  void OnMessage(grpc::ByteBuffer buffer) override {
    v1::NodeMessage message;
    CHECK(DecodeMessage(buffer, &message));
    absl::MutexLock lock(&rig_->mutex_);
    if (message.has_register_()) {
      v1::SchedulerMessage welcome;
      welcome.mutable_welcome()->set_lease_ms(60000);
      stream_->Write(EncodeMessage(welcome));
      rig_->sessions_[message.register_().node().name()] = stream_;
    }
    if (!message.has_heartbeat()) rig_->messages_.push_back(std::move(message));
  }
  void OnClosed(const absl::Status&) override {
    absl::MutexLock lock(&rig_->mutex_);
    std::erase_if(rig_->sessions_, [this](const auto& entry) { return entry.second == stream_; });
    stream_ = nullptr;
  }

 private:
  NodeRig* const rig_;
  std::shared_ptr<ByteStream> stream_;
};

NodeRig::NodeRig(const NodeRigOptions& options)
    : network_({.delay_seed = options.delay_seed, .max_delay = options.max_delay}) {
  scheduler_ =
      *network_.Listen("scheduler", {{Plane::kSession, [this](std::shared_ptr<ByteStream> stream, const std::string&) {
                                        return std::make_shared<SchedulerEnd>(this, std::move(stream));
                                      }}});
  for (uint32_t i = 0; i < options.servers; ++i) {
    Server& server = servers_.emplace_back();
    ServerOptions o;
    o.node = ServerTestNode("server", i);
    o.host_id = "host";
    o.address = o.node.name();
    o.scheduler = "scheduler";
    o.checkpoint_root = options.checkpoint_root;
    o.memory_limit = options.memory_limit;
    o.lanes = options.lanes;
    o.hello_patience = options.hello_patience;
    server.transport = network_.MakeTransport(o.address);
    o.transport = server.transport.get();
    server.node = ServerNode::Start(o);
    server.listener = *network_.Listen(o.address, {{Plane::kParameter, server.node->parameter_acceptor()},
                                                   {Plane::kShard, server.node->shard_acceptor()}});
    if (!options.grpc) continue;
    server.service.SetNode(server.node.get());
    server.grpc = *GrpcServer::Start(GrpcServerOptions(), {&server.service});
  }
  if (options.grpc) {
    workers_ = std::make_unique<GrpcTransport>();
  } else {
    workers_ = network_.MakeTransport("workers");
  }
  absl::MutexLock lock(&mutex_);
  const auto all = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return sessions_.size() == options.servers; };
  CHECK(mutex_.AwaitWithTimeout(absl::Condition(&all), kNodeRigPatience));
}

NodeRig::~NodeRig() {
  workers_ = nullptr;
  for (Server& server : servers_) {
    server.listener = nullptr;
    server.grpc = nullptr;
    server.node = nullptr;
    server.transport = nullptr;
  }
  scheduler_ = nullptr;
}

void NodeRig::Send(const v1::SchedulerMessage& message) {
  absl::MutexLock lock(&mutex_);
  CHECK(sessions_.size() == servers_.size());
  for (auto& [name, stream] : sessions_) stream->Write(EncodeMessage(message));
}

void NodeRig::SendPlan(const std::shared_ptr<const Layout>& layout) {
  v1::SchedulerMessage message;
  *message.mutable_plan() = layout->plan();
  Send(message);
}

void NodeRig::SendFence(const std::string& job, uint64_t generation) {
  v1::SchedulerMessage message;
  message.mutable_fence()->set_job_id(job);
  message.mutable_fence()->set_generation(generation);
  Send(message);
}

void NodeRig::SendEnd(const std::string& job) {
  v1::SchedulerMessage message;
  message.mutable_end_job()->set_job_id(job);
  Send(message);
}

void NodeRig::BreakSessions() {
  const auto registered = [](const std::vector<v1::NodeMessage>& all) {
    return std::count_if(all.begin(), all.end(), [](const v1::NodeMessage& m) { return m.has_register_(); });
  };
  const int64_t before = registered(messages());
  for (const Server& server : servers_) network_.Break(server.listener->address(), "scheduler");
  CHECK(Await([&](const auto& all) { return registered(all) == before + static_cast<int64_t>(servers_.size()); }));
}

std::vector<v1::NodeMessage> NodeRig::messages() {
  absl::MutexLock lock(&mutex_);
  return messages_;
}

bool NodeRig::Await(const std::function<bool(const std::vector<v1::NodeMessage>&)>& ready) {
  absl::MutexLock lock(&mutex_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ready(messages_); };
  return mutex_.AwaitWithTimeout(absl::Condition(&done), kNodeRigPatience);
}

v1::NodeProblem NodeRig::AwaitProblem() {
  v1::NodeProblem problem;
  Await([&](const std::vector<v1::NodeMessage>& all) {
    for (const v1::NodeMessage& m : all) {
      if (m.has_problem()) problem = m.problem();
    }
    return problem.code() != 0;
  });
  return problem;
}

std::shared_ptr<StreamEnd> NodeRig::Open(uint32_t server, std::function<void()> on_closed) {
  auto end = std::make_shared<StreamEnd>(std::move(on_closed));
  end->stream = workers_->Open(address(server), Plane::kParameter, end);
  return end;
}

std::shared_ptr<StreamEnd> NodeRig::Open(uint32_t server, const v1::StreamHello& hello) {
  std::shared_ptr<StreamEnd> end = Open(server);
  v1::ChunkFrame frame;
  *frame.mutable_hello() = hello;
  end->Write(frame);
  return end;
}

// ------------------------------------------------------------------------------------------------------- messages

v1::StreamHello NodeRigHello(const Layout& layout, uint32_t contributor) {
  v1::StreamHello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_job_id(layout.plan().job_id());
  *hello.mutable_node() = layout.plan().ranks(static_cast<int>(contributor)).node();
  hello.set_contributor(contributor);
  hello.set_generation(layout.generation());
  return hello;
}

v1::ChunkFrame NodeRigSubscribe(const Layout& layout, uint64_t version) {
  v1::ChunkFrame frame;
  frame.mutable_subscribe()->set_generation(layout.generation());
  v1::Want* want = frame.mutable_subscribe()->add_wants();
  want->set_chunks(layout.table().chunks());
  want->set_version(version);
  return frame;
}

v1::ChunkHeader NodeRigHeader(const Layout& layout, uint64_t round, uint32_t contributor, uint64_t chunk,
                              double count) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_generation(layout.generation());
  header.set_round(round);
  header.set_contributor(contributor);
  header.set_elements(layout.table().range(chunk).size());
  header.set_count(count);
  return header;
}

// ----------------------------------------------------------------------------------------------------- WorkersEnd

WorkersEnd::WorkersEnd(NodeRig* rig, std::shared_ptr<const Layout> layout, uint64_t seed)
    : rig_(rig), layout_(std::move(layout)), random_(seed) {
  for (uint32_t c = 0; c < layout_->ranks(); ++c) {
    auto& streams = streams_.emplace_back();
    for (uint64_t chunk = 0; chunk < layout_->table().chunks(); ++chunk) {
      const std::string server = ServerOf(chunk);
      if (streams.contains(server)) continue;
      streams[server] =
          rig_->Open(static_cast<uint32_t>(std::stoul(server.substr(server.find('-') + 1))), NodeRigHello(*layout_, c));
      streams[server]->Write(NodeRigSubscribe(*layout_, layout_->plan().start()));
    }
  }
}

std::string WorkersEnd::ServerOf(uint64_t chunk) const {
  return layout_->primary(layout_->table().shard(chunk)).node().name();
}

float WorkersEnd::Gradient(uint64_t round, uint32_t contributor, uint64_t element) {
  uint64_t x = round * 0x9E3779B97F4A7C15 + contributor * 0xC2B2AE3D27D4EB4F + element * 0x165667B19E3779F9 + 1;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9;
  x ^= x >> 32;
  // Magnitudes apart, so that another order of addition gives other bits.
  return std::ldexp(static_cast<float>(x >> 40) / static_cast<float>(1 << 23) - 1.0f, static_cast<int>(x % 9) - 4);
}

double WorkersEnd::Count(uint64_t round, uint32_t contributor) {
  return (round + 2 * contributor) % 5 == 3 ? 0 : 1 + (round + contributor) % 3;
}

void WorkersEnd::Push(uint64_t round, const std::function<bool(uint32_t, uint64_t)>& which) {
  std::mt19937_64 random(random_++);
  struct Frame {
    StreamEnd* stream;
    v1::ChunkFrame control;
    std::vector<std::vector<float>> payload;
  };
  std::vector<Frame> frames;
  std::vector<uint64_t> chunks(layout_->table().chunks());
  std::iota(chunks.begin(), chunks.end(), 0);
  for (uint32_t c = 0; c < layout_->ranks(); ++c) {
    const double count = Count(round, c);
    std::shuffle(chunks.begin(), chunks.end(), random);
    std::map<StreamEnd*, Frame> open;
    for (uint64_t chunk : chunks) {
      if (!which(c, chunk)) continue;
      StreamEnd* const end = &stream(c, chunk);
      Frame& frame = open[end];
      frame.stream = end;
      v1::ChunkHeader* header = frame.control.add_header();
      *header = NodeRigHeader(*layout_, round, c, chunk, count);
      if (count == 0) {
        header->set_elements(0);
      } else {
        const Range range = layout_->table().range(chunk);
        std::vector<float>& values = frame.payload.emplace_back();
        for (uint64_t e = range.begin; e < range.end; ++e) values.push_back(Gradient(round, c, e));
      }
      if (random() % 3 == 0) {
        frames.push_back(std::move(frame));
        open.erase(end);
      }
    }
    for (auto& [end, frame] : open) frames.push_back(std::move(frame));
    Frame& report = frames.emplace_back();
    report.stream = &stream(c, 0);
    v1::RoundReport* r = report.control.mutable_report();
    r->set_generation(layout_->generation());
    r->set_round(round);
    r->set_contributor(c);
    r->set_loss_sum(count * 0.5);
    r->set_count(count);
  }
  std::shuffle(frames.begin(), frames.end(), random);
  for (const Frame& frame : frames) frame.stream->Write(frame.control, frame.payload);
}

bool WorkersEnd::Train(uint64_t from, uint64_t to) {
  for (uint64_t round = from; round <= to; ++round) {
    for (uint32_t c = 0; c < layout_->ranks(); ++c) {
      for (uint64_t chunk = 0; chunk < layout_->table().chunks(); ++chunk) {
        if (stream(c, chunk).AwaitValue(chunk, round)) continue;
        ADD_FAILURE() << "chunk " << chunk << " version " << round << " did not come to contributor " << c;
        return false;
      }
    }
    if (round < to) Push(round, [](uint32_t, uint64_t) { return true; });
  }
  return true;
}

std::vector<float> WorkersEnd::Values(uint64_t version) {
  std::vector<float> all;
  for (uint64_t chunk = 0; chunk < layout_->table().chunks(); ++chunk) {
    EXPECT_TRUE(stream(0, chunk).AwaitValue(chunk, version));
    const std::vector<float> values = stream(0, chunk).value(chunk, version);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace sluice
