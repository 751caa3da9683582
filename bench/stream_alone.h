// Transport and frames without a parameter server: what the stream itself costs. The receiver stores what comes with
// one copy and acknowledges it; the sender keeps to a window. No sums, no verdict, no optimizer.
#ifndef SLUICE_BENCH_STREAM_ALONE_H_
#define SLUICE_BENCH_STREAM_ALONE_H_

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/grpc_transport.h"
#include "common/transport.h"
#include "sluice/v1/parameter.grpc.pb.h"

namespace sluice {

struct TransferShape {
  size_t bytes;         // of one transfer
  size_t chunk_bytes;   // a frame each
  size_t window_bytes;  // under way and unacknowledged
  size_t chunks() const { return (bytes + chunk_bytes - 1) / chunk_bytes; }
  size_t size_of(size_t chunk) const { return std::min(chunk_bytes, bytes - chunk * chunk_bytes); }
};

using SharedValues = std::shared_ptr<std::vector<float>>;

class StreamAloneEnd;

// The receiving process's service: one store for all its streams.
class StreamAloneService final
    : public v1::ParameterService::WithRawCallbackMethod_Stream<v1::ParameterService::Service> {
 public:
  explicit StreamAloneService(const TransferShape& shape);
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override;

 private:
  const Acceptor acceptor_;
};

// The other process's end. Push and Pull block, up to a minute (DEADLINE_EXCEEDED). Not thread-safe.
class StreamAlone {
 public:
  // Pulled values are stored into `pulled`. `transport` outlives this.
  StreamAlone(const TransferShape& shape, Transport* transport, const std::string& address, SharedValues pulled);
  ~StreamAlone();

  // Until the last chunk is acknowledged. Rounds differ from each other.
  absl::Status Push(SharedValues values, uint64_t round);
  // What was pushed last comes back as `round`.
  absl::Status Pull(uint64_t round);

 private:
  const TransferShape shape_;
  std::shared_ptr<StreamAloneEnd> end_;
};

}  // namespace sluice

#endif  // SLUICE_BENCH_STREAM_ALONE_H_
