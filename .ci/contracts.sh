#!/usr/bin/env bash
# What the package relies on in its frameworks (tests/contracts), over every supported version; nothing is installed.
#   .ci/contracts.sh [FOLDER]      FOLDER keeps the unpacked wheels (default: .venv/frameworks)
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
folder=${1:-.venv/frameworks}
status=0
check() {  # check PACKAGE==VERSION MODULE ...
  local place=$folder/$1
  if [ ! -d "$place" ]; then
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --python-version 3.12 \
      --implementation cp --platform manylinux_2_28_x86_64 --platform any --only-binary=:all: --dest "$place.wheel" "$1" ||
      { status=1; return; }
    "$python" -m zipfile -e "$place.wheel"/*.whl "$place"
  fi
  echo "== $1"
  "$python" -m tests.contracts "${@:2}" || status=1
}

check megatron-core==0.16.1 "megatron.core=$folder/megatron-core==0.16.1"
for version in 0.19.0 0.19.2; do
  place=$folder/megatron-core==$version
  check "megatron-core==$version" "megatron.core=$place" "megatron.training=$place"
done
for version in 5.0.0 5.8.0 5.16.0 5.23.0 5.24.0; do
  check "transformers==$version" "transformers=$folder/transformers==$version"
done
for version in 1.13.0 1.15.0; do
  check "accelerate==$version" "accelerate=$folder/accelerate==$version"
done
exit "$status"
