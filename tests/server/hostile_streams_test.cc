// Streams over a real gRPC server whose clients send what they must not, or do not read: such a stream ends with the
// most specific code, the log names its sender, and the workers' streams beside it train on to the same bits.
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"
#include "tests/server/node_rig.h"

namespace sluice {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using C = absl::StatusCode;

// What this process logs. Thread-safe.
class LogLines : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // Whether a line with all of these comes.
  bool Await(const std::vector<std::string>& parts) {
    absl::MutexLock lock(&lines_mutex_);
    const auto found = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lines_mutex_) {
      for (const std::string& line : lines_) {
        bool all = true;
        for (const std::string& part : parts) all = all && absl::StrContains(line, part);
        if (all) return true;
      }
      return false;
    };
    return lines_mutex_.AwaitWithTimeout(absl::Condition(&found), kNodeRigPatience);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    absl::MutexLock lock(&lines_mutex_);
    lines_.emplace_back(message.payload.data(), message.payload.size());
  }
  void flush_() override {}

 private:
  absl::Mutex lines_mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(lines_mutex_);
};

// server-0 holds chunks 0, 2, 3 of 2 elements; two workers train beside what a test does.
class HostileStreamsTest : public ::testing::Test {
 protected:
  explicit HostileStreamsTest(absl::Duration hello_patience = absl::Seconds(60), uint64_t hidden = 0,
                              uint64_t chunk_elements = 2)
      : log_(std::make_shared<LogLines>()),
        plan_{.chunk_elements = chunk_elements, .rounds = 40, .hidden = hidden},
        layout_(plan_.Make()),
        rig_({.servers = 2, .grpc = true, .hello_patience = hello_patience}) {
    spdlog::default_logger()->sinks().push_back(log_);
    rig_.SendPlan(layout_);
    workers_ = std::make_unique<WorkersEnd>(&rig_, layout_, 3);
    EXPECT_TRUE(workers_->Train(0, 1));
  }
  ~HostileStreamsTest() override {
    workers_ = nullptr;
    spdlog::default_logger()->sinks().pop_back();
  }
  void TearDown() override {
    const uint64_t rounds = trained_ + 2;
    EXPECT_TRUE(workers_->Train(trained_, rounds));
    NodeRig quiet({.servers = 2});
    quiet.SendPlan(layout_);
    WorkersEnd undisturbed(&quiet, layout_, 3);
    EXPECT_TRUE(undisturbed.Train(0, rounds));
    EXPECT_EQ(workers_->Values(rounds), undisturbed.Values(rounds));
  }

  void ExpectRefused(StreamEnd& end, C code, const std::string& text, const std::string& who) {
    const absl::Status status = end.AwaitClosed();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_TRUE(end.refusal().has_value());
    EXPECT_TRUE(log_->Await({who, "127.0.0.1", text})) << "the log names " << who << " with: " << text;
  }
  std::shared_ptr<StreamEnd> OpenAs(uint32_t contributor) { return rig_.Open(0, NodeRigHello(*layout_, contributor)); }
  v1::ChunkFrame Push(std::initializer_list<uint64_t> chunks) const {
    v1::ChunkFrame frame;
    for (const uint64_t chunk : chunks) *frame.add_header() = NodeRigHeader(*layout_, trained_, 0, chunk, 1);
    return frame;
  }

  const std::shared_ptr<LogLines> log_;
  const ServerTestPlan plan_;
  const std::shared_ptr<const Layout> layout_;
  NodeRig rig_;
  std::unique_ptr<WorkersEnd> workers_;
  uint64_t trained_ = 1;  // rounds
};

