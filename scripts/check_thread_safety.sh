#!/usr/bin/env bash
# Parses every source with clang: -Werror=thread-safety, and without precompiled headers, so that a missing #include shows.
# Compiles nothing. Prints the files it objects to; exit 1 if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset clang -DSLUICE_TESTS=ON -DSLUICE_BENCH=ON >/dev/null
ninja -C build/clang sluice_proto_files >/dev/null
# The compile commands of this tree's own sources (not of generated ones), a line each, to parse only.
/usr/bin/python3 - build/clang/compile_commands.json <<'EOF' | xargs -P "$(nproc)" -d '\n' -n 1 bash -c
import json, os, shlex, sys

done = set()
for entry in json.load(open(sys.argv[1])):
    source = os.path.relpath(entry["file"], os.getcwd())
    if source.startswith("build") or source in done:
        continue
    done.add(source)
    words = shlex.split(entry["command"])
    words = words[next(i for i, word in enumerate(words) if "clang++" in word):]  # without the launcher
    cut = words.index("-o")
    words[cut:cut + 2] = []
    words[words.index("-c")] = "-fsyntax-only"
    command = "cd %s && %s" % (shlex.quote(entry["directory"]), " ".join(map(shlex.quote, words)))
    print("%s || { echo %s: see above >&2; exit 255; }" % (command, shlex.quote(source)))
EOF
