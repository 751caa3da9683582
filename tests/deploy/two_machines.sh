#!/usr/bin/env bash
# The lines of docs/two_machines.md, on two network namespaces joined by a cable (a veth pair) with the page's addresses.
#
#   tests/deploy/two_machines.sh [FOLDER OF THE PROGRAMS]      default: build/release/bin
#
# Two things are not as on the page: the programs and the example spec come from this tree, so the installing half of the first
# line is left out (deploy/test_deb.sh installs the package). Exit codes: 0 passed, 1 failed, 77 skipped with a reason.
set -euo pipefail
programs=$(realpath "${1:-$(dirname "$0")/../../build/release/bin}")
cd "$(dirname "$0")/../.."
source=$PWD
. deploy/testing/checks.sh

[ "$(id -u)" = 0 ] || skip "network namespaces take root"
for tool in ip nsenter; do command -v $tool >/dev/null || skip "$tool is not installed (iproute2, util-linux)"; done
[ -r /usr/share/common-licenses/GPL-3 ] || skip "the page's text, /usr/share/common-licenses/GPL-3, is not on this system"

work=$(mktemp -d /tmp/sluice-two-XXXXXX)
at_exit "rm -rf $work"
name=$(basename "$work")
namespace_of() { echo "$name-$1"; }

# ---------------------------------------------------------------- two hosts and a cable
end_host() {
  local pids
  pids=$(ip netns pids "$1" 2>/dev/null)
  [ -z "$pids" ] || kill $pids 2>/dev/null
  wait_for 20 no_process_in "$1" || kill -KILL $(ip netns pids "$1") 2>/dev/null
  ip netns del "$1" 2>/dev/null
}
no_process_in() { [ -z "$(ip netns pids "$1" 2>/dev/null)" ]; }
for host in A B; do
  ip netns add "$(namespace_of $host)" 2>"$work/error" || skip "a network namespace cannot be made: $(cat "$work/error")"
  at_exit "end_host $(namespace_of $host)"
  mkdir "$work/$host"
  echo "$host" >"$work/$host/machine-id"
done
ip link add cable netns "$(namespace_of A)" type veth peer name cable netns "$(namespace_of B)" 2>"$work/error" ||
  skip "a veth pair cannot be made: $(cat "$work/error")"
number=0
for host in A B; do
  number=$((number + 1))
  ip -n "$(namespace_of $host)" address add "10.0.0.$number/24" dev cable
  ip -n "$(namespace_of $host)" link set cable up
  ip -n "$(namespace_of $host)" link set lo up
done

# on HOST LINE: as typed at that host's prompt, in the host's own home folder; with a host name and a machine id of its own,
# so that nobody takes the two for one host. What stays in the foreground has four minutes.
on() {
  (cd "$work/$1" && PATH="$programs:$PATH" HOME="$work/$1" SLUICE_SCHEDULER='' \
    timeout --foreground 240 nsenter "--net=/run/netns/$(namespace_of "$1")" unshare --mount --uts bash -c \
    'hostname "$0"; [ ! -e /etc/machine-id ] || mount --bind machine-id /etc/machine-id; eval "$1"' "host-$1" "$2" \
    </dev/null >>"$work/$1.log" 2>&1)
}

# ---------------------------------------------------------------- the page's lines
grep -E '^    [AB](,[AB])?\$ ' docs/two_machines.md >"$work/lines" || true
[ "$(wc -l <"$work/lines")" = 6 ] || failed "docs/two_machines.md has six lines to type"
while read -r hosts line; do
  hosts=${hosts%\$}
  if [[ $line == *apt-get* ]]; then line=${line#*; }; fi
  line=${line//\/usr\/share\/sluice\/examples/$source/examples}
  for host in ${hosts//,/ }; do
    on "$host" "$line" || failed "on $host: $line" "$work/$host.log"
    ok "on $host: $line"
  done
done <"$work/lines"

# ---------------------------------------------------------------- what came of it
grep -q ' succeeded: 60 rounds' "$work/A.log" || failed "the job succeeded" "$work/A.log"
loss=$(sed -n 's/^validation loss //p' "$work/A.log" | tail -n 1)
python3 -c "import sys; sys.exit(not 0 < float('$loss') < 4.5)" || failed "it learned: validation loss $loss below 4.5 (untrained: 5.5)" "$work/A.log"
ok "the job succeeded and learned: validation loss $loss (untrained: 5.5)"
[ -s "$work/A/model/model.safetensors" ] && [ -s "$work/A/model/config.json" ] || failed "the model is exported"
ok "the model is exported"
addresses=$(cd "$work" && nsenter "--net=/run/netns/$(namespace_of A)" "$programs/sluice" status latest --json --scheduler 10.0.0.1 |
  json "' '.join(sorted(r['address'].split(':')[0] for r in d['plan']['ranks']))")
[ "$addresses" = "10.0.0.1 10.0.0.2" ] || failed "a worker on each host: $addresses"
ok "a worker on each host, the one that listens at 0.0.0.0 under its address on the cable: $addresses"
# B's worker pushes all gradients of 60 rounds, 0.8 million of 4 bytes each.
bytes=$(nsenter "--net=/run/netns/$(namespace_of A)" cat /proc/net/dev | awk '$1 == "cable:" {print $2}')
[ "${bytes:-0}" -gt 100000000 ] || failed "gradients crossed the cable: $bytes bytes"
ok "gradients crossed the cable: $((bytes / 1000000)) MB"
echo "$checks_passed passed, 0 failed in $SECONDS s"
