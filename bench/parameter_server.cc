#include "bench/parameter_server.h"

#include <utility>

#include "bench/parameter_job.h"
#include "common/frame.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "server/server_node.h"
#include "server/services.h"
#include "sluice/v1/scheduler.grpc.pb.h"

namespace sluice {
namespace {

// What the server hears from its scheduler.
class SchedulerEnd : public StreamHandler {
 public:
  SchedulerEnd(std::shared_ptr<ByteStream> stream, uint64_t mib, uint64_t chunk_elements)
      : stream_(std::move(stream)), mib_(mib), chunk_elements_(chunk_elements) {}

  void OnMessage(grpc::ByteBuffer buffer) override {
    v1::NodeMessage message;
    if (!DecodeMessage(buffer, &message)) return stream_->Close(absl::InvalidArgumentError("not a NodeMessage"));
    if (message.has_problem()) LOG_ERROR("the server reports: {}", message.problem().message());
    if (!message.has_register_()) return;
    const auto layout = MakeBenchLayout(mib_, chunk_elements_, message.register_().address());
    if (!layout.ok()) return stream_->Close(layout.status());
    v1::SchedulerMessage welcome, plan;
    welcome.mutable_welcome()->set_lease_ms(60000);
    stream_->Write(EncodeMessage(welcome));
    *plan.mutable_plan() = (*layout)->plan();
    stream_->Write(EncodeMessage(plan));
  }
  void OnClosed(const absl::Status&) override { stream_ = nullptr; }

 private:
  std::shared_ptr<ByteStream> stream_;
  const uint64_t mib_, chunk_elements_;
};

class SessionService final : public v1::SchedulerService::WithRawCallbackMethod_Session<v1::SchedulerService::Service> {
 public:
  SessionService(uint64_t mib, uint64_t chunk_elements)
      : acceptor_([=](std::shared_ptr<ByteStream> stream, const std::string&) {
          return std::make_shared<SchedulerEnd>(std::move(stream), mib, chunk_elements);
        }) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

class Running final : public BenchServer {
 public:
  Running(uint64_t mib, uint64_t chunk_elements) : sessions_(mib, chunk_elements) {}
  ~Running() override {
    if (listener_ != nullptr) listener_->Shutdown();
    node_ = nullptr;
    if (scheduler_ != nullptr) scheduler_->Shutdown();
  }

  absl::Status Start() {
    ASSIGN_OR_RETURN(scheduler_, GrpcServer::Start({}, {&sessions_}));
    ASSIGN_OR_RETURN(listener_, GrpcServer::Start({}, {&parameter_service_, &shard_service_}));
    ServerOptions options;
    options.node = BenchServerId();
    options.address = listener_->address();
    options.scheduler = scheduler_->address();
    options.lanes = 1;
    options.transport = &transport_;
    options.on_refused = [](const absl::Status& status) { LOG_ERROR("refused: {}", status.ToString()); };
    node_ = ServerNode::Start(options);
    parameter_service_.SetNode(node_.get());
    shard_service_.SetNode(node_.get());
    return absl::OkStatus();
  }
  int port() const override { return listener_->port(); }

 private:
  SessionService sessions_;
  ParameterServiceImpl parameter_service_;
  ShardServiceImpl shard_service_;
  GrpcTransport transport_;
  std::unique_ptr<GrpcServer> scheduler_, listener_;
  std::unique_ptr<ServerNode> node_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchServer>> BenchServer::Start(uint64_t mib, uint64_t chunk_elements) {
  auto server = std::make_unique<Running>(mib, chunk_elements);
  RETURN_IF_ERROR(server->Start());
  return server;
}

}  // namespace sluice
