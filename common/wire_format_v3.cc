// The kernels for x86-64-v3; the flag stands in common/CMakeLists.txt.
#define SLUICE_TARGET v3
#define SLUICE_WIRE_TABLE kWireTableV3
#define SLUICE_TARGET_NAME "x86-64-v3"
#include "common/wire_kernels.inc"
