#!/usr/bin/env bash
# Megatron's pretrain_gpt.py with distributed attention, on the GPUs of one machine, in a container.
#
#   docker build -f containers/Dockerfile -t dfa-megatron .
#   git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM
#   MEGATRON=$PWD/Megatron-LM examples/ngc/single_node.sh [more flags, which win over the file]
#
# docs/containers.md explains every variable.
set -euo pipefail

MEGATRON=${MEGATRON:?the folder of a Megatron-LM clone}
IMAGE=${IMAGE:-dfa-megatron}
GPUS=${GPUS:-8}
CONFIG=${CONFIG:-/opt/dfa_megatron/configs/megatron/llama-3-8b.args}
TRAINING=${TRAINING:-/opt/dfa_megatron/configs/megatron/training/mock.args}

exec docker run --rm --gpus all \
  --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --env CUDA_DEVICE_MAX_CONNECTIONS=1 \
  --env NCCL_DEBUG="${NCCL_DEBUG:-WARN}" \
  --volume "$MEGATRON":/workspace/Megatron-LM:ro \
  "$IMAGE" \
  torchrun --standalone --nproc-per-node "$GPUS" \
  -m dfa_megatron.launch /workspace/Megatron-LM/pretrain_gpt.py "@$CONFIG" "@$TRAINING" \
  --context-parallel-size "$GPUS" "$@"
