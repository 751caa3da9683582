// The `fake_device` backend: a device for machines that have none. Its operations are the cpu's, but they run on a
// thread per stream, some time later, over memory that faults when anybody else touches it (PROT_NONE outside of the
// operation that names the buffer). It keeps models and train loop honest about copies, streams and events. Use
// MakeBackend.
#ifndef SLUICE_WORKER_BACKEND_FAKE_DEVICE_H_
#define SLUICE_WORKER_BACKEND_FAKE_DEVICE_H_

#include <cstdint>
#include <memory>

#include "worker/backend/backend.h"

namespace sluice {

// delay_seed 0: no delays. Else some operations start up to 100 microseconds late, by seed, stream and operation.
std::unique_ptr<Backend> MakeFakeDevice(int threads, uint64_t delay_seed);

}  // namespace sluice

#endif  // SLUICE_WORKER_BACKEND_FAKE_DEVICE_H_
