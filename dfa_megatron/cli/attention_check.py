"""`dfa-megatron doctor attention`: the functions alone, over gloo ranks, against dense attention in float64."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.names import LAYOUTS

Tensor = Any
"""torch.Tensor; the command line loads torch only where it is needed."""

MOST_RANKS = 32
TOLERANCE = 1e-4
"""Largest |difference| over the largest entry of the whole tensor; attention computes in float32."""


@dataclass(frozen=True)
class AttentionFlags:
    """The flags of the check beside the options of distributed attention."""

    ranks: int = flag(4)
    tokens: int | None = flag(None, "of the whole sequence; 16 a rank by default")
    heads: int = flag(4)
    kv_heads: int = flag(2)
    head_dim: int = flag(16)
    batch: int = flag(1)
    causal: bool = flag(True)
    window_size: tuple[int, int] = flag((-1, -1), metavar=("LEFT", "RIGHT"))
    softcap: float = flag(0.0)
    cu_seqlens: str = flag("", "offsets of packed documents: 0,7,20,64; the last is the tokens")
    layout: str = flag("contiguous", "tokens of a rank; load_balanced is for packs", choices=LAYOUTS)


def add_parser(subparsers: Any) -> None:
    """Add `doctor attention`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "attention",
        help="one distributed attention of any shape and options against dense attention, on the CPU; --help has them",
        description=__doc__,
        epilog="Exit status: 0 where it is right, 1 where something differs, 2 for what is refused.",
    )
    add_flags(parser, AttentionFlags)
    DistAttentionConfig.add_arguments(parser, "function", prefix="--").set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one; return the exit status."""
    flags, settings = settings_of(args)
    from dfa_megatron.doctor import start_ranks, world

    if "RANK" not in os.environ:
        return start_ranks.start(["-m", "dfa_megatron.cli.main", *args.argv], flags.ranks)
    logging.disable(logging.WARNING)
    here = world.join("cpu")
    rows = compared(settings, here.rank, here.size)
    status = int(any(error > TOLERANCE for _, error, _ in rows))
    if here.rank == 0:
        print(
            f"attention on {flags.ranks} ranks, {settings['tokens']} tokens, {flags.heads} heads of {flags.head_dim} "
            f"over {flags.kv_heads}, layout {flags.layout}, schedule {settings['config']['schedule']}"
        )
        for name, error, where in rows:
            print(f"  {name:<4}{error:.1e}" + (f"  differs: {where}" if error > TOLERANCE else ""))
        print("wrong" if status else "right: the largest differences are rounding")
    here.leave()
    return status


def settings_of(args: argparse.Namespace) -> tuple[AttentionFlags, dict[str, Any]]:
    """Return the flags, and what `compared` takes.

    Raises:
        UnsupportedError: too many ranks, or an option with a value that it cannot have.
    """
    flags, config = from_flags(AttentionFlags, args), DistAttentionConfig.from_args(args, prefix="")
    if not 1 <= flags.ranks <= MOST_RANKS:
        raise UnsupportedError(f"--ranks {flags.ranks}", "each is a process here", f"1 to {MOST_RANKS}")
    sizes = (flags.heads, flags.kv_heads, flags.head_dim, flags.batch)
    if min(sizes) < 1 or flags.heads % flags.kv_heads:
        what = "--heads {} --kv-heads {} --head-dim {} --batch {}".format(*sizes)
        raise UnsupportedError(
            what, "each is at least 1, and key/value heads divide the heads", "--heads 4 --kv-heads 2"
        )
    offsets = [int(offset) for offset in flags.cu_seqlens.split(",")] if flags.cu_seqlens else None
    if offsets and flags.batch != 1:
        raise UnsupportedError(f"--batch {flags.batch} with --cu-seqlens", "a pack is one row", "--batch 1")
    tokens = offsets[-1] if offsets else flags.tokens or 16 * flags.ranks
    if tokens < 1 or tokens % flags.ranks:
        raise UnsupportedError(f"{tokens} tokens", f"they must divide among {flags.ranks} ranks", f"{16 * flags.ranks}")
    return flags, asdict(flags) | {"tokens": tokens, "cu_seqlens": offsets, "config": asdict(config)}


def compared(settings: Mapping[str, Any], rank: int, ranks: int) -> list[tuple[str, float, str]]:
    """Return of out, lse and the gradients: the largest error over all ranks, and the first place; collective."""
    import torch
    import torch.distributed as dist

    from dfa_megatron.sharding import layout_of_tokens, positions_of

    batch, tokens, heads, kv_heads, width = (
        settings[name] for name in ("batch", "tokens", "heads", "kv_heads", "head_dim")
    )
    generator = torch.Generator().manual_seed(7)
    q, k, v, dout = (
        torch.randn(batch, tokens, h, width, generator=generator) for h in (heads, kv_heads, kv_heads, heads)
    )
    here = positions_of(layout_of_tokens(settings["layout"], tokens, ranks, settings["cu_seqlens"]), rank)
    ours: list[Any] = []
    theirs: list[Any] = []
    for into, attention, at, dtype in (
        (ours, _distributed, here, torch.float32),
        (theirs, _dense, torch.arange(tokens), torch.float64),
    ):
        given = [x[:, at].to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = attention(given[0], given[1], given[2], settings)
        out.backward(dout[:, at].to(dtype))
        into += [out.detach(), lse.detach().transpose(1, 2), *(x.grad for x in given)]
    rows = []
    for name, part, whole in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
        error = (part.double() - whole[:, here]).abs().nan_to_num(torch.inf, torch.inf)
        error[part == whole[:, here]] = 0  # both are infinite for a row that sees nothing
        error /= whole[whole.isfinite()].abs().max().clamp_min(1e-30)
        wrong = (error > TOLERANCE).flatten(2).any(-1).any(0).nonzero().flatten()
        rows.append((name, float(error.max()), f"rank {rank}, token {int(here[wrong[0]])}" if len(wrong) else ""))
    held: list[Any] = [None] * ranks
    dist.all_gather_object(held, rows)
    columns = zip(*held, strict=True)
    return [(of[0][0], max(error for _, error, _ in of), next((w for _, _, w in of if w), "")) for of in columns]


def _distributed(q: Tensor, k: Tensor, v: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func

    given: dict[str, Any] = {name: settings[name] for name in ("causal", "softcap", "layout")}
    given |= {"window_size": tuple(settings["window_size"]), "config": DistAttentionConfig(**settings["config"])}
    given["return_lse"] = True
    if settings["cu_seqlens"] is None:
        out, lse = dist_flash_attn_func(q, k, v, **given)
        return out, lse
    out, lse = dist_flash_attn_varlen_func(q[0], k[0], v[0], settings["cu_seqlens"], **given)
    return out[None], lse[None]


def _dense(q: Tensor, k: Tensor, v: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition with all scores in memory, independent of the package's own code."""
    import torch

    groups, places = q.shape[2] // k.shape[2], torch.arange(q.shape[1])
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if cap := settings["softcap"]:
        scores = cap * torch.tanh(scores / cap)
    ahead = places[None, :] - places[:, None]
    (left, right), seen = settings["window_size"], torch.ones_like(ahead, dtype=torch.bool)
    right = 0 if settings["causal"] else right
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    if settings["cu_seqlens"] is not None:
        document = torch.bucketize(places, torch.tensor(settings["cu_seqlens"]), right=True)
        seen &= document[None, :] == document[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)
