# Sourced after checks.sh: a Docker engine to test with. find_engine takes the one that runs, or makes one of its own that
# does not touch this machine's firewall and network:
#   build phase    a daemon on the host's network without bridge and firewall rules: images are built with --network=host
#   run phase      a daemon on the same images in a network namespace of its own, where bridges and published ports live
#
# Afterwards: docker, compose and outside (a prefix for commands that use published ports), as arrays.

engine_home="" engine_namespace="" engine_pid=""
docker=(docker) compose=() outside=()

find_compose() {
  if "${docker[@]}" compose version >/dev/null 2>&1; then
    compose=("${docker[@]}" compose)
  elif command -v docker-compose >/dev/null; then
    compose=(docker-compose)
  else
    skip "neither docker compose nor docker-compose is installed (scripts/install_deps.sh deploy)"
  fi
}

start_daemon() {  # start_daemon PREFIX... -- FLAGS...
  local prefix=()
  while [ "$1" != -- ]; do prefix+=("$1"); shift; done
  shift
  # --storage-driver is the daemon's choice; the socket's path must stay short.
  "${prefix[@]}" dockerd --data-root "$engine_home/data" --exec-root "$engine_home/exec" --pidfile "$engine_home/pid" \
    -H "unix://$engine_home/socket" "$@" >"$engine_home/log" 2>&1 &
  engine_pid=$!
  wait_for 60 daemon_answers_or_died && docker version >/dev/null 2>&1 && return 0
  tail -n 5 "$engine_home/log" | sed 's/^/        /'
  skip "an engine could not be started here (its last lines are above)"
}
daemon_answers_or_died() { not_running "$engine_pid" || docker version >/dev/null 2>&1; }

stop_daemon() {
  [ -n "$engine_pid" ] || return 0
  end_process "$engine_pid"
  wait "$engine_pid" 2>/dev/null || true
  engine_pid=""
}

remove_engine() {
  stop_daemon
  [ -z "$engine_namespace" ] || ip netns del "$engine_namespace" 2>/dev/null
  # Whatever a daemon that had to be killed left mounted.
  awk -v home="$engine_home/" 'index($2, home) == 1 {print $2}' /proc/mounts | sort -r | xargs -r umount -l 2>/dev/null
  rm -rf "$engine_home"
}

# After it images can be built. With an own engine the base image is imported as debian:bookworm-slim.
find_engine() {
  if docker info >/dev/null 2>&1; then
    find_compose
    ok "engine: the one that runs here, $("${docker[@]}" version -f '{{.Server.Version}}')"
    return 0
  fi
  local tool
  for tool in dockerd docker mmdebstrap nsenter ip iptables; do
    command -v $tool >/dev/null || skip "no engine runs, and $tool to start one is not installed (scripts/install_deps.sh deploy)"
  done
  [ "$(id -u)" = 0 ] || skip "no engine runs, and starting one takes root"
  find_compose
  engine_home=$(mktemp -d /tmp/sluice-engine-XXXXXX)
  engine_namespace=$(basename "$engine_home")
  export DOCKER_HOST=unix://$engine_home/socket
  at_exit remove_engine
  start_daemon -- --iptables=false --ip-forward=false --ip-masq=false --bridge=none
  debian_base "$base_tar" || failed "a Debian 12 to build upon (mmdebstrap)" "$base_tar.log"
  docker import "$base_tar" debian:bookworm-slim >/dev/null
  ok "engine: an own one, $(docker version -f '{{.Server.Version}}'), with a base image by mmdebstrap"
}

# After it containers can run: nothing to do with an engine that was there.
engine_run_phase() {
  [ -n "$engine_home" ] || return 0
  stop_daemon
  ip netns add "$engine_namespace"
  ip -n "$engine_namespace" link set lo up
  outside=(nsenter "--net=/run/netns/$engine_namespace")
  start_daemon "${outside[@]}" --
}
