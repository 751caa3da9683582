#!/usr/bin/env bash
# Runs deploy/docker-compose.yml on a real Docker engine, with the programs of build/release: trains, scales, kills
# containers, and takes all of it down again. Prints a line a check; minutes.
#
#   scripts/install_deps.sh deploy; deploy/test_compose.sh
#
# Exit codes: 0 passed, 1 failed, 2 not built, 77 skipped (no engine runs and none can be started; the reason is printed).
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/testing/checks.sh
. deploy/testing/engine.sh

programs=(sluice sluice-scheduler sluice-server sluice-worker)
for program in "${programs[@]}"; do
  [ -x "build/release/bin/$program" ] || { echo "test_compose.sh: build/release/bin/$program is missing; build first" >&2; exit 2; }
done
find_engine

# A project of its own, so that nobody's containers are touched.
work=$(mktemp -d /tmp/sluice-compose-XXXXXX)
at_exit "rm -rf $work"
export COMPOSE_PROJECT_NAME=sluicetest$$ SLUICE_IMAGE=sluice-test:$$ SLUICE_DATA=$work/data SLUICE_PORT
mkdir "$work/data"
cat README.md docs/*.md common/*.h >"$work/data/text.txt"
chmod a+rx "$work"
chmod -R a+rwX "$work/data"  # that it cannot be written from a container is the mount's doing alone
# A port that was free a moment ago; with an own engine nobody else is in its namespace.
SLUICE_PORT=$("${outside[@]}" python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# ---------------------------------------------------------------- image
# Where this machine is Debian 12 its own programs go into the image; elsewhere the image compiles them.
. /etc/os-release
started=$SECONDS
if [ "${VERSION_CODENAME:-}" = bookworm ]; then
  ninja -C build/release sluice-all >"$work/build.log" 2>&1 || failed "ninja sluice-all" "$work/build.log"
  install -D -t "$work/context/build/release/bin" build/release/bin/sluice-all
  cp -r deploy scripts .dockerignore "$work/context/"
  build=(--build-arg PREBUILT=yes "$work/context")
else
  build=(.)
fi
at_exit "docker image rm $SLUICE_IMAGE >/dev/null 2>&1"
docker build --network=host -f deploy/Dockerfile -t "$SLUICE_IMAGE" "${build[@]}" >"$work/build.log" 2>&1 ||
  failed "the image builds" "$work/build.log"
ok "the image builds: $((SECONDS - started)) s"
size=$((($(docker image inspect -f '{{.Size}}' "$SLUICE_IMAGE") - $(docker image inspect -f '{{.Size}}' debian:bookworm-slim)) / 100000))
# Debian's oneDNN alone is 40 MB of it (docs/deployment.md).
[ $size -le 600 ] || failed "the image is at most 60 MB larger than its base: $((size / 10)).$((size % 10)) MB"
ok "the image is at most 60 MB larger than its base: $((size / 10)).$((size % 10)) MB"

# ---------------------------------------------------------------- up
engine_run_phase
compose+=(-f deploy/docker-compose.yml)
at_exit '"${compose[@]}" down -v --remove-orphans >/dev/null 2>&1'
started=$SECONDS
up() { "${compose[@]}" up -d "$@" >"$work/up.log" 2>&1 || failed "compose up $*" "$work/up.log"; }
up --scale server=2 --scale worker=2
sluice() { "${outside[@]}" build/release/bin/sluice "$1" --scheduler "127.0.0.1:$SLUICE_PORT" "${@:2}"; }
explain() { { "${compose[@]}" ps; sluice status; sluice status latest; "${compose[@]}" logs --no-color --tail=30; } >"$work/state" 2>&1 || true; }
give_up() { explain; sed 's/^/        /' "$work/state"; failed "$1"; }
nodes() { sluice status --json 2>/dev/null | json "sum(n['role'] == '$1' for n in d['nodes'])"; }
has_nodes() { [ "$(nodes "$1")" = "$2" ]; }

wait_for 60 has_nodes SERVER 2 && wait_for 60 has_nodes WORKER 2 || give_up "2 servers and 2 workers register"

job() {  # job NAME ROUNDS
  cat >"$work/$1.yaml" <<SPEC
name: $1
model: {gpt2: {layers: 2, heads: 2, width: 64, context: 32}}
data: {text: {path: text.txt}}
train: {rounds: $2, batch: 8, eval_every: 0, eval_samples: 64}
optimizer: {adamw: {learning_rate: 1e-3}}
parallel: {data: 2}
checkpoint: {every_rounds: 50}
SPEC
  sluice submit "$work/$1.yaml" 2>"$work/submit.log" || failed "a job is submitted from outside" "$work/submit.log"
}
field() { sluice status "$1" --json 2>/dev/null | json "$2"; }
rounds_reach() { local done; done=$(field "$1" "d['rounds_done']"); [ "${done:-0}" -ge "$2" ]; }
is() { [ "$(field "$1" "d['state']")" = "$2" ]; }

first=$(job first 600)
wait_for 60 rounds_reach "$first" 1 || give_up "a job submitted from outside trains"
took=$((SECONDS - started))
[ $took -lt 60 ] || give_up "from compose up to the first round in under 60 s: $took s"
ok "from compose up to the first round in under 60 s: $took s"
sluice watch "$first" >"$work/first.log" 2>&1 || failed "the job succeeds" "$work/first.log"
loss=$(field "$first" "d['last_evaluation']['loss']")
python3 -c "import sys; sys.exit(not 0 < $loss < 4.5)" || give_up "the job learns: validation loss $loss is not below 4.5 (untrained: 5.5)"
ok "the job learns: validation loss $loss after 600 rounds (untrained: 5.5)"

all_healthy() {
  local ids
  ids=$("${compose[@]}" ps -q)
  [ -n "$ids" ] && ! docker inspect -f '{{.State.Health.Status}}' $ids | grep -qv '^healthy$'
}
wait_for 60 all_healthy || give_up "all containers are healthy"
ok "all containers are healthy"
container() { docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" --filter "label=com.docker.compose.service=$1" | head -n 1; }
[ "$(docker exec "$(container worker)" id -u)" = 7700 ] || give_up "daemons run as an ordinary user"
if docker exec "$(container worker)" touch /data/new 2>/dev/null; then give_up "the data mount is read-only"; fi
ok "daemons run as an ordinary user, with data read-only"

"${compose[@]}" exec -T worker sluice list >"$work/list.log" 2>&1 && grep -q "^$first " "$work/list.log" ||
  failed "the client in a container finds the scheduler" "$work/list.log"
ok "the client in a container finds the scheduler"

# ---------------------------------------------------------------- scaling and dying
# As many rounds as this machine trains in two minutes. Each time a container is killed the job must be running; where it is
# fast, it may be through by the time that is looked for.
rate=$(field "$first" "int(600 / (d['ended_unix_seconds'] - d['started_unix_seconds'])) + 1")
long=$(job long $((rate * 120)))
wait_for 60 rounds_reach "$long" 60 || give_up "a second job trains"

up --scale server=2 --scale worker=4
wait_for 60 has_nodes WORKER 4 || give_up "compose up --scale worker=4: four workers"
ok "compose up --scale worker=4: four workers, while a job trains"

container_at() {  # the container with an address, HOST:PORT
  docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" |
    xargs docker inspect -f '{{.Id}} {{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}' | grep -F " ${1%:*} " | cut -d' ' -f1
}
still_runs() { is "$long" RUNNING || give_up "a $1 is killed: the job was over before, as this machine got faster since the first job"; }
goes_on() { rounds_reach "$long" "$1" || is "$long" SUCCEEDED; }
# kill_at ROLE EXPRESSION: docker kill of the container at that address of the job's plan; then the job must go on.
kill_at() {
  local address generation before began=$SECONDS
  still_runs "$1"
  address=$(field "$long" "$2")
  generation=$(field "$long" "d['generation']")
  docker kill "$(container_at "$address")" >/dev/null || give_up "docker kill of the $1 at $address"
  newer() { local now; now=$(field "$long" "d['generation']"); [ "${now:-0}" -gt "$generation" ]; }
  wait_for 60 newer || give_up "a $1 is killed: a new generation is planned"
  before=$(field "$long" "d['rounds_done']")
  wait_for 60 goes_on $((before + 20)) || give_up "a $1 is killed: the job goes on"
  ok "a $1 container is killed: the job goes on (20 rounds later after $((SECONDS - began)) s)"
}
kill_at worker "d['plan']['ranks'][0]['address']"
kill_at server "d['plan']['chains'][0]['members'][0]['address']"

# A killed container stays down until somebody starts it again (docker's rule for docker kill).
still_runs scheduler
docker kill "$(container scheduler)" >/dev/null
up --scale server=2 --scale worker=4
wait_for 60 has_nodes SERVER 2 && wait_for 60 has_nodes WORKER 4 || give_up "the scheduler is killed, compose up: all nodes are back"
before=$(field "$long" "d['rounds_done']")
wait_for 60 goes_on $((before + 20)) || give_up "the scheduler is killed, compose up: the job goes on"
ok "the scheduler's container is killed, compose up: all nodes are back and the job goes on"

sluice watch "$long" >"$work/long.log" 2>&1 || give_up "the disturbed job succeeds"
ok "the disturbed job succeeds: $(field "$long" "str(d['rounds_done']) + ' rounds, ' + str(d['recoveries']) + ' recoveries, ' + str(d['rewinds']) + ' rewinds'")"

# ---------------------------------------------------------------- down
"${compose[@]}" down -v >"$work/down.log" 2>&1 || failed "compose down" "$work/down.log"
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || failed "compose down leaves no container"
ok "compose down leaves no container"
echo "$checks_passed passed, 0 failed in $SECONDS s"
