// A parameter server to measure: the real ServerNode behind its real gRPC services, with a scheduler's end that answers
// every registration with the bench's plan and does nothing else.
#ifndef SLUICE_BENCH_PARAMETER_SERVER_H_
#define SLUICE_BENCH_PARAMETER_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layout.h"
#include "sluice/v1/scheduler.pb.h"

namespace sluice {

class BenchServer {
 public:
  using OnRecord = std::function<void(const v1::RoundRecord&)>;

  // Listens at a port of its own; what comes is served from Serve on.
  static absl::StatusOr<std::unique_ptr<BenchServer>> Listen(const std::string& host = "127.0.0.1");
  virtual ~BenchServer() = default;  // streams that are open are cut
  virtual int port() const = 0;
  // As `node` of the plan, with one lane. `on_record`: of each round at the verdict holder, on a thread of the
  // transport's; may be null. Once.
  virtual absl::Status Serve(std::shared_ptr<const Layout> layout, const v1::NodeId& node, bool shared_memory,
                             OnRecord on_record) = 0;
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_SERVER_H_
