#!/usr/bin/env bash
# The direction of dependencies: proto <- common <- {scheduler, server, worker}; those three never include each other;
# worker/{model,backend,data,parallel} include nothing else of worker/; client/ and bench/ may use those libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
forbid() {  # FOLDER PATTERN WHY
  local found
  found=$(grep -rnE "^#include \"($2)" "$1" --include='*.h' --include='*.cc' --include='*.inc' || true)
  if [ -n "$found" ]; then
    echo "$found"
    echo "  ^ $3"
    bad=1
  fi
}
forbid common '(scheduler|server|worker|client|bench|tests)/' 'common/ includes only common/ and proto/'
forbid scheduler '(server|worker|client|bench|tests)/' 'scheduler/ includes only scheduler/, common/ and proto/'
forbid server '(scheduler|worker|client|bench|tests)/' 'server/ includes only server/, common/ and proto/'
forbid worker '(scheduler|server|client|bench|tests)/' 'worker/ includes only worker/, common/ and proto/'
for library in model backend data parallel; do
  [ -d "worker/$library" ] || continue
  forbid "worker/$library" 'worker/[^/"]*\.h' "worker/$library is a library: nothing of the worker's runtime"
done
forbid client '(scheduler|server|bench|tests)/|worker/[^/"]*\.h' 'client/ uses common/ and worker/{model,backend,data}'
# Cores know no gRPC, no threads, no files.
for core in scheduler/*core*.{h,cc} server/shard_core.{h,cc} server/verdict.{h,cc} worker/round_core.{h,cc} worker/host_sum_core.{h,cc}; do
  [ -f "$core" ] || continue
  if grep -nE '^#include ("(common/(transport|grpc_transport|rpc|frame|file|session)\.h|.*\.grpc\.pb\.h)|<(thread|mutex|grpcpp/.*|fstream)>|"absl/synchronization)' "$core"; then
    echo "  ^ $core is a core: no gRPC, threads, locks or files"
    bad=1
  fi
done
[ $bad -eq 0 ] && echo "include direction: ok"
exit $bad
