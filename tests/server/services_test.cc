// Pull and GetPlan as a stock gRPC stub meets them, and a port that garbage was sent to.
#include "server/services.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "common/rpc.h"
#include "server/pull_call.h"
#include "tests/server/node_rig.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ServicesTest : public ::testing::Test {
 protected:
  ServicesTest() : rig_({.servers = 2}), layout_(ServerTestPlan{}.Make()) {
    GrpcServerOptions options;
    options.listen = *ParseHostPort("127.0.0.1:0", 0);
    auto server = GrpcServer::Start(options, {&service_});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::ParameterService::NewStub(MakeChannel(server_->address()));
  }
  ~ServicesTest() override { server_ = nullptr; }  // before the node goes

  void Train(uint64_t rounds) {
    service_.SetNode(&rig_.node(0));  // chunks 0, 2, 3
    rig_.SendPlan(layout_);
    workers_ = std::make_unique<WorkersEnd>(&rig_, layout_, 1);
    ASSERT_TRUE(workers_->Train(0, rounds));
  }
  struct Pulled {
    grpc::Status status;
    std::vector<v1::ChunkHeader> headers;
    std::vector<float> values;
  };
  Pulled Pull(const v1::PullRequest& request, std::chrono::milliseconds patience = std::chrono::seconds(60)) {
    Pulled pulled;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + patience);
    auto reader = stub_->Pull(&context, request);
    v1::ChunkFrame frame;
    while (reader->Read(&frame)) {
      pulled.headers.insert(pulled.headers.end(), frame.header().begin(), frame.header().end());
      const size_t before = pulled.values.size();
      pulled.values.resize(before + frame.payload().size() / sizeof(float));
      std::memcpy(pulled.values.data() + before, frame.payload().data(), frame.payload().size());
    }
    pulled.status = reader->Finish();
    return pulled;
  }
  v1::PullRequest Request() const {
    v1::PullRequest request;
    request.set_job_id(layout_->plan().job_id());
    return request;
  }
  // Of this server's chunks.
  std::vector<float> Values(uint64_t version) {
    std::vector<float> values;
    for (const uint64_t chunk : {0, 2, 3}) {
      const std::vector<float> one = workers_->stream(0, chunk).value(chunk, version);
      values.insert(values.end(), one.begin(), one.end());
    }
    return values;
  }

  NodeRig rig_;
  const std::shared_ptr<const Layout> layout_;
  std::unique_ptr<WorkersEnd> workers_;
  ParameterServiceImpl service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::ParameterService::Stub> stub_;
};

TEST_F(ServicesTest, PullGivesWhatWasServed) {
  Train(2);
  v1::PullRequest request = Request();
  Pulled pulled = Pull(request);
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.error_message();
  EXPECT_EQ(pulled.values, Values(2));
  ASSERT_EQ(pulled.headers.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(pulled.headers[i].chunk(), std::vector<uint64_t>({0, 2, 3})[i]);
    EXPECT_EQ(pulled.headers[i].round(), 2u);
    EXPECT_EQ(pulled.headers[i].generation(), 1u);
    EXPECT_EQ(pulled.headers[i].elements(), 2u);
  }
  request.set_version(1);
  EXPECT_EQ(Pull(request).values, Values(1));
  request.set_first_chunk(1);
  request.set_chunks(2);  // chunk 1 is another server's
  pulled = Pull(request);
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.error_message();
  EXPECT_EQ(pulled.values, workers_->stream(0, 2).value(2, 1));
}

TEST_F(ServicesTest, PullWaitsForAVersionThatComes) {
  Train(1);
  v1::PullRequest request = Request();
  request.set_version(2);
  Pulled pulled;
  std::thread puller([&] { pulled = Pull(request); });
  ASSERT_TRUE(workers_->Train(1, 2));
  puller.join();
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.error_message();
  EXPECT_EQ(pulled.values, Values(2));
}

