#!/usr/bin/env bash
# Writes the locks anew from pyproject.toml and constraints.txt: every package that is installed, its version and its hashes. Needs uv.
#   locks/update.sh [--upgrade]      without --upgrade versions stay where they may
# PyTorch is in none of them: which build of it is right depends on the machine, and constraints.txt has its version.
set -euo pipefail
cd "$(dirname "$0")/.."

without=$(mktemp)
trap 'rm -f "$without"' EXIT
torch_needs=(filelock fsspec jinja2 networkx setuptools sympy typing-extensions) # on a CPU; a CUDA build brings its libraries itself

lock() { # NAME PACKAGES-LEFT-OUT, then arguments of uv; requirements may come from standard input
  # shellcheck disable=SC2086 # several names; uv takes the line for "never"
  printf '%s==0 ; python_version < "0"\n' $2 > "$without"
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
    --no-emit-find-links --custom-compile-command locks/update.sh --constraints constraints.txt --override "$without" \
    --output-file "locks/$1.txt" "${upgrade[@]}" "${@:3}"
}
upgrade=("$@")

# What NVIDIA's image has is dropped when it is built (containers/packages.py); its PyTorch and Triton are never ours.
lock ngc "torch triton" pyproject.toml --extra megatron --extra deepspeed --extra flash4-cu13 --extra examples
printf '%s\n' "${torch_needs[@]}" | lock cpu torch pyproject.toml --extra megatron --extra examples -
printf '%s\n' "${torch_needs[@]}" editables hatchling |
  lock dev torch pyproject.toml --extra megatron --extra examples --extra test --extra dev -
printf '%s\n' hatchling ninja setuptools wheel | lock build torch -
printf '%s\n' cyclonedx-bom pip-audit | lock tools torch -
