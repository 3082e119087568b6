"""Times packs that are cut zigzag document by document, as Megatron's scripts cut them, beside Transformer Engine.

    torchrun --nproc-per-node 2 -m benchmarks.packed_zigzag --tokens-per-rank 8192 --out packed_zigzag.json

Documents are log-normal, of any length, and padded to multiples of 2P. All methods get the same tokens:

    dfa inside        ours on tokens in order, as the layers of a model see them in layout `boundary`
    dfa boundary      ours with an exchange of q, k, v before each call and of its result after
    te KIND           Transformer Engine's DotProductAttention, format thd, with this cp_comm_type
    exchange          hidden states to tokens in order and back, which a model pays once around all its layers

Each is compared with float64 of each document first, and timed, as in `benchmarks.packed`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import packs
from benchmarks.attention.baselines import version_of
from benchmarks.attention.baselines.transformer_engine import communicators
from benchmarks.bench import flags_of
from benchmarks.packs import Attend, Method, Pack, compare_and_time
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from dfa_megatron.megatron.tokens.exchange import Relayout, plan_exchange


@dataclass(frozen=True)
class Shapes(packs.Shapes):
    """What is timed, and how."""

    check_tokens: int = flag(1024, "of a rank, in the comparison with float64")
    peers: tuple[str, ...] = flag(("p2p", "a2a"), "of Transformer Engine", choices=("p2p", "a2a", "all_gather"))
    kernel: str = flag("auto", "of ours, as DistAttentionConfig takes it")


def padded_pack(shapes: Shapes, ranks: int) -> Pack:
    """Return padded documents; each has up to 2P - 1 tokens of padding."""
    padded, draw = shapes.documents(ranks, shapes.seed), random.Random(shapes.seed)
    real = tuple(accumulate((hi - lo - draw.randrange(2 * ranks) for lo, hi in pairwise(padded)), initial=0))
    return Pack(real, padded[-1], DocumentOrder.of(real, padded, ranks))


def our_methods(shapes: Shapes, world: World) -> list[Method]:
    """Return ours inside the layers, and with the exchange around each call."""
    config, relayout = DistAttentionConfig(kernel=shapes.kernel), Relayout(dist.group.WORLD)

    def inside(pack: Pack) -> Attend:
        offsets = pack.order.inside(world.size)
        return lambda q, k, v: dist_flash_attn_varlen_func(q, k, v, offsets, causal=True, config=config)  # type: ignore[return-value]

    def boundary(pack: Pack) -> Attend:
        attend = inside(pack)

        def exchanged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = relayout(torch.cat((q, k, v), 1), pack.order, "contiguous")
            parts = rows.split((q.shape[1], k.shape[1], v.shape[1]), 1)
            return relayout(attend(*(part.contiguous() for part in parts)), "contiguous", pack.order)

        return exchanged

    return [
        Method("dfa inside", inside, lambda pack: torch.arange(pack.tokens).chunk(world.size)[world.rank]),
        Method("dfa boundary", boundary, places(world)),
    ]


def places(world: World) -> Callable[[Pack], torch.Tensor]:
    """Return where this rank's tokens are in the row of all real tokens and then all padding, cut zigzag."""

    def of(pack: Pack) -> torch.Tensor:
        at: torch.Tensor = pack.order.positions(world.size, world.rank)
        return at

    return of


def their_method(shapes: Shapes, world: World, kind: str) -> Method:
    """Return Transformer Engine's attention with a cp_comm_type."""

    def start(pack: Pack) -> Attend:
        version_of("transformer-engine")
        if not world.cuda:
            raise UnsupportedError("TransformerEngine on a CPU", "its kernels are CUDA", "GPUs")
        from transformer_engine.pytorch import DotProductAttention

        attention = DotProductAttention(
            shapes.heads,
            shapes.head_dim,
            num_gqa_groups=shapes.kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        group, stream = communicators(kind, world)
        attention.set_context_parallel_group(group, list(range(world.size)), stream, kind)
        real, padded = (
            torch.tensor(x, dtype=torch.int32, device=world.device) for x in (pack.offsets, pack.order.padded)
        )
        longest = max(hi - lo for lo, hi in pairwise(pack.order.padded))
        documents: dict[str, Any] = {f"cu_seqlens_{side}": real for side in ("q", "kv")}
        documents |= {f"cu_seqlens_{side}_padded": padded for side in ("q", "kv")}
        documents |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return lambda q, k, v: attention(q, k, v, **documents).view(q.shape)

    return Method(f"te {kind}", start, places(world))


def exchange_method(world: World) -> Method:
    """Return the exchange of hidden states there and back."""
    relayout = Relayout(dist.group.WORLD)

    def start(pack: Pack) -> Attend:
        return lambda q, k, v: relayout(
            relayout(q.flatten(1), pack.order, "contiguous"), "contiguous", pack.order
        ).view(q.shape)

    return Method("exchange", start, places(world), exact=lambda whole: (whole[0], whole[3]))


def sent_mib(shapes: Shapes, pack: Pack, world: World) -> float:
    """Return what this rank sends in one exchange of hidden states; forward and backward have two each."""
    plan = plan_exchange(pack.order, "contiguous", pack.tokens, world.size, world.rank)
    rows = sum(count for rank, count in enumerate(plan.send_counts) if rank != world.rank)
    item = getattr(torch, shapes.dtype).itemsize
    return world.slowest([rows * shapes.heads * shapes.head_dim * item / 2**20])[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    world = join(shapes.device)
    theirs = (their_method(shapes, world, kind) for kind in shapes.peers)
    methods = [*our_methods(shapes, world), exchange_method(world), *theirs]
    short = replace(shapes, tokens_per_rank=shapes.check_tokens, mean=4.0, sigma=1.0, lengths=None)
    small, pack = (padded_pack(one, world.size) for one in (short, shapes))
    compare_and_time(methods, shapes, small, pack, world, exchange_sent_mib=sent_mib(shapes, pack, world))
    world.leave()


if __name__ == "__main__":
    main()
