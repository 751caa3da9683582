#!/usr/bin/env bash
# Makes the Debian package of build/release, installs it in a clean Debian 12 and trains there: by `sluice local`, and with
# the daemons started as their systemd units say. Prints a line a check; minutes.
#
#   scripts/install_deps.sh deploy; deploy/test_deb.sh
#
# Exit codes: 0 passed, 1 failed, 2 not built, 77 skipped (the reason is printed).
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/testing/checks.sh

programs=(sluice sluice-scheduler sluice-server sluice-worker)
for program in "${programs[@]}"; do
  [ -x "build/release/bin/$program" ] || { echo "test_deb.sh: build/release/bin/$program is missing; build first" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || skip "a chroot takes root"
. /etc/os-release
[ "${VERSION_CODENAME:-}" = bookworm ] || skip "the programs of this machine (${PRETTY_NAME:-unknown}) do not run on Debian 12"
for tool in cpack dpkg-shlibdeps mmdebstrap unshare ip; do
  command -v $tool >/dev/null || skip "$tool is not installed (scripts/install_deps.sh build deploy)"
done
work=$(mktemp -d /tmp/sluice-deb-XXXXXX)
root=$work/root
at_exit "rm -rf --one-file-system $work"

# ---------------------------------------------------------------- the package
(cd build/release && cpack -G DEB -B "$work/cpack") >"$work/cpack.log" 2>&1 || failed "cpack -G DEB makes a package" "$work/cpack.log"
package=("$work"/cpack/*.deb)
[ ${#package[@]} = 1 ] && [[ ${package[0]##*/} == sluice_*_amd64.deb ]] || failed "one package: ${package[*]##*/}"
ok "cpack -G DEB makes ${package[0]##*/}, $(($(stat -c %s "${package[0]}") / 1000)) kB"
depends=$(dpkg-deb -f "${package[0]}" Depends)
for library in libc6 libgrpc++1.51 libprotobuf32 libdnnl2 libsqlite3-0 passwd; do
  [[ ", $depends," =~ ,\ "$library"(\ \([^,]*\))?, ]] || failed "it depends on $library; Depends: $depends"
done
ok "it depends on the libraries that the programs are linked to"

# ---------------------------------------------------------------- a clean Debian 12
debian_base "$base_tar" || failed "a clean Debian 12 (mmdebstrap)" "$base_tar.log"
mkdir "$root"
tar -xf "$base_tar" -C "$root"
cp /etc/resolv.conf "$root/etc/"
cp "${package[0]}" "$root/tmp/"
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" && chmod +x "$root/usr/sbin/policy-rc.d"
# inside COMMAND...: in the chroot, with a /proc; whatever it leaves running ends with it. `alone` has also a loopback of its
# own, where port 7700 is free.
inside() { in_chroot true "$@"; }
alone() { in_chroot 'ip link set lo up' "$@"; }
in_chroot() {
  local net=()
  [ "$1" = true ] || net=(--net)
  timeout --foreground 300 unshare "${net[@]}" --mount --pid --fork --kill-child sh -c "$1"' && mount -t proc proc "$0/proc" &&
    exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "$@"' \
    "$root" "${@:2}" </dev/null
}
inside sh -c 'apt-get update -q && apt-get install -y -q --no-install-recommends /tmp/sluice_*.deb' >"$work/install.log" 2>&1 ||
  failed "it installs in a clean Debian 12" "$work/install.log"
ok "it installs in a clean Debian 12, with $(grep -c '^Setting up' "$work/install.log") packages"

# ---------------------------------------------------------------- programs, user, folders, units
for program in "${programs[@]}"; do
  inside "$program" --version >"$work/version" 2>&1 && grep -q '^sluice [0-9]' "$work/version" || failed "$program --version" "$work/version"
done
ok "all four programs run: $(head -n 1 "$work/version")"
[ "$(inside stat -c %U /var/lib/sluice/scheduler /var/lib/sluice/checkpoints | xargs)" = "sluice sluice" ] ||
  failed "user sluice owns /var/lib/sluice/scheduler and /var/lib/sluice/checkpoints"
