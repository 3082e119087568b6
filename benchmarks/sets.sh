#!/usr/bin/env bash
# Run a set of measurements, one after another, the most worth first:
#
#   benchmarks/sets.sh paper runs/paper                          # OUT gets NAME.log, and what a cell writes
#   benchmarks/sets.sh four-gpus runs/four paper-7b training     # some cells
#   LIST=1 benchmarks/sets.sh two-gpus runs/two                  # their commands
#
# Sets: paper (two GPUs), paper-toy (CPU), one-gpu, two-gpus, four-gpus, eight-gpus. PYTHON names the interpreter.
# A cell that runs over its seconds is ended. The status is 1 if a cell failed.
set -u
if [ $# -lt 2 ]; then sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; fi
SET=$1 OUT=$2 FAILED=0
shift 2
ONLY=" $* "
case $SET in
paper | two-gpus) GPUS=2 ;; paper-toy) GPUS=0 ;; one-gpu) GPUS=1 ;; four-gpus) GPUS=4 ;; eight-gpus) GPUS=8 ;;
*) echo "no set $SET: paper, paper-toy, one-gpu, two-gpus, four-gpus or eight-gpus" >&2; exit 2 ;;
esac
mkdir -p "$OUT"

# NAME SECONDS [VARIABLE=VALUE ...] COMMAND: {out} is OUT/NAME, {budget} the seconds less half a minute.
cell() {
    local name=$1 seconds=$2 begun=$SECONDS status
    shift 2
    set -- "${@//\{out\}/$OUT/$name}"
    set -- "${@//\{budget\}/$((seconds - 30))}"
    if [[ $ONLY != "  " && $ONLY != *" $name "* ]]; then return; fi
    if [ -n "${LIST:-}" ]; then echo "$name $seconds $*"; return; fi
    timeout -k 45 "$seconds" env "$@" >"$OUT/$name.log" 2>&1
    status=$?
    [ $status = 0 ] || FAILED=1
    echo "$name: status $status in $((SECONDS - begun)) s"
}

PY=${PYTHON:-python}
TORCHRUN="$PY -m torch.distributed.run --standalone --nproc-per-node $((GPUS ? GPUS : 2)) -m"
ATTENTION="$PY -m benchmarks.attention --ranks $GPUS --budget {budget} --out {out}"
LAYERS="$TORCHRUN benchmarks.megatron_layers --out {out}.json"
WHOLE="$LAYERS --modes tp-te-full te-full full remat --depth 1 --warmup 1"
HYBRID="$LAYERS --modes te te-full remat-te remat none --warmup 1 --repeats 3"
STEPS="$LAYERS --vocab-size 32768 --train 131072:4:3:remat 131072:4:3:full 131072:4:3:te-full"
LONGEST="$PY -m benchmarks.deepspeed_longest --gpus $GPUS --budget {budget} --out {out}.json"
PACKED="$TORCHRUN benchmarks.packed --out {out}.json --tokens-per-rank"
RECURRENCE="$PY -m benchmarks.recurrence --link-gbs 370 --out {out}.json"
HOSTS="NCCL_NET=Socket $TORCHRUN benchmarks.own_host benchmarks.attention --budget {budget} --out {out}"

