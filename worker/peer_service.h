// The peer plane over gRPC: only translates between calls and the worker's node.
#ifndef SLUICE_WORKER_PEER_SERVICE_H_
#define SLUICE_WORKER_PEER_SERVICE_H_

#include <atomic>

#include "common/grpc_transport.h"
#include "sluice/v1/peer.grpc.pb.h"
#include "worker/worker_node.h"

namespace sluice {

class PeerServiceImpl final : public v1::PeerService::WithRawCallbackMethod_Stream<
                                  v1::PeerService::WithRawCallbackMethod_Mail<v1::PeerService::Service>> {
 public:
  // Streams may come before SetNode: they are answered UNAVAILABLE. The node outlives the gRPC server.
  void SetNode(WorkerNode* node) { node_.store(node); }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override {
    WorkerNode* const node = node_.load();
    return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->peer_acceptor());
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Mail(grpc::CallbackServerContext* context) override {
    WorkerNode* const node = node_.load();
    return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->mail_acceptor());
  }

 private:
  static std::shared_ptr<StreamHandler> NotReady(std::shared_ptr<ByteStream> stream, const std::string&) {
    stream->Close(absl::UnavailableError("the worker is starting"));
    return nullptr;
  }

  std::atomic<WorkerNode*> node_{nullptr};
};

}  // namespace sluice

#endif  // SLUICE_WORKER_PEER_SERVICE_H_
