// The kernels for x86-64-v2; the flag stands in common/CMakeLists.txt.
#define SLUICE_TARGET v2
#define SLUICE_TABLE kTableV2
#define SLUICE_TARGET_NAME "x86-64-v2"
#include "common/optimizer_kernels.inc"
