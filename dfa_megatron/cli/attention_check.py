"""`dfa-megatron selfcheck attention`: the functions alone, over gloo ranks, against dense attention in float64."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS
from dfa_megatron.selfcheck.case import Case, Section

if TYPE_CHECKING:
    from dfa_megatron.selfcheck.record import Recorder

Tensor = Any
"""torch.Tensor; the command line loads torch only where it is needed."""

MOST_RANKS = 32


def case_of(words: Sequence[str]) -> Case:
    """The self-check of one attention, of the shapes and options on a command line.

    Raises:
        UnsupportedError: too many ranks, or an option with a value that it cannot have.
    """
    args = _parser().parse_args(list(words))
    if not 1 <= args.ranks <= MOST_RANKS:
        raise UnsupportedError(f"--ranks {args.ranks}", "each is a process here", f"1 to {MOST_RANKS}")
    if min(args.heads, args.kv_heads, args.head_dim, args.batch) < 1 or args.heads % args.kv_heads:
        raise UnsupportedError(
            f"--heads {args.heads} --kv-heads {args.kv_heads} --head-dim {args.head_dim} --batch {args.batch}",
            "each is at least 1, and key/value heads divide the heads",
            "--heads 4 --kv-heads 2",
        )
    offsets = [int(offset) for offset in args.cu_seqlens.split(",")] if args.cu_seqlens else None
    if offsets and args.batch != 1:
        raise UnsupportedError(f"--batch {args.batch} with --cu-seqlens", "a pack is one row", "--batch 1")
    config = dataclasses.asdict(DistAttentionConfig.from_args(args, prefix=""))
    tokens = offsets[-1] if offsets else args.tokens or 16 * args.ranks
    if tokens < 1 or tokens % args.ranks:
        raise UnsupportedError(f"{tokens} tokens", f"they must divide among {args.ranks} ranks", f"{16 * args.ranks}")
    shapes = f"{tokens} tokens, {args.heads} heads of {args.head_dim} over {args.kv_heads}"
    return Case(
        title=f"attention, {shapes}, layout {args.layout}, schedule {args.schedule}",
        ranks=args.ranks,
        measure=f"{__name__}:measure",
        settings={
            "shape": [args.batch, tokens, args.heads, args.kv_heads, args.head_dim],
            "causal": args.causal,
            "window": args.window_size,
            "softcap": args.softcap,
            "cu_seqlens": offsets,
            "layout": args.layout,
            "config": config,
        },
        sections=(Section("attention", "attention"),),
        unseen=("GPU kernels and transports: `dfa-megatron doctor` compares kernels on the GPUs themselves",),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dfa-megatron selfcheck attention", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of the whole sequence; 16 a rank by default")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--window-size", type=int, nargs=2, default=(-1, -1), metavar=("LEFT", "RIGHT"))
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--cu-seqlens", help="offsets of packed documents: 0,7,20,64; the last is the tokens")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="contiguous", help="tokens of a rank; load_balanced is for packs"
    )
    return DistAttentionConfig.add_arguments(parser, prefix="--", scope="function")


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run in a rank process; see `dfa_megatron.selfcheck.case.Case`."""
    import torch
    import torch.distributed as dist

    from dfa_megatron.sharding import layout_of_tokens, positions_of

    recorder.section = sections[0]
    batch, tokens, heads, kv_heads, width = settings["shape"]
    generator = torch.Generator().manual_seed(7)
    q, k, v, dout = (
        torch.randn(batch, tokens, h, width, generator=generator) for h in (heads, kv_heads, kv_heads, heads)
    )
    offsets, here = settings["cu_seqlens"], torch.arange(tokens)
    if whole:
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
    else:
        held = layout_of_tokens(settings["layout"], tokens, dist.get_world_size(), offsets)
        here = positions_of(held, dist.get_rank())
    q, k, v = (x[:, here].requires_grad_() for x in (q, k, v))
    out, lse = _dense(q, k, v, settings) if whole else _distributed(q, k, v, settings)
    out.backward(dout[:, here])
    rows = ("sample", "token", "head", "channel")
    recorder.add("out", "out", out, rows, {1: here})
    recorder.add("lse", "lse", lse, ("sample", "head", "token"), {2: here})
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert x.grad is not None
        recorder.add(name, name, x.grad, rows, {1: here})


def _distributed(q: Tensor, k: Tensor, v: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func

    given: dict[str, Any] = {name: settings[name] for name in ("causal", "softcap", "layout")}
    given |= {"window_size": tuple(settings["window"]), "return_lse": True}
    given |= {"config": DistAttentionConfig(**settings["config"])}
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
    (left, right), seen = settings["window"], torch.ones_like(ahead, dtype=torch.bool)
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