[ -z "$(find "$root/etc/systemd/system" -name 'sluice*' 2>/dev/null)" ] || failed "no unit is enabled by installing"
[ "$(inside dpkg-query -W -f='${Conffiles}' sluice | grep -c /etc/default/sluice-)" = 3 ] || failed "/etc/default/sluice-* are conffiles"
ok "user, folders and configuration files are there, no unit is enabled"
inside apt-get install -y -q --no-install-recommends systemd >"$work/systemd.log" 2>&1 || failed "systemd installs beside it" "$work/systemd.log"
units=(sluice-scheduler.service sluice-server.service sluice-worker.service)
inside systemd-analyze verify --man=no "${units[@]}" >"$work/verify.log" 2>&1 || failed "systemd-analyze verify" "$work/verify.log"
! grep -i sluice "$work/verify.log" || failed "systemd-analyze verify finds nothing in the units" "$work/verify.log"
for unit in "${units[@]}"; do
  inside systemd-analyze security --offline=true --threshold=35 --no-pager "$unit" >"$work/security.log" 2>&1 ||
    failed "systemd-analyze security rates $unit at most 3.5" "$work/security.log"
done
ok "systemd-analyze: the units verify, exposure at most 3.5 of 10"

# ---------------------------------------------------------------- training there, as an ordinary user
small=(/usr/share/sluice/examples/gpt_kjv.yaml --set data.text.path=/tmp/text.txt --set train.rounds=20
  --set train.eval_every=0 --set train.eval_samples=50)
cp docs/protocol.md "$root/tmp/text.txt"
alone runuser -u sluice -- sh -c 'cd /tmp && mkdir run && cd run && exec sluice local "$@"' sh "${small[@]}" --sample_bytes 0 >"$work/local.log" 2>&1 ||
  failed "sluice local trains" "$work/local.log"
grep -q 'succeeded: 20 rounds' "$work/local.log" || failed "sluice local trains" "$work/local.log"
ok "sluice local trains 20 rounds as user sluice"

# The daemons as systemd would start them, with the environment files as installed; two workers for the example's two replicas.
# Flags that the units pass and the programs do not have end this at once.
cat >"$root/tmp/units.sh" <<'SCRIPT'
set -e
start() {
  OPTIONS=
  . /etc/default/$1
  command=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/$1.service)
  eval "exec_line=\"$command\""
  runuser -u sluice -- $exec_line >/tmp/$1-$2.log 2>&1 &
}
start sluice-scheduler 1
start sluice-server 1
start sluice-worker 1
start sluice-worker 2
cp /tmp/text.txt /var/lib/sluice/data/text.txt
sluice submit "$@" --set data.text.path=text.txt -f
sluice export latest /tmp/model
SCRIPT
alone sh /tmp/units.sh "${small[@]}" >"$work/units.log" 2>&1 ||
  { cat "$root"/tmp/sluice-*.log >>"$work/units.log"; failed "the daemons, started as their units say, train a job" "$work/units.log"; }
grep -q 'succeeded: 20 rounds' "$work/units.log" && [ -s "$root/tmp/model/model.safetensors" ] ||
  failed "the daemons, started as their units say, train a job" "$work/units.log"
ok "the daemons, started as their units say, train a job; its model is exported"

# ---------------------------------------------------------------- removal
inside apt-get purge -y -q sluice >"$work/purge.log" 2>&1 || failed "it is purged" "$work/purge.log"
left=$(find "$root/etc/default" "$root/usr/bin" "$root/usr/lib/systemd/system" "$root/var/lib/sluice/scheduler" -name 'sluice*' 2>/dev/null || true)
[ -z "$left" ] && [ ! -e "$root/var/lib/sluice/scheduler" ] || failed "purging leaves nothing but checkpoints: $left"
[ -n "$(ls "$root/var/lib/sluice/checkpoints")" ] || failed "purging keeps the checkpoints"
ok "purging leaves nothing but the checkpoints"
echo "$checks_passed passed, 0 failed in $SECONDS s"
