#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py on your text, from a Hugging Face model's weights, without containers.
#
#   git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM
#   pip install -e . six pydantic pybind11 transformers tensorboard               # what its scripts need
#   MEGATRON=Megatron-LM TEXT=book.jsonl examples/pretrain.sh                     # the GPUs of this machine
#   MEGATRON=/shared/Megatron-LM TEXT=/shared/book.jsonl sbatch --nodes 2 --gpus-per-node 8 examples/pretrain.sh
#   WEIGHTS=/shared/qwen3-8b ... examples/pretrain.sh --train-iters 1000 --dfa-prove   # from converted weights; more flags
#
# Without Transformer Engine add --transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion
# --no-persist-layer-norm; without Apex too, Megatron's distributed optimizer trains, but does not load its checkpoint.
# Each line of TEXT is {"text": "..."}. WEIGHTS is a folder that Megatron-Bridge wrote:
#   python Megatron-Bridge/examples/conversion/convert_checkpoints.py import --hf-model Qwen/Qwen3-8B --megatron-path /shared/qwen3-8b
#SBATCH --job-name=dfa-pretrain
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

MEGATRON=$(realpath "${MEGATRON:?the folder of a Megatron-LM clone}")
TEXT=$(realpath "${TEXT:?a file with a JSON object a line}")
MODEL=${MODEL:-Qwen/Qwen3-8B}                      # its tokenizer
ARGS=${ARGS:-configs/megatron/qwen3-8b.args}       # its shape, by Megatron's flags
RUN=${RUN:-runs/pretrain}                          # data, checkpoints and TensorBoard's files
WEIGHTS=${WEIGHTS:-}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus | wc -l)}}
NODES=${SLURM_JOB_NUM_NODES:-1}
mkdir -p "$RUN" && RUN=$(realpath "$RUN")
export CUDA_DEVICE_MAX_CONNECTIONS=1               # Megatron asks for it on Hopper and before
export PYTHONPATH="$MEGATRON${PYTHONPATH:+:$PYTHONPATH}"  # the clone's own megatron.core, not an installed one

# Tokens, once: RUN/data_text_document.bin and .idx
if [ ! -e "$RUN/data_text_document.idx" ]; then
  python "$MEGATRON/tools/preprocess_data.py" --input "$TEXT" --output-prefix "$RUN/data" --append-eod --workers 8 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL"
fi

flags=(
  --context-parallel-size "$((NODES * GPUS))"      # all ranks share each sequence
  --data-path "$RUN/data_text_document" --tokenizer-model "$MODEL" --tensorboard-dir "$RUN/tensorboard"
  --save "$RUN/checkpoints" --load "$RUN/checkpoints"
)
if [ -n "$WEIGHTS" ] && [ ! -e "$RUN/checkpoints/latest_checkpointed_iteration.txt" ]; then
  flags+=(--pretrained-checkpoint "$WEIGHTS" --dist-ckpt-strictness log_unexpected)
fi

# The first lines of rank 0's log say that attention is distributed; docs/megatron.md explains the flags.
launch=(torchrun --nnodes "$NODES" --nproc-per-node "$GPUS")
if [ "$NODES" -gt 1 ]; then
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  launch=(srun --kill-on-bad-exit=1 "${launch[@]}" --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID")
fi
exec "${launch[@]}" -m dfa_megatron.launch "$MEGATRON/pretrain_gpt.py" \
  "@$ARGS" "@configs/megatron/training/pretrain.args" "${flags[@]}" "$@"
