"""Times packs that are cut zigzag document by document, as Megatron's scripts cut them, beside Transformer Engine.

    torchrun --nproc-per-node 2 -m benchmarks.packed_zigzag --tokens-per-rank 8192 --out packed_zigzag.json

Documents are log-normal, of any length, and padded to multiples of 2P. All methods get the same tokens:

    dfa inside        ours on tokens in order, as the layers of a model see them in layout `boundary`
    dfa boundary      ours with an exchange of q, k, v before each call and of its result after
    te KIND           Transformer Engine's DotProductAttention, format thd, with this cp_comm_type
    exchange          hidden states to tokens in order and back, which a model pays once around all its layers

Each is compared with float64 of each document first, and is not timed if it is wrong. Times are of the slowest rank,
forward and backward, the median over repetitions in turns; the file has every row that is there, after each round.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import version_of
from benchmarks.attention.baselines.transformer_engine import communicators
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import NAMES, too_far
from benchmarks.attention.failures import Failure, together
from benchmarks.documents import draw_documents, log_normal
from benchmarks.packed import BOTH, TOLERANCE, Attend, draw_inputs, exact_of, parser_of, relative
from benchmarks.surroundings import machine
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from dfa_megatron.megatron.tokens.exchange import Relayout, plan_exchange

ROUNDS = 4


@dataclass(frozen=True)
class Method:
    """start: a pack -> the attention of this rank's tokens. in_order: the tokens are those inside the layers."""

    name: str
    start: Callable[[DocumentOrder], Attend]
    in_order: bool


def draw_pack(args: argparse.Namespace, tokens: int, ranks: int) -> DocumentOrder:
    """Return padded documents of `tokens` together; each has up to 2P - 1 tokens of padding."""
    padded = draw_documents(tokens, 2 * ranks, args.seed, log_normal(args.mean, args.sigma))
    draw = random.Random(args.seed)
    real = accumulate((hi - lo - draw.randrange(2 * ranks) for lo, hi in pairwise(padded)), initial=0)
    return DocumentOrder.of(tuple(real), padded, ranks)


def places(pack: DocumentOrder, world: World, *, in_order: bool) -> torch.Tensor:
    """Return where this rank's tokens are in the row of all real tokens and then all padding."""
    rows = torch.arange(pack.padded[-1]).chunk(world.size)[world.rank]
    return (rows if in_order else pack.positions(world.size, world.rank)).to(world.device)


def our_methods(args: argparse.Namespace, world: World) -> list[Method]:
    """Return ours inside the layers, and with the exchange around each call."""
    config, relayout = DistAttentionConfig(kernel=args.kernel), Relayout(dist.group.WORLD)

    def inside(pack: DocumentOrder) -> Attend:
        offsets = pack.inside(world.size)
        return lambda q, k, v: dist_flash_attn_varlen_func(q, k, v, offsets, causal=True, config=config)  # type: ignore[return-value]

    def boundary(pack: DocumentOrder) -> Attend:
        attend = inside(pack)

        def exchanged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = relayout(torch.cat((q, k, v), 1), pack, "contiguous")
            parts = rows.split((q.shape[1], k.shape[1], v.shape[1]), 1)
            return relayout(attend(*(part.contiguous() for part in parts)), "contiguous", pack)

        return exchanged

    return [Method("dfa inside", inside, in_order=True), Method("dfa boundary", boundary, in_order=False)]


