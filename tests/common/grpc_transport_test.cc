// What only the gRPC transport has: ports, addresses, other methods beside streams, strangers on the socket.
#include "common/grpc_transport.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/common/transport_fixture.h"

namespace sluice {
namespace {

class GrpcServerTest : public testing::Test {
 protected:
  void SetUp() override { net_.Listen(); }

  void ExpectServes() {
    GrpcTransport transport;
    auto client = std::make_shared<Recorder>();
    const size_t index = net_.parameter.size();
    auto stream = transport.Open(net_.address(), Plane::kParameter, client);
    stream->Write(Message("hello"));
    EXPECT_EQ(net_.parameter.Await(index).recorder->AwaitTexts(1), std::vector<std::string>{"hello"});
    stream->Close(absl::OkStatus());
    EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  }

  GrpcNet net_;
};

TEST_F(GrpcServerTest, PortZeroBecomesAFreeOne) {
  EXPECT_GT(net_.port(), 0);
  EXPECT_EQ(net_.address(), absl::StrCat("127.0.0.1:", net_.port()));
}

TEST_F(GrpcServerTest, UsedPortIsAClearError) {
  GrpcServerOptions options;
  options.listen.port = net_.port();
  const auto second = GrpcServer::Start(options, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status();
  EXPECT_NE(std::string(second.status().message()).find(absl::StrCat("127.0.0.1:", net_.port())), std::string::npos);
  ExpectServes();
}

TEST_F(GrpcServerTest, AddressesThatCannotBe) {
  GrpcServerOptions options;
  options.listen = {"0.0.0.0", 0};
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  options.insecure = true;
  options.advertise = {"trainer-7.example", 0};
  const auto open = GrpcServer::Start(options, {});
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_EQ((*open)->address(), absl::StrCat("trainer-7.example:", (*open)->port()));
  options.listen = {"198.51.100.1", 0};  // set aside for documentation: nobody's
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(GrpcServerTest, UnaryMethodsLiveBesideTheStream) {
  const auto stub = v1::ParameterService::NewStub(MakeChannel(net_.address()));
  grpc::ClientContext context;
  v1::GetPlanRequest request;
  request.set_job_id("none-1");
  v1::GetPlanResponse response;
  const absl::Status status = FromGrpc(stub->GetPlan(&context, request, &response));
  EXPECT_EQ(status, absl::NotFoundError("none-1"));
}

TEST_F(GrpcServerTest, StockStubSpeaksToAnAcceptedStream) {
  const auto stub = v1::ParameterService::NewStub(MakeChannel(net_.address()));
  grpc::ClientContext context;
  const auto call = stub->Stream(&context);
  v1::ChunkFrame frame;
  frame.mutable_hello()->set_job_id("from outside");
  ASSERT_TRUE(call->Write(frame));
  const auto accepted = net_.parameter.Await();
  EXPECT_EQ(accepted.recorder->AwaitTexts(1).at(0), frame.SerializeAsString());
  frame.mutable_ack()->set_bytes(12);
  accepted.stream->Write(Message(frame.SerializeAsString()));
  v1::ChunkFrame answer;
  ASSERT_TRUE(call->Read(&answer));
  EXPECT_EQ(answer.SerializeAsString(), frame.SerializeAsString());
  call->WritesDone();
  EXPECT_EQ(accepted.recorder->AwaitClosed(), absl::OkStatus());
  EXPECT_TRUE(call->Finish().ok());
}

TEST_F(GrpcServerTest, BytesThatAreNotHttp2HarmNobody) {
  GrpcTransport transport;
  auto client = std::make_shared<Recorder>();
  auto stream = transport.Open(net_.address(), Plane::kParameter, client);
  stream->Write(Message("before"));
  const auto accepted = net_.parameter.Await();
  accepted.recorder->AwaitTexts(1);

  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  std::string noise(5000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), noise, preface + noise,
                                   preface.substr(0, 10), std::string(), std::string("\x16\x03\x01\x02\x00", 5)}) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(net_.port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    shutdown(fd, SHUT_WR);
    const timeval limit = {.tv_sec = 10, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    char answer[4096];
    ssize_t n;
    while ((n = recv(fd, answer, sizeof(answer), 0)) > 0) {
    }
    EXPECT_TRUE(n == 0 || errno == ECONNRESET) << "the server keeps the connection";
    close(fd);
  }
  stream->Write(Message("after"));
  EXPECT_EQ(accepted.recorder->AwaitTexts(2).at(1), "after");
  ExpectServes();
}

TEST_F(GrpcServerTest, ShutdownLetsCallsEndWithinItsGrace) {
  Sessions service(To(&net_.session));
  auto server = GrpcServer::Start({}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  GrpcTransport transport;
  auto client = std::make_shared<Recorder>();
  auto stream = transport.Open((*server)->address(), Plane::kSession, client);
  stream->Write(Message("hello"));
  const auto accepted = net_.session.Await();
  accepted.recorder->AwaitTexts(1);
  std::thread stopping([&] { (*server)->Shutdown(absl::Seconds(60)); });
  accepted.stream->Write(Message("the end"));
  accepted.stream->Close(absl::OkStatus());
  EXPECT_EQ(client->AwaitClosed(), absl::OkStatus());
  EXPECT_EQ(client->texts(), std::vector<std::string>{"the end"});
  stopping.join();
  (*server)->Shutdown();
}

}  // namespace
}  // namespace sluice