gpu-tests() {
    cell gpu-tests 420 $PY -m pytest -q -m gpu -n 12 --dist loadgroup --support-report={out}.jsonl
}
everywhere() {
    gpu-tests
    cell packages 180 $ATTENTION --preset quick --baselines installed
    cell host-time 120 $TORCHRUN benchmarks.host_time --kernel flash4 --out {out}.json
    cell packed-8k 120 $PACKED 8192
    cell layers-in-a-row 200 $TORCHRUN benchmarks.layers --out {out}.json
}
paper() {
    cell paper-7b 160 $WHOLE --layers 32768:7b 131072:7b 262144:7b --repeats 3
    cell paper-33h 200 $WHOLE --repeats 3 --layers {32768,131072,262144}:{33h-as-34,33h-as-40,33h}
    cell paper-schedules 130 $ATTENTION --preset schedules
    cell paper-ablations 140 $ATTENTION --preset ablations --transport p2p copy_engine
    cell paper-gqa 160 $WHOLE --layers 32768:gqa 131072:gqa 262144:gqa --repeats 3
    cell paper-512k 230 $WHOLE --layers 524288:7b 524288:33h 524288:gqa --repeats 1
    cell paper-few-heads 200 $WHOLE --repeats 1 --layers {131072,524288}:{16,8,4,2}h
    cell paper-ulysses 200 $TORCHRUN benchmarks.deepspeed_training --shapes llama-3-8b 33-heads \
        --lengths 32768 131072 --budget 140 --out {out}.json
    cell paper-longest 230 $LONGEST --layers 1 --shortest 1048576 --methods dfa-remat ulysses-full
    cell paper-rsa 150 $ATTENTION --baselines ring_self_attention --repetitions 3 --seconds 0.2 --passes both \
        --seq-length 8192 16384 24576 28672 32768 36864 40960 65536 131072 262144 524288
}
trees() {
    cell masks 200 $TORCHRUN benchmarks.packed --masks all --heads 32 --tokens 32768 131072 --repetitions 7 \
        --out {out}.json
    cell tree-layers 120 $TORCHRUN benchmarks.tree_layers --out {out}.json
}
paper-toy() {
    cell toy-layers 90 $LAYERS --toy --layers 64:33h --depth 1 --modes tp-te-full tp-full full remat
    cell toy-ablations 90 $PY -m benchmarks.attention --ranks 2 --device cpu --seq-length 64 --heads 2 --head-dim 16 \
        --repetitions 2 --seconds 0 --kernel cpu --passes forward --out {out} --schedule ring balanced \
        --baselines ulysses --ablation none no_overlap
    cell toy-ulysses 90 DS_ACCELERATOR=cpu $TORCHRUN benchmarks.deepspeed_training --dry-run --shapes llama-3-8b \
        --out {out}.json
}
one-gpu() {
    gpu-tests
    cell host-time 120 $PY -m benchmarks.host_time --kernel flash4 --out {out}.json
    cell one-gpu 120 $ATTENTION --preset one_gpu
    cell recurrence 150 $RECURRENCE
    cell recurrence-forward 150 $RECURRENCE --no-backward
    cell fuzz 300 $PY -m tests.fuzz --device cuda --seconds 200 --out {out}.json
    trees
}
two-gpus() {
    everywhere
    cell automatic-nvlink 180 $ATTENTION --preset automatic
    cell automatic-no-link 180 NCCL_P2P_DISABLE=1 $ATTENTION --preset automatic
    cell automatic-sockets 240 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 $HOSTS --preset automatic
    cell hybrid 180 $HYBRID --layers 65536:qwen3-next
    cell megatron-layers 240 $LAYERS --layers 65536:8:14336 131072:8:14336 --warmup 1 --repeats 3
    cell megatron-training 300 $STEPS 524288:1:2:remat
    cell packed-32k 150 $PACKED 32768
    trees
}
four-gpus() {
    cell automatic 300 $ATTENTION --preset automatic --seq-length 8192 32768 65536 131072 524288
    cell packed-16k 120 $PACKED 16384
    cell layers 180 $LAYERS --layers 131072:8:14336 --warmup 1 --repeats 3
    cell training 240 $STEPS
    cell tp2-cp2 150 $LAYERS --layers 131072:8:14336 --tensor-model-parallel-size 2 --modes remat-te te-full \
        --warmup 1 --repeats 3
    cell hybrid 180 $HYBRID --layers 131072:qwen3-next
    cell two-hosts 180 RANKS_PER_HOST=2 $HOSTS --kv-heads 32 8 --schedule auto ring balanced_shared \
        --baselines ulysses pytorch
    everywhere
    paper
}
eight-gpus() {
    everywhere
    cell packed-16k 120 $PACKED 16384
    cell whole-llama 570 $LONGEST --layers 32 --shortest 1048576 --methods dfa-remat-host ulysses-full-host
    cell two-hosts 240 RANKS_PER_HOST=4 $HOSTS --preset automatic
    paper
}
$SET
exit $FAILED