TEST_F(ServicesTest, PullsThatCannotBe) {
  EXPECT_EQ(Pull(Request()).status.error_code(), grpc::StatusCode::NOT_FOUND);  // no node yet
  Train(3);
  v1::PullRequest request = Request();
  request.set_job_id("other");
  EXPECT_EQ(Pull(request).status.error_code(), grpc::StatusCode::NOT_FOUND);
  request = Request();
  request.set_version(1);
  Pulled pulled = Pull(request);
  EXPECT_EQ(pulled.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_THAT(pulled.status.error_message(), HasSubstr("version 1 is gone; now 3"));
  request.set_version(4);
  EXPECT_EQ(Pull(request, std::chrono::milliseconds(30)).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  request.clear_version();
  for (const auto& [first, chunks] : {std::pair<uint64_t, uint64_t>{1, 1}, {4, 0}, {4, UINT64_MAX}}) {
    request.set_first_chunk(first);
    request.set_chunks(chunks);
    EXPECT_EQ(Pull(request).status.error_code(), grpc::StatusCode::OUT_OF_RANGE) << first;
  }
  rig_.SendEnd(layout_->plan().job_id());
  ASSERT_TRUE(workers_->stream(0, 0).AwaitClosed().ok());
  EXPECT_EQ(Pull(Request()).status.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServicesTest, AWaitingPullEndsWithTheJob) {
  Train(1);
  v1::PullRequest request = Request();
  request.set_version(5);
  Pulled pulled;
  std::thread puller([&] { pulled = Pull(request); });
  rig_.SendEnd(layout_->plan().job_id());
  puller.join();
  EXPECT_EQ(pulled.status.error_code(), grpc::StatusCode::NOT_FOUND) << pulled.status.error_message();
}

// A thread for each would be too many; a call that waits for a version, or for its client, has none.
TEST_F(ServicesTest, PullsThatNobodyReadsHoldNobodyUp) {
  Train(1);
  const auto threads = [] {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      if (int n; word == "Threads:" && status >> n) return n;
    }
    return -1;
  };
  v1::PullRequest never = Request();
  never.set_version(5);
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::ChunkFrame>> reader;
  };
  const int before = threads();
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 100; ++i) {
    calls.push_back(std::make_unique<Call>());
    calls.back()->reader = stub_->Pull(&calls.back()->context, i % 2 ? never : Request());
  }
  const Pulled pulled = Pull(Request());
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.error_message();
  EXPECT_EQ(pulled.values, Values(1));
  EXPECT_LT(threads(), before + 50);
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i % 2) calls[i]->context.TryCancel();
    v1::ChunkFrame frame;
    while (calls[i]->reader->Read(&frame)) {
    }
    const grpc::Status status = calls[i]->reader->Finish();
    EXPECT_EQ(status.error_code(), i % 2 ? grpc::StatusCode::CANCELLED : grpc::StatusCode::OK)
        << status.error_message();
  }
}

TEST_F(ServicesTest, APullEndsAtTheLatestWhenItsTimeIsOver) {
  Train(1);
  // As ParameterServiceImpl, less patient.
  class Impatient final : public v1::ParameterService::WithRawCallbackMethod_Pull<v1::ParameterService::Service> {
   public:
    explicit Impatient(ServerNode* node) : node_(node) {}
    grpc::ServerWriteReactor<grpc::ByteBuffer>* Pull(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request) override {
      return NewPullCall(context, node_, *request, absl::Milliseconds(50));
    }

   private:
    ServerNode* const node_;
  } service(&rig_.node(0));
  auto server = GrpcServer::Start({}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  stub_ = v1::ParameterService::NewStub(MakeChannel((*server)->address()));
  v1::PullRequest request = Request();
  request.set_version(3);
  const Pulled pulled = Pull(request);
  EXPECT_EQ(pulled.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(pulled.status.error_message(), HasSubstr("a Pull takes 50ms at most"));
}

TEST_F(ServicesTest, GetPlan) {
  v1::GetPlanRequest request;
  request.set_job_id(layout_->plan().job_id());
  v1::GetPlanResponse response;
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub_->GetPlan(&context, request, &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  Train(0);
  grpc::ClientContext context;
  const grpc::Status status = stub_->GetPlan(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.plan().hash(), layout_->plan().hash());
  EXPECT_EQ(response.chunks_size(), 4);
}

TEST_F(ServicesTest, BytesThatAreNotHttp2CostOnlyTheirConnection) {
  Train(1);
  std::mt19937 random(3);
  for (int run = 0; run < 20; ++run) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_GE(fd, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(server_->port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    std::string bytes = run % 2 ? "" : "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for (int i = 0; i < 300; ++i) bytes.push_back(static_cast<char>(random()));
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  const Pulled pulled = Pull(Request());
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.error_message();
  EXPECT_EQ(pulled.values, Values(1));
}

}  // namespace
}  // namespace sluice
