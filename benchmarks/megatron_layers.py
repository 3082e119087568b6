"""Times Megatron-Core layers, and training steps of a Llama-shaped model, with distributed attention; writes JSON.

    torchrun --nproc-per-node 4 -m benchmarks.megatron_layers --out megatron.json
    torchrun --nproc-per-node 4 -m benchmarks.megatron_layers --layers 131072:8:14336 --train --out x.json
    torchrun --nproc-per-node 2 -m benchmarks.megatron_layers --toy --out toy.json     # on CPU, to see that it runs

Layers alone (`--layers LENGTH:KV_HEADS:FFN ...`, or `LENGTH:SHAPE`: 7b, gqa, 33h, 16h, 8h, 4h or 2h of the paper,
33h-as-34 and 33h-as-40 with the heads that 2 and 8 tensor-parallel GPUs pad to, or qwen3-next, whose gated delta nets
Megatron spreads by all-to-all): forward and backward of `--depth` layers, without embedding, head and optimizer, in
several modes:

    remat           ours; attention's output and lse are kept, the rest is recomputed
    remat-offload   the same, kept in pinned host memory
    remat-boundary  as remat, on Megatron's zigzag batches, whose ids travel to their place (training alone)
    full            ours with Megatron's full recomputation: attention runs twice
    none            ours without recomputation
    remat-te        as remat, among Transformer Engine's modules; -fp8: with its linear layers in 8 bits
    te, te-full     Transformer Engine's attention over a ring, without and with full recomputation
    tp-te-full      all GPUs share weights and heads (tensor and sequence parallelism); full recomputation
    tp-full         the same with Megatron's unfused attention, which runs without Transformer Engine

Modes that need nothing of ours come first, so that our memory does not count in their peaks. What a mode cannot do is
written with its reason. Each mode's attention is compared with float64 first, and a mode that is wrong is not timed.

Training (`--train LENGTH:LAYERS:STEPS:MODE ...`), in the same modes: GPTModel, DDP, the distributed optimizer and
random tokens; what does not fit is said so, and the next case goes on. CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron
demands on Hopper, unless it is set.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.correctness import too_far
from benchmarks.megatron_check import TOLERANCE, attention_errors
from benchmarks.megatron_common import (
    MODES,
    NAMED,
    Mode,
    Shape,
    arrange,
    attempt,
    described,
    join,
    make_config,
    make_spec,
    median_ms,
    peak_gib,
    refusal,
)
from benchmarks.surroundings import machine

LAYERS = ("65536:8:14336", "131072:8:14336", "131072:32:11008")
TRAINING = (
    "32768:8:30:remat", "32768:8:8:full",
    *(f"131072:4:5:{mode}" for mode in ("remat", "remat-boundary", "full", "none", "te-full", "te")),
    "262144:4:4:remat", "524288:2:2:remat", "1048576:2:1:remat",
)  # fmt: skip
CHECKED = 256
"""Tokens of each rank in the comparison with float64."""
LAYER_MODES = ("remat", "full", "none", "te", "te-full", "remat-te", "remat-te-fp8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank; return the exit status."""
    args = flags(argv)
    begin = time.perf_counter()
    device = join()
    report: dict[str, Any] = {
        "machine": {"ranks": dist.get_world_size(), **machine()},
        "arguments": vars(args) | {"out": str(args.out)},
    }
    report |= {"layers": [], "training": []}
    for phase in PHASES:
        for length, shape in args.layers:
            for mode in (MODES[name] for name in args.modes if phase(MODES[name])):
                run = partial(time_layers, args, shape, mode, length, device)
                figures = tried(args, mode, shape, run)
                note(report, "layers", {"mode": mode.name, "length": length, **described(shape), **figures}, args.out)
    for length, depth, steps, name in args.train:
        from benchmarks.megatron_training import train

        shape = Shape(args.hidden_size, args.heads, args.kv_heads, args.ffn_hidden_size)
        run = partial(train, args, shape, MODES[name], length, depth, steps, device)
        figures = tried(args, MODES[name], shape, run)
        case = {"mode": name, "length": length, "num_layers": depth, **described(shape)}
        note(report, "training", {**case, **figures}, args.out)
    report["seconds"] = round(time.perf_counter() - begin, 1)
    write(report, args.out)
    return 0


PHASES: tuple[Callable[[Mode], bool], ...] = (
    lambda mode: mode.tensor,
    lambda mode: not mode.tensor and mode.checkpoint is None,
    lambda mode: mode.checkpoint is not None,
)
"""Kinds of modes, in the order in which they run."""


