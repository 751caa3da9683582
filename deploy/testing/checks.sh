# Sourced by the deployment's test scripts: one line a check, clean-up in every case, and a Debian 12 to test in.
#
# Exit codes of these scripts: 0 all checks passed, 1 one failed, 77 skipped (the reason is printed).

checks_passed=0
cleanups=()

skip() { echo "SKIPPED: $*"; exit 77; }
ok() { checks_passed=$((checks_passed + 1)); printf 'ok      %s\n' "$*"; }
# What failed, and a file whose end explains it.
failed() {
  printf 'FAILED  %s\n' "$1"
  [ $# -lt 2 ] || [ ! -s "$2" ] || tail -n 40 "$2" | sed 's/^/        /'
  exit 1
}

# Run at the end, last one first; each a command line.
at_exit() { cleanups+=("$1"); }
run_cleanups() {
  local code=$? i
  trap '' INT TERM
  set +e
  for ((i = ${#cleanups[@]} - 1; i >= 0; i--)); do eval "${cleanups[i]}"; done
  exit "$code"
}
trap run_cleanups EXIT
trap 'exit 130' INT TERM

# wait_for SECONDS COMMAND...: until COMMAND succeeds; fails when the time is over.
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.2
  done
}

# Ends a process that this script started, and waits for it.
end_process() {
  kill "$1" 2>/dev/null || return 0
  wait_for 20 not_running "$1" || kill -KILL "$1" 2>/dev/null
  return 0
}
not_running() { ! kill -0 "$1" 2>/dev/null; }

# debian_base FILE: a tar of a minimal Debian 12, made once and kept in build/deploy for all scripts.
debian_base() {
  [ -s "$1" ] && return 0
  mkdir -p "$(dirname "$1")"
  at_exit "rm -f $1.part.$$"
  mmdebstrap --quiet --format=tar --variant=minbase bookworm "$1.part.$$" >"$1.log" 2>&1 || return 1
  mv "$1.part.$$" "$1"
}
base_tar=build/deploy/debian-bookworm.tar

# json EXPRESSION: of the object on stdin, called d; empty where it cannot be read.
json() { python3 -c 'import json, sys
try: d = json.load(sys.stdin)
except ValueError: sys.exit()
print('"$1"')'; }
