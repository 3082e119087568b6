#!/usr/bin/env bash
# examples/automodel_cp.py with NeMo Automodel: toy models on one process and on two and three ranks. By hand: it needs a
# virtual environment of its own, because it pins another transformers, and .ci/run does not call it.
#   .ci/automodel.sh [MODEL ...]      the names in tests/examples/automodel_models.py; all by default, minutes each
# ONLY_SET_UP=1 makes .venv/automodel and runs nothing. FLA's kernels, which need a GPU, are loops there.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.venv/automodel
needed=(torch numpy transformers==5.18.0 accelerate datasets einops pyyaml tiktoken torchdata triton)
alone=(nemo-automodel==0.7.0 flash-linear-attention==0.6.0 fla-core==0.6.0)  # they ask for what CUDA needs
wanted="${needed[*]} ${alone[*]}"
if [ "$(cat "$folder/.ready" 2>/dev/null)" != "$wanted" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" --constraint <(grep -v -e ^transformers -e ^accelerate constraints.txt) "${needed[@]}"
  "${pip[@]}" --no-deps "${alone[@]}"
  echo "$wanted" > "$folder/.ready"
fi
[ -z "${ONLY_SET_UP:-}" ] || exit 0

# Automodel compiles small functions, which takes longer than all the rest.
export PYTHONPATH="$PWD:$PWD/examples${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
"$folder/bin/python" -W ignore -m tests.examples.automodel_models "$@"