def tried(args: argparse.Namespace, mode: Mode, shape: Shape, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a case's figures, or why there are none."""
    if why := refusal(mode, shape, dist.get_world_size()):
        return {"cannot": why}
    arrange(dist.get_world_size() if mode.tensor else args.tensor_model_parallel_size)
    return attempt(run)


def shape_of(args: argparse.Namespace, case: str) -> tuple[int, Shape]:
    """Return the length and the layers of `LENGTH:KV_HEADS:FFN` or `LENGTH:SHAPE`; --toy makes a shape narrow."""
    length, *rest = case.split(":")
    if len(rest) == 2:
        return int(length), Shape(args.hidden_size, args.heads, int(rest[0]), int(rest[1]))
    shape = NAMED[rest[0]]
    toy = replace(shape, hidden_size=8 * shape.heads, ffn=args.ffn_hidden_size, width=16 if shape.width else 0)
    return int(length), toy if args.toy else shape


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse them; --toy stands for sizes that a CPU can do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=None, metavar="LENGTH:KV_HEADS:FFN|LENGTH:SHAPE")
    parser.add_argument("--train", nargs="*", default=None, metavar="LENGTH:LAYERS:STEPS:MODE")
    parser.add_argument("--modes", nargs="*", default=list(LAYER_MODES), choices=tuple(MODES))
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8, help="of the trained model")
    parser.add_argument("--ffn-hidden-size", type=int, default=14336, help="of the trained model")
    parser.add_argument("--vocab-size", type=int, default=128256, help="of the trained model")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--depth", type=int, default=4, help="layers that are timed together")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fusion", action=argparse.BooleanOptionalAction, default=True, help="compile SwiGLU")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.toy:
        args.hidden_size, args.heads, args.kv_heads, args.ffn_hidden_size, args.vocab_size = 32, 4, 2, 48, 64
        args.warmup, args.repeats = 1, 2
    toy_layers, toy_training = ["48:2:48"], ["48:2:3:remat", "48:2:2:full"]
    layers = (toy_layers if args.toy else LAYERS) if args.layers is None else args.layers
    training = (toy_training if args.toy else TRAINING) if args.train is None else args.train
    args.layers = [shape_of(args, case) for case in layers]
    args.train = [(*(int(size) for size in case.split(":")[:3]), case.split(":")[3]) for case in training]
    return args


def note(report: dict[str, Any], part: str, result: dict[str, Any], out: Path) -> None:
    """Add a result, show it, and write what there is so far: a run that is cut short has its first cases."""
    report[part].append(result)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    write(report, out)


def write(report: dict[str, Any], out: Path) -> None:
    """Rank 0 writes the report."""
    if dist.get_rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1, default=str) + "\n")


def time_layers(
    args: argparse.Namespace, shape: Shape, mode: Mode, length: int, device: torch.device
) -> dict[str, Any]:
    """Return milliseconds per layer, both passes, and the peak memory in GiB with weights and gradients.

    Where the attention is not that of float64, return what is wrong.
    """
    block, table = build_layers(args, shape, mode, length, device)
    errors = attention_errors(block, shape, mode, CHECKED * dist.get_world_size())
    if why := too_far(errors, TOLERANCE[block.config.params_dtype]):
        return {"wrong": why}
    rows = length // dist.get_world_size()  # under sequence parallelism tensor-parallel ranks share a part's rows
    hidden = torch.randn(rows, 1, shape.hidden_size, device=device, dtype=block.config.params_dtype)
    gradient = torch.randn_like(hidden)

    def step() -> None:
        for parameter in block.parameters():
            parameter.grad = None
        block(hidden.requires_grad_(), None, rotary_pos_emb=table).backward(gradient)
        hidden.grad = None

    block.train()
    peak_gib(reset=True)
    elapsed = median_ms(step, warmup=args.warmup, repeats=args.repeats) / args.depth
    useful = 3 * shape.layer_flop(length) / dist.get_world_size()
    rate = {} if shape.hybrid else {"tflops_per_gpu": round(useful / elapsed / 1e9, 1)}
    error = float(f"{max(errors.values()):.2e}")
    return {"ms_per_layer": round(elapsed, 3), **rate, "peak_gib": round(peak_gib(), 2), "attention_error": error}


def build_layers(args: argparse.Namespace, shape: Shape, mode: Mode, length: int, device: torch.device) -> Any:
    """Return Megatron's block of layers, and the table of its rotary positions."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    from dfa_megatron.megatron import declare_batch_layout

    group = parallel_state.get_context_parallel_group()
    config = make_config(shape, args.depth, mode, fusion=args.fusion)
    options = mode.options(args.kernel, args.schedule)
    declare_batch_layout(group, "contiguous" if options is not None and mode.layout == "contiguous" else "zigzag")
    block = TransformerBlock(
        config,
        make_spec(config, mode, options),
        post_layer_norm=False,
        post_process=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(device, config.params_dtype)
    rotary = RotaryEmbedding(shape.head_dim, 1.0, rotary_base=500000, use_cpu_initialization=True, cp_group=group)
    return block, rotary.to(device)(length)


if __name__ == "__main__":
    status = main()
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(status)
