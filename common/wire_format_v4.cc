// The kernels for x86-64-v4; the flag stands in common/CMakeLists.txt.
#define SLUICE_TARGET v4
#define SLUICE_WIRE_TABLE kWireTableV4
#define SLUICE_TARGET_NAME "x86-64-v4"
#include "common/wire_kernels.inc"
