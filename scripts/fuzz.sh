#!/usr/bin/env bash
# Fuzzes what takes bytes from peers (tests/fuzz) with libFuzzer, address and undefined-behaviour sanitizers, for SECONDS in
# all (default 60). Found inputs are kept in build/fuzz/corpus for the next run, failing ones in build/fuzz/failures.
#
#   scripts/fuzz.sh [SECONDS] [PROGRAM...]      programs: frame server
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
[[ $seconds =~ ^[0-9]+$ ]] && [ "$seconds" -gt 0 ] || { echo "usage: scripts/fuzz.sh [SECONDS] [frame|server ...]" >&2; exit 2; }
programs=("${@:2}")
[ ${#programs[@]} -gt 0 ] || programs=(frame server)
scripts/install_deps.sh build check
cmake --preset fuzz >/dev/null
NINJA_STATUS='build: [%f/%t] ' ninja -C build/fuzz fuzz
folder=build/fuzz
mkdir -p $folder/failures
$folder/bin/fuzz_corpus $folder/corpus
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
each=$(((seconds + ${#programs[@]} - 1) / ${#programs[@]}))
for program in "${programs[@]}"; do
  log=$folder/$program.log
  if ! $folder/bin/${program}_fuzz -max_total_time=$each -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -artifact_prefix=$folder/failures/$program- $folder/corpus/$program >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "fuzz: $program FAILED; again with: $folder/bin/${program}_fuzz $(ls -t $folder/failures/$program-* 2>/dev/null | head -n 1)" >&2
    exit 1
  fi
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  covered=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1)
  echo "fuzz: $program: $runs inputs in $each s, ${covered/cov: /} edges covered, no failure"
  [ "${runs:-0}" -gt 1000 ] || { echo "fuzz: $program: only ${runs:-0} inputs; see $log" >&2; exit 1; }
done
