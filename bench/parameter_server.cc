#include "bench/parameter_server.h"

#include <utility>

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
  SchedulerEnd(std::shared_ptr<ByteStream> stream, std::shared_ptr<const Layout> layout,
               BenchServer::OnRecord on_record)
      : stream_(std::move(stream)), layout_(std::move(layout)), on_record_(std::move(on_record)) {}

  void OnMessage(grpc::ByteBuffer buffer) override {
    v1::NodeMessage message;
    if (!DecodeMessage(buffer, &message)) return stream_->Close(absl::InvalidArgumentError("not a NodeMessage"));
    if (message.has_problem()) LOG_ERROR("the server reports: {}", message.problem().message());
    if (message.has_round_record() && on_record_ != nullptr) on_record_(message.round_record());
    if (!message.has_register_()) return;
    v1::SchedulerMessage welcome, plan;
    welcome.mutable_welcome()->set_lease_ms(60000);
    stream_->Write(EncodeMessage(welcome));
    *plan.mutable_plan() = layout_->plan();
    stream_->Write(EncodeMessage(plan));
  }
  void OnClosed(const absl::Status&) override { stream_ = nullptr; }

 private:
  std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<const Layout> layout_;
  const BenchServer::OnRecord on_record_;
};

class SessionService final : public v1::SchedulerService::WithRawCallbackMethod_Session<v1::SchedulerService::Service> {
 public:
  SessionService(std::shared_ptr<const Layout> layout, BenchServer::OnRecord on_record)
      : acceptor_([layout = std::move(layout), on_record = std::move(on_record)](std::shared_ptr<ByteStream> stream,
                                                                                 const std::string&) {
          return std::make_shared<SchedulerEnd>(std::move(stream), layout, on_record);
        }) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

class Running final : public BenchServer {
 public:
  ~Running() override {
    if (listener_ != nullptr) listener_->Shutdown();
    node_ = nullptr;
    if (scheduler_ != nullptr) scheduler_->Shutdown();
  }

  absl::Status Listen(const std::string& host) {
    ASSIGN_OR_RETURN(
        listener_, GrpcServer::Start({.listen = {host, 0}, .insecure = true}, {&parameter_service_, &shard_service_}));
    return absl::OkStatus();
  }
  int port() const override { return listener_->port(); }

  absl::Status Serve(std::shared_ptr<const Layout> layout, const v1::NodeId& node, bool shared_memory,
                     OnRecord on_record) override {
    sessions_ = std::make_unique<SessionService>(std::move(layout), std::move(on_record));
    ASSIGN_OR_RETURN(scheduler_, GrpcServer::Start({}, {sessions_.get()}));
    ServerOptions options;
    options.node = node;
    options.address = listener_->address();
    options.scheduler = scheduler_->address();
    options.lanes = 1;
    options.shared_memory = shared_memory;
    options.transport = &transport_;
    options.on_refused = [](const absl::Status& status) { LOG_ERROR("refused: {}", status.ToString()); };
    node_ = ServerNode::Start(options);
    parameter_service_.SetNode(node_.get());
    shard_service_.SetNode(node_.get());
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<SessionService> sessions_;
  ParameterServiceImpl parameter_service_;
  ShardServiceImpl shard_service_;
  GrpcTransport transport_;
  std::unique_ptr<GrpcServer> scheduler_, listener_;
  std::unique_ptr<ServerNode> node_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchServer>> BenchServer::Listen(const std::string& host) {
  auto server = std::make_unique<Running>();
  RETURN_IF_ERROR(server->Listen(host));
  return server;
}

}  // namespace sluice
