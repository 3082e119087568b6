#!/usr/bin/env bash
# DeepSpeed, or HF Trainer on it, with distributed attention, on the GPUs of one machine, in a container.
#
#   docker build -f containers/Dockerfile -t dfa-megatron .
#   examples/ngc/single_node_deepspeed.sh                                  # a tiny new Llama, to see that all works
#   DATA=$PWD/texts examples/ngc/single_node_deepspeed.sh \
#     --model Qwen/Qwen3-8B --data /workspace/data/book.txt --seq-length 131072
#
# docs/containers.md explains every variable.
set -euo pipefail

IMAGE=${IMAGE:-dfa-megatron}
GPUS=${GPUS:-8}
DATA=${DATA:-$PWD}
CONFIG=${CONFIG:-/opt/dfa_megatron/configs/deepspeed/zero3.json} # eight ranks share a sequence

exec docker run --rm --gpus all \
  --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --env NCCL_DEBUG="${NCCL_DEBUG:-WARN}" \
  --volume "$DATA":/workspace/data:ro \
  "$IMAGE" \
  torchrun --standalone --nproc-per-node "$GPUS" \
  "/opt/dfa_megatron/examples/deepspeed_transformers.py" --deepspeed_config "$CONFIG" "$@"
