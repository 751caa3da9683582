// Who a daemon is: a name that may outlive it, the life it is in, the host it runs on.
#ifndef SLUICE_COMMON_NODE_IDENTITY_H_
#define SLUICE_COMMON_NODE_IDENTITY_H_

#include <string>
#include <string_view>

#include "sluice/v1/plan.pb.h"

namespace sluice {

// `name`, or "<role>-<6 random hexadecimal digits>" where it is empty; incarnation: wall clock in nanoseconds.
v1::NodeId MakeNodeId(std::string_view role, std::string_view name);

// Equal for all processes of one host until it boots anew: /etc/machine-id, else host name and boot id; or what
// SetHostId said.
std::string HostId();

// For the whole process; before anything asks. Not thread-safe.
void SetHostId(std::string_view id);

}  // namespace sluice

#endif  // SLUICE_COMMON_NODE_IDENTITY_H_
