#!/usr/bin/env bash
# Installs what Sluice needs from Debian's packages, and only what is missing. Root (or sudo) is used for that alone.
#
#   scripts/install_deps.sh [build] [example] [test] [check] [accept] [deploy]     default: build
#
# build: compiler, libraries    example: the King James text    test: GoogleTest, gRPC for Python
# deploy: Docker's engine and what makes Debian trees, for the tests of deploy/
# check: clang with sanitizers, clang-format (CI's further checks)    accept: PyTorch and data sets that the acceptance runs compare with
set -euo pipefail

packages_of() {
  case "$1" in
    build) echo g++ cmake ninja-build ccache pkg-config protobuf-compiler protobuf-compiler-grpc libprotobuf-dev \
      libgrpc++-dev libabsl-dev libspdlog-dev libyaml-cpp-dev nlohmann-json3-dev libsqlite3-dev zlib1g-dev libdnnl-dev \
      libhwy-dev libutf8proc-dev libssl-dev ;;
    example) echo bible-kjv bible-kjv-text ;;
    test) echo libgtest-dev libgmock-dev python3-grpcio python3-protobuf python3-numpy ;;
    check) echo clang-19 libclang-rt-19-dev clang-format ;;
    accept) echo python3-torch python3-numpy libopenblas-openmp-dev dataset-fashion-mnist ;;
    deploy) echo docker.io docker-compose mmdebstrap iptables iproute2 util-linux dpkg-dev file python3 ;;
    *) echo "install_deps.sh: unknown group '$1' (build, example, test, check, accept, deploy)" >&2; return 2 ;;
  esac
}

missing=()
for group in "${@:-build}"; do
  list=$(packages_of "$group")
  for package in $list; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "dependencies: all installed (${*:-build})"
  exit 0
fi
echo "dependencies: installing ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install_deps.sh: run as root once, or install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
# Package lists may be absent or stale on a fresh machine.
install || { "${as_root[@]}" apt-get update -q >>"$log" 2>&1 && install; } || { cat "$log" >&2; exit 1; }
echo "dependencies: done"
