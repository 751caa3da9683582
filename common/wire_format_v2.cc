// The kernels for x86-64-v2; the flag stands in common/CMakeLists.txt.
#define SLUICE_TARGET v2
#define SLUICE_WIRE_TABLE kWireTableV2
#define SLUICE_TARGET_NAME "x86-64-v2"
#include "common/wire_kernels.inc"
