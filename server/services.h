// gRPC service classes of a server: they only translate between proto, calls and ServerNode.
#ifndef SLUICE_SERVER_SERVICES_H_
#define SLUICE_SERVER_SERVICES_H_

#include "common/grpc_transport.h"
#include "server/server_node.h"
#include "sluice/v1/parameter.grpc.pb.h"
#include "sluice/v1/shard.grpc.pb.h"

namespace sluice {

class ParameterServiceImpl final
    : public v1::ParameterService::WithRawCallbackMethod_Stream<
          v1::ParameterService::WithRawCallbackMethod_Pull<v1::ParameterService::Service>> {
 public:
  // Streams and calls may come before SetNode: they are answered UNAVAILABLE. The node outlives the gRPC server.
  void SetNode(ServerNode* node) { node_.store(node); }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Pull(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request) override;
  grpc::Status GetPlan(grpc::ServerContext* context, const v1::GetPlanRequest* request,
                       v1::GetPlanResponse* response) override;

 private:
  std::atomic<ServerNode*> node_{nullptr};
};

class ShardServiceImpl final : public v1::ShardService::WithRawCallbackMethod_Stream<v1::ShardService::Service> {
 public:
  void SetNode(ServerNode* node) { node_.store(node); }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override;

 private:
  std::atomic<ServerNode*> node_{nullptr};
};

}  // namespace sluice

#endif  // SLUICE_SERVER_SERVICES_H_
