#!/usr/bin/env bash
# Measures what a subject promises and prints a row per number: what, target, measured, ok / SHORT / NOISY; exit 1 when one is
# SHORT. It measures; it never loosens a target.
#
#   scripts/accept.sh SUBJECT [--quick] [--only PART[,PART]] [--json FILE] [--keep]      subjects: one-job in-and-out data-path parallel
#
# --quick fails on a wrong result always, on a speed only below 0.7 of its target, and leaves out what takes long.
set -euo pipefail
cd "$(dirname "$0")/.."
subject=${1:-}
case "$subject" in
  one-job | in-and-out | data-path | parallel) ;;
  *) echo "usage: scripts/accept.sh one-job|in-and-out|data-path|parallel [--quick] [--only PART[,PART]] [--json FILE] [--keep]" >&2; exit 2 ;;
esac
shift
groups=(build test example accept)
[ "$subject" != in-and-out ] || groups+=(deploy)
scripts/install_deps.sh "${groups[@]}" >&2
cmake --preset release -DSLUICE_TESTS=ON -DSLUICE_BENCH=ON >/dev/null
NINJA_STATUS='build: [%f/%t] ' ninja -C build/release >&2
exec /usr/bin/python3 "scripts/accept/${subject//-/_}.py" "$@"
