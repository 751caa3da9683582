// A parameter server to measure: the real ServerNode behind its real gRPC services, with a scheduler's end that answers
// every registration with the bench's plan and does nothing else.
#ifndef SLUICE_BENCH_PARAMETER_SERVER_H_
#define SLUICE_BENCH_PARAMETER_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace sluice {

class BenchServer {
 public:
  // Serves from here on, with one lane. Workers may come at once: their frames wait for the plan.
  static absl::StatusOr<std::unique_ptr<BenchServer>> Start(uint64_t mib, uint64_t chunk_elements);
  virtual ~BenchServer() = default;  // streams that are open are cut
  virtual int port() const = 0;      // of 127.0.0.1
};

}  // namespace sluice

#endif  // SLUICE_BENCH_PARAMETER_SERVER_H_
