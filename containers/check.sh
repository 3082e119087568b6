#!/bin/sh
# What is to be true inside an image; ends at the first thing that is not. It needs no GPU, and says what it finds of one.
#
#   docker run --rm --volume "$PWD/containers:/checks:ro" dfa-megatron sh /checks/check.sh
#   docker run --rm --volume "$PWD/containers:/checks:ro" dfa-megatron:cpu sh /checks/check.sh cpu
set -eu

[ "$(id -u)" -ne 0 ] || { echo "the user is root" >&2; exit 1; }
touch written && rm written
dfa-megatron plan --ranks 2 --seq-length 64 > /dev/null # the health check's command
python3 -W ignore -c "import torch, megatron.core, matplotlib, rich; print('PyTorch', torch.__version__, 'Megatron-Core', megatron.core.__version__)"
if [ "${1:-ngc}" = ngc ]; then
  python3 -W ignore -c "import deepspeed, transformers, accelerate; print('DeepSpeed', deepspeed.__version__, 'transformers', transformers.__version__)"
  python3 -W ignore -c "import dfa_megatron.deepspeed, dfa_megatron.huggingface, dfa_megatron.megatron"
  python3 -W ignore -c "import flash_attn.cute, importlib.metadata as of; print('flash-attn-4', of.version('flash-attn-4'))"
fi
dfa-megatron doctor
