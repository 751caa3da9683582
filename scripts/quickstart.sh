#!/usr/bin/env bash
# From a fresh clone to a trained model: installs dependencies, builds, and trains examples/gpt_kjv.yaml with a scheduler,
# 2 servers and 2 workers as separate processes on this machine. Again: re-uses what is there and says so.
#
#   scripts/quickstart.sh [--set field=value ...]      further arguments go to `sluice local`
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

scripts/install_deps.sh build example

if [ -f build/release/build.ninja ]; then
  echo "build: re-using build/release"
else
  mkdir -p build
  cmake --preset release -DSLUICE_TESTS=OFF -DSLUICE_BENCH=OFF >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
fi
NINJA_STATUS='build: [%f/%t] ' ninja -C build/release sluice sluice-scheduler sluice-server sluice-worker

data=sluice-runs/data
text=$data/kjv.txt
if [ -s "$text" ]; then
  echo "data: re-using $text"
else
  mkdir -p "$data"
  # The verse marks at line starts ("Ge1:1 ") come off.
  bible -f gen1:1-rev22:21 | sed -E 's/^[^ ]+ //' >"$text.part"
  mv "$text.part" "$text"
  echo "data: wrote $text ($(wc -c <"$text") bytes)"
fi
echo "ready after $((SECONDS - started)) s; training (Ctrl-C stops it and says how to go on)"
exec build/release/bin/sluice local examples/gpt_kjv.yaml --set "data.text.path=$PWD/$text" --servers 2 --workers 2 "$@"
