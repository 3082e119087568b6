"""The named sets of cells that `python -m benchmarks.cells` runs: each in order of worth, on so many GPUs."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, replace
from functools import cached_property

NEEDS = {
    "benchmarks.megatron_layers": ("megatron.core",),
    "benchmarks.tiled_loss": ("megatron.core",),
    "benchmarks.deepspeed_training": ("deepspeed", "transformers"),
    "benchmarks.deepspeed_longest": ("deepspeed", "transformers"),
    "benchmarks.host_time": ("flash_attn.cute",),
    "benchmarks.layers": ("flash_attn.cute",),
    "benchmarks.recurrence": ("fla",),
    "benchmarks.tree_layers": ("transformers",),
    "pytest": ("pytest", "xdist"),
}
"""Packages without which a module is not worth starting."""


@dataclass(frozen=True)
class Cell:
    """One command and what it needs.

    Attributes:
        name: of the cell, and of its files.
        text: the command as it would be typed, variables of its environment first, for no shell. `python` is this
            interpreter, `torchrun` as many ranks of this machine as GPUs, or two; `{gpus}` their number, `{out}` the
            cell's own path in the folder of results, `{budget}` the seconds less half a minute.
        seconds: after which it is ended.
        gpus: that it uses.
    """

    name: str
    text: str
    seconds: float
    gpus: int = 0

    @cached_property
    def environment(self) -> dict[str, str]:
        """Return the variables beside those of the caller."""
        words = itertools.takewhile(re.compile(r"\w+=").match, shlex.split(self.text))
        return dict(word.split("=", 1) for word in words)

    @cached_property
    def command(self) -> list[str]:
        """Return program and arguments."""
        given = {"{gpus}": [str(self.gpus)], "{budget}": [f"{self.seconds - 30:.0f}"]}
        given["torchrun"] = f"python -m torch.distributed.run --standalone --nproc-per-node {self.gpus or 2}".split()
        words = shlex.split(self.text)[len(self.environment) :]
        return [one for word in words for one in given.get(word, [word])]

    @property
    def packages(self) -> tuple[str, ...]:
        """Return modules that it imports."""
        return next((NEEDS[word] for word in self.command if word in NEEDS), ())


ATTENTION = "python -m benchmarks.attention --ranks {gpus} --budget {budget} --out {out}"
LAYERS = "torchrun -m benchmarks.megatron_layers --out {out}.json"
END_TO_END = f"{LAYERS} --modes tp-te-full te-full full remat --depth 1 --warmup 1"
HYBRID = f"{LAYERS} --modes te te-full remat-te remat none --warmup 1 --repeats 3"
STEPS = f"{LAYERS} --vocab-size 32768 --train 131072:4:3:remat 131072:4:3:full 131072:4:3:te-full"
LONGEST = "python -m benchmarks.deepspeed_longest --gpus {gpus} --budget {budget} --out {out}.json"
PACKED = "torchrun -m benchmarks.packed --out {out}.json --tokens-per-rank"
MASKS = "torchrun -m benchmarks.packed --masks all --heads 32 --repetitions 7 --out {out}.json"
RECURRENCE = "python -m benchmarks.recurrence --link-gbs 370 --out {out}.json"
HOSTS = "NCCL_NET=Socket torchrun -m benchmarks.own_host benchmarks.attention --budget {budget} --out {out}"
SOCKETS = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"
TINY = "--device cpu --seq-length 64 --heads 2 --head-dim 16 --repetitions 2 --seconds 0 --kernel cpu"

TREES = (
    Cell(
        "masks",
        "torchrun -m benchmarks.packed --masks all --heads 32 --tokens 32768 131072 --repetitions 7 --out {out}.json",
        200,
    ),
    Cell("tree-layers", "torchrun -m benchmarks.tree_layers --out {out}.json", 120),
)

EVERYWHERE = (
    Cell("gpu-tests", "python -m pytest -q -m gpu -n 12 --dist loadgroup --support-report {out}.jsonl", 420),
    Cell("packages", f"{ATTENTION} --preset quick --baselines installed", 180),
    Cell("host-time", "torchrun -m benchmarks.host_time --kernel flash4 --out {out}.json", 120),
    Cell("packed-8k", f"{PACKED} 8192", 120),
    Cell("layers-in-a-row", "torchrun -m benchmarks.layers --out {out}.json", 200),
)

PAPER = (
    Cell("paper-7b", f"{END_TO_END} --layers 32768:7b 131072:7b 262144:7b --repeats 3", 160),
    Cell("paper-33h", f"{END_TO_END} --repeats 3 --layers "
         + " ".join(f"{n * 1024}:{shape}" for n in (32, 128, 256) for shape in ("33h-as-34", "33h-as-40", "33h")), 200),
    Cell("paper-schedules", f"{ATTENTION} --preset schedules", 130),
    Cell("paper-ablations", f"{ATTENTION} --preset ablations --transport p2p copy_engine", 140),
    Cell("paper-gqa", f"{END_TO_END} --layers 32768:gqa 131072:gqa 262144:gqa --repeats 3", 160),
    Cell("paper-512k", f"{END_TO_END} --layers 524288:7b 524288:33h 524288:gqa --repeats 1", 230),
    Cell("paper-few-heads", f"{END_TO_END} --repeats 1 --layers "
         + " ".join(f"{n * 1024}:{heads}h" for n in (128, 512) for heads in (16, 8, 4, 2)), 200),
    Cell("paper-ulysses", "torchrun -m benchmarks.deepspeed_training --shapes llama-3-8b 33-heads "
         "--lengths 32768 131072 --budget 140 --out {out}.json", 200),
    Cell("paper-longest", f"{LONGEST} --layers 1 --shortest 1048576 --methods dfa-remat ulysses-full", 230),
    Cell("paper-rsa", f"{ATTENTION} --baselines ring_self_attention --repetitions 3 --seconds 0.2 --passes both "
         "--seq-length 8192 16384 24576 28672 32768 36864 40960 65536 131072 262144 524288", 150),
)  # fmt: skip

TOY = (
    Cell("toy-layers", f"{LAYERS} --toy --layers 64:33h --depth 1 --modes tp-te-full tp-full full remat", 90),
    Cell("toy-ablations", f"python -m benchmarks.attention --ranks 2 {TINY} --passes forward --out {{out}} "
         "--schedule ring balanced --baselines ulysses --ablation none no_overlap", 90),
    Cell("toy-ulysses", "DS_ACCELERATOR=cpu torchrun -m benchmarks.deepspeed_training --dry-run --shapes llama-3-8b "
         "--out {out}.json", 90),
)  # fmt: skip

ONE_GPU = (
    EVERYWHERE[0],
    Cell("host-time", "python -m benchmarks.host_time --kernel flash4 --out {out}.json", 120),
    Cell("tiled-loss", "torchrun -m benchmarks.tiled_loss --out {out}.json", 180),
    Cell("one-gpu", f"{ATTENTION} --preset one_gpu", 120),
    Cell("recurrence", RECURRENCE, 150),
    Cell("recurrence-forward", f"{RECURRENCE} --no-backward", 150),
    Cell("fuzz", "python -m tests.fuzz --device cuda --seconds 200 --out {out}.json", 300),
    *TREES,
)  # fmt: skip

TWO_GPUS = (
    *EVERYWHERE,
    Cell("automatic-nvlink", f"{ATTENTION} --preset automatic", 180),
    Cell("automatic-no-link", f"NCCL_P2P_DISABLE=1 {ATTENTION} --preset automatic", 180),
    Cell("automatic-sockets", f"{SOCKETS} {HOSTS} --preset automatic", 240),
    Cell("hybrid", f"{HYBRID} --layers 65536:qwen3-next", 180),
    Cell("tiled-loss", "torchrun -m benchmarks.tiled_loss --out {out}.json", 180),
    Cell("megatron-layers", f"{LAYERS} --layers 65536:8:14336 131072:8:14336 --warmup 1 --repeats 3", 240),
    Cell("megatron-training", f"{STEPS} 524288:1:2:remat", 300),
    Cell("packed-32k", f"{PACKED} 32768", 150),
    *TREES,
)

FOUR_GPUS = (
    Cell("automatic", f"{ATTENTION} --preset automatic --seq-length 8192 32768 65536 131072 524288", 300),
    Cell("packed-16k", f"{PACKED} 16384", 120),
    Cell("layers", f"{LAYERS} --layers 131072:8:14336 --warmup 1 --repeats 3", 180),
    Cell("training", STEPS, 240),
    Cell("tp2-cp2", f"{LAYERS} --layers 131072:8:14336 --tensor-model-parallel-size 2 --modes remat-te te-full "
         "--warmup 1 --repeats 3", 150),
    Cell("hybrid", f"{HYBRID} --layers 131072:qwen3-next", 180),
    Cell("two-hosts", f"RANKS_PER_HOST=2 {HOSTS} --kv-heads 32 8 --schedule auto ring balanced_shared --baselines "
         "ulysses pytorch", 180),
    *EVERYWHERE,
    *PAPER,
)  # fmt: skip

EIGHT_GPUS = (
    *EVERYWHERE,
    Cell("packed-16k", f"{PACKED} 16384", 120),
    Cell("whole-llama", f"{LONGEST} --layers 32 --shortest 1048576 --methods dfa-remat-host ulysses-full-host", 570),
    Cell("two-hosts", f"RANKS_PER_HOST=4 {HOSTS} --preset automatic", 240),
    *PAPER,
)

GPUS = {"paper": 2, "paper-toy": 0, "one-gpu": 1, "two-gpus": 2, "four-gpus": 4, "eight-gpus": 8}
SETS = {
    name: tuple(replace(cell, gpus=gpus) for cell in cells)
    for (name, gpus), cells in zip(GPUS.items(), (PAPER, TOY, ONE_GPU, TWO_GPUS, FOUR_GPUS, EIGHT_GPUS), strict=True)
}
"""Cells by the name of their set."""
