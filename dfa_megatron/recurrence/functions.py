"""Recurrences and causal convolutions over a sequence sharded across ranks: what layers call in place of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.leaf import outside_graphs
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.recurrence.local_scan import Decay, Scan, Tokens, local_scan, zero_tokens
from dfa_megatron.recurrence.passing import Place, pass_states, tokens_before
from dfa_megatron.rows import row_by_row
from dfa_megatron.runtime.comm.compared import together
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, rows_of
from dfa_megatron.runtime.request import DEFAULTS
from dfa_megatron.sharding import sequence_dim


@outside_graphs
@together
def dist_scan(
    scan: Scan,
    tokens: Tokens,
    *,
    decay: Decay | None = None,
    group: Group = None,
    cu_seqlens: CuSeqlens = None,
    parents: Sequence[int] | None = None,
    layout: Layout | str = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final state) of a recurrence over contiguous tokens; collective, and exact with its gradients.

    The kernel runs once; one all-gather of states follows, and one in the backward. In a group of one, and where no
    path has tokens on two ranks, nothing is sent.

    Args:
        scan: the kernel and the names of its tokens.
        tokens: its arguments that have this rank's tokens along dimension 1, by name.
        decay: for decays that multiply elementwise (Mamba-2, lightning attention, GLA): the cheaper way. None finds M
            as a matrix, by running the kernel on wider values.
        group: the ranks that share the sequence, in the order of their tokens.
        cu_seqlens: global token offsets of packed documents; of each row a list, and rows then run one by one. None:
            each sequence of the batch is one document.
        parents: for documents that are the segments of a prompt tree, depth first: the number of each one's parent, -1
            for a root. The state after the parent comes into each of its children.
        layout: "contiguous": equal parts, or with cu_seqlens the first ranks one token more. Or a value of
            `dfa_megatron.layouts`: contiguous tokens in rank order, any number on each rank, also none.
        config: its verify is used.

    Returns:
        out as the kernel gives it; the state (batch, heads, keys, values) after this rank's last token, float32 (or
        float64) where a state came in, else as the kernel gives it. A rank without tokens has that of the one before.

    Raises:
        UnsupportedError: tokens, cu_seqlens and layout do not fit together.
        DisagreementError: the ranks ask for different recurrences, or run different calls; the message is a table.
    """
    some = next(iter(tokens.values()), torch.empty(0, 0))  # none are refused with those that lack a name
    if rows := rows_of(cu_seqlens, some):
        each = []
        for at, offsets in enumerate(rows):
            row = {name: x[at : at + 1] for name, x in tokens.items()}
            its = decay and decay._replace(read=decay.read[at : at + 1], log=decay.log[at : at + 1])
            alone = Place.of(row[next(iter(row))], 1, group, offsets, parents, layout=layout, config=config)
            each.append(_scanned(scan, row, its, alone))
        out, state = (torch.cat(parts) for parts in zip(*each, strict=True))
        return out, state
    return _scanned(scan, tokens, decay, Place.of(some, 1, group, cu_seqlens, parents, layout=layout, config=config))


def _scanned(scan: Scan, tokens: Tokens, decay: Decay | None, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    local = local_scan(scan, tokens, place.share, decay)
    crosses = place.share.crosses
    return local.finish(pass_states(local.carries, place, matrix=local.matrix) if crosses else None)


Convolve = Callable[[torch.Tensor, Offsets], torch.Tensor]
"""A causal convolution with what follows token by token: (x, local offsets of documents or ()) -> like x."""


@outside_graphs
@together
def dist_conv(
    run: Convolve,
    x: torch.Tensor,
    width: int,
    *,
    dim: int = 1,
    packs: bool = False,
    group: Group = None,
    cu_seqlens: CuSeqlens = None,
    parents: Sequence[int] | None = None,
    layout: Layout | str = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor:
    """Return a causal convolution over contiguous tokens; collective, and exact with its gradients.

    Each rank gets the `width - 1` tokens before its own, and before each child, cut at the start of their path, and
    convolves them too.

    Args:
        run: convolves whole documents that have zeros before them.
        x: this rank's tokens along dimension `dim`.
        width: of the convolution, in tokens.
        packs: whether `run` takes documents in a batch of one; otherwise it is called for each of them with ().
        group, cu_seqlens, parents, layout, config: as for `dist_scan`.

    Raises:
        UnsupportedError: a width below 1, or cu_seqlens that do not fit.
        DisagreementError: as for `dist_scan`.
    """
    if not isinstance(width, int) or width < 1:
        raise UnsupportedError(f"a convolution of width {width}", "it reads tokens", "an int of 1 or more")
    if rows_of(cu_seqlens):
        where: dict[str, Any] = {"parents": parents, "layout": layout, "config": config, "dim": dim, "packs": packs}
        by_row = row_by_row(functools.partial(dist_conv, run, width=width))
        return by_row(x, group=group, cu_seqlens=cu_seqlens, **where)
    dim = sequence_dim(x, dim)
    place = Place.of(x, dim, group, cu_seqlens, parents, layout=layout, config=config)
    share, added, pieces = place.share, width - 1, place.share.pieces
    if not (added and (share.led or any(share.reach(added).brings))):
        added = 0
    else:
        pieces = share.reach(added).documents
        before = tokens_before(x, added, place, dim=dim)
        own = x.split(share.lengths(share.leads), dim) if share.mine else [x]
        both = zip(before.split(added, dim), own, strict=True)
        x = torch.cat([part for parts in both for part in parts], dim)
    if not share.mine:  # a kernel takes no empty tensor, and its parameters need gradients
        return run(torch.cat([x, zero_tokens(x, 1, dim)], dim), ()).narrow(dim, 0, 0)
    if len(pieces) == 2:
        out = run(x, ())
    elif packs and x.shape[0] == 1:  # kernels take a pack as a batch of one
        out = run(x, pieces)
    else:
        out = torch.cat([run(x.narrow(dim, lo, hi - lo), ()) for lo, hi in pairwise(pieces)], dim)
    if not added:
        return out
    kept = out.split([size for length in share.lengths(share.leads) for size in (added, length)], dim)[1::2]
    return torch.cat(kept, dim) if len(kept) > 1 else kept[0]