TEST_F(HostileStreamsTest, FramesThatThePlanDoesNotAllow) {
  struct Case {
    std::vector<uint64_t> chunks;
    std::function<void(v1::ChunkFrame*)> change;
    size_t values;
    C code;
    std::string text;
  };
  const std::vector<Case> cases = {
      {{4}, [](auto*) {}, 2, C::kOutOfRange, "chunk 4 of 4"},
      {{1}, [](auto*) {}, 2, C::kInvalidArgument, "belongs to another server"},
      {{0, 2, 0}, [](auto*) {}, 6, C::kInvalidArgument, "chunk 0 comes twice"},
      {{0}, [](auto* f) { f->mutable_header(0)->set_elements(3); }, 3, C::kInvalidArgument, "3 elements; it has 2"},
      {{0, 2}, [](auto*) {}, 3, C::kInvalidArgument, "payload bytes"},
      {{0}, [](auto*) {}, 3, C::kInvalidArgument, "payload bytes"},
      {{0},
       [](auto* f) { f->mutable_header(0)->set_encoding(static_cast<v1::Encoding>(77)); },
       2,
       C::kInvalidArgument,
       "encoding 77"},
      {{0}, [](auto* f) { f->mutable_header(0)->set_generation(9); }, 2, C::kInvalidArgument, "generation 9"},
      {{0},
       [](auto* f) { f->mutable_header(0)->set_count(std::numeric_limits<double>::infinity()); },
       2,
       C::kInvalidArgument,
       "count inf"},
      {{},
       [this](auto* f) {
         *f = NodeRigSubscribe(*layout_, 1);
         for (int i = 0; i < 1000; ++i) *f->mutable_subscribe()->add_wants() = f->subscribe().wants(0);
       },
       0,
       C::kInvalidArgument,
       "each chunk once"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    v1::ChunkFrame frame;
    for (const uint64_t chunk : c.chunks) {
      *frame.add_header() = NodeRigHeader(*layout_, trained_, 0, chunk % layout_->table().chunks(), 1);
      frame.mutable_header(frame.header_size() - 1)->set_chunk(chunk);
    }
    c.change(&frame);
    auto end = OpenAs(0);
    end->Write(frame, {std::vector<float>(c.values, 1e30f)});
    ExpectRefused(*end, c.code, c.text, "worker-0 contributor 0");
  }
}

TEST_F(HostileStreamsTest, AControlPartThatIsTooLarge) {
  auto end = OpenAs(0);
  v1::ChunkFrame frame;
  frame.mutable_refusal()->set_message(std::string(kMaxFrameControl, 'x'));
  end->Write(frame);
  ExpectRefused(*end, C::kInvalidArgument, "bytes beside the payload", "worker-0 contributor 0");
}

TEST_F(HostileStreamsTest, TruncatedMessages) {
  std::string bytes = [&] {
    v1::ChunkFrame frame = Push({0});
    frame.set_payload(std::string(8, 'x'));
    return frame.SerializeAsString();
  }();
  for (size_t length = bytes.size() - 1; length > 0; length -= std::min<size_t>(length, 3)) {
    SCOPED_TRACE(length);
    v1::ChunkFrame whole;
    if (whole.ParseFromString(bytes.substr(0, length))) continue;  // a shorter frame, not a truncated one
    auto end = OpenAs(0);
    end->WriteBytes(bytes.substr(0, length));
    ExpectRefused(*end, C::kInvalidArgument, "frame: ", "worker-0 contributor 0");
  }
  auto end = rig_.Open(0);  // before hello
  end->WriteBytes(bytes.substr(0, bytes.size() - 1));
  ExpectRefused(*end, C::kInvalidArgument, "frame: ", "unknown");
}

// A client that does not read hears only that its stream was cut, unless it reads within 2 s.
constexpr grpc::StatusCode kUnread = grpc::StatusCode::RESOURCE_EXHAUSTED;

// What follows uses the stub of a stock client, which reads only when it is told to.
class StockStream {
 public:
  explicit StockStream(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    stub_ = v1::ParameterService::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    stream_ = stub_->Stream(&context_);
  }
  bool Write(const v1::ChunkFrame& frame) { return stream_->Write(frame); }
  bool Read(v1::ChunkFrame* frame) { return stream_->Read(frame); }
  void ReadToTheEnd() {
    v1::ChunkFrame frame;
    while (stream_->Read(&frame)) {
    }
  }
  grpc::Status Finish() {
    ReadToTheEnd();
    return stream_->Finish();
  }

 private:
  std::unique_ptr<v1::ParameterService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ChunkFrame, v1::ChunkFrame>> stream_;
};

TEST_F(HostileStreamsTest, AMessageLargerThanAnyIsRefusedByTheTransport) {
  StockStream client(rig_.address(0));
  v1::ChunkFrame frame;
  *frame.mutable_hello() = NodeRigHello(*layout_, 0);
  frame.set_payload(std::string(kMaxMessageBytes + 1, 'x'));
  client.Write(frame);
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
}

TEST_F(HostileStreamsTest, PushingForEverWithoutReading) {
  StockStream client(rig_.address(0));
  v1::ChunkFrame hello;
  *hello.mutable_hello() = NodeRigHello(*layout_, 0);
  ASSERT_TRUE(client.Write(hello));
  // A contribution that was counted already: acknowledged, and dropped.
  v1::ChunkFrame frame = Push({0});
  frame.mutable_header(0)->set_round(0);
  frame.set_payload(std::string(8, '\0'));
  std::thread pusher([&] {
    while (client.Write(frame)) {
    }
  });
  EXPECT_TRUE(log_->Await({"worker-0 contributor 0", "does not read"}));
  client.ReadToTheEnd();
  pusher.join();
  EXPECT_THAT(client.Finish().error_code(), AnyOf(kUnread, grpc::StatusCode::CANCELLED));
}

// Values of 1.2 MB a version, which do not fit into what a connection takes without being read.
class LargeHostileStreamsTest : public HostileStreamsTest {
 protected:
  LargeHostileStreamsTest() : HostileStreamsTest(absl::Seconds(60), /*hidden=*/50000, /*chunk_elements=*/16384) {}
};

TEST_F(LargeHostileStreamsTest, SubscribingWithoutReading) {
  StockStream client(rig_.address(0));
  v1::ChunkFrame hello = NodeRigSubscribe(*layout_, 1);
  *hello.mutable_hello() = NodeRigHello(*layout_, 0);
  ASSERT_TRUE(client.Write(hello));
  v1::ChunkFrame first;
  ASSERT_TRUE(client.Read(&first));  // it is served; from here on it reads nothing
  ASSERT_GT(first.header_size(), 0);
  trained_ = 20;
  ASSERT_TRUE(workers_->Train(1, trained_));
  EXPECT_TRUE(log_->Await({"worker-0 contributor 0", "two versions behind"}));
  EXPECT_THAT(client.Finish().error_code(), AnyOf(kUnread, grpc::StatusCode::CANCELLED));
}

class SilentStreamsTest : public HostileStreamsTest {
 protected:
  SilentStreamsTest() : HostileStreamsTest(absl::Seconds(2)) {}
};

TEST_F(SilentStreamsTest, NoHello) {
  std::vector<std::unique_ptr<StockStream>> clients;
  for (int i = 0; i < 20; ++i) clients.push_back(std::make_unique<StockStream>(rig_.address(0)));
  const std::unique_ptr<Transport> transport = rig_.network().MakeTransport("stranger");
  auto peer = std::make_shared<StreamEnd>();  // as if from another server
  peer->stream = transport->Open("server-0", Plane::kShard, peer);
  for (const auto& client : clients) {
    const grpc::Status status = client->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("no hello within 2s"));
  }
  EXPECT_TRUE(log_->Await({"127.0.0.1", "no hello within 2s"}));
  EXPECT_THAT(peer->AwaitClosed().ToString(), HasSubstr("no hello within 2s"));
  EXPECT_TRUE(log_->Await({"stranger", "no hello within 2s"}));
}

}  // namespace
}  // namespace sluice
