"""`dfa-megatron selfcheck attention`: the functions alone, over gloo ranks, against dense attention in float64."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.names import LAYOUTS
from dfa_megatron.selfcheck.case import Case

if TYPE_CHECKING:
    from dfa_megatron.selfcheck.record import Recorder

Tensor = Any
"""torch.Tensor; the command line loads torch only where it is needed."""

MOST_RANKS = 32


@dataclass(frozen=True)
class AttentionFlags:
    """The flags of the self-check beside the options of distributed attention."""

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


def case_of(words: Sequence[str]) -> Case:
    """The self-check of one attention, of the shapes and options on a command line.

    Raises:
        UnsupportedError: too many ranks, or an option with a value that it cannot have.
    """
    parser = argparse.ArgumentParser(prog="dfa-megatron selfcheck attention", description=__doc__, allow_abbrev=False)
    add_flags(parser, AttentionFlags)
    args = DistAttentionConfig.add_arguments(parser, "function", prefix="--").parse_args(list(words))
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
    shapes = f"{tokens} tokens, {flags.heads} heads of {flags.head_dim} over {flags.kv_heads}"
    return Case(
        title=f"attention, {shapes}, layout {flags.layout}, schedule {config.schedule}",
        ranks=flags.ranks,
        measure=f"{__name__}:measure",
        settings=asdict(flags) | {"tokens": tokens, "cu_seqlens": offsets, "config": asdict(config)},
        sections={"attention": "attention"},
        unseen=("GPU kernels and transports: `dfa-megatron doctor` compares kernels on the GPUs themselves",),
    )


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run in a rank process; see `dfa_megatron.selfcheck.case.Case`."""
    import torch
    import torch.distributed as dist

    from dfa_megatron.sharding import layout_of_tokens, positions_of

    recorder.section = sections[0]
    batch, tokens, heads, kv_heads, width = (
        settings[name] for name in ("batch", "tokens", "heads", "kv_heads", "head_dim")
    )
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
