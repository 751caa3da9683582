// The transport over gRPC: raw ByteBuffers on bidirectional streams, callback API.
//
// Accepting end, in a daemon (one line per streaming method, any number of other methods beside it):
//
//   class ParameterServiceImpl final : public
//   v1::ParameterService::WithRawCallbackMethod_Stream<v1::ParameterService::Service> {
//     grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context)
//     override {
//       return NewAcceptedStream(context, acceptor_);
//     }
//     grpc::Status GetPlan(grpc::ServerContext*, const v1::GetPlanRequest*, v1::GetPlanResponse*) override;
//   };
//   ASSIGN_OR_RETURN(auto server, GrpcServer::Start({.listen = {"127.0.0.1", 0}}, {&parameter_service,
//   &shard_service}));
//
// Opening end: GrpcTransport. Events come on gRPC's threads; there are few of them, so a handler must not block for
// long.
#ifndef SLUICE_COMMON_GRPC_TRANSPORT_H_
#define SLUICE_COMMON_GRPC_TRANSPORT_H_

#include <grpcpp/server.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/rpc.h"
#include "common/transport.h"

namespace sluice {

// Turns one call of a raw bidi method into a stream of transport.h: calls `acceptor`, feeds its handler. The reactor
// deletes itself when gRPC has done with the call. `acceptor` is copied.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewAcceptedStream(grpc::CallbackServerContext* context,
                                                                               const Acceptor& acceptor);

struct GrpcServerOptions {
  HostPort listen{"127.0.0.1", 0};  // port 0: any free one
  // What others reach it by; empty host: that of `listen`; port 0: the port that it listens at.
  HostPort advertise{"", 0};
  bool insecure = false;  // allow an address beyond loopback without TLS
};

// One gRPC server: the given services, health service and reflection. Thread-safe.
class GrpcServer final : public Listener {
 public:
  // Listens and serves from here on; the services must outlive it. ALREADY_EXISTS where the port is taken,
  // FAILED_PRECONDITION beyond loopback without `insecure`, INVALID_ARGUMENT for an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                           const std::vector<grpc::Service*>& services);
  // Shutdown(absl::ZeroDuration()).
  ~GrpcServer() override;

  const std::string& address() const override { return address_; }
  int port() const { return port_; }

  // Accepts nothing more, waits up to `grace` for calls to end by themselves, cancels the rest (streams too: their
  // handlers get OnClosed) and returns when no callback runs or will run. Idempotent. Never call it from a handler.
  void Shutdown(absl::Duration grace = absl::ZeroDuration());

 private:
  GrpcServer(std::unique_ptr<grpc::Server> server, std::string address, int port);

  const std::unique_ptr<grpc::Server> server_;
  const std::string address_;
  const int port_;
};

// Opens streams to HOST:PORT addresses; one connection an address, shared by all streams of this object and by nobody
// else. An Open to a peer that was down a moment ago tries to connect at once. Fails fast: OnClosed(UNAVAILABLE).
// Destruction cancels what is open and returns when no callback runs or will run: never from a handler.
class GrpcTransport final : public Transport {
 public:
  GrpcTransport();
  ~GrpcTransport() override;

  std::shared_ptr<ByteStream> Open(const std::string& address, Plane plane,
                                   std::shared_ptr<StreamHandler> handler) override;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace sluice

#endif  // SLUICE_COMMON_GRPC_TRANSPORT_H_
