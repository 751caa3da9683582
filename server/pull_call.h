// One call of ParameterService.Pull: a frame is made when the one before has been written, so a client that does not
// read costs one frame of values (which it only refers to; counted with --stream_memory) and no thread, for 5 minutes
// at most.
#ifndef SLUICE_SERVER_PULL_CALL_H_
#define SLUICE_SERVER_PULL_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/time/time.h"
#include "server/server_node.h"

namespace sluice {

inline constexpr absl::Duration kLongestPull = absl::Minutes(5);

// Serves the call and deletes itself. `node` may be null: the server is starting. `patience` is for tests.
grpc::ServerWriteReactor<grpc::ByteBuffer>* NewPullCall(grpc::CallbackServerContext* context, ServerNode* node,
                                                        const grpc::ByteBuffer& request,
                                                        absl::Duration patience = kLongestPull);

}  // namespace sluice

#endif  // SLUICE_SERVER_PULL_CALL_H_
