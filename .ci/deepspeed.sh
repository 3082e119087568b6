#!/usr/bin/env bash
# tests/huggingface and tests/deepspeed with both packages installed; `make test` skips them, because it installs neither.
#   .ci/deepspeed.sh [FOLDER]      FOLDER keeps the virtual environment (default: .venv/deepspeed), which adds to the first one
# ONLY_SET_UP=1 makes that folder and runs nothing. At the end every refusal of both must have been met by a test.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
python=${PYTHON:-$python}
folder=${1:-.venv/deepspeed}

packages=(deepspeed transformers accelerate peft trl)
wanted=$(cat constraints.txt && echo "${packages[*]}")
if [ "$(cat "$folder/.ready" 2>/dev/null)" != "$wanted" ]; then
  "$python" -m venv "$folder"
  site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  "$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/first.pth"
  DS_BUILD_OPS=0 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    "${packages[@]}"
  echo "$wanted" > "$folder/.ready"
fi
[ -z "${ONLY_SET_UP:-}" ] || exit 0

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
"$folder/bin/python" -W ignore -c \
  "import deepspeed, transformers; print(f'DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}')"
# Every second one of the trainings that are compared with one process, by turns from day to day.
DFA_HALF=$((10#$(date +%j) % 2))
DFA_REACHED=$(mktemp -d)
export DFA_HALF DFA_REACHED
trap 'rm -r "$DFA_REACHED"' EXIT
"$folder/bin/python" -m pytest -q -n 2 --dist loadgroup tests/huggingface tests/deepspeed tests/contracts \
  tests/examples -k "not own_model and not megatron_loop and not main_job and not notebook and not torchrun_ends"
"$folder/bin/python" -m tests.support.reached "$DFA_REACHED" deepspeed huggingface
