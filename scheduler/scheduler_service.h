// sluice.v1.SchedulerService over gRPC: translates calls into those of a SchedulerNode, nothing more.
#ifndef SLUICE_SCHEDULER_SCHEDULER_SERVICE_H_
#define SLUICE_SCHEDULER_SCHEDULER_SERVICE_H_

#include <grpcpp/impl/codegen/service_type.h>

#include <memory>

#include "scheduler/scheduler_node.h"

namespace sluice {

// `node` outlives the service and the server that it is registered with.
std::unique_ptr<grpc::Service> MakeSchedulerService(SchedulerNode* node);

}  // namespace sluice

#endif  // SLUICE_SCHEDULER_SCHEDULER_SERVICE_H_
