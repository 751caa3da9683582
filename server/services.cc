#include "server/services.h"

#include "common/rpc.h"
#include "server/pull_call.h"

namespace sluice {
namespace {

// Refuses what comes before the node is there.
std::shared_ptr<StreamHandler> NotReady(std::shared_ptr<ByteStream> stream, const std::string&) {
  stream->Close(absl::UnavailableError("the server is starting"));
  return nullptr;
}

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ParameterServiceImpl::Stream(
    grpc::CallbackServerContext* context) {
  ServerNode* node = node_.load();
  return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->parameter_acceptor());
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ParameterServiceImpl::Pull(grpc::CallbackServerContext* context,
                                                                       const grpc::ByteBuffer* request) {
  return NewPullCall(context, node_.load(), *request);
}

grpc::Status ParameterServiceImpl::GetPlan(grpc::ServerContext*, const v1::GetPlanRequest* request,
                                           v1::GetPlanResponse* response) {
  ServerNode* node = node_.load();
  if (node == nullptr) return {grpc::StatusCode::UNAVAILABLE, "the server is starting"};
  absl::StatusOr<v1::GetPlanResponse> plan = node->GetPlan(*request);
  if (!plan.ok()) return ToGrpc(plan.status());
  *response = *std::move(plan);
  return grpc::Status::OK;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ShardServiceImpl::Stream(
    grpc::CallbackServerContext* context) {
  ServerNode* node = node_.load();
  return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->shard_acceptor());
}

}  // namespace sluice