def their_method(args: argparse.Namespace, world: World, kind: str) -> Method:
    """Return Transformer Engine's attention with a cp_comm_type."""

    def start(pack: DocumentOrder) -> Attend:
        version_of("transformer-engine")
        if not world.cuda:
            raise UnsupportedError("TransformerEngine on a CPU", "its kernels are CUDA", "GPUs")
        from transformer_engine.pytorch import DotProductAttention

        attention = DotProductAttention(
            args.heads,
            args.head_dim,
            num_gqa_groups=args.kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        group, stream = communicators(kind, world)
        attention.set_context_parallel_group(group, list(range(world.size)), stream, kind)
        real, padded = (torch.tensor(x, dtype=torch.int32, device=world.device) for x in (pack.real, pack.padded))
        longest = max(hi - lo for lo, hi in pairwise(pack.padded))
        documents: dict[str, Any] = {f"cu_seqlens_{side}": real for side in ("q", "kv")}
        documents |= {f"cu_seqlens_{side}_padded": padded for side in ("q", "kv")}
        documents |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return lambda q, k, v: attention(q, k, v, **documents).view(q.shape)

    return Method(f"te {kind}", start, in_order=False)


def exchange_method(world: World) -> Method:
    """Return the exchange of hidden states there and back."""
    relayout = Relayout(dist.group.WORLD)

    def start(pack: DocumentOrder) -> Attend:
        return lambda q, k, v: relayout(relayout(q.flatten(1), pack, "contiguous"), "contiguous", pack).view(q.shape)

    return Method("exchange", start, in_order=False)


def sent_mib(args: argparse.Namespace, pack: DocumentOrder, world: World) -> float:
    """Return what this rank sends in one exchange of hidden states; forward and backward have two each."""
    plan = plan_exchange(pack, "contiguous", pack.padded[-1], world.size, world.rank)
    rows = sum(count for rank, count in enumerate(plan.send_counts) if rank != world.rank)
    item = getattr(torch, args.dtype).itemsize
    return world.slowest([rows * args.heads * args.head_dim * item / 2**20])[0]


def own_part(
    method: Method, args: argparse.Namespace, pack: DocumentOrder, world: World
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Return this rank's q, k, v and dout, where its tokens are, and all tokens. Padding has no gradient."""
    whole = draw_inputs(args, pack.padded[-1], world, 1)
    whole[3][pack.real[-1] :] = 0
    at = places(pack, world, in_order=method.in_order)
    parts = [x[at] for x in whole]
    return [*(x.requires_grad_() for x in parts[:3]), parts[3]], at, whole


def errors_of(method: Method, args: argparse.Namespace, pack: DocumentOrder, world: World) -> dict[str, float]:
    """Return how far out, dq, dk and dv of the real tokens are from float64 of each document."""
    (q, k, v, dout), at, whole = own_part(method, args, pack, world)
    out = method.start(pack)(q, k, v)
    got = out, *torch.autograd.grad(out, (q, k, v) if method.name != "exchange" else (q,), dout)
    want = (whole[0], whole[3]) if method.name == "exchange" else exact_of(whole, pack.real, True)
    real = at < pack.real[-1]
    return {name: relative(g[real], w[at][real]) for name, g, w in zip(NAMES, got, want, strict=False)}


def checked(method: Method, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return a method's errors on a small pack, the largest of all ranks, and whether it is wrong."""
    small = argparse.Namespace(**vars(args) | {"mean": 4.0, "sigma": 1.0})
    pack = draw_pack(small, args.check_tokens * world.size, world.size)
    found = together(world, functools.partial(errors_of, method, args, pack, world))
    if isinstance(found, Failure):
        return {"method": method.name, "wrong": f"{found.state}: {found.why}"}
    worst = world.slowest([error if math.isfinite(error) else math.inf for error in found.values()])
    errors = dict(zip(found, worst, strict=True))
    wrong = too_far(errors, TOLERANCE[getattr(torch, args.dtype)])
    return {"method": method.name, "errors": errors, "wrong": wrong}


def timer_of(method: Method, args: argparse.Namespace, pack: DocumentOrder, world: World) -> Timer:
    """Return a timer of the forward and backward, after some calls of it."""
    (q, k, v, dout), _, _ = own_part(method, args, pack, world)
    leaves, attend = ((q,) if method.name == "exchange" else (q, k, v)), method.start(pack)

    def both() -> object:
        return torch.autograd.grad(attend(q, k, v), leaves, dout)

    for _ in range(3):
        both()
    return Timer(both, max(1, args.repetitions // ROUNDS))


def main(argv: Sequence[str] | None = None) -> None:
    """Check, time, print and write."""
    args = arguments(argv)
    world = join("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    pack = draw_pack(args, args.tokens_per_rank * world.size, world.size)
    theirs = (their_method(args, world, kind) for kind in args.peers)
    methods = [*our_methods(args, world), exchange_method(world), *theirs]
    about = {"machine": machine(), "ranks": world.size, "real": pack.real[-1], "documents": len(pack.real) - 1}
    about |= {"arguments": vars(args), "exchange_sent_mib": sent_mib(args, pack, world)}
    rows: list[dict[str, Any]] = []
    for method in methods:
        rows.append(checked(method, args, world))
        write(args.out, about, rows, world, show=rows[-1:])
    timed = [(row, method) for row, method in zip(rows, methods, strict=True) if not row["wrong"]]
    timers = [timer_of(method, args, pack, world) for _, method in timed]
    pairs = sum((n * n + n) / 2 for n in (hi - lo for lo, hi in pairwise(pack.real)))
    flop = BOTH * 4 * pairs * args.heads * args.head_dim / world.size
    for turn in range(ROUNDS):
        take_turns(world, timers)
        for (row, method), timer in zip(timed, timers, strict=True):
            row |= {"both_ms": timer.median, "host_ms": timer.host_median}
            if method.name != "exchange":
                row["tflops_per_rank"] = flop / timer.median / 1e9
        write(args.out, about, rows, world, show=rows if turn == ROUNDS - 1 else [])
    world.leave()


def write(
    out: Path | None, about: dict[str, Any], rows: list[dict[str, Any]], world: World, *, show: list[dict[str, Any]]
) -> None:
    """Print some rows, and write all that are there."""
    if world.rank:
        return
    for row in show:
        print(json.dumps(row), flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"about": about, "rows": rows}, indent=1, default=str) + "\n")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--check-tokens", type=int, default=1024, help="of a rank, in the comparison with float64")
    parser.add_argument("--peers", nargs="*", default=["p2p", "a2a"], choices=("p2p", "a2a", "all_gather"))
    parser.add_argument("--kernel", default="auto", help="as DistAttentionConfig takes it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
