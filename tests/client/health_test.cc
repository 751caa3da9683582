// sluice health against a daemon's gRPC server, a server without health service, one that does not serve, and nobody.
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include <sstream>

#include "client/commands.h"
#include "common/grpc_transport.h"
#include "sluice/v1/scheduler.grpc.pb.h"

namespace sluice {
namespace {

class HealthTest : public testing::Test {
 protected:
  int Run(const std::vector<std::string>& words, const std::string& scheduler = "") {
    out_.str("");
    err_.str("");
    ClientEnvironment environment;
    environment.out = &out_;
    environment.err = &err_;
    environment.getenv = [&](const std::string& name) { return name == "SLUICE_SCHEDULER" ? scheduler : ""; };
    environment.interrupt = &interrupt_;
    return RunClient(words, environment);
  }

  std::ostringstream out_, err_;
  Interrupt interrupt_;
};

TEST_F(HealthTest, ADaemonServes) {
  const auto server = GrpcServer::Start({}, {});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(Run({"health", (*server)->address()}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), (*server)->address() + " serves\n");
  // Without an address: the scheduler, found as for all other commands.
  EXPECT_EQ(Run({"health"}, (*server)->address()), kExitOk) << err_.str();
  EXPECT_EQ(Run({"health", "--scheduler", (*server)->address()}), kExitOk) << err_.str();
}

TEST_F(HealthTest, NotServingAndNoHealthService) {
  for (const bool has_service : {true, false}) {
    grpc::EnableDefaultHealthCheckService(has_service);
    v1::SchedulerService::Service service;
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const auto server = builder.BuildAndStart();
    ASSERT_NE(server, nullptr);
    if (has_service) server->GetHealthCheckService()->SetServingStatus(false);
    const std::string address = "127.0.0.1:" + std::to_string(port);
    EXPECT_EQ(Run({"health", address}), kExitJobFailed);
    EXPECT_NE(err_.str().find(address), std::string::npos) << err_.str();
    EXPECT_NE(err_.str().find(has_service ? "does not serve" : "no health service"), std::string::npos) << err_.str();
    EXPECT_TRUE(out_.str().empty());
  }
}

TEST_F(HealthTest, NobodyThere) {
  int port = 0;
  {
    const auto server = GrpcServer::Start({}, {});
    ASSERT_TRUE(server.ok()) << server.status();
    port = (*server)->port();
  }
  const std::string address = "127.0.0.1:" + std::to_string(port);
  EXPECT_EQ(Run({"health", address, "--timeout", "1"}), kExitUnreachable);
  EXPECT_NE(err_.str().find(address), std::string::npos) << err_.str();
  EXPECT_TRUE(out_.str().empty());
}

TEST_F(HealthTest, Usage) {
  EXPECT_EQ(Run({"health", "a:b"}), kExitUsage);
  EXPECT_EQ(Run({"health", "127.0.0.1:1", "127.0.0.1:2"}), kExitUsage);
  EXPECT_EQ(Run({"health", "127.0.0.1:1", "--timeout", "0"}), kExitUsage);
}

}  // namespace
}  // namespace sluice
