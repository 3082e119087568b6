#!/usr/bin/env bash
# A subset of tests/megatron on the newest Megatron-Core that was tried, beside the one that is installed.
#   .ci/megatron_latest.sh [FOLDER]      FOLDER keeps the unpacked wheel (default: .venv/megatron-latest)
# ONLY_SET_UP=1 makes that folder and runs nothing.
# The wheel declares Python 3.12; unpacked and put on PYTHONPATH it also runs under 3.11 (see megatron_latest/sitecustomize.py).
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.19.2
python=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
python=${PYTHON:-$python}
folder=${1:-.venv/megatron-latest}

if [ ! -d "$folder/$version/megatron/core" ]; then
  mkdir -p "$folder"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --dest "$folder" "megatron-core==$version"
  "$python" -m zipfile -e "$folder"/megatron_core-"$version"-*.whl "$folder/$version"
fi
[ -z "${ONLY_SET_UP:-}" ] || exit 0
folder=$(cd "$folder" && pwd)

export PYTHONPATH="$folder/$version:$PWD/.ci/megatron_latest:$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Every second training of each kind, by turns from day to day: `make test` runs them all on the other version.
DFA_HALF=$((10#$(date +%j) % 2))
export OMP_NUM_THREADS=1 DFA_HALF
found=$("$python" -W ignore -c "import megatron.core; print(megatron.core.__version__)")
# Inside a git checkout Megatron-Core adds the checkout's commit to its version.
[ "${found%%+*}" = "$version" ] || { echo "megatron-core $found is imported, not $version" >&2; exit 1; }
echo "tests/megatron on megatron-core $version"
# Without what depends on Megatron-Core least: odd ranks of the same, exchanges alone, our benchmarks, code that 0.16 has
# too.
"$python" -m pytest -q -n 2 --dist loadgroup tests/megatron tests/contracts -k "not [odd-ranks] and not [one-rank] and not an_exchange and not test_benchmark and not dropout_elsewhere and not test_own_groups and not (test_door and tp2)"
