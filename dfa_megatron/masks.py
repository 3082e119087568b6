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

from collections.abc import Iterator
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import UNBOUNDED
from dfa_megatron.plan.language.mask import *  # noqa: F403 -- its `__all__` is the one list of masks
from dfa_megatron.plan.language.mask import Mask, Span, Tile
from dfa_megatron.plan.language.mask import __all__ as _most
from dfa_megatron.plan.language.tree import prompt_tree as prompt_tree

__all__ = [*_most, "from_dense", "prompt_tree"]

_CELLS = 1 << 24
"""Cells that are looked at together."""


def from_dense(visible: Any, length: int | None = None, *, name: str = "dense", most: int = 1024) -> Mask:
    """Find the tiles of a mask that is given cell by cell. It is exact: the tiles hold the same pairs.

    Args:
        visible: (length, length) of bool; a BlockMask; or a function of (batch, head, i, j), as flex attention's
            `mask_mod` and transformers' mask functions are. It is called with tensors, for the first batch and head.
        length: tokens of the sequence; a matrix says it itself.
        name: of the mask.
        most: tiles that it may have.

    Raises:
        UnsupportedError: it has more tiles; names the first cell (i, j) of the next one.
    """
    import torch

    look = getattr(visible, "mask_mod", visible)
    if not callable(look):
        dense = torch.as_tensor(visible)
        if dense.dim() != 2 or dense.shape[0] != dense.shape[1] or dense.dtype != torch.bool:
            what = f"a matrix of shape {tuple(dense.shape)} and dtype {dense.dtype}"
            raise UnsupportedError(what, "each token has a row and a column", "(length, length) of bool")
        length = len(dense)
        look = lambda batch, head, i, j: dense[i[:, 0]]  # noqa: E731
    if length is None:
        raise UnsupportedError("a mask function without length", "it does not say it", "from_dense(function, 4096)")
    tiles, growing, pairs = list[Tile](), list[_Growing](), 0
    device = visible.kv_num_blocks.device if hasattr(visible, "kv_num_blocks") else None
    for i, runs, pairs in _changes(look, length, device):  # noqa: B007 -- the last count is that of all pairs
        waiting = [one.grow_to(i - 1) for one in growing]
        growing = []
        for begin, end, steps in runs:
            at = next((at for at, one in enumerate(waiting) if one.takes(begin, end)), None)
            growing.append(_Growing(i, begin, end, steps) if at is None else waiting.pop(at).step(begin, end))
            if len(tiles) + len(waiting) + len(growing) > most:
                why = f"it is no union of {most} tiles: cell ({i}, {begin}) needs one more"
                raise UnsupportedError(f"the mask {name!r}", why, "blocks and bands of many tokens, or a larger most=")
        tiles += [one.tile for one in waiting]
    mask = Mask(name, length, tuple(shrunk for tile in tiles if (shrunk := tile.shrink())))
    assert mask.area == pairs, f"{mask.area} pairs of {pairs} were found"
    return mask


class _Growing:
    """A tile while rows are added to it: its left edge may stay, then move; its right edge may move, then stay."""

    def __init__(self, row: int, begin: int, end: int, steps: tuple[int, int]) -> None:
        self.first, self.row, self.steps = (row, begin, end), row, steps
        self.begin, self.end = begin, end
        self.left_moves = self.right_stays = False

    def grow_to(self, row: int) -> _Growing:
        """Add rows in which both edges do what they did in the last one."""
        more = row - self.row
        return self._grow(self.begin + self.steps[0] * more, self.end + self.steps[1] * more, row) if more else self

    def takes(self, begin: int, end: int) -> bool:
        """Return whether the next row may have these edges."""
        left, right = begin - self.begin, end - self.end
        return left in (0, 1) and right in (0, 1) and left >= self.left_moves and right <= (not self.right_stays)

    def step(self, begin: int, end: int) -> _Growing:
        """Add the next row."""
        self.steps = begin - self.begin, end - self.end
        return self._grow(begin, end, self.row + 1)

    def _grow(self, begin: int, end: int, row: int) -> _Growing:
        self.left_moves |= begin > self.begin
        self.right_stays |= end == self.end
        self.begin, self.end, self.row = begin, end, row
        return self

    @property
    def tile(self) -> Tile:
        """Return the tile of the rows so far."""
        row, begin, end = self.first
        lo = self.begin - self.row if self.left_moves else -UNBOUNDED
        hi = end - 1 - row if self.end > end else UNBOUNDED
        return Tile(Span(row, self.row + 1), Span(begin, self.end), lo, hi)


def _changes(look: Any, length: int, device: Any) -> Iterator[tuple[int, list[tuple[int, int, tuple[int, int]]], int]]:
    """Yield rows whose runs of visible keys do not go on as the row before: (row, runs, pairs so far), and the end.

    A run is its first key, the key behind its last, and by how much both moved since the row before, (0, 0) where they
    jumped: then the next row is yielded too.
    """
    import torch

    keys, zero, pairs = torch.arange(length, device=device), torch.zeros((), dtype=torch.long, device=device), 0
    rows_at_once = max(1, _CELLS // length)
    for top in range(0, length, rows_at_once):
        halo = min(top, 2)
        i = torch.arange(top - halo, min(top + rows_at_once, length), device=device)[:, None]
        cells = torch.broadcast_to(look(zero, zero, i, keys[None]), (len(i), length)).cpu()
        pairs += int(cells[halo:].sum())
        edges = torch.nn.functional.pad(cells.to(torch.int8), (1, 1)).diff(dim=1)
        (row, begin), end = (edges == 1).nonzero(as_tuple=True), (edges == -1).nonzero(as_tuple=True)[1]
        count = torch.bincount(row, minlength=len(i))
        as_before = torch.cat([count[:1] < 0, count[1:] == count[:-1]])
        above = (torch.arange(len(row), device="cpu") - count[row]).clamp(min=0)
        left, right = begin - begin[above], end - end[above]
        goes_on = as_before[row] & (left >= 0) & (left <= 1) & (right >= 0) & (right <= 1)
        code = torch.where(goes_on, 2 * left + right, -1)
        changed = ~as_before
        changed[row[~goes_on | (code != code[above])]] = True
        first = count.cumsum(0) - count
        for at in changed[halo:].nonzero()[:, 0].add(halo).tolist():
            runs = slice(int(first[at]), int(first[at] + count[at]))
            steps = [(one >> 1, one & 1) if one >= 0 else (0, 0) for one in code[runs].tolist()]
            yield top - halo + at, list(zip(begin[runs].tolist(), end[runs].tolist(), steps, strict=True)), pairs
    yield length, [], pairs
