"""Masks for `mask=` of `dist_flash_attn_func`: which query i of a whole sequence attends to which key j.

Every function returns a `Mask`: disjoint rectangles of (query, key) pairs, each cut by a diagonal band. Positions are
those of the whole sequence, whatever the layout of the tokens. `union` makes a mask of any such rectangles, and
`from_dense` finds them in a matrix or a `mask_mod`.

The twelve static masks of the Long-Context Attention Benchmark (arXiv 2510.17896), and what makes them:

    full                          full(n)
    causal                        causal(n)
    full sliding window           sliding_window(n, w, w)
    causal sliding window         sliding_window(n, w)
    full document                 documents(lengths, causal=False)
    causal document               documents(lengths)
    prefix LM causal              prefix_lm(n, prefix)
    prefix LM document            prefix_lm_documents(lengths, prefix)
    share question                prompt_tree([question, answer, ...], [-1, 0, ...])
    causal blockwise              causal_blockwise(lengths)
    block causal document         block_causal_documents(lengths, block)
    global sliding                global_sliding(n, w, w)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import plain
from dfa_megatron.plan.language.geometry import UNBOUNDED
from dfa_megatron.plan.language.mask import *  # noqa: F403 -- its `__all__` is the one list of masks
from dfa_megatron.plan.language.mask import Mask, Span, Tile
from dfa_megatron.plan.language.mask import __all__ as _most
from dfa_megatron.plan.language.tree import prompt_tree as prompt_tree
from dfa_megatron.plan.lowering.kernel_calls import fuse

__all__ = [*_most, "from_dense", "prompt_tree"]


def _taking_any(function: Callable[..., Mask]) -> Callable[..., Mask]:
    """Let a function take the numbers of numpy and PyTorch, which overflow and have other text than Python's."""

    @wraps(function)
    def taking(*args: Any, **options: Any) -> Mask:
        return function(*plain(args, "torch"), **{name: plain(value, "torch") for name, value in options.items()})

    return taking


for _name in (*_most[3:], "prompt_tree"):
    globals()[_name] = _taking_any(globals()[_name])

_CELLS = 1 << 24
"""Cells that are looked at together."""


def from_dense(visible: Any, length: int | None = None, *, name: str = "dense", most: int = 4096) -> Mask:
    """Find the tiles of a mask that is given cell by cell. It is exact: the tiles hold the same pairs.

    Args:
        visible: (length, length) of bool; a BlockMask; or a function of (batch, head, i, j), as flex attention's
            `mask_mod` and transformers' mask functions are. It is called with tensors, for the first batch and head.
        length: tokens of the sequence; a matrix says it itself.
        name: of the mask.
        most: pieces that are looked at: runs of keys, in rows where each of their ends stays, or moves with the rows.

    Raises:
        UnsupportedError: there are more; names the first cell (i, j) of the next one.
    """
    look, device = getattr(visible, "mask_mod", visible), None
    if hasattr(visible, "kv_num_blocks"):
        device = visible.kv_num_blocks.device
        if max(visible.shape[:-2], default=1) > 1:
            what, why = f"a BlockMask of shape {visible.shape}", "one Mask is that of one row and of all its heads"
            instead = "a list: from_dense(lambda _, h, i, j: block_mask.mask_mod(row, h, i, j), length) for each row"
            raise UnsupportedError(what, why, instead)
    if not callable(look):
        if getattr(visible, "ndim", 0) != 2 or len(visible) != visible.shape[1] or "bool" not in str(visible.dtype):
            raise UnsupportedError(
                "a mask that is no matrix of bool", "each cell says what attends", "(length, length)"
            )
        length, look = len(visible), lambda batch, head, i, j: visible[i[:, 0].numpy()]
    length, most = plain((length, most), "torch")
    if length is None or length < 1:
        raise UnsupportedError("a mask without length", "it is not given, or below 1", "from_dense(function, 4096)")
    pieces, rows = list[Tile](), max(1, _CELLS // length)
    for top in range(0, length, rows):
        for piece in _pieces(look, length, Span(top, min(top + rows, length)), device):
            pieces.append(piece)
            if len(pieces) > most:
                why = f"it is no union of {most} pieces: cell ({piece.q.lo}, {piece.kv.lo}) needs one more"
                raise UnsupportedError(f"the mask {name!r}", why, "blocks and bands of many tokens, or a larger most=")
    return Mask(name, length, tuple(fuse(pieces)))


def _pieces(look: Any, length: int, rows: Span, device: Any) -> Iterator[Tile]:
    """Yield the tiles of some rows, cut where a run of keys begins or ends, or an end of one moves otherwise."""
    import torch

    i, j = torch.arange(rows.lo, rows.hi, device=device)[:, None], torch.arange(length, device=device)[None]
    zero = torch.zeros((), dtype=torch.long, device=device)
    cells = torch.broadcast_to(torch.as_tensor(look(zero, zero, i, j)), (len(rows), length)).cpu()
    edges = torch.nn.functional.pad(cells.to(torch.int8), (1, 1)).diff(dim=1)
    (row, begin), end = (edges == 1).nonzero(as_tuple=True), (edges == -1).nonzero(as_tuple=True)[1]
    count = torch.bincount(row, minlength=len(rows))
    first = count.cumsum(0) - count
    alike = (row > 0) & (count[row] == count[row - 1])
    above = torch.where(alike, torch.arange(len(row), device="cpu") - count[row], 0)
    left, right = begin - begin[above], end - end[above]
    step = torch.where(alike & (left >= 0) & (left < 2) & (right >= 0) & (right < 2), 2 * left + right, -1)
    cut = torch.ones(len(rows) + 1, dtype=torch.bool, device="cpu")
    cut[1:-1] = count[1:] != count[:-1]
    cut[row[(step < 0) | ((step != step[above]) & (step[above] >= 0))]] = True
    found = 0
    for at, until in pairwise(cut.nonzero()[:, 0].tolist()):
        runs, span = slice(int(first[at]), int(first[at] + count[at])), Span(rows.lo + at, rows.lo + until)
        steps = step[runs.stop :][: runs.stop - runs.start].tolist() if until > at + 1 else [0] * int(count[at])
        for lo, hi, moves in zip(begin[runs].tolist(), end[runs].tolist(), steps, strict=True):
            keys = Span(lo, hi + moves % 2 * (len(span) - 1))
            tile = Tile(
                span, keys, lo - span.lo if moves > 1 else -UNBOUNDED, hi - 1 - span.lo if moves % 2 else UNBOUNDED
            )
            found += tile.area
            if shrunk := tile.shrink():
                yield shrunk
    assert found == int(cells.sum()), f"{found} pairs were found of {int(cells.sum())}"
