"""Trains a GPT on real text with distributed attention over all ranks and beside it on one, and compares the losses.

    export PYTHONPATH=examples                                                        # the text comes from there
    torchrun --nproc-per-node 4 benchmarks/megatron_loss.py --out loss.json           # bfloat16, on GPUs
    torchrun --nproc-per-node 2 benchmarks/megatron_loss.py --toy --out toy.json      # on CPU, to see that it runs

A seed gives the initial weights; the text is the same for both. For each seed Megatron's GPTModel is trained thrice:

    sdpa, 1 rank     PyTorch's scaled_dot_product_attention in the same slot of the layer: nothing of this package
    ours, 1 rank     distributed attention over one rank
    ours, N ranks    over all ranks, each with one contiguous part of every sequence, with rematerialization

Runs on one rank go side by side, each rank with its own. In bfloat16 no two of them agree to the bit; that they differ
less than two seeds do is what is asked: the mean over the steps of |ours, N ranks - sdpa|, with the same seed, may not
be larger than that of |one seed - the other|, both sdpa. The exit status is 1 if it is. A picture is drawn beside OUT
where matplotlib is installed. CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron demands on Hopper, unless it is set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: the environment that Megatron demands.
from megatron_common import MODES, Shape, arrange, join, make_config, seed  # isort: skip
import torch
import torch.distributed as dist
from megatron_training import build, forward_step
from torch._C._distributed_c10d import HashStore

from dfa_megatron.doctor.machine import machine
from gpt.text import Tokens, open_tokens, sample

REFERENCE, ALONE = "sdpa, 1 rank", "ours, 1 rank"


class SdpaAttention(torch.nn.Module):
    """PyTorch's causal attention for Megatron's core_attention slot, grouped heads as they are; shapes as there."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(seq, batch, heads, head_dim) to (seq, batch, heads * head_dim)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank; return the exit status."""
    args = flags(argv)
    begin = time.perf_counter()
    tokens = open_tokens(args.data, vocab_size=args.vocab_size, seq_length=args.seq_length)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = [(kind, number) for number in args.seeds for kind in (REFERENCE, ALONE)]
    device = join_alone()
    curves = {run: train(args, tokens, device, *run) for run in alone[rank::ranks]}
    leave()
    together = f"ours, {ranks} ranks"
    join()
    arrange(1)
    for number in args.seeds:
        curves[together, number] = train(args, tokens, device, together, number)
    report: dict[str, Any] = {
        "machine": {"ranks": dist.get_world_size(), **machine()},
        "arguments": vars(args) | {"out": str(args.out)},
        "text": tokens.name,
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "runs": gather(curves, [*alone, *((together, number) for number in args.seeds)], args.train_iters),
    }
    report["summary"] = summary(report["runs"], together)
    report["seconds"] = round(time.perf_counter() - begin, 1)
    if rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        print(json.dumps(report["summary"], indent=1), flush=True)
        draw(report, args.out.with_suffix(".png"))
    dist.barrier()
    leave()
    return 0 if report["summary"]["within_two_seeds"] else 1


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; model and training flags are named as Megatron's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; a picture is written beside it")
    parser.add_argument("--toy", action="store_true", help="sizes that a CPU can do")
    parser.add_argument("--seeds", type=int, nargs=2, default=[1, 2], help="of the initial weights")
    parser.add_argument("--data", help="a text file, or the prefix of an indexed dataset (default: Python's manual)")
    parser.add_argument("--vocab-size", type=int, help="for an indexed dataset; a text is read byte by byte")
    sizes = {
        "--train-iters": (50, 4),
        "--seq-length": (16384, 96),
        "--num-layers": (8, 2),
        "--hidden-size": (2048, 32),
        "--num-attention-heads": (16, 4),
        "--num-query-groups": (4, 2),
        "--ffn-hidden-size": (5632, 48),
    }
    for name, (default, toy) in sizes.items():
        parser.add_argument(name, type=int, help=f"default {default}, with --toy {toy}")
    parser.add_argument("--lr", type=float, default=3e-4, help="after a tenth of the steps")
    parser.add_argument("--kernel", default="auto", help="as DistAttentionConfig takes it")
    parser.add_argument("--schedule", default="auto", help="as DistAttentionConfig takes it")
    args = parser.parse_args(argv)
    if args.seeds[0] == args.seeds[1]:
        parser.error("--seeds must be two different numbers")
    for name, choices in sizes.items():
        field = name[2:].replace("-", "_")
        if getattr(args, field) is None:
            setattr(args, field, choices[args.toy])
    return args


