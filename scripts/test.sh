#!/usr/bin/env bash
# Installs what is missing, builds Release and runs all tests. Ends with ctest's own summary.
#
#   scripts/test.sh [ctest arguments]      e.g. scripts/test.sh -R server
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_deps.sh build test
cmake --preset release -DSLUICE_TESTS=ON -DSLUICE_BENCH=ON >/dev/null
NINJA_STATUS='build: [%f/%t] ' ninja -C build/release
exec ctest --test-dir build/release --output-on-failure -j "$(nproc)" "$@"
