#!/usr/bin/env bash
# Builds and runs tests under sanitizers.
#
#   scripts/sanitize.sh asan [ctest arguments]     address and undefined behaviour: all tests but those of whole clusters
#   scripts/sanitize.sh tsan [ctest arguments]     threads: the tests that have several, clusters in one process included
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-}
case "$preset" in
  asan) target=tests_unit select=(-LE 'cluster|tree') ;;
  tsan) target=tests_threads select=(-L threads) ;;
  *) echo "usage: scripts/sanitize.sh asan|tsan [ctest arguments]" >&2; exit 2 ;;
esac
shift
scripts/install_deps.sh build test check
# Debian's libraries are not instrumented: ThreadSanitizer must not guess about accesses inside them.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$PWD/tests/sanitizer/tsan_suppressions.txt ${TSAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
cmake --preset "$preset" -DSLUICE_TESTS=ON >/dev/null
NINJA_STATUS='build: [%f/%t] ' ninja -C "build/$preset" "$target"
exec ctest --test-dir "build/$preset" --output-on-failure -j "$(nproc)" "${select[@]}" "$@"