def join_alone() -> torch.device:
    """Make a world of this rank only: runs on one rank share nothing with those beside them."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=HashStore(), rank=0, world_size=1)
    device: torch.device = join()
    arrange(1)
    return device


def leave() -> None:
    """Out of Megatron's groups and the world, so that another can be joined."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(args: argparse.Namespace, tokens: Tokens, device: torch.device, kind: str, number: int) -> list[float]:
    """Return a sum over the initial weights, then the mean loss of every step; the same on all ranks of the world."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from dfa_megatron.megatron import distribute_attention

    seed(number)
    shape = Shape(args.hidden_size, args.num_attention_heads, args.num_query_groups, args.ffn_hidden_size)
    mode = MODES["none" if kind in (REFERENCE, ALONE) else "remat"]
    options = mode.options(args.kernel, args.schedule)
    config = make_config(shape, args.num_layers, mode, fusion=False)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if kind == REFERENCE:
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    else:
        spec = distribute_attention(spec, config, config=options)
    model, optimizer = build(config, spec, tokens.vocabulary, args.seq_length, lr=args.lr)
    curve = [sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())]
    for step in range(args.train_iters):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) * 10 / args.train_iters)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(tokens, args.seq_length, step, options, device),
            model=model,
            num_microbatches=1,
            seq_length=args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        total = reduced[0]["loss"].double().cpu()
        dist.all_reduce(total)
        curve.append((total[0] / total[1]).item())
    return curve


def batches(tokens: Tokens, length: int, step: int, options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield this rank's tokens of each step's sequence, which is the same in every run."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    whole = sample(tokens, length, seed=0, indices=[step])
    sharded = shard_batch(whole, parallel_state.get_context_parallel_group(), options)
    yield {name: part.contiguous().to(device) for name, part in sharded.items() if part is not None}


def gather(curves: dict[tuple[str, int], list[float]], runs: list[tuple[str, int]], steps: int) -> list[dict[str, Any]]:
    """Return all runs on every rank, each the mean over the ranks that know it.

    Raises:
        RuntimeError: two runs of a seed did not start from the same weights.
    """
    table = torch.zeros(len(runs), steps + 2, dtype=torch.float64)
    for place, run in enumerate(runs):
        if run in curves:
            table[place] = torch.tensor([1.0, *curves[run]])
    dist.all_reduce(table)
    table /= table[:, :1].clone()  # by how many ranks know it
    weights: dict[int, float] = {}
    for (kind, number), row in zip(runs, table.tolist(), strict=True):
        if abs(weights.setdefault(number, row[1]) - row[1]) > 1e-9 * row[1]:
            raise RuntimeError(f"{kind} with seed {number} started from other weights: {row[1]}, not {weights[number]}")
    return [
        {"attention": kind, "seed": number, "weights": row[1], "losses": row[2:]}
        for (kind, number), row in zip(runs, table.tolist(), strict=True)
    ]


def summary(runs: list[dict[str, Any]], together: str) -> dict[str, Any]:
    """Return how far runs are apart, over all steps: mean and largest difference of losses."""
    losses: dict[str, list[torch.Tensor]] = {}
    for run in runs:
        losses.setdefault(run["attention"], []).append(torch.tensor(run["losses"], dtype=torch.float64))
    one, other = losses[REFERENCE]

    def apart(kind: str) -> torch.Tensor:
        return torch.stack([(a - b).abs() for a, b in zip(losses[kind], losses[REFERENCE], strict=True)])

    found = {"two seeds": (one - other).abs(), together: apart(together), ALONE: apart(ALONE)}
    return {
        "mean_difference": {name: difference.mean().item() for name, difference in found.items()},
        "largest_difference": {name: difference.max().item() for name, difference in found.items()},
        "last_loss": {kind: [curve[-1].item() for curve in both] for kind, both in losses.items()},
        "within_two_seeds": bool(found[together].mean() <= found["two seeds"].mean()),
    }


def draw(report: dict[str, Any], out: Path) -> None:
    """Draw the losses, and below them the differences."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed", flush=True)
        return
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = {REFERENCE: ("0.6", "-", 4.0), ALONE: ("tab:orange", "-", 1.5)}
    seeds = sorted({run["seed"] for run in report["runs"]})
    reference = {run["seed"]: run["losses"] for run in report["runs"] if run["attention"] == REFERENCE}
    for run in report["runs"]:
        kind, number = run["attention"], run["seed"]
        color, line, width = styles.get(kind, ("tab:blue", "--", 1.5))
        first = number == seeds[0]
        steps = range(1, len(run["losses"]) + 1)
        above.plot(steps, run["losses"], line, color=color, linewidth=width, label=kind if first else None)
        if kind != REFERENCE:
            apart = [abs(a - b) for a, b in zip(run["losses"], reference[number], strict=True)]
            below.plot(steps, apart, line, color=color, linewidth=1, label=f"{kind} - {REFERENCE}" if first else None)
    spread = [abs(a - b) for a, b in zip(*reference.values(), strict=True)]
    below.plot(range(1, len(spread) + 1), spread, color="0.6", linewidth=4, label="one seed - the other")
    above.set(ylabel="loss", title=f"{report['text']}, {report['arguments']['seq_length']:,} tokens, {report['dtype']}")
    below.set(ylabel="difference", xlabel="step", yscale="log")
    for axes in (above, below):
        axes.legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
